"""KV memory by kind, as the paper divides it (arXiv:2309.06180, Fig. 2)."""

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from jpaged.core.scheduler import Scheduler


class Kinds(NamedTuple):
    """Shares of the KV memory.

    Attributes:
        tokens: slots that hold keys and values.
        reserved: slots of running sequences that will hold them later.
        internal: slots of running sequences that will never hold any.
        external: slots of no sequence: free ones, and those that a buddy system rounds up to.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


def kinds(scheduler: Scheduler) -> Kinds:
    """The present shares. Each block counts once, however many sequences share it."""
    size, num_blocks = scheduler.pool.block_size, scheduler.pool.num_blocks
    sequences = [sequence for request in scheduler.running for sequence in request.live]
    lengths = [len(sequence.table) for sequence in sequences]
    block_ids = np.fromiter(itertools.chain.from_iterable(s.table.held for s in sequences), np.int64, sum(lengths))
    starts = size * np.concatenate([np.arange(length) for length in lengths] or [block_ids])
    slots = np.zeros((2, num_blocks), np.int64)  # tokens of each block, now and at the end
    computed = [s.num_computed_tokens for s in sequences]
    # The last token is never written.
    ends = [max(n, s.request.max_length - 1) for n, s in zip(computed, sequences)]
    for found, tokens in zip(slots, (computed, ends)):
        np.maximum.at(found, block_ids, np.clip(np.repeat(tokens, lengths) - starts, 0, size))
    tokens, at_end = slots.sum(axis=1).tolist()
    held, total = size * len(np.unique(block_ids)), num_blocks * size
    return Kinds(tokens / total, (at_end - tokens) / total, (held - at_end) / total, 1 - held / total)


class MemoryWatch:
    """Takes the shares of every `every`-th step in which requests wait for memory.

    Attributes:
        running: number of sequences of these steps.
    """

    def __init__(self, every: int = 10):
        self.every, self._steps = every, 0
        self.samples: list[Kinds] = []
        self.running: list[int] = []

    def __call__(self, scheduler: Scheduler) -> None:
        self._steps += 1
        if self._steps % self.every == 0 and scheduler.waiting:
            self.samples.append(kinds(scheduler))
            self.running.append(sum(len(request.live) for request in scheduler.running))

    def mean(self) -> Kinds | None:
        """Average over the steps; None if no request ever waited."""
        return Kinds(*map(fmean, zip(*self.samples))) if self.samples else None

    def mean_running(self) -> float | None:
        """Average number of sequences."""
        return fmean(self.running) if self.running else None


def percentages(found: Kinds) -> Sequence[str]:
    """For a table."""
    return [f"{100 * share:.1f}" for share in found]
