"""Online softmax of the attention kernels, in base 2, and their tensor core products (Mosaic GPU, Hopper)."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.options import AttentionOptions, Ref

LOG2E = math.log2(math.e)
LN2 = math.log(2)
NEG = -1e30  # a finite minus infinity: NEG - NEG is 0, not NaN


def scales(options: AttentionOptions, num_kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return the factors [K] float32 of q·k and of the output."""
    ones_k = jnp.ones(num_kv_heads, jnp.float32)
    k_scale_k = ones_k if options.k_scale_k is None else options.k_scale_k
    return options.scale * k_scale_k, ones_k if options.v_scale_k is None else options.v_scale_k


def softmax_state(rows: int, columns: int, softmax_axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return an empty online softmax: output [rows, columns], and maximum and sum along `softmax_axis`."""
    layout, kept = plgpu.Layout.WGMMA, (rows, columns)[1 - softmax_axis]
    cast = plgpu.layout_cast
    return (
        cast(jnp.zeros((rows, columns), jnp.float32), layout),
        cast(jnp.full((kept,), NEG, jnp.float32), layout.reduce(softmax_axis)),
        cast(jnp.zeros((kept,), jnp.float32), layout.reduce(softmax_axis)),
    )


def capped(x: jax.Array, scale: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return q·k as it is, or as tanh(scale q·k / soft_cap), which `exponent_factor` turns into an exponent of 2.

    The maximum is taken before the factor, which then costs nothing: it is the multiplication of an FFMA. tanh is
    computed as 1 - 2 / (e^2y + 1), because the hardware's tanh is exact to only 11 bits.
    """
    return x if soft_cap is None else 1.0 - 2.0 / (jnp.exp2(x * (scale * (2 * LOG2E / soft_cap))) + 1.0)


def exponent_factor(scale: jax.Array, soft_cap: float | None) -> jax.Array | float:
    """Return the factor, above 0, that makes a score of `capped` the exponent of 2 of a softmax weight."""
    return scale * LOG2E if soft_cap is None else soft_cap * LOG2E


def with_sinks(sink_log2: jax.Array, max_log2: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the factor of softmax results after their sinks are added, and the new maxima and sums, all base 2."""
    new_max = jnp.maximum(max_log2, sink_log2)
    shrink = jnp.exp2(max_log2 - new_max)
    return shrink, new_max, total * shrink + jnp.exp2(sink_log2 - new_max)


def sinks_first(kernel: Callable[..., None], sinks_ref: Ref, *refs: Ref, **scratch: Any) -> None:
    """Run a kernel whose launch has the sinks before its other arguments."""
    kernel(*refs, sinks_ref=sinks_ref, **scratch)


def natural_lse(max_log2: jax.Array, total: jax.Array) -> jax.Array:
    """Return the natural log of the sum of exp of all scores; -inf if there are none."""
    return jnp.where(total == 0.0, -jnp.inf, (max_log2 + jnp.log2(total)) * LN2)


def product(a: Ref, b: Ref, rows: int, columns: int) -> jax.Array:
    """Return a @ b [rows, columns] in fp32, after waiting for the tensor cores."""

    def scoped(acc_ref: Ref) -> jax.Array:
        plgpu.wgmma(acc_ref, a, b)
        out: jax.Array = acc_ref[...]
        return out

    out: jax.Array = pl.run_scoped(scoped, plgpu.ACC((rows, columns), jnp.float32))
    return out
