"""Measures the scheduler's own time in a step, with few and with many running sequences and waiting requests.

    python benchmarks/engine/scheduler.py --out results      a minute and a half

The time of a step is that of `schedule` and `commit`, and of the calls of `add` and `abort` before it (`events`). The
runner computes nothing. The lengths of the queue are measured in turn, step by step, and `ratio` is the median of
the ratios of such steps. The cases:

    full         All rows are in use.
    cold         The same, and other data fills the caches before `schedule` and `commit`, as the rest of a step may do.
    blocked      There are free rows, but too few free blocks for the first waiting request. Each step tries it.
    turnover     In each step one of 64 running requests ends, a waiting one replaces it, and a new one arrives.
    clients      The same, and each request has its own client.
    tenants      The same as turnover, and the requests are in turn those of four tenants.
    aborts       All rows are in use. Before each step a request arrives, and a random waiting one is aborted.
    preemption   Each step preempts the last running request. It is restarted between the steps.
    held         There are free rows, but no new request may start, as before an update of parameters.
"""

import argparse
import functools
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepPlan, StepResult
from jpaged.core.scheduler import Scheduler

PROMPT, COMMON, BLOCK_SIZE = 64, 32, 16  # tokens of a prompt, of the common prefix of all, of a block
LIFETIME = 64  # steps of a request under turnover
RUNNING, WAITING = (256, 4096), (0, 1000, 100_000)
WARM_UP = 4  # steps
PARTS = ("events", "schedule", "commit")


class Load:
    """A scheduler with some running sequences and waiting requests: the case `full`, and the base of the others."""

    spare_rows = 0

    def __init__(self, running: int, waiting: int, steps: int):
        self.running, self.waiting, self.length = running, waiting, 2 * (steps + WARM_UP) + LIFETIME
        rows, width = running + self.spare_rows, (PROMPT + self.length) // BLOCK_SIZE + 2
        self.scheduler = Scheduler(
            BlockPool(rows * width, BLOCK_SIZE), Limits(PROMPT + self.length, rows, PROMPT * rows), vocab_size=32_000
        )
        self.ballast: list[int] = []  # blocks that are kept from requests
        self.numbers = itertools.count()
        for number in range(running):
            self.add(self.first_life(number), PROMPT - number % BLOCK_SIZE)  # few blocks end at once
        self.step()
        for _ in range(waiting):
            self.add(self.life)

    @property
    def life(self) -> int:
        return self.length

    def first_life(self, number: int) -> int:
        return self.life

    def client(self, number: int) -> str | None:
        return None

    def tenant(self, number: int) -> str | None:
        return None

    def add(self, max_tokens: int, length: int = PROMPT) -> str:
        number = next(self.numbers)
        prompt = [1] * COMMON + [2 + number % 31_000] * (length - COMMON)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.6)
        client, tenant = self.client(number), self.tenant(number)
        return self.scheduler.add(str(number), prompt, params, seed=0, client=client, tenant=tenant).request_id

    def keep_free(self, beyond: int) -> None:
        """Leave as many free blocks as the running sequences need in the next step, plus `beyond`."""
        pool = self.scheduler.pool
        wanted = beyond + sum(r.sequences[0].num_computed_tokens % BLOCK_SIZE == 0 for r in self.scheduler.running)
        while pool.num_free > wanted:
            block_id = pool.allocate()
            assert block_id is not None
            self.ballast.append(block_id)
        while pool.num_free < wanted:
            pool.free(self.ballast.pop())

    def prepare(self) -> None:
        """Prepare the next step, outside the measured time."""

    def events(self) -> None:
        """Call `add` and `abort` between two steps."""

    def rest(self) -> None:
        """Do the rest of an engine's step, between `schedule` and `commit` and outside the measured time."""

    def step(self) -> tuple[StepPlan, float, float]:
        """Run a step; return its plan, and the seconds of `schedule` and `commit`."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        self.rest()
        result = StepResult([Sample(5, -1.0) for row in plan.rows for _ in range(row.num_samples)])
        before = time.perf_counter()
        self.scheduler.commit(plan, result)
        return plan, scheduled - start, time.perf_counter() - before

    def check(self, plan: StepPlan) -> None:
        """Check that a step was a step of this case."""
        assert len(plan.rows) == self.running and not plan.admitted, f"{len(plan.rows)} rows, {plan.admitted}"
        assert len(self.scheduler.waiting) == self.waiting


@functools.cache
def other_data() -> np.ndarray:
    """Return 128 MiB, more than a core's caches hold."""
    return np.zeros(2**27, np.uint8)


