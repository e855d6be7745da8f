"""The cost of preemption: computing a request's blocks again against swapping them, over block sizes.

    python benchmarks/paper/preemption.py --out results
    python benchmarks/paper/preemption.py --block-sizes 16 64 --modes recompute swap auto
    python benchmarks/paper/preemption.py --tiny               two block sizes, few tokens, to see that it works

The axes are PagedAttention's (arXiv:2309.06180, Fig. 19). First one request's blocks alone: milliseconds to move them
to the host, back, and to compute them again, through the ModelRunner. Then whole runs: a few clients, each with one
request at a time, in a pool too small for them; normalised latency is the mean over requests of latency / output
tokens. The prefix cache is off, as in the paper: it might find some of the blocks to be computed again.

It runs on any device, by default with the demo model, and names the device. A schedule depends on no clock, so
each run of a mode and block size preempts the same requests.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.runners import runner_of
from benchmarks.shared.timing import ratio, summarize
from jpaged.bench.workload import DATASETS, Dataset
from jpaged.config import EngineConfig, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Scheduled, StepPlan
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.runtime.runner import ModelRunner
from jpaged.start.load import load
from jpaged.start.measure import block_swap_cost, warm_up

MODES = ("recompute", "swap", "auto")


class Moves:
    """One request of `tokens` tokens, to be moved or computed again on a runner that nobody else uses."""

    def __init__(self, runner: ModelRunner, tokens: int, chunk: int):
        self.runner, self.tokens, self.chunk = runner, tokens, chunk
        self.blocks = list(range(-(-tokens // runner.blocks.cache.block_size)))
        admitted = Admitted(0, (1,) * tokens, tokens, SamplingParams(), 0, (tuple(self.blocks),))
        runner.dispatch(StepPlan(admitted=(admitted,)))

    def swap_out(self) -> None:
        self.runner.dispatch(StepPlan(swap_out=tuple((block, block) for block in self.blocks)))
        jax.block_until_ready([chunk.blocks for chunk in self.runner.blocks.host._chunks.values()])

    def swap_in(self) -> None:
        self.runner.dispatch(StepPlan(swap_in=tuple((block, block) for block in self.blocks)))
        jax.block_until_ready(self.runner.blocks.pool)

    def recompute(self) -> None:
        """In as many steps as the budget of a step makes of it, as the scheduler would."""
        for start in range(0, self.tokens, self.chunk):
            count = min(self.chunk, self.tokens - start)
            scheduled = Scheduled(0, start, count, num_samples=int(start + count == self.tokens))
            self.runner.dispatch(StepPlan((scheduled,))).result()
        jax.block_until_ready(self.runner.blocks.pool)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def micro(report: Report, runners: dict[int, ModelRunner], tokens: int, chunk: int, rounds: int) -> None:
    """Out, in and again, in turn, all block sizes in each round."""
    moves = {size: Moves(runner, tokens, chunk) for size, runner in runners.items()}
    names = ("swap_out", "swap_in", "recompute")
    samples: dict[tuple[int, str], list[float]] = {}
    for warm in range(-1, rounds):
        for (size, each), name in itertools.product(moves.items(), names):
            seconds = _seconds(getattr(each, name))
            if warm >= 0:
                samples.setdefault((size, name), []).append(seconds)
    for size, runner in runners.items():
        out, back, again = (summarize([[s] for s in samples[size, name]]) for name in names)
        both = summarize([[a + b] for a, b in zip(out.rounds, back.rounds)])
        for name, timing in zip((*names, "swap"), (out, back, again, both)):
            report.add(
                experiment="preemption", block_size=size, operation=name, tokens=tokens,
                blocks=-(-tokens // size), ms=1e3 * timing.median, ms_low=1e3 * timing.low, ms_high=1e3 * timing.high,
                over_recompute=ratio(timing, again), kernels=runner.kernels.name, status="ok",
            )  # fmt: skip


def requests_of(dataset: Dataset, count: int, most: tuple[int, int], vocab: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens of output) of each."""
    rng = np.random.default_rng(0)
    return [(rng.integers(2, vocab, prompt).tolist(), output) for prompt, output in dataset.lengths(count, most=most)]


def serve(engine: Engine, requests: Sequence[tuple[list[int], int]], clients: int) -> list[float]:
    """Latency per token of output of each request; a client sends the next one when its last has ended."""
    coming: Iterator = enumerate(requests)
    started: dict[str, float] = {}
    ended: list[float] = []

    def send() -> None:
        for i, (prompt, output) in itertools.islice(coming, 1):
            engine.add(str(i), prompt, SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0))
            started[str(i)] = time.perf_counter()

    for _ in range(clients):
        send()
    while engine.has_work:
        for delta in engine.step().deltas:
            if delta.finish_reason:
                latency = time.perf_counter() - started[delta.request_id]
                ended.append(latency / requests[int(delta.request_id)][1])
                send()
    return ended


