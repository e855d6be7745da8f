"""Rows of running sequences, on the host and on the device, where they hold the sampling state."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jpaged.core.params import MAX_TOP, SamplingParams
from jpaged.core.plan import Admitted, StepPlan
from jpaged.runtime.placement import Placement, padded, usable
from jpaged.runtime.row_table import RowTable


class SamplingState(NamedTuple):
    """Sampling state of R rows over a vocabulary of V. Jitted functions take it donated and change it in place."""

    output_counts: jax.Array  # [R, V] int32, how often the output holds the token
    in_prompt: jax.Array  # [R, V] bool
    bias: jax.Array  # [R, V] float32, added to the logit; -inf forbids the token
    listed: jax.Array  # [R, M] int32, tokens to list instead of the best ones, then -1; M = MAX_TOP, or V if less


def empty_state(num_rows: int, vocab_size: int, sharding: Sharding | None = None) -> SamplingState:
    """Return a state of empty rows: no token seen, none biased."""
    dtypes, widths = (jnp.int32, jnp.bool, jnp.float32, jnp.int32), [vocab_size] * 3 + [min(MAX_TOP, vocab_size)]
    return SamplingState(*(jnp.zeros((num_rows, n), dtype, device=sharding) for n, dtype in zip(widths, dtypes)))


def host_row(admitted: Admitted, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return a sequence's row of the state: [V] int32, [V] bool, [V] float32, [M] int32.

    The step that reads the last token of the output counts it. A bias never allows a forbidden token.
    """
    params, prompt_length = admitted.params, admitted.num_prompt_tokens
    counts_v = np.bincount(_ids(admitted.token_ids[prompt_length:-1]), minlength=vocab_size).astype(np.int32)
    in_prompt_v = np.zeros(vocab_size, np.bool)
    in_prompt_v[_ids(admitted.token_ids[:prompt_length])] = True
    bias_v = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias_v[:] = -np.inf
        bias_v[_ids(params.allowed_token_ids)] = 0
    if params.logit_bias:
        bias_v[_ids(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    bias_v[_ids(admitted.banned)] = -np.inf
    listed_m = np.full(min(MAX_TOP, vocab_size), -1, np.int32)
    if isinstance(params, SamplingParams) and params.logprob_token_ids:
        listed_m[: len(params.logprob_token_ids)] = params.logprob_token_ids
    return counts_v, in_prompt_v, bias_v, listed_m


def write_row(state: SamplingState, row: jax.Array, values: tuple[jax.Array, ...]) -> SamplingState:
    """Return the state with one row, an int32 scalar, replaced by `host_row`'s arrays; row -1 replaces nothing."""
    at = _or_past_the_end(row, state)
    return SamplingState(*(array.at[at].set(value, mode="drop") for array, value in zip(state, values, strict=True)))


def copy_rows(state: SamplingState, sources_c: jax.Array, destinations_c: jax.Array) -> SamplingState:
    """Return the state with rows copied, all of them read before any is written.

    Sources and destinations are [C] int32 each, -1 in either = padding.
    """
    at_c = _or_past_the_end(jnp.where(sources_c < 0, -1, destinations_c), state)

    def copy(array: jax.Array) -> jax.Array:
        # Read apart from the writing, or XLA may find that the writing needs a copy of the whole array.
        values_cv = jax.lax.optimization_barrier(array[jnp.maximum(sources_c, 0)])
        return array.at[at_c].set(values_cv, mode="drop")

    return SamplingState(*map(copy, state))


def count_tokens(state: SamplingState, rows_s: jax.Array, tokens_s: jax.Array, by: int = 1) -> SamplingState:
    """Return the state with token s counted as output of its row s, both [S] int32; -1 in either counts nothing.

    Args:
        by: -1 to take back a count.
    """
    at_s = _or_past_the_end(jnp.where(tokens_s < 0, -1, rows_s), state)
    return state._replace(output_counts=state.output_counts.at[at_s, tokens_s].add(by, mode="drop"))


def _ids(tokens: Collection[int]) -> np.ndarray:
    return np.fromiter(tokens, np.int64, len(tokens))


def _or_past_the_end(rows: jax.Array, state: SamplingState) -> jax.Array:
    """Move negative rows to where writes are dropped: an index of -1 would be the last row."""
    return jnp.where(rows < 0, state.output_counts.shape[0], rows)


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
