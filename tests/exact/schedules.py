"""The same requests under different schedules, on one runner."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import Scheduler
from jpaged.engine.draft_model import DraftModel
from jpaged.engine.engine import Engine
from jpaged.runtime.runner import ModelRunner
from tests.exact.asked import Asked, bits

BLOCK, BLOCKS = 8, 640
LENGTH, SEQS, TOKENS = 96, 32, 128  # limits of a runner: of a sequence, and of a step


class Schedule(NamedTuple):
    """How requests run; the results must not depend on it.

    Attributes:
        tokens, seqs: most tokens and sequences of a step.
        blocks: KV blocks of the pool.
        preemption: the mode where blocks are few.
        caches: whether cached prefixes are used.
        overlaps: whether a step is dispatched before the tokens of the previous one are known.
        exact, speculative_config: as in `EngineConfig`. A step has at most `seqs` sequences and all their drafts.
    """

    tokens: int = TOKENS
    seqs: int = SEQS
    blocks: int = BLOCKS
    preemption: str = "recompute"
    caches: bool = True
    overlaps: bool = True
    exact: bool = False
    speculative_config: Mapping[str, Any] | None = None


class Ran(NamedTuple):
    """Results of requests, and the scheduler that has run them."""

    bits: list[tuple]
    scheduler: Scheduler


def run(
    runner: ModelRunner, tokenizer: Tokenizer | None, asked: Sequence[Asked], schedule: Schedule,
    *, together: bool = True, drafting: ModelRunner | None = None,
) -> Ran:  # fmt: skip
    """Run requests that are all there at once, or one after the other.

    `drafting`: the runner of the draft model, if the schedule names one.
    """
    limits = Limits(
        LENGTH, schedule.seqs, schedule.tokens, BLOCK, speculative_config=schedule.speculative_config,
        exact=schedule.exact,
    )  # fmt: skip
    blocks = runner.blocks
    make = partial(BlockPool, block_size=BLOCK, windows=blocks.cache.groups.windows, reach=limits.max_tokens_in_flight)
    num_blocks = min(BLOCKS, schedule.blocks * len(blocks.cache.groups.windows))
    pool, host = make(num_blocks, num_pages=blocks.num_pages, enable_prefix_caching=schedule.caches), None
    if schedule.preemption == "swap":
        host = make(
            blocks.num_host_blocks, num_pages=blocks.num_host_pages, enable_prefix_caching=False, copies_of=pool
        )
    scheduler = Scheduler(
        pool, limits, vocab_size=runner.vocab_size, eos_token_ids=runner.config.eos_token_ids,
        preemption=schedule.preemption, host_pool=host,
    )  # fmt: skip
    draft_model = None
    if drafting is not None:
        plain = dataclasses.replace(limits, speculative_config=None, exact=False)
        theirs = Scheduler(make(BLOCKS, num_pages=drafting.blocks.num_pages), plain, vocab_size=runner.vocab_size)
        draft_model = DraftModel(Engine(theirs, drafting))
    engine = Engine(
        scheduler, runner, tokenizer, max_in_flight=2 if schedule.overlaps else 1, draft_model=draft_model
    )  # fmt: skip
    compiler = engine.grammar_compiler()
    requests = []
    for i, (prompt, params) in enumerate(asked):
        wanted = params.structured_outputs
        constraint = compiler.compile(wanted) if wanted else None
        requests.append(engine.add(str(i), prompt, params, constraint=constraint))
        while engine.has_work and not together:
            engine.step()
    while engine.has_work:
        engine.step()
    scheduler.check_invariants()
    assert scheduler.pool.num_used == 0
    return Ran([bits(request) for request in requests], scheduler)
