"""The paper's comparison on the real engine at the scale of a CPU: every policy on the same model, step and kernels.

    python benchmarks/paper/measured.py --out results           about eleven minutes on two cores
    python benchmarks/paper/measured.py --parts ablation        one part; also rates, prefixes, sizes, validation, user

Lengths, the context and the KV memory of OPT-13B on an A100 are divided by four: ShareGPT's requests have 40 tokens in
and 84 out, the pool has 3,925 tokens. Steps of the demo model take about as long for one sequence as for ten, as those
of a large model on a GPU do, so that the sequences in memory decide the throughput. Rates are multiples of the rate at
which the policy "paged" ends requests that all wait from the start.

For the validation, two engines take turns, one step each, so that the machine's drift is the same for both. Each has a
trace of its own at the same rate. The steps of one give the mean of each padded shape, a table of costs on which the
simulator runs the trace of the other one.
"""

import dataclasses
import gc
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from benchmarks.engine.step_table import StepTimes
from benchmarks.paper.clocked import RealEngine, take_turns, text_tokens
from benchmarks.paper.memory import MemoryWatch
from benchmarks.paper.policies import POLICIES, limits_of
from benchmarks.paper.traces import CONTEXT, WORKLOADS
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from benchmarks.shared.runners import runner_of
from jpaged.config import EngineConfig, Limits
from jpaged.core.params import SamplingParams
from jpaged.engine.engine import Engine
from jpaged.runtime.runner import ModelRunner
from jpaged.simulator.engine import VOCAB_SIZE, Served, VirtualEngine, drive
from jpaged.simulator.traffic import Call, Schedule
from jpaged.start.load import load
from jpaged.start.measure import warm_up

SCALE = 0.25
POOL_TOKENS = round(SCALE * 15_700)
LIMITS = Limits(round(SCALE * CONTEXT), 64, 256, block_size=8)
BLOCK_SIZES = (1, 8, 32, 256)
ROUNDS = 7  # of the validation
ALL = ("static", "static-paged", "orca-max", "orca-pow2", "orca-oracle", "paged")