def end_to_end(
    report: Report, runners: dict[int, ModelRunner], costs: dict[int, float], modes: Sequence[str], limits: Limits, *,
    pool_tokens: int, requests: Sequence[tuple[list[int], int]], clients: int, rounds: int,
) -> None:  # fmt: skip
    """Each round runs every mode at every block size, after a run that warms up."""
    cases = list(itertools.product(runners, modes))
    latencies: dict[tuple[int, str], list[list[float]]] = {case: [] for case in cases}
    schedulers: dict[tuple[int, str], Scheduler] = {}

    def run(size: int, mode: str) -> list[float]:
        runner = runners[size]
        scheduler = schedulers[size, mode] = Scheduler(
            BlockPool(pool_tokens // size, size, enable_prefix_caching=False), limits,
            vocab_size=runner.vocab_size, preemption=mode, block_swap_cost=costs[size],
            host_pool=BlockPool(runner.blocks.num_host_blocks, size, enable_prefix_caching=False),
        )  # fmt: skip
        return serve(Engine(scheduler, runner), requests, clients)

    run(*cases[0])
    for _ in range(rounds):
        for case in cases:
            latencies[case].append(run(*case))
    of = lambda case: summarize([[statistics.fmean(each)] for each in latencies[case]])
    for size, mode in cases:
        timing, scheduler = of((size, mode)), schedulers[size, mode]
        report.add(
            experiment="normalised latency", block_size=size, mode=mode, ms_per_token=1e3 * timing.median,
            ms_per_token_low=1e3 * min(timing.rounds), ms_per_token_high=1e3 * max(timing.rounds),
            over_recompute=ratio(timing, of((size, "recompute"))) if "recompute" in modes else None,
            preemptions=scheduler.num_preemptions, swapped_blocks=scheduler.num_swapped_blocks,
            swap_cost_tokens=costs[size] or None, requests=len(requests), clients=clients, pool_tokens=pool_tokens,
            prompt=statistics.fmean(len(prompt) for prompt, _ in requests),
            output=statistics.fmean(output for _, output in requests), status="ok",
        )  # fmt: skip


COLUMNS = {
    "preemption": ("operation", "block_size", "blocks", "tokens", "ms", "ms_low", "ms_high", "over_recompute"),
    "normalised latency": ("mode", "block_size", "ms_per_token", "ms_per_token_low", "ms_per_token_high",
                           "over_recompute", "preemptions", "swapped_blocks", "swap_cost_tokens"),
}  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "preemption")
    parser.add_argument("--tiny", action="store_true", help="two block sizes, few tokens")
    parser.add_argument("--model", default="demo", help="a directory, a hub id, or demo (the default)")
    parser.add_argument("--load-format", default="auto", help="dummy: random parameters")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["recompute", "swap"])
    parser.add_argument("--tokens", type=int, default=1024, help="of the request that is moved alone (default 1024)")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step (default 512)")
    parser.add_argument("--requests", type=int, default=16, help="of a whole run (default 16)")
    parser.add_argument("--clients", type=int, default=8, help="that send them (default 8)")
    parser.add_argument("--pool-tokens", type=int, default=768, help="of the pool that is too small (default 768)")
    parser.add_argument("--scale", type=float, default=0.5, help="of ShareGPT's mean lengths (default 0.5)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    args = parser.parse_args(argv)
    if args.tiny:
        args.block_sizes, args.tokens, args.chunk, args.rounds = [8, 32], 64, 16, 1
        args.requests, args.clients, args.pool_tokens, args.scale = 4, 2, 64, 0.1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    device = open_device(tiny=True)  # a CPU is enough: the results say so
    report = Report(args.out / "results.json", environment(device, args.tiny) | {"model": args.model})
    model = load(args.model, load_format=args.load_format, progress=False)
    limits = Limits(min(args.tokens, model.config.max_position_embeddings), args.clients, args.chunk)
    runners, costs = {}, {}
    for size in args.block_sizes:
        blocks = max(args.pool_tokens, limits.max_model_len) // size
        sized = dataclasses.replace(limits, block_size=size)
        runners[size] = runner_of(model, EngineConfig(num_gpu_blocks_override=blocks), sized)
        costs[size] = block_swap_cost(runners[size], sized, warm_up(runners[size], sized, progress=False))
        report.say(f"block size {size} is compiled")
    micro(report, runners, limits.max_model_len, args.chunk, 5 * args.rounds)
    means = DATASETS["ShareGPT"]
    dataset = Dataset(args.scale * means.prompt, args.scale * means.output)
    half = min(limits.max_model_len, args.pool_tokens) // 2
    requests = requests_of(dataset, args.requests, (half, half), model.config.vocab_size)
    end_to_end(
        report, runners, costs, args.modes, limits, pool_tokens=args.pool_tokens, requests=requests,
        clients=args.clients, rounds=args.rounds,
    )  # fmt: skip
    of = lambda name: [row for row in report.rows if row["experiment"] == name]
    tables = [f"## {name}\n\n{table(of(name), columns)}" for name, columns in COLUMNS.items()]
    report.publish("Preemption", *tables)
    plot(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
