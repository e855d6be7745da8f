"""KV memory by kind, as the paper divides it (arXiv:2309.06180, Fig. 2)."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

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
    size, total = scheduler.pool.block_size, scheduler.pool.num_blocks * scheduler.pool.block_size
    slots: dict[int, tuple[int, int]] = {}  # tokens of each block, now and at the end
    for request in scheduler.running:
        final = len(request.prompt_token_ids) + request.max_tokens - 1  # the last token is never written
        for sequence in request.live:
            for index, block_id in enumerate(sequence.table.block_ids):
                now = min(size, max(0, sequence.num_computed_tokens - index * size))
                end = min(size, max(0, final - index * size))
                before = slots.get(block_id, (0, 0))
                slots[block_id] = max(now, before[0]), max(now, end, before[1])
    tokens, future = sum(now for now, _ in slots.values()), sum(end - now for now, end in slots.values())
    held = len(slots) * size
    return Kinds(tokens / total, future / total, (held - tokens - future) / total, 1 - held / total)


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
