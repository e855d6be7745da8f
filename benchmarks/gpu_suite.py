"""Everything worth running while a GPU is at hand for ten minutes, in order of worth, in one command:

    python benchmarks/gpu_suite.py --out results --budget 580
    python benchmarks/gpu_suite.py --parts ceilings,decode --implementations mosaic --peers flashinfer torch
    python benchmarks/gpu_suite.py --tiny                            no GPU: small shapes, to see that it works

Runs from a bare checkout; needs jax, flax, transformers, numpy, orbax-checkpoint, and matplotlib for plots; no network.
Each part runs in a process of its own, so that one that hangs, crashes or breaks the device leaves the others alone.
The time that is left is shared out among the parts that are left; a part whose time is up starts no new case, and is
ended a little later. Rows go to results.json in --out as they are measured; report.md follows after each part, plots
at the end.

Exit status: 0 all well, 1 a part or a check failed.
"""

import argparse
import importlib.util
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernels, peers
from benchmarks.bench import Bench
from benchmarks.device import prepare_environment
from benchmarks.plots import plot
from benchmarks.results import Report, write_tables
from benchmarks.timing import Deadline

MIN_SECONDS = 8.0  # of time left to start a part with
CLOSING = 10.0  # seconds kept for the plots
Send = Callable[[str, Any], None]


class Part(NamedTuple):
    """`seconds` is its share of a budget of ten minutes."""

    seconds: float
    run: Callable[[Bench, argparse.Namespace], None]


def _correctness(implementation: str, bench: Bench, args: argparse.Namespace) -> None:
    from benchmarks.correctness import correctness

    correctness(bench, implementation)


def _ceilings(bench: Bench, args: argparse.Namespace) -> None:
    from benchmarks.ceilings import ceilings

    ceilings(bench)


def _decode(bench: Bench, args: argparse.Namespace) -> None:
    grid = dict(batches=bench.sized((1, 16, 64, 256), (1, 2)), contexts=bench.sized((4096, 1024, 16384), (40,)))
    small = dict(batches=bench.sized((64,), (2,)), contexts=bench.sized((4096,), (40,)))
    head_dims = bench.sized((128, 64), (64,))
    kernels.decode(bench, **grid, head_dims=head_dims, block_sizes=args.block_sizes[:1], lengths=("uniform",))
    kernels.decode(bench, **small, head_dims=head_dims, block_sizes=args.block_sizes[:1], lengths=("zipf",))
    kernels.decode(bench, **small, head_dims=head_dims, block_sizes=args.block_sizes[1:], lengths=("uniform",))


def _paging(bench: Bench, args: argparse.Namespace) -> None:
    kernels.paging(
        bench, head_dims=bench.sized((128, 64), (64,)), block_sizes=args.block_sizes,
        batches=bench.sized((64, 8), (3,)), contexts=bench.sized((4096,), (40,)), prompts=bench.sized((4096,), (40,)),
    )  # fmt: skip


def _prefill(bench: Bench, args: argparse.Namespace) -> None:
    grid = dict(head_dims=bench.sized((128, 64), (64,)), block_sizes=args.block_sizes[:1])
    kernels.prefill(bench, **grid, prompts=bench.sized((2048, 8192, 512, 32768), (40,)))
    kernels.mixed(bench, **grid)


def _write(bench: Bench, args: argparse.Namespace) -> None:
    kernels.write(
        bench, head_dims=bench.sized((128, 64), (64,)), block_sizes=args.block_sizes[:1],
        tokens=bench.sized((64, 2048, 1), (5,)),
    )  # fmt: skip


def _step(model: str, bench: Bench, args: argparse.Namespace) -> None:
    from benchmarks.engine import step

    step(
        bench, model=bench.sized(model, "tiny"), batches=bench.sized([1, 64, 256, 16], [1, 2]),
        contexts=bench.sized([1024, 4096], [40]), block_size=args.block_sizes[0],
    )  # fmt: skip


