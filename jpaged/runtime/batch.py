"""One step's arrays: a ScheduleDecision, laid out and padded to one of a few fixed shapes. numpy alone."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jpaged.config import Limits
from jpaged.core.params import SamplingParams
from jpaged.core.request import Sequence
from jpaged.core.scheduler import ScheduleDecision
from jpaged.runtime.sampler import Sampling, empty_sampling

# Below this, dividing by the temperature would overflow; it is greedy to any reader.
MIN_TEMPERATURE = 1e-5


Array = Any  # numpy where it is made, traced jax arrays inside the step


class Batch(NamedTuple):
    """Padding: tokens 0 at position 0 in slot -1; sequences of no query and no context; greedy samples of row 0."""

    tokens: Array  # [T] int32
    positions: Array  # [T] int32
    slot_mapping: Array  # [T] int32, flat slots to write, -1 = none
    targets: Array  # [T] int32, the token that follows, where its logprob is wanted; else -1
    block_tables: Array  # [S, W] int32, 0 past a sequence's blocks
    context_lens: Array  # [S] int32, this step's tokens included
    cu_q_lens: Array  # [S + 1] int32, first row of each sequence
    decodes: Array  # [S] bool: its one row follows a sampled token, and is attended as in a decode step
    sampled_from: Array  # [S] int32, the row of tokens after which sample s comes
    sampling: Sampling  # of S samples, in the order of the sequences; several of one that forks


class Bucket(NamedTuple):
    """The shape of a step. `decode`: one token per sequence, which follows a sampled one; row s is sequence s."""

    num_tokens: int
    num_seqs: int
    decode: bool


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """Return `high`, `high / factor`, ... down to `low` (2 or more) or just above it, in rising order."""
    rungs = [high]
    while (below := -(-rungs[0] // factor)) >= low:
        rungs.insert(0, below)
    return tuple(rungs)


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

    def fit(self, num_tokens: int, num_seqs: int, decode: bool) -> Bucket:
        """The smallest shape for a step of so many tokens, and of so many sequences and samples."""
        rungs = self.decode if decode else self.mixed
        return next(b for b in rungs if b.num_tokens >= num_tokens and b.num_seqs >= num_seqs)


def empty_batch(bucket: Bucket, table_width: int, vocab_size: int) -> Batch:
    """A batch of padding alone: it computes nothing and writes nothing."""
    t, s = bucket.num_tokens, bucket.num_seqs
    return Batch(
        tokens=np.zeros(t, np.int32),
        positions=np.zeros(t, np.int32),
        slot_mapping=np.full(t, -1, np.int32),
        targets=np.full(t, -1, np.int32),
        block_tables=np.zeros((s, table_width), np.int32),
        context_lens=np.zeros(s, np.int32),
        cu_q_lens=np.zeros(s + 1, np.int32),
        decodes=np.zeros(s, bool),
        sampled_from=np.zeros(s, np.int32),
        sampling=empty_sampling(s, vocab_size),
    )


def make_batch(
    decision: ScheduleDecision, buckets: Buckets, block_size: int, table_width: int, vocab_size: int
) -> tuple[Bucket, Batch]:
    """The batch of a decision, sequence i in row i; `Masks` adds what its samples may not be."""
    scheduled = decision.num_scheduled_tokens
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    targets: list[int] = []
    sampled_from: list[int] = []
    samples: list[tuple[Sequence, int]] = []
    for sequence, count in scheduled.items():
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        tokens += sequence.tokens[start:end]
        positions += range(start, end)
        slots += map(sequence.table.slot, range(start, end))
        if sequence.request.params.prompt_logprobs is not None:
            targets += [-1] * (len(tokens) - count - len(targets)) + _targets(sequence, start, end)
        branches = sequence.num_samples(count)
        samples += [(sequence, branch) for branch in range(branches)]
        sampled_from += [len(tokens) - 1] * branches
    # A prompt's token never takes the decode path, also if it is the only one of its chunk: the chunk depends on the
    # other requests, and its bits must not.
    decodes = [count == 1 and sequence.num_computed_tokens >= sequence.num_prompt_tokens
               for sequence, count in scheduled.items()]  # fmt: skip
    decode = all(decodes)
    bucket = buckets.fit(len(tokens), max(len(scheduled), len(samples)), decode)
    batch = empty_batch(bucket, table_width, vocab_size)
    batch.tokens[: len(tokens)] = tokens
    batch.positions[: len(tokens)] = positions
    batch.slot_mapping[: len(tokens)] = slots
    batch.targets[: len(targets)] = targets
    batch.sampled_from[: len(samples)] = sampled_from
    batch.cu_q_lens[1 : len(scheduled) + 1] = list(itertools.accumulate(scheduled.values()))
    batch.cu_q_lens[len(scheduled) + 1 :] = len(tokens)
    batch.decodes[: len(scheduled)] = decodes
    for s, (sequence, count) in enumerate(scheduled.items()):
        batch.context_lens[s] = sequence.num_computed_tokens + count
        batch.block_tables[s, : len(sequence.table.block_ids)] = sequence.table.block_ids
    for s, (sequence, branch) in enumerate(samples):
        _fill_sampling(batch.sampling, s, sequence, branch)
    return bucket, batch


def _targets(sequence: Sequence, start: int, end: int) -> list[int]:
    """The prompt's token after each of some positions, where its logprob is not known yet, else -1."""
    known, prompt = len(sequence.request.prompt_samples), sequence.request.prompt_token_ids
    return [prompt[i + 1] if known <= i < len(prompt) - 1 else -1 for i in range(start, end)]


def _fill_sampling(sampling: Sampling, s: int, sequence: Sequence, branch: int) -> None:
    request, params = sequence.request, sequence.request.params
    sampling.positions[s] = sequence.num_tokens
    if request.num_top is not None:
        sampling.num_top[s] = max(request.num_top, 1)  # a rank comes with a list
    if isinstance(params, SamplingParams):
        if params.temperature >= MIN_TEMPERATURE:
            seed = (request.seed + sequence.index + branch) % 2**64
            sampling.seeds[s] = seed >> 32, seed & 0xFFFFFFFF
            sampling.temperature[s] = params.temperature
            sampling.top_k[s] = max(params.top_k, 0) if params.top_k < 2**31 else 0
            sampling.top_p[s] = params.top_p
            sampling.min_p[s] = params.min_p
    else:
        sampling.beam[s] = True
    if params.has_state:
        sampling.stateful[s] = True
        sampling.rows[s] = sequence.row
        sampling.counted[s] = sequence.tokens[-1] if sequence.num_output_tokens else -1
        sampling.presence[s] = params.presence_penalty
        sampling.frequency[s] = params.frequency_penalty
        sampling.repetition[s] = params.repetition_penalty
