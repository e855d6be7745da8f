"""The online softmax of the attention kernels, in base 2 (Mosaic GPU, Hopper)."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
LN2 = math.log(2)
NEG = -1e30  # a finite minus infinity: NEG - NEG is 0, not NaN


def softmax_state(rows: int, columns: int, softmax_axis: int) -> tuple[Any, Any, Any]:
    """An empty online softmax: output [rows, columns], and maximum and sum along `softmax_axis`."""
    layout, kept = plgpu.Layout.WGMMA, (rows, columns)[1 - softmax_axis]
    cast = plgpu.layout_cast
    return (
        cast(jnp.zeros((rows, columns), jnp.float32), layout),
        cast(jnp.full((kept,), NEG, jnp.float32), layout.reduce(softmax_axis)),
        cast(jnp.zeros((kept,), jnp.float32), layout.reduce(softmax_axis)),
    )


def scores(x, scale, soft_cap: float | None):
    """q·k as the exponent of 2 of a softmax weight: scaled, capped.

    tanh is taken as 1 - 2 / (e^2y + 1): the hardware's own is good for 11 bits only.
    """
    if soft_cap is None:
        return x * (scale * LOG2E)
    return soft_cap * LOG2E * (1.0 - 2.0 / (jnp.exp2(x * (scale * (2 * LOG2E / soft_cap))) + 1.0))


def natural_lse(max_log2, total):
    """log of the sum of exp of all scores; -inf where there are none."""
    return jnp.where(total == 0.0, -jnp.inf, (max_log2 + jnp.log2(total)) * LN2)