def _throughput(bench: Bench, args: argparse.Namespace) -> None:
    from benchmarks.engine import throughput

    low, high = bench.sized((100, 1024), (4, 12))
    throughput(
        bench, model=bench.sized(args.throughput_model, "tiny"), requests=bench.sized(args.requests, 4), low=low,
        high=high, block_size=args.block_sizes[0],
    )  # fmt: skip


PARTS = {
    "correctness-mosaic": Part(120, partial(_correctness, "mosaic")),
    "correctness-triton": Part(50, partial(_correctness, "triton")),
    "ceilings": Part(25, _ceilings),
    "decode": Part(110, _decode),
    "paging": Part(60, _paging),
    "prefill": Part(60, _prefill),
    "step-1b": Part(45, partial(_step, "llama-3.2-1b")),
    "step-8b": Part(60, partial(_step, "llama-3.1-8b")),
    "throughput": Part(80, _throughput),
    "write": Part(15, _write),
    "correctness-reference": Part(30, partial(_correctness, "reference")),
}


def chosen(names: Sequence[str]) -> list[str]:
    """The parts whose names are, or begin with, one of `names`, in order of worth; all if there are none."""
    return [part for part in PARTS if not names or any(part == name or part.startswith(f"{name}-") for name in names)]


def share(name: str, left: Sequence[str], seconds: float) -> float:
    """A part's time, of what is left for it and those after it."""
    return seconds * PARTS[name].seconds / sum(PARTS[each].seconds for each in left)


class Relay(Report):
    """A Report whose rows go to the process that keeps the file."""

    def __init__(self, send: Send, environment: dict[str, Any]):
        self._send = send
        super().__init__(Path("results.json"), environment)

    def add(self, **row: Any) -> None:
        self._send("row", row)

    def say(self, line: str) -> None:
        self._send("say", line)

    def write(self) -> None:
        self._send("environment", self.environment)


def run_part(name: str, args: argparse.Namespace, ceilings: dict[str, float | None], send: Send) -> None:
    """Runs a part, and sends what it finds and how it ended."""
    try:
        prepare_environment()
        bench = kernels.make_bench(args, partial(Relay, send))
        bench.read_gb_per_s, bench.matmul_tflop_per_s = ceilings.get("read"), ceilings.get("matmul")
        PARTS[name].run(bench, args)
        send("ceilings", {"read": bench.read_gb_per_s, "matmul": bench.matmul_tflop_per_s})
        send("end", {"status": "ok"})
    except SystemExit as error:
        send("exit", str(error))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:600]
        send("end", {"status": "failed", "reason": reason, "traceback": traceback.format_exc()[-6000:]})


def _child(pipe: Connection, name: str, args: argparse.Namespace, ceilings: dict[str, float | None]) -> None:
    run_part(name, args, ceilings, lambda kind, value: pipe.send((kind, value)))


def _build_flashinfer() -> None:
    prepare_environment()
    peers.build_flashinfer((128, 64))


