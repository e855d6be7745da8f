"""Definition of the op `rms_norm`."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x_td: jax.Array, scale_d: jax.Array, epsilon: float, offset: float) -> jax.Array:
    """Define `Ops.rms_norm`."""
    x32_td = x_td.astype(jnp.float32)
    factor_t1 = lax.rsqrt(jnp.mean(x32_td * x32_td, axis=-1, keepdims=True) + epsilon)
    return (x32_td * (factor_t1 * (scale_d.astype(jnp.float32) + offset))).astype(x_td.dtype)
