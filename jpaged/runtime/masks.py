"""Which tokens the samples of a step may be."""

from collections.abc import Iterator, Set
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jpaged.core.request import Sequence
from jpaged.core.scheduler import ScheduleDecision
from jpaged.runtime.sampler import Sampling

if TYPE_CHECKING:
    from jpaged.grammar import MaskWriter


class Masks:
    """Made once the model's part of a step is under way: what is allowed needs nothing of what the device computes."""

    def __init__(self, vocab_size: int):
        words = -(-vocab_size // 32)
        self._all = np.packbits(np.arange(32 * words) < vocab_size, bitorder="little").view(np.uint32)

    @cached_property
    def _writer(self) -> "MaskWriter":
        from jpaged.grammar import MaskWriter  # loads llguidance: not for those who have no use for it

        return MaskWriter()

    def apply(self, decision: ScheduleDecision, sampling: Sampling) -> Sampling:
        """The sampling with the masks of the decision's samples, or as it was if there are none."""
        rows = list(_sampled_rows(decision))
        constrained = [(sequence, row) for sequence, row, _ in rows if sequence.constraint is not None]
        if not constrained and not decision.forbidden:
            return sampling
        masked, bits = sampling.masked.copy(), np.empty_like(sampling.allowed_bits)
        if constrained:
            self._writer.write([(sequence.constraint, row) for sequence, row in constrained], bits)
        without: dict[int, np.ndarray] = {}  # by the identity of a set: branches often forbid the same one
        for sequence, row, branches in rows:
            forbidden = decision.forbidden.get(sequence)
            if sequence.constraint is None:
                if not forbidden:
                    continue
                if id(forbidden) not in without:
                    without[id(forbidden)] = _without(self._all, forbidden)
                bits[row] = without[id(forbidden)]
            elif forbidden and (left := _without(bits[row], forbidden)).any():  # a complete text ends, however short
                bits[row] = left
            bits[row + 1 : row + branches] = bits[row]
            masked[row : row + branches] = True
        return sampling._replace(masked=masked, allowed_bits=bits)


def _without(bits_w: np.ndarray, tokens: Set[int]) -> np.ndarray:
    """Return a copy of one row's bits with some tokens cleared."""
    ids, cleared_w = np.fromiter(tokens, np.uint32, len(tokens)), bits_w.copy()
    np.bitwise_and.at(cleared_w, ids >> 5, ~(np.uint32(1) << (ids & np.uint32(31))))
    return cleared_w


def _sampled_rows(decision: ScheduleDecision) -> Iterator[tuple[Sequence, int, int]]:
    """Each sequence that gets samples, the row of its first one, and how many it gets."""
    row = 0
    for sequence, count in decision.num_scheduled_tokens.items():
        if samples := sequence.num_samples(count):
            yield sequence, row, samples
            row += samples
