"""Masks of a step: the allowed tokens of the samples of some rows."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jpaged.core.plan import StepPlan

if TYPE_CHECKING:
    from llguidance import LLExecutor

    from jpaged.structured.grammar import Constraint

MakeMasks = Callable[[], np.ndarray]  # [M, ceil(V / 32)] uint32 for the M masked rows of a plan


class Masks:
    """Writer of masks of W = ceil(V / 32) words a row: bit t % 32 of word t // 32 is set if token t is allowed."""

    def __init__(self, vocab_size: int):
        words = -(-vocab_size // 32)
        self._all_w = np.packbits(np.arange(32 * words) < vocab_size, bitorder="little").view(np.uint32)

    @cached_property
    def _executor(self) -> "LLExecutor":
        """Threads that compute the masks of many constraints at once."""
        from llguidance import LLExecutor  # here: an engine without constraints does not need it

        return LLExecutor()

    def write(self, rows: Iterable[tuple["Constraint | None", frozenset[int]]]) -> np.ndarray:
        """Return the masks, [M, W] uint32, of some constraints and of additional banned tokens.

        If bans leave none of a constraint's tokens, none of them is banned: a complete text ends, however short.
        """
        rows = list(rows)
        masks = np.empty((len(rows), len(self._all_w)), np.uint32)
        if constrained := [(constraint, m) for m, (constraint, _) in enumerate(rows) if constraint is not None]:
            self._write(constrained, masks)
        without: dict[int, np.ndarray] = {}  # by the identity of a set: branches often ban the same one
        for m, (constraint, banned) in enumerate(rows):
            if constraint is None:
                if id(banned) not in without:
                    without[id(banned)] = _without(self._all_w, banned)
                masks[m] = without[id(banned)]
            elif banned and (left := _without(masks[m], banned)).any():
                masks[m] = left
        return masks

    def of_plan(self, plan: StepPlan, constraint_of: Callable[[int], "Constraint | None"]) -> np.ndarray:
        """Return the masks of a plan's rows, [M, W] uint32; those of drafts follow the drafts before them."""
        drafts: dict[int, list[int]] = {}
        for index, token in plan.drafts:
            drafts.setdefault(plan.rows[index].row, []).append(token)
        rows: list[tuple[Constraint | None, frozenset[int]]] = []
        for row, entries in itertools.groupby(plan.masked, key=lambda each: each[0]):
            constraint = constraint_of(row)
            rows.append((constraint, next(entries)[1]))
            for token, (_, banned) in zip(drafts.get(row, ()), entries):
                if constraint is not None:
                    constraint = copy.copy(constraint)
                    constraint.take(token)
                rows.append((constraint, banned))
        return self.write(rows)

    def _write(self, constrained: Sequence[tuple["Constraint", int]], masks: np.ndarray) -> None:
        """Write the masks of constraints into their rows."""
        matchers = [(constraint.matcher, row) for constraint, row in constrained]
        assert masks.dtype == np.uint32 and masks.flags.c_contiguous, f"{masks.dtype}, {masks.flags}"
        self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))


def _without(bits_w: np.ndarray, tokens: frozenset[int]) -> np.ndarray:
    """Return a copy of one row's bits with some tokens cleared."""
    ids, cleared_w = np.fromiter(tokens, np.uint32, len(tokens)), bits_w.copy()
    np.bitwise_and.at(cleared_w, ids >> 5, ~(np.uint32(1) << (ids & np.uint32(31))))
    return cleared_w
