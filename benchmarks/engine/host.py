"""Measures the host's time in a decode step, by part, and how much of it a device does not hide.

    python benchmarks/engine/host.py --out results      half a minute

Every sequence has a context of 1,024 tokens. Parts: `schedule` makes the plan, `arrays` turns it into the step's
packed buffer (differences of rows included), `commit` takes in the tokens. The runner computes nothing. For the hidden
time the engine steps over a runner that is busy for 5 ms a step, as a device is that works while the host does.
"""

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepPlan, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine, MakeMasks
from jpaged.runtime.batch import Buckets, Layout, make_batch
from jpaged.runtime.row_table import RowTable

CONTEXT, BLOCK_SIZE, STEP_SECONDS = 1024, 16, 0.005
CHUNK = 8192  # tokens of a step
SIZES = (1, 64, 256, 1024)
LIMITS_MS = {64: 0.3, 256: 1.2}


class Host:
    """A scheduler with `num_seqs` running sequences, and all of a runner but the device."""

    def __init__(self, num_seqs: int, steps: int):
        most = steps + num_seqs * CONTEXT // CHUNK + 16  # the first ones go on while the last ones are admitted
        length = CONTEXT + most
        limits = Limits(length, num_seqs, CHUNK)
        width = -(-limits.max_model_len // BLOCK_SIZE)
        pool = BlockPool(num_seqs * (length // BLOCK_SIZE + 2), BLOCK_SIZE)
        self.scheduler = Scheduler(pool, limits, vocab_size=32_000)
        self.rows, self.buckets = RowTable(num_seqs, width, BLOCK_SIZE), Buckets(limits)
        self.layouts = {bucket: Layout(bucket, width) for bucket in self.buckets.all}
        self.params = SamplingParams(max_tokens=most, temperature=0.6)

    def fill(self, engine: Engine) -> None:
        for s in range(self.scheduler.limits.max_num_seqs):
            engine.add(str(s), [s % 31_000] * (CONTEXT - 1 - s % BLOCK_SIZE), self.params)  # few blocks end at once
        while any(not request.sequences[0].num_output_tokens for request in self.scheduler.requests.values()):
            engine.step()

    def arrays(self, plan: StepPlan) -> None:
        self.rows.apply(plan)
        make_batch(plan, self.rows, self.buckets, self.layouts)


def result_of(plan: StepPlan) -> StepResult:
    return StepResult([Sample(5, -1.0) for row in plan.rows for _ in range(row.num_samples)])


class Busy:
    """A runner whose steps take `seconds` each, one after another, beside the host.

    Attributes:
        idle: seconds that it had no step to run.
    """

    def __init__(self, host: Host, seconds: float):
        self.host, self.seconds = host, seconds
        self.free_at = self.idle = 0.0

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> "Step":
        self.host.arrays(plan)
        now = time.perf_counter()
        self.idle += max(0.0, now - self.free_at) if self.free_at else 0.0
        self.free_at = max(now, self.free_at) + self.seconds
        return Step(plan, self.free_at)

    def recover(self) -> None:
        """Nothing is computed, so nothing is lost."""


class Step:
    """A step with a fixed end and without any computation."""

    def __init__(self, plan: StepPlan, end: float):
        self.plan, self.end = plan, end

    def wait(self) -> None:
        """Do nothing: the next step is dispatched at once."""

    def result(self) -> StepResult:
        while (left := self.end - time.perf_counter()) > 0:
            threading.Event().wait(left) if left > 0.001 else None
        return result_of(self.plan)


def parts(num_seqs: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a decode step."""
    host = Host(num_seqs, steps)
    host.fill(Engine(host.scheduler, Busy(host, 0.0)))
    times: dict[str, list[float]] = {name: [] for name in ("schedule", "arrays", "commit")}
    for _ in range(steps):
        start = time.perf_counter()
        plan = host.scheduler.schedule()
        assert plan is not None and len(plan.rows) == num_seqs
        scheduled = time.perf_counter()
        host.arrays(plan)
        made = time.perf_counter()
        result = result_of(plan)
        before = time.perf_counter()
        host.scheduler.commit(plan, result)
        times["commit"].append(time.perf_counter() - before)
        times["schedule"].append(scheduled - start)
        times["arrays"].append(made - scheduled)
    return {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()} | {
        "whole_ms": 1e3 * statistics.median(map(sum, zip(*times.values())))
    }


def not_hidden(num_seqs: int, steps: int, max_in_flight: int) -> float:
    """Return the share of a step of `STEP_SECONDS` for which the device waits for the host."""
    host = Host(num_seqs, steps)
    runner = Busy(host, 0.0)
    engine = Engine(host.scheduler, runner, max_in_flight=max_in_flight)
    host.fill(engine)
    runner.seconds, runner.free_at, runner.idle = STEP_SECONDS, 0.0, 0.0
    for _ in range(steps):
        engine.step()
    return runner.idle / steps / STEP_SECONDS


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "host")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="numbers of sequences")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="how many steps are timed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    gc.set_threshold(700, 10, 100)  # as `jpaged.serving.serve` sets it
    for num_seqs in args.sizes:
        gc.collect()
        gc.freeze()  # likewise: the loaded modules
        row = parts(num_seqs, args.steps)
        exposed = {f"exposed_{depth}": not_hidden(num_seqs, args.steps, depth) for depth in (1, 2)}
        report.add(experiment="host", sequences=num_seqs, context=CONTEXT, **row, **exposed,
                   limit_ms=LIMITS_MS.get(num_seqs))  # fmt: skip
    report.publish(
        "The host's part of a decode step",
        f"Medians in milliseconds; `exposed_1` and `exposed_2` are the shares of a step of "
        f"{1e3 * STEP_SECONDS:g} ms for which the device waits, with one and with two steps in flight.",
        table(report.rows, ("sequences", "schedule_ms", "arrays_ms", "commit_ms", "whole_ms", "limit_ms",
                            "exposed_1", "exposed_2")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