class Suite:
    """Runs parts and keeps what they send.

    Args:
        child: what runs in a part's process; importable by name.
    """

    def __init__(self, args: argparse.Namespace, child: Callable[..., None] = _child):
        self.args, self._child = args, child
        self.report = Report(args.out / "results.json", {})
        self.ceilings: dict[str, float | None] = {}
        self._spawn = multiprocessing.get_context("spawn")
        self._end: dict[str, Any] = {}

    def run(self, parts: Sequence[str]) -> int:
        """All parts in order; the exit status."""
        deadline = Deadline(self.args.budget - self.args.isolate * CLOSING)
        builder = self._start_builder()
        for i, name in enumerate(parts):
            start = time.monotonic()
            if deadline.left < MIN_SECONDS:
                self.report.end_part(name, status="skipped", reason="time", seconds=0.0)
                continue
            seconds = share(name, parts[i:], deadline.left)
            self.report.say(f"part {name}: up to {seconds:.0f} s")
            end = self._run_part(name, seconds, deadline)
            self.report.end_part(name, **end, seconds=time.monotonic() - start)
            write_tables(self.report, "GPU suite")
        if builder is not None:
            builder.kill()
        try:
            plot(self.report)
        except Exception as error:  # what was measured is worth more than its pictures
            reason = f"{type(error).__name__}: {error}"
            self.report.end_part("plots", status="failed", reason=reason, seconds=0.0)
        print(write_tables(self.report, "GPU suite"))
        bad = [row for row in self.report.rows if row.get("status") in ("wrong", "failed")]
        ends = [end["status"] for end in self.report.parts.values()]
        return int(bool(bad) or any(status not in ("ok", "skipped") for status in ends))

    def handle(self, kind: str, value: Any) -> None:
        """Takes in what a part sends."""
        if kind == "row" and not (value.get("experiment") == "peers" and value in self.report.rows):
            self.report.add(**value)
        elif kind == "say":
            self.report.say(value)
        elif kind == "environment":
            versions = self.report.environment.get("versions", {}) | value["versions"]
            self.report.environment = value | {"versions": versions}
        elif kind == "ceilings":
            self.ceilings |= value
        elif kind == "end":
            self._end = value
        elif kind == "exit":
            raise SystemExit(value)

    def _run_part(self, name: str, seconds: float, deadline: Deadline) -> dict[str, Any]:
        """How the part ended."""
        args = argparse.Namespace(**vars(self.args) | {"budget": seconds})
        self._end = {"status": "failed", "reason": "its process ended without a word"}
        if not self.args.isolate:
            run_part(name, args, self.ceilings, self.handle)
            return self._end
        receiver, sender = self._spawn.Pipe(duplex=False)
        process = self._spawn.Process(target=self._child, args=(sender, name, args, self.ceilings))
        process.start()
        sender.close()
        stop = Deadline(min(seconds + self.args.grace, deadline.left))
        try:
            while not stop.passed:
                if receiver.poll(1):
                    self.handle(*receiver.recv())
            self._end = {"status": "killed", "reason": f"still running {self.args.grace:.0f} s after its time"}
        except EOFError:  # it has ended
            process.join(10)
            if process.exitcode:
                self._end = {"status": "failed", "reason": f"its process ended with {process.exitcode}"}
        finally:
            process.kill()
            process.join()
        return self._end

    def _start_builder(self) -> Any:
        """FlashInfer compiles on the processor while the first parts use the GPU."""
        wanted = any(name == "all" or name.startswith("flashinfer") for name in self.args.peers)
        found = all(importlib.util.find_spec(package) for package in peers.FlashInfer.packages)
        if not wanted or not found or not self.args.isolate or self.args.tiny:
            return None
        builder = self._spawn.Process(target=_build_flashinfer, daemon=True)
        builder.start()
        return builder


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels.add_common_arguments(parser)
    parser.set_defaults(budget=600.0)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[], metavar="NAME,...",
                        help=f"beginnings of: {', '.join(PARTS)}; default all")  # fmt: skip
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[64, 16], help="the first one is the main one")
    parser.add_argument("--requests", type=int, default=256, help="of the throughput part (default 256)")
    parser.add_argument("--throughput-model", choices=("llama-3.2-1b", "llama-3.1-8b"), default="llama-3.2-1b")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds a part gets to end its last case")
    parser.add_argument("--no-isolation", dest="isolate", action="store_false",
                        help="one process for all parts: starts faster, but a crash ends everything")  # fmt: skip
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts if not chosen([name])]
    if unknown:
        parser.error(f"--parts: no part begins with {', '.join(unknown)}")
    if args.tiny:
        args.block_sizes = [16]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment()
    return Suite(args).run(chosen(args.parts))


if __name__ == "__main__":
    sys.exit(main())
