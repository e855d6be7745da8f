"""Experiments as jobs: kernels, ceilings, steps of the engine and checks, each process with some of the cases."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import ops, peers
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.ceilings import ceilings
from benchmarks.kernels.correctness import correctness
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report
from benchmarks.suite.worker import Send, turn

# Sequences x context of decode.
ANCHORS = ((1, 1024), (32, 4096), (1, 32768), (8, 4096), (256, 1024))


class Relay(Report):
    """A Report whose rows go to the process that keeps the file."""

    def __init__(self, send: Send, environment: dict[str, Any]):
        self._send = send
        super().__init__(Path("results.json"), environment)

    def add(self, **row: Any) -> None:
        self._send("row", row)

    def start(self, case: dict[str, Any]) -> None:
        self._send("case", case)

    def say(self, line: str) -> None:
        self._send("say", line)

    def write(self) -> None:
        self._send("environment", self.environment)


def run(options: dict[str, Any], send: Send) -> None:
    """Run one of `EXPERIMENTS` as far as the time goes.

    Options: `experiment`, `settings` (its arguments), `implementations`, `peers`, `budget` (seconds), `tiny`, `rounds`,
    `tried` (cases to leave out), `lock` (held while measuring, None: nobody else measures) and `ceilings`.
    """
    prepare_environment()
    bench = ops.make_bench(argparse.Namespace(**options), partial(Relay, send))
    bench.tried = options["tried"]
    bench.exclusive = partial(turn, options["lock"], send)
    bench.read_gb_per_s, bench.matmul_tflop_per_s = (options["ceilings"].get(name) for name in ("read", "matmul"))
    EXPERIMENTS[options["experiment"]](bench, **options["settings"])
    send("ceilings", {"read": bench.read_gb_per_s, "matmul": bench.matmul_tflop_per_s})


def anchors(bench: Bench, block_size: int) -> None:
    """Time decode attention at the batches and contexts that published figures are for."""
    for batch, context in bench.sized(ANCHORS, ((1, 40), (2, 40))):
        ops.decode(
            bench, head_dims=_head_dims(bench)[:1], block_sizes=[block_size], batches=[batch], contexts=[context],
            lengths=["uniform"],
        )  # fmt: skip


def prompts(bench: Bench, block_size: int) -> None:
    """Time prefill of 2k and 8k tokens."""
    lengths = bench.sized((2048, 8192), (40,))
    ops.prefill(bench, head_dims=_head_dims(bench)[:1], block_sizes=[block_size], prompts=lengths)


def mixed(bench: Bench, block_size: int, step: int) -> None:
    """Time one of `ops.MIXED_STEPS`."""
    steps = ops.MIXED_STEPS[step : step + 1]
    ops.mixed(bench, head_dims=_head_dims(bench)[:1], block_sizes=[block_size], steps=steps)


def sweep(bench: Bench, name: str, block_sizes: list[int]) -> None:
    """Time a whole grid: decode, prefill or writes."""
    grid: dict[str, Any] = dict(head_dims=_head_dims(bench), block_sizes=block_sizes)
    if name == "decode":
        batches, contexts = bench.sized((1, 16, 64, 256), (1, 2)), bench.sized((4096, 1024, 16384), (40,))
        ops.decode(bench, **grid, batches=batches, contexts=contexts)
    elif name == "prefill":
        ops.prefill(bench, **grid, prompts=bench.sized((512, 2048, 8192, 32768), (40,)))
    else:
        ops.write(bench, **grid, tokens=bench.sized((1, 64, 2048), (5,)))


def paging(bench: Bench, block_sizes: list[int]) -> None:
    """Time the same kernel on blocks in order and on scattered blocks."""
    ops.paging(
        bench, head_dims=_head_dims(bench), block_sizes=block_sizes, batches=bench.sized((64, 8), (3,)),
        contexts=bench.sized((4096,), (40,)), prompts=bench.sized((4096,), (40,)),
    )  # fmt: skip


def step(bench: Bench, model: str, batch: int, block_size: int, kernels: str) -> None:
    """Time one decode step of a model, at a context of 1,024 tokens."""
    from benchmarks.engine import steps as engine

    engine.step(
        bench, model=bench.sized(model, "tiny"), batches=[bench.sized(batch, 2)], contexts=[bench.sized(1024, 40)],
        block_size=block_size, kernels=kernels,
    )  # fmt: skip


def throughput(bench: Bench, model: str, requests: int, block_size: int) -> None:
    """Count the tokens per second of a whole workload."""
    from benchmarks.engine import steps as engine

    low, high = bench.sized((100, 1024), (4, 12))
    engine.throughput(
        bench, model=bench.sized(model, "tiny"), requests=bench.sized(requests, 4), low=low, high=high,
        block_size=block_size,
    )  # fmt: skip


def check(bench: Bench) -> None:
    """Check every op of the only implementation."""
    (implementation,) = bench.implementations
    correctness(bench, implementation)


def _head_dims(bench: Bench) -> tuple[int, ...]:
    return bench.sized((128, 64), (64,))


EXPERIMENTS = {
    "ceilings": ceilings, "anchors": anchors, "prompts": prompts, "mixed": mixed, "sweep": sweep, "paging": paging,
    "step": step, "throughput": throughput, "check": check,
}  # fmt: skip


def describe_device(options: dict[str, Any], send: Send) -> None:
    """Send the description of the device. Exits where there is no GPU and the run is not `tiny`."""
    prepare_environment()
    send("environment", environment(open_device(options["tiny"]), options["tiny"]))


def build_flashinfer(options: dict[str, Any], send: Send) -> None:
    """Compile FlashInfer's modules while the first parts use the device."""
    prepare_environment()
    peers.build_flashinfer((128, 64))
