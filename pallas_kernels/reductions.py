"""Reductions of rows of logits, whose order depends on the length of a row only.

On a CPU they run in lanes. XLA's reductions of single rows take several times as long there once their order does not
depend on the number of rows (`pallas_kernels.ROW_ORDER`).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

LANES = 256  # numbers of a row that are combined at once


def row_max(x_sv: jax.Array) -> jax.Array:
    """Return the highest value of each row, [S]; NaN for a row with NaN."""
    return _reduced(x_sv, jnp.max, jnp.maximum, -jnp.inf)


def row_sum(x_sv: jax.Array) -> jax.Array:
    """Return the sum of each row, [S]."""
    return _reduced(x_sv, jnp.sum, _add, 0)


def row_logsumexp(x_sv: jax.Array) -> jax.Array:
    """Return the log of the sum of the exponentials of each row, [S]; -inf for a row of -inf."""
    highest_s = row_max(x_sv)
    highest_s = jnp.where(jnp.isfinite(highest_s), highest_s, 0)
    return highest_s + jnp.log(row_sum(jnp.exp(x_sv - highest_s[:, None])))


def row_argmax(x_sv: jax.Array) -> jax.Array:
    """Return the first of the highest values of each row, [S] int32; any place in a row that holds NaN.

    XLA's own argmax takes three times as long on a CPU.
    """
    size = x_sv.shape[1]
    highest_sv = x_sv == row_max(x_sv)[:, None]
    return _reduced(jnp.where(highest_sv, jnp.arange(size, dtype=jnp.int32), size - 1), jnp.min, jnp.minimum, size - 1)


def sum_by_xla(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return the sum over some axes with the bits of `ROW_ORDER` in any program, without derivatives."""
    summed: jax.Array = lax.reduce(x, jnp.zeros((), x.dtype), _add, axes)
    return summed


def max_by_xla(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return the highest value over some axes, as `sum_by_xla` returns the sum."""
    highest: jax.Array = lax.reduce(x, jnp.full((), -jnp.inf, x.dtype), lambda a, b: -lax.min(-a, -b), axes)
    return highest


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the sum of two numbers. XLA leaves a reduction to YNNPACK only if its operation is an addition."""
    return a - (-b)


def _reduced(
    x_sv: jax.Array, reduce: Callable[..., jax.Array], combine: Callable[..., jax.Array], neutral: Any
) -> jax.Array:
    """Return [S], each row reduced by an operation of two numbers; `neutral` does not change a result."""

    def in_lanes(x_sv: jax.Array) -> jax.Array:
        padded_sv = jnp.pad(x_sv, ((0, 0), (0, -x_sv.shape[1] % LANES)), constant_values=neutral)
        lanes_snl = padded_sv.reshape(len(x_sv), -1, LANES)
        y_sl = lax.reduce(lanes_snl, jnp.asarray(neutral, x_sv.dtype), combine, (1,))
        while y_sl.shape[1] > 1:  # XLA would merge two reductions into one of single rows
            y_sl = combine(*jnp.split(y_sl, 2, axis=1))
        first_s: jax.Array = y_sl[:, 0]
        return first_s

    return cast(jax.Array, lax.platform_dependent(x_sv, cpu=in_lanes, default=lambda x_sv: reduce(x_sv, axis=-1)))
