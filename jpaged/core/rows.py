"""Rows of running sequences, and the differences that the next plan contains."""

import itertools
from typing import TypedDict

from jpaged.core.plan import Admitted, Chosen, Entry, Pairs
from jpaged.core.request import Sequence


class RowDifferences(TypedDict):
    """Fields of a `StepPlan` that describe rows."""

    released_rows: tuple[int, ...]
    row_copies: Pairs
    admitted: tuple[Admitted, ...]
    chosen: tuple[Chosen, ...]
    entries: tuple[Entry, ...]


class Rows:
    """Rows of running sequences. A sequence has one row, on the host and on the device, from admission to release.

    Args:
        size: maximum number of running sequences.
    """

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Release every row and drop all differences."""
        self._sequences: list[Sequence | None] = [None] * self.size
        self._free = list(range(self.size))
        self._copies: dict[int, int] = {}  # {destination: source}: a later copy replaces an earlier one
        self._admitted: dict[int, Admitted] = {}
        self._chosen: dict[int, Chosen] = {}
        self._entries: dict[int, list[Entry]] = {}  # by row
        self._released: dict[int, None] = {}

    @property
    def free(self) -> tuple[int, ...]:
        """Free rows."""
        return tuple(self._free)

    @property
    def num_free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def __getitem__(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a row, and add its whole state to the next plan."""
        row, request = self._take(sequence), sequence.request
        wants = request.params.prompt_logprobs is not None
        self._admitted[row] = Admitted(
            row,
            tuple(sequence.tokens),
            sequence.num_prompt_tokens,
            request.params,
            sequence.seed,
            tuple(sequence.table.block_ids),
            request.num_top,
            num_scored=len(request.prompt_samples) if wants else None,
            banned=request.bans.single_tokens,
        )

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Give a branch a row with the state of its parent."""
        assert sequence.row is not None
        self._copies[self._take(child)] = sequence.row

    def choose(self, sequence: Sequence) -> None:
        """Add the last token of a sequence, which the host has chosen, to the next plan."""
        assert sequence.row is not None
        self._chosen[sequence.row] = Chosen(sequence.row, sequence.tokens[-1], sequence.seed)

    def change(self, sequence: Sequence, first: int, stop: int) -> None:
        """Add the entries [first, stop) of a sequence's block table to the next plan."""
        row, block_ids = sequence.row, sequence.table.block_ids
        assert row is not None
        changed = self._entries.setdefault(row, [])
        changed += [Entry(row, index, block_ids[index]) for index in range(first, stop)]

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's row, if it has one."""
        row = sequence.row
        if row is None:
            return
        sequence.row, sequence.steady_until, self._sequences[row] = None, 0, None
        self._free.append(row)
        self._released[row] = None
        self._copies.pop(row, None)
        self._chosen.pop(row, None)
        self._admitted.pop(row, None)
        self._entries.pop(row, None)

    def differences(self) -> RowDifferences:
        """Return the fields of the next plan that describe rows, and reset them."""
        differences = RowDifferences(
            released_rows=tuple(self._released),
            row_copies=tuple((source, row) for row, source in self._copies.items()),
            admitted=tuple(self._admitted.values()),
            chosen=tuple(self._chosen.values()),
            entries=tuple(itertools.chain.from_iterable(self._entries.values())),
        )
        self._copies, self._admitted, self._chosen, self._entries, self._released = {}, {}, {}, {}, {}
        return differences

    def _take(self, sequence: Sequence) -> int:
        row = sequence.row = self._free.pop()
        self._sequences[row] = sequence
        return row
