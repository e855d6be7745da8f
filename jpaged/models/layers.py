"""Common parts of models. Parameters name their axes, which `Placement` maps to axes of a mesh.

A module that calls an op has it as an attribute, such as `product`, by default the definition in `pallas_kernels`.
`set_ops` replaces it by that of a step's kernels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_kernels
from pallas_kernels import Weight

SCALE, MINIMUM = "_scale", "_min"  # ends of the names of a quantized weight's further leaves

Names = tuple[str | None, str | None]  # of the axes of a matrix
Product = Callable[..., jax.Array]  # as `pallas_kernels.Ops.product`
Products = Callable[..., tuple[jax.Array, ...]]  # as `pallas_kernels.Ops.products`


def set_ops(model: Any, **functions: Callable[..., Any]) -> None:
    """Let the modules of a model use these functions for the ops of their names, in place of the definitions.

    An attribute of the same name with another value is not changed.
    """
    for _, module in nnx.iter_modules(model):
        for name, function in functions.items():
            if getattr(module, name, None) is getattr(pallas_kernels, name):
                setattr(module, name, function)


def axes(*names: str | None) -> dict[str, Any]:
    """Return metadata that names a parameter's axes, such as "heads", "kv_heads", "mlp" and "vocab"."""
    return {"out_sharding": names, "eager_sharding": False}


def weight_of(module: nnx.Module, name: str = "weight", *, bias: str | None = "bias") -> Weight:
    """Return a weight of a module from its leaves, the scales and the minima of a quantized one included."""
    names = (name, name + SCALE, name + MINIMUM, bias)
    leaves = [getattr(module, each)[...] if each and hasattr(module, each) else None for each in names]
    return Weight._make(leaves)


class Linear(nnx.Module):
    """Linear layer y = x W^T + b, with a weight [out, in], as Hugging Face stores it, whose axes have these names.

    `jpaged.models.quantized` may replace the weight by a quantized one, and add `weight_scale` and `weight_min`.

    Attributes:
        adapter: the function of a step's adapters, as `jpaged.models.adapters.attach` makes it, and the layer's name;
            None: the step has none.
    """

    adapter: tuple[Callable[..., tuple[jax.Array, ...]], str] | None = None

    product: Product = staticmethod(pallas_kernels.product)
    products: Products = staticmethod(pallas_kernels.products)

    def __init__(self, fan_in: int, fan_out: int, names: Names, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        self.weight = nnx.Param(init(rngs.params(), (fan_out, fan_in), dtype), **axes(*names))
        if bias:
            self.bias = nnx.Param(jnp.zeros(fan_out, dtype), **axes(names[0]))

    def __call__(
        self, x_ti: jax.Array, activation: str | None = None, *, up: "Linear | None" = None,
        dtype: DTypeLike | None = None, residual_to: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return y, or activation(y), [T, out] in `dtype` or else in that of x.

        Args:
            up: layer whose result, without activation, is a factor of this layer's.
            residual_to: is added to the result; None: nothing.
        """
        up_weight = None if up is None else weight_of(up)
        layers = [self] if up is None else [self, up]
        options = {"up": up_weight, "activation": activation, "dtype": dtype, "residual_to": residual_to}
        return self.product(x_ti, weight_of(self), **options, **_added(x_ti, layers))

    def together(self, x_ti: jax.Array, *others: "Linear") -> tuple[jax.Array, ...]:
        """Return the results of this and other layers of the same input, each [T, out] in the dtype of x."""
        weights = [weight_of(layer) for layer in (self, *others)]
        return self.products(x_ti, *weights, **_added(x_ti, [self, *others]))


def _added(x_ti: jax.Array, layers: Sequence[Linear]) -> dict[str, tuple[jax.Array, ...]]:
    """Return the option of a product that adds the results of the layers' adapters; nothing if they have none."""
    found = [layer.adapter for layer in layers if layer.adapter is not None]
    if not found:
        return {}
    assert len(found) == len(layers), "all linear layers of a step have adapters, or none"
    adapt, _ = found[0]
    return {"added": adapt(x_ti, [name for _, name in found])}


class Embedding(nnx.Module):
    """Embedding of a vocabulary, with a leaf `embedding` [V, D], which may be quantized like a weight.

    Attributes:
        dtype: dtype of the rows that a call returns; the leaf may have another one.
    """

    product: Product = staticmethod(pallas_kernels.product)

    def __init__(self, vocab_size: int, size: int, name: str | None, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dtype = dtype
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, size), dtype), **axes(name, None))

    def __call__(self, tokens_t: jax.Array) -> jax.Array:
        """Return the rows [T, D] of tokens [T] int32."""
        weight = weight_of(self, "embedding")
        rows = Weight._make(None if leaf is None else leaf[tokens_t] for leaf in weight)
        return rows.dense().astype(self.dtype)

    def logits(self, x_sd: jax.Array) -> jax.Array:
        """Return the products of hidden states [S, D] with all rows, [S, V] float32."""
        return self.product(x_sd, weight_of(self, "embedding"), dtype=jnp.float32)


class RMSNorm(nnx.Module):
    """Root-mean-square norm of the last axis, whose name is `name`, times `offset` + scale.

    A norm with an offset of 1 begins with a scale of 0.
    """

    rms_norm: Callable[..., jax.Array] = staticmethod(pallas_kernels.rms_norm)

    def __init__(self, size: int, epsilon: float, *, dtype: DTypeLike, offset: float = 0.0, name: str | None = None):
        self.epsilon, self.offset = epsilon, offset
        self.scale = nnx.Param(jnp.full(size, 1 - offset, dtype), **axes(name))

    def __call__(self, x_td: jax.Array) -> jax.Array:
        """Return the normed x [T, D], of the same dtype."""
        return self.rms_norm(x_td, self.scale[...], epsilon=self.epsilon, offset=self.offset)
