"""Counts the tokens that steps compute for nothing, because every step has one of a few fixed shapes.

    python benchmarks/engine/padding.py --out results      ten seconds

The scheduler serves closed loops of ShareGPT-like and Alpaca-like requests under the default limits of a GPU. Nothing
is computed, so the counts are the same on every machine. A step with a prompt in it is `mixed`. The shapes are those of
a device on which a mixed step costs by its tokens and all decode steps cost the same. The kernels of a CPU compute no
padding.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged.bench.workload import DATASETS
from jpaged.config import EngineConfig, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.demo import DIRECTORY as DEMO
from jpaged.models.registry import read_config
from jpaged.runtime.batch import Buckets, Layout, make_batch
from jpaged.runtime.row_table import RowTable
from jpaged.start.measure import further_shapes
from jpaged.start.resolve import Device, resolve

MAX_WASTE = 0.25  # of the tokens that are computed
CONTEXT, BLOCK_SIZE = 2048, 16
AT_ONCE = (48, 256)  # requests at a time
ROUNDS = 8  # requests are as many times those at a time


def count_tokens(limits: Limits, lengths: Sequence[tuple[int, int]], at_once: int) -> Counter[str]:
    """Return, by kind of step, the numbers of steps, of tokens, and of computed tokens, which include the padding.

    Args:
        lengths: tokens of the prompt and of the output of each request.
        at_once: how many requests are there at a time, as long as there are so many.
    """
    width = -(-limits.max_model_len // BLOCK_SIZE)
    scheduler = Scheduler(BlockPool(limits.max_num_seqs * width, BLOCK_SIZE), limits, vocab_size=32_000)
    rows, buckets = RowTable(limits.max_num_seqs, width, BLOCK_SIZE), Buckets(limits)
    buckets.add(further_shapes({bucket: 1.0 if bucket.decode else bucket.num_tokens for bucket in buckets.all}))
    layouts = {bucket: Layout(bucket, width) for bucket in buckets.all}
    waiting, counts = list(enumerate(lengths))[::-1], Counter[str]()
    while waiting or scheduler.has_work:
        while waiting and len(scheduler.requests) < at_once:
            number, (prompt, output) = waiting.pop()
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add(str(number), [number] * prompt, params, seed=0)  # No two prompts share a token.
        plan = scheduler.schedule()
        assert plan is not None
        rows.apply(plan)
        bucket = make_batch(plan, rows, buckets, layouts).bucket
        kind = "decode" if bucket.decode else "mixed"
        tokens = sum(count for _, _, count, _ in plan.rows)
        counts.update({f"{kind}_steps": 1, f"{kind}_tokens": tokens, f"{kind}_computed": bucket.num_tokens})
        scheduler.commit(plan, StepResult([Sample(5, -1.0) for row in plan.rows for _ in range(row.num_samples)]))
    return counts


def waste(counts: Counter[str], *kinds: str) -> float:
    """Return the share of padding in the tokens that steps of some kinds compute."""
    return 1 - sum(counts[f"{kind}_tokens"] for kind in kinds) / sum(counts[f"{kind}_computed"] for kind in kinds)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "padding")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="requests for each one at a time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    model = replace(read_config(DEMO), max_position_embeddings=CONTEXT)
    limits = resolve(EngineConfig(model=str(DEMO)), model, Device("any", "cuda")).limits
    for at_once in AT_ONCE:
        for name, dataset in DATASETS.items():
            counts = count_tokens(limits, dataset.lengths(args.rounds * at_once), at_once)
            report.add(
                experiment="padding", max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens, at_once=at_once, workload=name,
                decode_steps=counts["decode_steps"], mixed_steps=counts["mixed_steps"],
                decode_waste=waste(counts, "decode"), mixed_waste=waste(counts, "mixed"),
                waste=waste(counts, "decode", "mixed"),
            )  # fmt: skip
    report.publish(
        "Padding",
        f"The share of padding in the tokens that steps compute, under the default limits of a GPU; the limit "
        f"is {MAX_WASTE:.0%}. Counted, not timed.",
        table(report.rows, ("max_num_seqs", "max_num_batched_tokens", "at_once", "workload",
                            "decode_steps", "mixed_steps", "decode_waste", "mixed_waste", "waste")),
    )  # fmt: skip
    above = [row for row in report.rows if row["waste"] > MAX_WASTE]
    for row in above:
        print(f"above the limit: {row['at_once']} at a time, {row['workload']}: {row['waste']:.1%}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
