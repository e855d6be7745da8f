"""Measures the steps of an engine under load: the table of costs that `jpaged plan --costs` reads.

    python benchmarks/engine/step_table.py --model DIR --out results       a few minutes
    python benchmarks/engine/step_table.py --tiny --out results            few users, to see that it works

Users send requests of ShareGPT's lengths, each after the answer to the last one, so that steps have all kinds of shapes
and contexts. The cost of a padded shape is a line through its steps' durations over their tokens of context, with the
host's part. The table is that of this device and model only.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.paper.clocked import RealEngine
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged.bench.workload import DATASETS, Lengths, fit
from jpaged.llm import LLM
from jpaged.runtime.batch import Buckets
from jpaged.simulator.cost import CostTable, MeasuredStep, StepLoad
from jpaged.simulator.engine import drive
from jpaged.simulator.traffic import Users, calls_of

MANY = 50  # steps of a shape that suffice for a line


class StepTimes:
    """Durations of steps by padded shape, each with the step's tokens of context."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets
        self._seen: dict[tuple[int, int, bool], list[tuple[int, float]]] = defaultdict(list)

    def take(self, load: StepLoad, seconds: float) -> None:
        """Add a step."""
        decode = load.tokens == load.rows == load.samples
        shape = self._buckets.fit(load.tokens, max(load.rows, load.samples), decode)
        self._seen[shape].append((load.context, seconds))

    def table(self, source: str) -> CostTable:
        """Return the costs of the shapes: the mean of few steps, a line through many."""
        steps = []
        for shape, points in self._seen.items():
            contexts, seconds = np.array(points).T
            slope = max(0.0, float(np.polyfit(contexts, seconds, 1)[0])) if len(points) > MANY else 0.0
            steps.append(MeasuredStep(*shape, max(1e-6, float(seconds.mean() - slope * contexts.mean())), slope))
        return CostTable(steps, source)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    parser = script_parser(__doc__, "step-table")
    parser.add_argument("--model", default="demo", help="a directory, a hub id, or demo (the default)")
    parser.add_argument("--load-format", default="auto", help="dummy: random parameters")
    parser.add_argument("--max-num-seqs", type=int, help="most sequences of a step")
    parser.add_argument("--tiny", action="store_true", help="few users")
    args = parser.parse_args(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny) | {"model": args.model})
    sizes = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32) if args.tiny else {}
    if args.max_num_seqs:
        sizes["max_num_seqs"] = args.max_num_seqs
    llm = LLM(args.model, load_format=args.load_format, progress=False, **sizes)
    scheduler, runner = llm.engine.scheduler, llm.engine.runner
    most = scheduler.limits.max_num_seqs
    users = sorted({1, *(most // share for share in (32, 16, 8, 4, 2, 1) if most >= share)})
    lengths, _ = fit(
        [Lengths(*pair) for pair in DATASETS["ShareGPT"].lengths(2 * most + 8)], llm.engine.limits.max_model_len
    )
    source = f"steps of {args.model} on {report.environment['device_kind']}, {report.environment['date'][:10]}"
    calls, times = calls_of(lengths), StepTimes(runner.shapes.buckets)
    for count in users:
        drive(RealEngine(scheduler, runner, on_step=times.take), Users(calls[: 2 * count + 8], count))
        report.say(f"{count} users: done")
    found = times.table(source)
    for step in found.steps:
        report.add(experiment="step", **step._asdict(), status="ok")
    found.save(args.out / "table.json")
    report.publish("Steps", table(report.rows, ("num_tokens", "num_seqs", "decode", "base", "per_token")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
