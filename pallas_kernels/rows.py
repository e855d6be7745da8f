"""Products of one row after the other in jnp: a row has the same bits next to any number of other rows.

XLA's product of a matrix adds the terms of a row in an order that depends on the number of rows. Rows that are not
wanted, and rows that belong to no expert, are not computed.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import reference
from pallas_kernels.options import ProductOptions
from pallas_kernels.weights import Weight


def product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Implement `Ops.product` and `Ops.products`. Rows that are not wanted are 0."""
    if 0 in x_ti.shape:
        return reference.product(x_ti, weights, options)
    wanted_t = _wanted(len(x_ti), options)
    sums = [_sums(reference.rows_for(weight, x_ti, options), weight, wanted_t, options.sizes_e) for weight in weights]
    return tuple(
        jnp.where(wanted_t[:, None], y_to, 0) for y_to in reference.finished(sums, weights, options, x_ti.dtype)
    )


def _wanted(rows: int, options: ProductOptions) -> jax.Array:
    """Return whether each row is computed, [T] bool."""
    wanted_t = jnp.ones(rows, bool) if options.wanted_t is None else options.wanted_t
    if options.wanted_t is not None and options.tokens_m is not None:
        wanted_t = wanted_t[options.tokens_m]
    return wanted_t if options.sizes_e is None else wanted_t & (jnp.arange(rows) < options.sizes_e.sum())


def _sums(x_ti: jax.Array, weight: Weight, wanted_t: jax.Array, sizes_e: jax.Array | None) -> jax.Array:
    """Return x W^T [T, O], in float32 (float64 of float64), without bias; 0 in rows that are not wanted."""
    row_scales = None if weight.has_groups else weight.scales  # factors of the sums
    matrix = weight.dense() if row_scales is None else weight.values.astype(x_ti.dtype)
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(x_ti, matrix))
    experts_t = None if sizes_e is None else jnp.searchsorted(jnp.cumsum(sizes_e), jnp.arange(len(x_ti)), side="right")

    def row(x_i: jax.Array, expert: jax.Array | None) -> jax.Array:
        matrix_oi, scales_o = (
            each if expert is None or each is None else lax.dynamic_index_in_dim(each, expert, keepdims=False)
            for each in (matrix, row_scales)
        )
        y_o = jnp.einsum("i,oi->o", x_i, matrix_oi, preferred_element_type=dtype)
        return y_o if scales_o is None else y_o * scales_o

    zeros_o = jnp.zeros(weight.shape[0], dtype)
    at_t = wanted_t, x_ti, experts_t
    y_to: jax.Array = lax.map(lambda at: lax.cond(at[0], lambda: row(*at[1:]), lambda: zeros_o), at_t)
    return y_to
