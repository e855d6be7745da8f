"""One step's arrays: a ScheduleDecision, laid out and padded to one of a few fixed shapes. numpy alone."""

from typing import Any, NamedTuple

import numpy as np

from jpaged.config import Limits
from jpaged.core.request import Sequence
from jpaged.core.scheduler import ScheduleDecision

# Below this, dividing by the temperature would overflow; it is greedy to any reader.
MIN_TEMPERATURE = 1e-5


Array = Any  # numpy where it is made, traced jax arrays inside the step


class Batch(NamedTuple):
    """Padding: tokens 0 at position 0 in slot -1; sequences of no query and no context; temperature 0."""

    tokens: Array  # [T] int32
    positions: Array  # [T] int32
    slot_mapping: Array  # [T] int32, flat slots to write, -1 = none
    block_tables: Array  # [S, W] int32, 0 past a sequence's blocks
    context_lens: Array  # [S] int32, this step's tokens included
    cu_q_lens: Array  # [S + 1] int32, first row of each sequence
    temperature: Array  # [S] float32, 0 = greedy
    top_k: Array  # [S] int32, 0 = all
    top_p: Array  # [S] float32
    min_p: Array  # [S] float32
    seeds: Array  # [S, 2] uint32


class Bucket(NamedTuple):
    """The shape of a step. `decode`: one token per sequence, row s is sequence s."""

    num_tokens: int
    num_seqs: int
    decode: bool


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """`low`, `low * factor`, ... and `high`."""
    rungs = []
    while low < high:
        rungs.append(low)
        low *= factor
    return (*rungs, high)


class Buckets:
    """Every shape that a step can have, known before the first one runs.

    Decode steps are the many and the small, so their ladder is fine. A step with a prompt in it costs by its tokens,
    and pays for `num_seqs` only in logits. One row alone is never run: XLA's bfloat16 product of a single row falls
    off a cliff on CPUs.
    """

    def __init__(self, limits: Limits):
        max_seqs, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self.decode = tuple(Bucket(s, s, True) for s in ladder(2, max(2, max_seqs), 2))
        seqs = (8, max_seqs) if max_seqs > 8 else (max_seqs,)
        self.mixed = tuple(Bucket(t, s, False) for t in ladder(16, max(16, max_tokens), 4) for s in seqs)
        self.all = self.decode + self.mixed

    def fit(self, num_tokens: int, num_seqs: int) -> Bucket:
        """The smallest shape for a step: by sequences for one token each, else by tokens."""
        rungs = self.decode if num_tokens == num_seqs else self.mixed
        return next(b for b in rungs if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs)


def empty_batch(bucket: Bucket, table_width: int) -> Batch:
    """A batch of padding alone: it computes nothing and writes nothing."""
    t, s = bucket.num_tokens, bucket.num_seqs
    return Batch(
        tokens=np.zeros(t, np.int32),
        positions=np.zeros(t, np.int32),
        slot_mapping=np.full(t, -1, np.int32),
        block_tables=np.zeros((s, table_width), np.int32),
        context_lens=np.zeros(s, np.int32),
        cu_q_lens=np.zeros(s + 1, np.int32),
        temperature=np.zeros(s, np.float32),
        top_k=np.zeros(s, np.int32),
        top_p=np.ones(s, np.float32),
        min_p=np.zeros(s, np.float32),
        seeds=np.zeros((s, 2), np.uint32),
    )


def make_batch(decision: ScheduleDecision, buckets: Buckets, block_size: int, table_width: int) -> tuple[Bucket, Batch]:
    """The batch of a decision, sequence i in row i."""
    scheduled = decision.num_scheduled_tokens
    bucket = buckets.fit(decision.num_tokens, len(scheduled))
    batch = empty_batch(bucket, table_width)
    row = 0
    for s, (sequence, count) in enumerate(scheduled.items()):
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        blocks = np.asarray(sequence.table.block_ids, np.int32)
        positions = np.arange(start, end, dtype=np.int32)
        rows = slice(row, row + count)
        batch.tokens[rows] = sequence.tokens[start:end]
        batch.positions[rows] = positions
        batch.slot_mapping[rows] = blocks[positions // block_size] * block_size + positions % block_size
        batch.block_tables[s, : len(blocks)] = blocks
        batch.context_lens[s] = end
        row += count
        batch.cu_q_lens[s + 1 :] = row
        _fill_sampling(batch, s, sequence)
    return bucket, batch


def _fill_sampling(batch: Batch, s: int, sequence: Sequence) -> None:
    params, seed = sequence.request.params, sequence.request.seed % 2**64
    batch.temperature[s] = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
    batch.top_k[s] = max(params.top_k, 0) if params.top_k < 2**31 else 0
    batch.top_p[s] = params.top_p
    batch.min_p[s] = params.min_p
    batch.seeds[s] = seed >> 32, seed & 0xFFFFFFFF
