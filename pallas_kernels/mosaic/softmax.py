"""The online softmax of the attention kernels, in base 2, and their tensor core products (Mosaic GPU, Hopper)."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
LN2 = math.log(2)
NEG = -1e30  # a finite minus infinity: NEG - NEG is 0, not NaN


def softmax_state(rows: int, columns: int, softmax_axis: int) -> tuple[Any, Any, Any]:
    """Return an empty online softmax: output [rows, columns], and maximum and sum along `softmax_axis`."""
    layout, kept = plgpu.Layout.WGMMA, (rows, columns)[1 - softmax_axis]
    cast = plgpu.layout_cast
    return (
        cast(jnp.zeros((rows, columns), jnp.float32), layout),
        cast(jnp.full((kept,), NEG, jnp.float32), layout.reduce(softmax_axis)),
        cast(jnp.zeros((kept,), jnp.float32), layout.reduce(softmax_axis)),
    )


def capped(x, scale, soft_cap: float | None):
    """Return q·k as it is, or as tanh(scale q·k / soft_cap), which `exponent_factor` turns into an exponent of 2.

    The maximum is taken before the factor, which then costs nothing: it is the multiplication of an FFMA. tanh is taken
    as 1 - 2 / (e^2y + 1): the hardware's own is good for 11 bits only.
    """
    return x if soft_cap is None else 1.0 - 2.0 / (jnp.exp2(x * (scale * (2 * LOG2E / soft_cap))) + 1.0)


def exponent_factor(scale, soft_cap: float | None):
    """Return the factor, above 0, that makes a score of `capped` the exponent of 2 of a softmax weight."""
    return scale * LOG2E if soft_cap is None else soft_cap * LOG2E


def natural_lse(max_log2, total):
    """Return the natural log of the sum of exp of all scores; -inf where there are none."""
    return jnp.where(total == 0.0, -jnp.inf, (max_log2 + jnp.log2(total)) * LN2)


def product(a, b, rows: int, columns: int):
    """Return a @ b [rows, columns] in fp32, waiting for the tensor cores."""

    def scoped(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(scoped, plgpu.ACC((rows, columns), jnp.float32))
