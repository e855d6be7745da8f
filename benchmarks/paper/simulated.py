"""The paper's evaluation in the simulator: every policy on the shapes of OPT and Llama-3.

    python benchmarks/paper/simulated.py --out results               all cases, about six minutes on two cores
    python benchmarks/paper/simulated.py --only "opt-13b sharegpt"   cases whose name contains this
    python benchmarks/paper/simulated.py --million                   one run of a million requests, three minutes

The scheduler and the allocator are jpaged's. The duration of a step is that of a roofline (`jpaged.simulator.cost`).
Pools are the paper's (table 1). For each policy, the request rate is searched at which the normalised latency reaches
0.2 s per token; all points on the way are kept. Traces of OPT last five minutes, or 50 to 100 s with Alpaca's short
requests, instead of the paper's hour, so that latencies under overload are smaller. No figure depends on the machine
or on the time of the run.
"""

import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper.memory import MemoryWatch
from benchmarks.paper.policies import POLICIES
from benchmarks.paper.traces import WORKLOADS
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.config import Limits
from jpaged.simulator.cost import Roofline
from jpaged.simulator.deployment import Deployment
from jpaged.simulator.engine import VOCAB_SIZE, VirtualEngine, drive
from jpaged.simulator.gpu import GPUS
from jpaged.simulator.shape import SHAPES
from jpaged.simulator.traffic import Schedule

LIMIT_S = 0.2  # of the normalised latency
FACTOR = 1.5  # between the rates of a search, until the latency limit lies between two
# Lengths of traces with Alpaca's lengths, and of those with several outputs each, over the lengths of other traces.
SHORT, WIDE = 1 / 3, 1 / 6


class Setup(NamedTuple):
    """A model on its GPUs.

    Attributes:
        pool_tokens: the paper's (table 1); None: as many as fit.
        seconds: length of the traces.
        start: first rate of a search, in requests per second.
    """

    gpu: str
    num_gpus: int
    pool_tokens: int | None
    seconds: float
    start: float
    max_num_seqs: int = 256

    def seconds_of(self, workload: str) -> float:
        """Return the length of a workload's traces."""
        return self.seconds * (WIDE if "," in workload else SHORT if workload.startswith("alpaca") else 1.0)

    def start_of(self, workload: str) -> float:
        """Return the first rate of a search."""
        return self.start * (10.0 if workload.startswith("alpaca") else 1.0)


SETUPS = {
    "opt-13b": Setup("a100-40gb", 1, 15_700, 300, 1.0),
    "opt-66b": Setup("a100-40gb", 4, 9_700, 300, 0.6),
    "opt-175b": Setup("a100-80gb", 8, 60_100, 300, 1.5),
    "llama-13b": Setup("a100-40gb", 1, 15_700, 120, 20.0),
    "llama-3-8b": Setup("h100", 1, None, 60, 50.0, 1024),
    "llama-3-70b": Setup("h100", 4, None, 120, 16.0, 1024),
}
ORCA = ("orca-max", "orca-pow2", "orca-oracle")


class Case(NamedTuple):
    """One search."""

    model: str
    workload: str
    policy: str
    block_size: int = 16

    @property
    def name(self) -> str:
        return " ".join(map(str, self))