class Cold(Load):
    def rest(self) -> None:
        data = other_data()
        data += 1

    prepare = rest


class Blocked(Load):
    spare_rows = 8

    def prepare(self) -> None:
        self.keep_free(1)  # the first waiting request needs two


class Turnover(Load):
    @property
    def life(self) -> int:
        return LIFETIME

    def first_life(self, number: int) -> int:
        return 2 + number % LIFETIME

    def events(self) -> None:
        while len(self.scheduler.requests) < self.running + self.waiting:
            self.add(self.life)

    def check(self, plan: StepPlan) -> None:
        assert len(plan.rows) == self.running and len(plan.admitted) == self.running // LIFETIME


class Clients(Turnover):
    def client(self, number: int) -> str | None:
        return str(number)


class Tenants(Turnover):
    def tenant(self, number: int) -> str | None:
        return str(number % 4)


class Aborts(Load):
    def __init__(self, running: int, waiting: int, steps: int):
        super().__init__(running, waiting, steps)
        self.names, self.random = [request.request_id for request in self.scheduler.waiting], random.Random(0)

    def events(self) -> None:
        self.names.append(self.add(self.life))
        at = self.random.randrange(len(self.names))
        self.names[at], self.names[-1] = self.names[-1], self.names[at]
        self.scheduler.abort(self.names.pop())


class Preemption(Load):
    def prepare(self) -> None:
        while self.ballast:
            self.scheduler.pool.free(self.ballast.pop())
        self.step()
        self.keep_free(-1)

    def check(self, plan: StepPlan) -> None:
        assert len(plan.rows) == self.running - 1 and len(self.scheduler.waiting) == self.waiting + 1


class Held(Load):
    spare_rows = 8

    def prepare(self) -> None:
        self.scheduler.holds_new = True


CASES: dict[str, type[Load]] = {
    "full": Load, "cold": Cold, "blocked": Blocked, "turnover": Turnover, "clients": Clients, "tenants": Tenants,
    "aborts": Aborts, "preemption": Preemption, "held": Held,
}  # fmt: skip


def measure(case: str, running: int, waiting: Sequence[int], steps: int) -> list[Row]:
    """Return the median microseconds of a step and of its parts, for each length of the queue."""
    gc.disable()  # a young collection after every few hundred requests would take most of the time to add them
    loads = [CASES[case](running, length, steps) for length in waiting]
    times: list[list[tuple[float, ...]]] = [[] for _ in loads]
    gc.freeze()  # as `jpaged.serving.serve` does with the loaded modules
    gc.enable()
    for number in range(-WARM_UP, steps):
        for load, found in zip(loads, times):
            load.prepare()
            start = time.perf_counter()
            load.events()
            events = time.perf_counter() - start
            plan, *seconds = load.step()
            if number >= 0:
                load.check(plan)
                found.append((events, *seconds))
    gc.unfreeze()
    del loads, load
    gc.collect()
    rows = []
    for length, found in zip(waiting, times):
        parts = {f"{name}_us": 1e6 * statistics.median(each) for name, each in zip(PARTS, zip(*found))}
        step = 1e6 * statistics.median(map(sum, found))
        ratio = statistics.median(sum(each) / sum(first) for each, first in zip(found, times[0]))
        rows.append(dict(case=case, running=running, waiting=length, **parts, step_us=step,
                         per_running_us=step / running, ratio=ratio))  # fmt: skip
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "scheduler")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="cases to run")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING, metavar="N", help="numbers of sequences")
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, metavar="N",
                        help="lengths of the queue; ratios refer to the first")  # fmt: skip
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="how many steps are timed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    gc.set_threshold(700, 10, 100)  # as `jpaged.serving.serve` sets it
    for case in args.cases:
        for running in args.running:
            for row in measure(case, running, args.waiting, args.steps):
                report.add(experiment="scheduler", **row)
    report.publish(
        "The scheduler's part of a step",
        "Medians in microseconds of `schedule`, of `commit`, and of the calls of `add` and `abort` before a step; "
        f"`ratio` compares steps with those of {args.waiting[0]} waiting requests that were run in turn with them.",
        table(report.rows, ("case", "running", "waiting", "events_us", "schedule_us", "commit_us", "step_us",
                            "per_running_us", "ratio")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