class Lab:
    """Runners of the demo model by block size, each compiled once, and runs of traces on them.

    Args:
        seconds: length of the traces.
    """

    def __init__(self, report: Report, seconds: float):
        self.report, self.seconds = report, seconds
        self._model = load("demo", progress=False)
        self._runners: dict[int, ModelRunner] = {}
        self._saturation: dict[str, float] = {}

    def runner(self, block_size: int) -> ModelRunner:
        if block_size not in self._runners:
            self._runners[block_size] = self.new_runner(block_size)
            self.report.say(f"block size {block_size} is compiled")
        return self._runners[block_size]

    def new_runner(self, block_size: int) -> ModelRunner:
        limits = dataclasses.replace(LIMITS, block_size=block_size)
        runner = runner_of(self._model, EngineConfig(num_gpu_blocks_override=POOL_TOKENS // block_size), limits)
        warm_up(runner, limits, progress=False)
        return runner

    def forget(self) -> None:
        """Free all runners: the executables of many need more memory mappings than a process may have."""
        self._runners.clear()
        jax.clear_caches()
        gc.collect()

    def engine(self, name: str, block_size: int = LIMITS.block_size, **options: Any) -> RealEngine:
        policy = POLICIES[name]
        limits = limits_of(policy, dataclasses.replace(LIMITS, block_size=block_size))
        runner = self.runner(limits.block_size)
        return RealEngine(
            policy.make(limits, POOL_TOKENS, runner.vocab_size, preemption="recompute"), runner, **options
        )

    def run(self, name: str, calls: Sequence[Call], block_size: int = LIMITS.block_size) -> Row:
        """One trace under one policy."""
        policy, watch = POLICIES[name], MemoryWatch(every=5)
        engine = self.engine(name, block_size, on_plan=watch)
        served = drive(engine, Schedule(calls), shares=policy.shares, together=policy.together)
        scheduler, memory = engine.scheduler, watch.mean()
        return dict(
            policy=name, block_size=scheduler.pool.block_size, **summary(served), batched=watch.mean_running(),
            preemptions=scheduler.num_preemptions / len(served), memory=memory and memory._asdict(),
            cached=scheduler.prefix_hits / max(1, scheduler.prefix_queries), status="ok",
        )  # fmt: skip

    def trace(self, workload: str, rate: float, seed: int = 0) -> list[Call]:
        return WORKLOADS[workload](max(20, round(rate * self.seconds)), rate, seed=seed, scale=SCALE)

    def saturation(self, workload: str) -> float:
        """Requests per second of the policy "paged" if all wait from the start."""
        if workload not in self._saturation:
            calls = [call._replace(arrival=0.0) for call in WORKLOADS[workload](300, 1.0, seed=9, scale=SCALE)]
            self.run("paged", calls[:30])
            self._saturation[workload] = self.run("paged", calls)["requests_per_s"]
            self.report.say(f"{workload}: {self._saturation[workload]:.1f} requests/s at saturation")
        return self._saturation[workload]


def summary(served: Sequence[Served]) -> Row:
    seconds = max(each.end for each in served) - min(each.call.arrival for each in served)
    return dict(
        normalised=statistics.fmean(each.normalised for each in served),
        ttft=statistics.fmean(each.first - each.call.arrival for each in served),
        requests=len(served), requests_per_s=len(served) / seconds,
    )  # fmt: skip


def rates(lab: Lab) -> None:
    """Latency against the request rate, all policies."""
    for workload in ("sharegpt", "alpaca"):
        for share in (0.3, 0.7, 1.1):
            rate = share * lab.saturation(workload)
            for name in ALL:
                lab.report.add(experiment="measured", workload=workload, share=share, rate=rate,
                               **lab.run(name, lab.trace(workload, rate)))  # fmt: skip


def ablation(lab: Lab) -> None:
    """Requests per second under overload: {static, continuous} x {contiguous, paged}, in interleaved rounds."""
    calls = [call._replace(arrival=0.0) for call in WORKLOADS["sharegpt"](200, 1.0, seed=1, scale=SCALE)]
    names = ("static", "static-paged", "orca-max", "paged")
    found: dict[str, list[Row]] = defaultdict(list)
    for _ in range(3):
        for name in names:
            found[name].append(lab.run(name, calls))
    for rows in found.values():
        throughputs = [row["requests_per_s"] for row in rows]
        lab.report.add(experiment="ablation", workload="sharegpt", throughputs=throughputs,
                       **rows[0] | {"requests_per_s": statistics.median(throughputs)})  # fmt: skip


def prefixes(lab: Lab) -> None:
    """Requests per second and first tokens with shared prefixes and conversations, by kind of prefix cache."""
    for workload in ("1-shot", "5-shot", "chatbot"):
        rate = 0.9 * lab.saturation(workload)
        for name in ("orca-oracle", "paged", "prefix", "radix"):
            lab.report.add(experiment="prefixes", workload=workload, share=0.9, rate=rate,
                           **lab.run(name, lab.trace(workload, rate)))  # fmt: skip


def sizes(lab: Lab) -> None:
    """Block sizes, just below saturation."""
    traces = {name: lab.trace(name, 0.9 * lab.saturation(name)) for name in ("sharegpt", "alpaca")}
    for size in BLOCK_SIZES:
        lab.forget()
        for workload, calls in traces.items():
            lab.report.add(experiment="block size", workload=workload, **lab.run("paged", calls, size))


def validation(lab: Lab) -> None:
    """The simulator on measured costs against the engine, on traces that the costs do not come from.

    A point has the figures of its round with the median error: a pause of the machine falls into the steps of one
    engine only.
    """
    runners = lab.runner(LIMITS.block_size), lab.new_runner(LIMITS.block_size)
    make = lambda vocab_size: POLICIES["paged"].make(LIMITS, POOL_TOKENS, vocab_size, preemption="recompute")
    found: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for number, workload in itertools.product(range(ROUNDS), ("sharegpt", "alpaca")):
        for share in (0.2, 0.4, 0.6):
            times = StepTimes(runners[0].shapes.buckets)
            takes = times.take, None
            engines = [RealEngine(make(each.vocab_size), each, on_step=take) for each, take in zip(runners, takes)]
            traces = [lab.trace(workload, share * lab.saturation(workload), seed=seed + number) for seed in (200, 100)]
            measured = summary(take_turns(engines, traces)[1])
            simulated, start = VirtualEngine(make(VOCAB_SIZE), times.table("steps of this CPU")), time.process_time()
            predicted = summary(drive(simulated, Schedule(traces[1])))
            found[workload, share].append(dict(
                measured=measured["normalised"], predicted=predicted["normalised"], measured_ttft=measured["ttft"],
                predicted_ttft=predicted["ttft"], speed=simulated.now / (time.process_time() - start),
                requests=len(traces[1]), error=predicted["normalised"] / measured["normalised"] - 1,
            ))  # fmt: skip
        lab.report.say(f"validation: {workload}, round {number + 1} of {ROUNDS}")
    for (workload, share), rows in found.items():
        rows.sort(key=lambda row: row["error"])
        lab.report.add(experiment="validation", workload=workload, share=share, rate=share * lab.saturation(workload),
                       errors=[row["error"] for row in rows], **rows[ROUNDS // 2], status="ok")  # fmt: skip


def user(lab: Lab) -> None:
    """One user at home: conversations and repeated system prompts on one stream, with and without the prefix cache."""
    runner = lab.runner(16)
    tokens = lambda text, count: text_tokens(text, count, runner.vocab_size)
    for scenario, system, rounds, question, answer in (
        ("conversation", 40, 8, 20, 30), ("system prompt", 380, 8, 20, 30),
    ):  # fmt: skip
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for repetition in range(-1, 5):
            for name in ("paged", "prefix"):
                limits = dataclasses.replace(LIMITS, block_size=16)
                scheduler = POLICIES[name].make(limits, POOL_TOKENS, runner.vocab_size, preemption="recompute")
                history, firsts, total = tokens(1000 + repetition, system), [], 0.0
                for number in range(rounds):
                    asked = tokens(random.Random((repetition, number).__hash__()).randrange(10**6), question)
                    first, seconds, output = answer_of(Engine(scheduler, runner), history + asked, answer)
                    firsts.append(first)
                    total += seconds
                    if scenario == "conversation":
                        history += asked + output
                if repetition >= 0:
                    found[name].append((statistics.fmean(firsts[1:]), total))
        for name, pairs in found.items():
            first, total = (statistics.median(column) for column in zip(*pairs))
            lab.report.add(experiment="one user", scenario=scenario, policy=name, ttft=first, total_s=total,
                           rounds=rounds, status="ok")  # fmt: skip


def answer_of(engine: Engine, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
    """Seconds to the first and to the last token of an answer, and its tokens."""
    start = time.perf_counter()
    request = engine.add("0", prompt, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
    first = 0.0
    while engine.has_work:
        engine.step()
        first = first or (time.perf_counter() - start if request.sequences[0].num_output_tokens else 0.0)
    return first, time.perf_counter() - start, request.sequences[0].output_token_ids


GROUPS = ("ablation", "rates", "validation"), ("prefixes", "sizes"), ("user",)  # parts of a process
PARTS: dict[str, Callable[[Lab], None]] = {
    "ablation": ablation, "rates": rates, "prefixes": prefixes, "sizes": sizes, "validation": validation, "user": user,
}  # fmt: skip


def measure(report: Report, seconds: float, parts: Sequence[str] = tuple(PARTS)) -> None:
    """Add the rows of some parts."""
    lab = Lab(report, seconds)
    for name in parts:
        start = time.monotonic()
        PARTS[name](lab)
        report.end_part(name, status="ok", seconds=time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    parser = script_parser(__doc__, "measured")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each trace (default 3)")
    parser.add_argument("--tiny", action="store_true", help="short traces, to see that it works")
    args = parser.parse_args(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    measure(report, 0.5 if args.tiny else args.seconds, args.parts)
    columns = ("experiment", "workload", "scenario", "policy", "block_size", "share", "normalised", "ttft", "total_s",
               "requests_per_s", "measured", "predicted", "error", "speed")  # fmt: skip
    report.publish("Measured", table(report.rows, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
