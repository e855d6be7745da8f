"""Common parts of models. Parameters name their axes, which `Placement` maps to axes of a mesh."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

MANY_ROWS = 256  # from here on both forms of a product take the same time on a CPU

Names = tuple[str | None, str | None]  # of the axes of a matrix
Activation = Callable[[jax.Array], jax.Array]
Product = Callable[[jax.Array, jax.Array], jax.Array | None]

_product: ContextVar[Product | None] = ContextVar("_product", default=None)


@contextmanager
def multiplying(multiply: Product | None) -> Iterator[None]:
    """Let `product` use a function within the context, in which a step is traced.

    Args:
        multiply: return x W^T [T, O] float32 of x [T, I] and W [O, I], or None if XLA should compute it. It need not
            have derivatives, and runs on one device. None: XLA computes all products.
    """
    token = _product.set(multiply)
    try:
        yield
    finally:
        _product.reset(token)


ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def axes(*names: str | None) -> dict[str, Any]:
    """Return metadata that names a parameter's axes, such as "heads", "kv_heads", "mlp" and "vocab"."""
    return {"out_sharding": names, "eager_sharding": False}


class Epilogue(NamedTuple):
    """Operations on the sums of a product.

    Attributes:
        scale_o: factors [out] float32 of a quantized weight. The weight is converted to the dtype of the other operand,
            and sums are scaled in float32.
        bias_o: added numbers [out].
        activation: function of single elements.
    """

    scale_o: jax.Array | None = None
    bias_o: jax.Array | None = None
    activation: Activation | None = None

    @classmethod
    def of(cls, layer: nnx.Module, activation: Activation | None = None) -> Self:
        """Return the operations with the scale and the bias of a layer, if it has them."""
        names = ("weight_scale", "bias")
        scale_o, bias_o = (getattr(layer, name)[...] if hasattr(layer, name) else None for name in names)
        return cls(scale_o, bias_o, activation)

    def __call__(self, y: jax.Array, dtype: DTypeLike, axis: int = 1) -> jax.Array:
        """Return the result in `dtype` of the sums y, whose outputs are along `axis`."""
        along: Callable[[jax.Array], jax.Array] = lambda vector_o: vector_o[:, None] if axis == 0 else vector_o
        y = y if self.scale_o is None else (y * along(self.scale_o)).astype(dtype)
        y = y if self.bias_o is None else y + along(self.bias_o)
        return self.activation(y) if self.activation else y


PLAIN = Epilogue()


class Linear(nnx.Module):
    """Linear layer y = x W^T + b, with a weight [out, in], as Hugging Face stores it, whose axes have these names.

    `jpaged.models.quantized` may replace the weight by one of 8 bits, and add `weight_scale` [out] float32, a factor on
    each of its rows.
    """

    def __init__(self, fan_in: int, fan_out: int, names: Names, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.weight = nnx.Param(init(rngs.params(), (fan_out, fan_in), dtype), **axes(*names))
        if bias:
            self.bias = nnx.Param(jnp.zeros(fan_out, dtype), **axes(names[0]))

    def __call__(self, x_ti: jax.Array, activation: Activation | None = None) -> jax.Array:
        """Return y, or activation(y), [T, out] in the dtype of x."""
        return product(x_ti, self.weight[...], epilogue=Epilogue.of(self, activation))


class UnitOffsetNorm(nnx.Module):
    """Root-mean-square norm of the last axis that multiplies by 1 + weight, in float32 inside."""

    def __init__(self, size: int, epsilon: float, *, dtype: DTypeLike):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.zeros(size, dtype), **axes(None))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normed x, of the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


def product(
    x_ti: jax.Array, weight_oi: jax.Array, dtype: DTypeLike | None = None, epilogue: Epilogue = PLAIN
) -> jax.Array:
    """Return epilogue(x W^T) [T, out], in `dtype` or else in that of x."""
    result_dtype, is_scaled = dtype or x_ti.dtype, epilogue.scale_o is not None
    sum_dtype = jnp.float32 if is_scaled else dtype
    converted: Callable[[jax.Array], jax.Array] = lambda w_oi: w_oi.astype(x_ti.dtype) if is_scaled else w_oi

    def elsewhere(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array:
        y_to = jnp.einsum("ti,oi->to", x_ti, converted(weight_oi), preferred_element_type=sum_dtype)
        return epilogue(y_to, result_dtype)

    multiply = _product.get()
    if multiply and (multiplied_to := multiply(x_ti, weight_oi)) is not None:
        return epilogue(multiplied_to.astype(sum_dtype or x_ti.dtype), result_dtype)

    def on_cpu(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array:
        # XLA multiplies W x^T up to twice as fast as x W^T if there are few rows, unless it is free to swap the two. A
        # single row of bfloat16 takes ten times as long as two. An activation is not vectorized if it is computed
        # while its operand is transposed.
        rows = x_ti.shape[0]
        if rows >= MANY_ROWS:
            return elsewhere(x_ti, weight_oi)
        if rows == 1 and x_ti.dtype != jnp.float32:
            x_ti = jnp.pad(x_ti, ((0, 1), (0, 0)))
        y_ot = jnp.einsum("oi,ti->ot", converted(weight_oi), x_ti, preferred_element_type=sum_dtype)
        y_to: jax.Array = lax.optimization_barrier(epilogue(y_ot, result_dtype, axis=0))[:, :rows].T
        return y_to

    y_to: jax.Array = lax.platform_dependent(x_ti, weight_oi, cpu=on_cpu, default=elsewhere)
    return y_to
