"""Rows of running sequences, on the host and on the device."""

from collections.abc import Sequence
from typing import cast

import jax
import numpy as np

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, StepPlan
from jpaged.runtime.placement import Placement, padded, usable
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_state import SamplingState, copy_rows, empty_state, host_row, write_row


class DeviceRows:
    """Owner of the rows. The step takes `state` and `last_tokens` donated, and its caller stores the new ones here.

    Args:
        copy_sizes: numbers of rows that are copied at once; a sequence takes at most one in a step.

    Attributes:
        table: the rows on the host.
        state: the state of the sampler.
        last_tokens: [R] int32, the last sample of each row.
    """

    def __init__(self, table: RowTable, vocab_size: int, copy_sizes: Sequence[int], placement: Placement):
        self.table, self._vocab_size, self.copy_sizes, self._placement = table, vocab_size, copy_sizes, placement
        self._copy = jax.jit(copy_rows, donate_argnums=0, out_shardings=placement.whole)
        self._write = jax.jit(write_row, donate_argnums=0, out_shardings=placement.whole)
        self.state, self.last_tokens = self._empty_state(), self._no_tokens()

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan's changes of rows, on the host and on the device."""
        stateful = self.table.sampling["stateful"]
        if copies := [(source, row) for source, row in plan.row_copies if stateful[source]]:
            self._copy_rows(copies)
        self.table.apply(plan)
        for admitted in plan.admitted:
            if admitted.params.has_state:
                self._write_row(admitted)

    def warm_up(self) -> None:
        """Compile every change of rows, without changing a row."""
        for size in self.copy_sizes:
            self._copy_rows([(-1, -1)] * size)
        self._write_row(Admitted(-1, (), 0, SamplingParams(), 0, ()))

    def drop(self) -> None:
        """Let go of the sampler's state, until `recover`."""
        self.state = None  # type: ignore[assignment]  # nothing reads it meanwhile

    def recover(self) -> None:
        """Allocate the state again, empty, if it was dropped or a failed step has lost it."""
        if self.state is None or not usable(self.state):
            self.state = self._empty_state()
        if not usable([self.last_tokens]):
            self.last_tokens = self._no_tokens()

    def _copy_rows(self, copies: Sequence[tuple[int, int]]) -> None:
        self.state = self._copy(self.state, *self._placement.put(padded(copies, self.copy_sizes)))

    def _write_row(self, admitted: Admitted) -> None:
        """Write a sequence's row of the state; row -1 writes none."""
        row = np.int32(admitted.row), host_row(admitted, self._vocab_size)
        self.state = self._write(self.state, *self._placement.put(row))

    def _empty_state(self) -> SamplingState:
        return empty_state(len(self.table.tokens), self._vocab_size, self._placement.whole)

    def _no_tokens(self) -> jax.Array:
        return cast(jax.Array, self._placement.put(np.zeros(len(self.table.tokens), np.int32)))
