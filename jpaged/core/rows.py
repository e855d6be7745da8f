"""Rows of running sequences, and their differences from one plan to the next."""

import itertools
from typing import Any

from jpaged.core.adapter_slots import AdapterSlots
from jpaged.core.plan import Admitted, Chosen, Entry
from jpaged.core.request import Sequence


class Rows:
    """Rows of `size` sequences. A running sequence has one, on host and device, from admission to release.

    It holds a slot for its adapter as long.
    """

    def __init__(self, size: int, num_adapters: int = 0):
        self.size, self.adapters = size, AdapterSlots(num_adapters)
        self.clear()

    def clear(self) -> None:
        """Release every row and drop all differences."""
        self._sequences: list[Sequence | None] = [None] * self.size
        self.adapters.clear()
        self.free = list(range(self.size))
        self._copies: dict[int, int] = {}  # {destination: source}: a later copy replaces an earlier one
        self._admitted: dict[int, Admitted] = {}
        self._chosen: dict[int, Chosen] = {}
        self._entries: dict[int, list[Entry]] = {}  # by row
        self._released: dict[int, None] = {}

    def __getitem__(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a row, and add its whole state to the next plan."""
        row, request = self._take(sequence), sequence.request
        self._admitted[row] = Admitted(
            row,
            tuple(sequence.tokens),
            sequence.num_prompt_tokens,
            request.params,
            sequence.seed,
            tuple(map(tuple, sequence.table.block_ids)),
            request.num_top,
            num_scored=None if request.params.prompt_logprobs is None else len(request.prompt_samples),
            banned=request.bans.single_tokens,
            adapter_slot=self.adapters.take(request.adapter),
        )

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Give a branch a row with the state of its parent."""
        assert sequence.row is not None
        self._copies[self._take(child)] = sequence.row
        self.adapters.take(child.request.adapter)

    def choose(self, sequence: Sequence) -> None:
        """Add the last token of a sequence, which the host has chosen, to the next plan."""
        assert sequence.row is not None
        self._chosen[sequence.row] = Chosen(sequence.row, sequence.tokens[-1], sequence.seed)

    def change(self, sequence: Sequence, first: int, stop: int) -> None:
        """Add the entries [first, stop) of a sequence's block table to the next plan."""
        row = sequence.row
        assert row is not None
        changed = self._entries.setdefault(row, [])
        for group, (block_ids, gone) in enumerate(zip(sequence.table.block_ids, sequence.table.first)):
            changed += [Entry(row, group, index, block_ids[index]) for index in range(max(first, gone), stop)]

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's row, if it has one."""
        row = sequence.row
        if row is None:
            return
        sequence.row, sequence.steady_until, self._sequences[row] = None, 0, None
        self.free.append(row)
        self.adapters.release(sequence.request.adapter)
        self._released[row] = None
        self._copies.pop(row, None)
        self._chosen.pop(row, None)
        self._admitted.pop(row, None)
        self._entries.pop(row, None)

    def differences(self) -> dict[str, tuple[Any, ...]]:
        """Return the fields of the next `StepPlan` that describe rows, and reset them."""
        differences: dict[str, tuple[Any, ...]] = dict(
            released_rows=tuple(self._released),
            row_copies=tuple((source, row) for row, source in self._copies.items()),
            admitted=tuple(self._admitted.values()),
            chosen=tuple(self._chosen.values()),
            entries=tuple(itertools.chain.from_iterable(self._entries.values())),
            adapters=self.adapters.loads(),
        )
        self._copies, self._admitted, self._chosen, self._entries, self._released = {}, {}, {}, {}, {}
        return differences

    def _take(self, sequence: Sequence) -> int:
        row = sequence.row = self.free.pop()
        self._sequences[row] = sequence
        return row