def cases() -> list[Case]:
    """The searches of the evaluation, each once."""
    found = [
        *(Case(model, data, policy) for model in ("opt-13b", "opt-66b", "opt-175b")
          for data in ("sharegpt", "alpaca") for policy in ("static", *ORCA, "paged")),
        *(Case("opt-13b", data, "static-paged") for data in ("sharegpt", "alpaca")),
        *(Case("opt-13b", f"alpaca, {kind} {width}", policy) for kind in ("parallel", "beam") for width in (2, 4, 6)
          for policy in ("orca-oracle", "unshared", "paged")),
        *(Case("llama-13b", f"{shots}-shot", policy) for shots in (1, 5)
          for policy in ("orca-oracle", "paged", "prefix", "radix")),
        *(Case("opt-13b", "chatbot", policy) for policy in (*ORCA, "paged", "prefix")),
        *(Case("opt-13b", data, "paged", size) for data in ("sharegpt", "alpaca")
          for size in (8, 32, 64, 128, 256)),
        *(Case(model, "sharegpt", policy) for model in ("llama-3-8b", "llama-3-70b")
          for policy in ("static", *ORCA, "paged")),
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def pool_tokens(model: str) -> int:
    setup, shape = SETUPS[model], SHAPES[model]
    deployment = Deployment(GPUS[setup.gpu], shape, setup.num_gpus, max_model_len=shape.context)
    return setup.pool_tokens or deployment.pool_tokens


def cost_of(model: str) -> Roofline:
    setup = SETUPS[model]
    return Roofline(GPUS[setup.gpu], SHAPES[model], setup.num_gpus)


def run(case: Case, rate: float, count: int | None = None) -> Row:
    """One trace at one rate."""
    setup, policy = SETUPS[case.model], POLICIES[case.policy]
    limits = Limits(2048, setup.max_num_seqs, 2048, case.block_size)
    calls = WORKLOADS[case.workload](count or max(100, round(rate * setup.seconds_of(case.workload))), rate)
    scheduler = policy.make(limits, pool_tokens(case.model), VOCAB_SIZE, preemption="recompute")
    watch = MemoryWatch(every=20)
    engine = VirtualEngine(scheduler, cost_of(case.model), on_plan=watch)
    start = time.process_time()
    served = drive(engine, Schedule(calls), shares=policy.shares, together=policy.together)
    took = time.process_time() - start
    memory, prompts = watch.mean(), sum(call.num_prompt_tokens for call in calls)
    return dict(
        experiment="simulated", model=case.model, workload=case.workload, policy=case.policy,
        block_size=scheduler.pool.block_size, rate=rate, normalised=fmean(each.normalised for each in served),
        ttft=fmean(each.first - each.call.arrival for each in served), requests=len(served),
        requests_per_s=len(served) / engine.now, batched=watch.mean_running(),
        preemptions=scheduler.num_preemptions / len(served), cached=scheduler.prefix_hits / prompts,
        memory=memory and memory._asdict(), steps=engine.steps, virtual_s=engine.now, process_s=took,
        speed=engine.now / took, status="ok",
    )  # fmt: skip


def search(case: Case, tiny: bool = False) -> list[Row]:
    """The points of a search for the rate with the latency limit, and a last row with that rate.

    Args:
        tiny: traces of ten seconds.
    """
    latencies: dict[float, float] = {}
    rows: list[Row] = []

    def is_good(rate: float) -> bool:
        rows.append(run(case, rate, max(100, round(10 * rate)) if tiny else None))
        latencies[rate] = rows[-1]["normalised"]
        return latencies[rate] <= LIMIT_S

    low = high = SETUPS[case.model].start_of(case.workload)
    if is_good(low):
        while is_good(high := low * FACTOR):
            low = high
    else:
        while not is_good(low := high / FACTOR):
            high = low
    middle = math.sqrt(low * high)
    low, high = (middle, high) if is_good(middle) else (low, middle)
    a, b, limit = math.log(latencies[low]), math.log(latencies[high]), math.log(LIMIT_S)
    sustained = low + (high - low) * (limit - a) / (b - a)
    rows.append(dict(
        experiment="sustained", model=case.model, workload=case.workload, policy=case.policy,
        block_size=rows[0]["block_size"], rate=sustained, limit_s=LIMIT_S, source=cost_of(case.model).source,
        status="ok",
    ))  # fmt: skip
    return rows


def search_all(wanted: Sequence[Case], tiny: bool = False) -> Iterator[tuple[Case, list[Row]]]:
    """The rows of each case in the order of their ends. The longest cases start first."""
    length = lambda case: ("beam" in case.workload, case.model.startswith("llama-3"), case.policy == "radix")
    order = sorted(wanted, key=length, reverse=True)
    # At Python's thresholds, garbage collection takes a tenth of the time.
    rarely = dict(initializer=gc.set_threshold, initargs=(50_000, 20, 100))
    with ProcessPoolExecutor(mp_context=get_context("spawn"), **rarely) as pool:
        runs = {pool.submit(search, case, tiny): case for case in order}
        for done in as_completed(runs):
            yield runs[done], done.result()


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.shared.device import environment, open_device

    parser = script_parser(__doc__, "simulated")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--million", action="store_true", help="one run of a million requests")
    parser.add_argument("--tiny", action="store_true", help="traces of ten seconds, to see that it works")
    args = parser.parse_args(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    if args.million:
        report.add(**run(Case("opt-13b", "alpaca", "paged"), 30.0, 1_000_000))
        columns = ("rate", "requests", "requests_per_s", "normalised", "steps", "virtual_s", "process_s", "speed")
        report.publish("A million simulated requests", table(report.rows, ("model", "workload", "policy", *columns)))
    else:
        wanted = [case for case in cases() if args.only in case.name]
        for _, rows in search_all(wanted, args.tiny):
            for row in rows:
                report.add(**row)
        of = [row for row in report.rows if row["experiment"] == "sustained"]
        report.publish("Simulated", table(of, ("model", "workload", "policy", "block_size", "rate")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
