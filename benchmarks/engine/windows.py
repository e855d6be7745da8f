"""KV memory of models whose layers have windows: the memory that the allocator holds, beside that of visible tokens.

    python benchmarks/engine/windows.py --out results      half a minute

The scheduler runs requests under the default limits of a GPU. Nothing is computed, so the figures are the same on every
machine. `all` is the memory of all tokens in all layers, `seen` that of the tokens that a later token sees, each in its
layers. The first table is of a single sequence that decodes. The second one is of ShareGPT-like requests, 64 at a time,
on average over the steps.
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.bench.workload import DATASETS
from jpaged.config import GPU, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.groups import Groups, Windows, group_layers
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample, StepPlan, StepResult
from jpaged.core.request import Sequence
from jpaged.core.scheduler import Scheduler

BLOCK_SIZE, AT_ONCE, REQUESTS = 16, 64, 512
LENGTHS = (1024, 8192, 32_768, 131_072)
# Windows of the layers with attention, from the config.json of the checkpoints.
MODELS: dict[str, Windows] = {
    "gemma-3-27b": [None if layer % 6 == 5 else 1024 for layer in range(62)],
    "gemma-3-270m": [None if layer % 6 == 5 else 512 for layer in range(18)],
    "gemma-2-9b": [4096, None] * 21,
    "gpt-oss-20b": [128, None] * 12,
    "qwen3.5-9b": [None] * 8,  # of 32; the others are recurrent
    "llama-3.1-8b": [None] * 32,
}
COLUMNS = ("model", "groups", "layers", "tokens", "all", "held", "seen", "held / all", "held / seen")


def make_scheduler(groups: Groups, max_model_len: int, max_num_seqs: int) -> Scheduler:
    """Return a scheduler with a large pool, without a prefix cache."""
    limits = Limits(max_model_len, max_num_seqs, GPU.max_num_batched_tokens, BLOCK_SIZE)
    num_blocks = max_num_seqs * limits.blocks_per_seq * len(groups.windows)
    pool = BlockPool(
        num_blocks, BLOCK_SIZE, enable_prefix_caching=False, windows=groups.windows, reach=limits.max_tokens_in_flight
    )
    return Scheduler(pool, limits, vocab_size=32_000)


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Commit a plan with samples of one token."""
    scheduler.commit(plan, StepResult([Sample(1, -1.0)] * sum(each.num_samples for each in plan.rows)))


def seen(windows: Windows, sequence: Sequence) -> int:
    """Return the tokens, summed over the layers, whose keys and values a next token of a sequence sees."""
    computed = sequence.num_computed_tokens
    return sum(computed if window is None else min(window - 1, computed) for window in windows)


def of_one(windows: Windows, tokens: int) -> Row:
    """Return the tokens, summed over the layers, for which a decoding sequence has memory."""
    groups = group_layers(windows, max(LENGTHS) + 64)
    scheduler = make_scheduler(groups, tokens + 64, 1)
    request = scheduler.add("0", [0] * (tokens - 2), SamplingParams(max_tokens=64, ignore_eos=True), seed=0)
    (sequence,) = request.live
    while sequence.num_tokens <= tokens:
        plan = scheduler.schedule()
        assert plan is not None
        commit(scheduler, plan)
    held = scheduler.memory.num_held(request) * BLOCK_SIZE * groups.size
    return figures(windows, groups, len(windows) * sequence.num_computed_tokens, held, seen(windows, sequence))


def of_traffic(windows: Windows) -> Row:
    """Return the same of many requests, summed over the steps."""
    lengths = DATASETS["ShareGPT"].lengths(REQUESTS)
    groups = group_layers(windows, 4096)
    scheduler = make_scheduler(groups, 4096, AT_ONCE)
    waiting, totals = list(enumerate(lengths)), [0, 0, 0]
    while waiting:
        while waiting and len(scheduler.requests) < AT_ONCE:
            number, (prompt, output) = waiting.pop()
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.add(str(number), [0] * prompt, params, seed=0)
        plan = scheduler.schedule()
        assert plan is not None
        commit(scheduler, plan)
        live = [sequence for request in scheduler.running for sequence in request.live]
        totals[0] += len(windows) * sum(sequence.num_computed_tokens for sequence in live)
        totals[1] += scheduler.pool.num_used * BLOCK_SIZE * groups.size
        totals[2] += sum(seen(windows, sequence) for sequence in live)
    return figures(windows, groups, *totals)


def figures(windows: Windows, groups: Groups, everything: int, held: int, needed: int) -> Row:
    return {
        "groups": len(groups.windows), "layers": f"{len(windows)} of {len(groups.windows) * groups.size}",
        "all": everything, "held": held, "seen": needed, "held / all": held / everything, "held / seen": held / needed,
    }  # fmt: skip


def main() -> None:
    args = script_parser(__doc__, "windows").parse_args()
    prepare_environment()
    report = Report(args.out / "results.json", environment(open_device(True), False))
    for model, windows in MODELS.items():
        for tokens in LENGTHS:
            report.add(model=model, tokens=tokens, **of_one(windows, tokens))
    alone = table(report.rows, COLUMNS)
    for model, windows in MODELS.items():
        report.add(model=model, tokens="ShareGPT", **of_traffic(windows))
    report.publish("KV memory of windows", alone, table(report.rows[len(MODELS) * len(LENGTHS) :], COLUMNS))


if __name__ == "__main__":
    main()
