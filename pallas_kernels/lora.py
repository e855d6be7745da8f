"""Definition of the op `low_rank`, and its implementation where there is no kernel for it: two products for all rows.

Axis letters of this op: N slots, R the rank of a slot, I inputs, O outputs.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.options import LowRank, ProductOptions
from pallas_kernels.weights import Weight

Product = Callable[[jax.Array, tuple[Weight, ...], ProductOptions], tuple[jax.Array, ...]]


def low_rank(product: Product, x_ti: jax.Array, pairs: Sequence[LowRank], slots_t: jax.Array) -> tuple[jax.Array, ...]:
    """Define `Ops.low_rank` by a product of an implementation.

    The matrices of all slots lie side by side, and each row keeps the columns of its own slot.
    """
    options = ProductOptions(None, False, jnp.float32)
    is_own_tn = slots_t[:, None] == jnp.arange(len(pairs[0].a))
    reduced = product(x_ti, tuple(Weight(a.reshape(-1, a.shape[2])) for a, _ in pairs), options)
    results = []
    for z_tc, (_, b_nro) in zip(reduced, pairs, strict=True):
        is_own_tc = jnp.repeat(is_own_tn, b_nro.shape[1], axis=1)
        weight = Weight(b_nro.reshape(-1, b_nro.shape[2]).T)
        (y_to,) = product(jnp.where(is_own_tc, z_tc, 0), (weight,), options)
        results.append(jnp.where(is_own_tn.any(1, keepdims=True), y_to, -0.0))
    return tuple(results)
