"""Layers of one input as one product: queries, keys and values, or gate and up.

One product launches less on a GPU, and XLA need not concatenate weights for it. The rows of the weights lie one after
another, on several devices those of each device: [q of device 0, k of device 0, v of device 0, q of device 1, ...].
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jpaged.models.base import Model
from jpaged.models.layers import Linear, axes, product

LEAVES = ("weight", "bias", "weight_scale")


class Members(NamedTuple):
    """Layers that one fused layer replaces.

    Attributes:
        names: their names in the module that holds them.
        rows: rows of each weight.
        parts: number of devices among which the rows are divided.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    parts: int


class FusedLinear(nnx.Module):
    """Linear layers of one input; its leaves are those of `Linear`.

    Attributes:
        members: the layers that it replaces.
    """

    weight: nnx.Variable[Any]

    def __init__(self, members: Members, leaves: Mapping[str, nnx.Variable[Any]]):
        self.members = members
        for name, leaf in leaves.items():
            setattr(self, name, leaf)

    def __call__(self, x_ti: jax.Array, width: int) -> list[jax.Array]:
        """Return the result of each layer, [T, rows / width, width] in the dtype of x.

        The results are slices of one array along one axis, so that XLA can put them together again without a copy.
        """
        bias_o = self.bias[...] if hasattr(self, "bias") else None
        scale_o = self.weight_scale[...] if hasattr(self, "weight_scale") else None
        y_to = product(x_ti, self.weight[...], scale_o=scale_o, bias_o=bias_o)
        t, (_, rows, parts) = len(x_ti), self.members
        counts = [count // (parts * width) for count in rows]
        if parts == 1:
            y_tcw, axis = y_to.reshape(t, -1, width), 1
        else:
            y_tcw, axis = y_to.reshape(t, parts, -1, width), 2
        starts = [sum(counts[:i]) for i in range(1, len(counts))]
        return [y.reshape(t, -1, width) for y in jnp.split(y_tcw, starts, axis=axis)]


Join = Callable[[Sequence[Any], int, Sharding], Any]  # leaves of members, parts, place -> the leaf of their layer


def fuse(model: Model, place: Callable[[nnx.Variable[Any]], Sharding], join: Join | None = None) -> None:
    """Fuse layers of a model in place, one after another, so that little memory is needed twice.

    A module states its fused layers and their members in `fusable`. Layers stay as they are if their weights differ in
    dtype, or are not divided among equally many devices.

    Args:
        place: sharding of a parameter.
        join: makes each leaf; None: `interleave`, compiled. A model without memory needs another one.
    """
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(cast(nnx.Module, model)))
    for _, module in modules:
        for name, members in getattr(type(module), "fusable", {}).items():
            layers = [getattr(module, member, None) for member in members]
            if (fused := _fused(layers, members, place, join or _joined)) is not None:
                for member in members:
                    delattr(module, member)
                setattr(module, name, fused)


def fused_layers(model: Model) -> dict[str, Members]:
    """Return the members of each fused layer by its path, such as `layers.0.self_attn.qkv_proj`."""
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(cast(nnx.Module, model)))
    return {".".join(map(str, path)): layer.members for path, layer in modules if isinstance(layer, FusedLinear)}


def interleave(arrays: Sequence[jax.Array], parts: int) -> jax.Array:
    """Return the leaf of a fused layer, [sum of rows, ...], from those of its members."""
    split = [array.reshape(parts, -1, *array.shape[1:]) for array in arrays]
    return jnp.concatenate(split, axis=1).reshape(-1, *arrays[0].shape[1:])


@cache
def interleaver(parts: int, sharding: Sharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return `interleave`, compiled, with its result in this place."""
    return jax.jit(partial(interleave, parts=parts), out_shardings=sharding)


def _fused(
    layers: Sequence[Any], names: Sequence[str], place: Callable[[nnx.Variable[Any]], Sharding], join: Join
) -> FusedLinear | None:
    """Return a layer that replaces some; None if they can't be replaced."""
    if not all(isinstance(layer, Linear) for layer in layers):
        return None
    found = [{name: getattr(layer, name) for name in LEAVES if hasattr(layer, name)} for layer in layers]
    if any(leaves.keys() != found[0].keys() for leaves in found):
        return None
    weights = [leaves["weight"] for leaves in found]
    parts = {weight.shape[0] // place(weight).shard_shape(weight.shape)[0] for weight in weights}
    if len(parts) > 1 or len({weight.dtype for weight in weights}) > 1:
        return None
    members = Members(tuple(names), tuple(weight.shape[0] for weight in weights), parts.pop())
    names_of_axes = weights[0].get_metadata()["out_sharding"]
    fused = {}
    for name in found[0]:
        arrays = [leaves[name].get_value() for leaves in found]
        variable = nnx.Param(arrays[0], **axes(*names_of_axes[: arrays[0].ndim]))
        fused[name] = variable.replace(join(arrays, members.parts, place(variable)))
    return FusedLinear(members, fused)


def _joined(arrays: Sequence[jax.Array], parts: int, sharding: Sharding) -> jax.Array:
    return interleaver(parts, sharding)(arrays)
