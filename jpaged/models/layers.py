"""Parts that models are made of. Parameters name their axes, which a mesh maps to its own."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

MANY_ROWS = 256  # from here on both forms of a product take the same time on a CPU


def axes(*names: str | None) -> dict:
    """Return metadata that names a parameter's axes, such as "heads", "mlp" and "vocab"."""
    return {"out_sharding": names, "eager_sharding": False}


class Linear(nnx.Module):
    """y = x W^T + b, with a weight [out, in], as Hugging Face stores it.

    Args:
        names: of the weight's axes.
    """

    def __init__(
        self, fan_in: int, fan_out: int, names: tuple[str | None, str | None], *, bias: bool, dtype, rngs: nnx.Rngs
    ):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.weight = nnx.Param(init(rngs.params(), (fan_out, fan_in), dtype), **axes(*names))
        if bias:
            self.bias = nnx.Param(jnp.zeros(fan_out, dtype), **axes(names[0]))

    def __call__(self, x_ti: jax.Array) -> jax.Array:
        """Return [T, out], in the dtype of x."""
        y_to = product(x_ti, self.weight[...])
        return y_to + self.bias[...] if hasattr(self, "bias") else y_to


def rms_norm(size: int, epsilon: float, *, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Return a root-mean-square norm of the last axis."""
    return nnx.RMSNorm(
        size, epsilon=epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs, scale_metadata=axes(None)
    )  # fmt: skip


def product(x_ti: jax.Array, weight_oi: jax.Array, dtype=None) -> jax.Array:
    """Return x W^T [T, out], in `dtype` or else in that of x."""

    def elsewhere(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array:
        return jnp.einsum("ti,oi->to", x_ti, weight_oi, preferred_element_type=dtype)

    def on_cpu(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array:
        # XLA multiplies W x^T up to twice as fast as x W^T if there are few rows, unless it is free to swap the two.
        if x_ti.shape[0] >= MANY_ROWS:
            return elsewhere(x_ti, weight_oi)
        return lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight_oi, x_ti, preferred_element_type=dtype)).T

    return lax.platform_dependent(x_ti, weight_oi, cpu=on_cpu, default=elsewhere)
