"""Weights in the form of a GPU's products: layers with the same input are one product, and experts are transposed.

One product needs fewer launches, and XLA does not concatenate weights in each step. Rows of different layers lie one
after another, on several devices within the rows of each device: [q of device 0, k of device 0, v of device 0, q of
device 1, ...].
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

import pallas_kernels
from jpaged.models.base import Leaf, Model, Place
from jpaged.models.layers import MINIMUM, SCALE, Linear, Product, axes, weight_of

LEAVES = ("weight", "bias", "weight" + SCALE, "weight" + MINIMUM)

# (leaves, their joint, sharding of the leaf that replaces them) -> that leaf
Join = Callable[[Sequence[Any], "Joint", Sharding], Any]


class Joint(NamedTuple):
    """Form of a leaf that replaces others.

    Attributes:
        names: names of the leaves that it replaces, below the module that held them.
        shapes: their shapes.
        parts: number of devices among which `axis` is divided.
        axis: axis along which the leaves lie one after another.
        swaps: whether the last two axes of each leaf are exchanged first.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: int
    axis: int = 0
    swaps: bool = False


class FusedLinear(nnx.Module):
    """Linear layers of one input; its leaves are those of `Linear`. `joints` has the form of each, by its name."""

    weight: Leaf
    product: Product = staticmethod(pallas_kernels.product)

    def __init__(self, leaves: Mapping[str, Leaf], joints: dict[str, Joint]):
        self.joints = joints
        for name, leaf in leaves.items():
            setattr(self, name, leaf)

    def __call__(self, x_ti: jax.Array, width: int) -> list[jax.Array]:
        """Return the result of each layer, [T, rows / width, width] in the dtype of x.

        The results are slices of one array along one axis, so that XLA can put them together again without a copy.
        """
        y_to = self.product(x_ti, weight_of(self))
        t, parts = len(x_ti), self.joints["weight"].parts
        counts = [rows // (parts * width) for rows, *_ in self.joints["weight"].shapes]
        shape, axis = ((t, -1, width), 1) if parts == 1 else ((t, parts, -1, width), 2)
        starts = [sum(counts[:i]) for i in range(1, len(counts))]
        return [y.reshape(t, -1, width) for y in jnp.split(y_to.reshape(shape), starts, axis=axis)]


def fuse(model: Model, place: Place, join: Join | None = None, *, gates: bool = True) -> None:
    """Call `fuse` of a model's modules, one after another: only the weights of one layer are in memory twice.

    Args:
        join: makes a leaf; None: `joined`, compiled, which a model without memory can't use.
        gates: also fuse gates, and transpose experts. Kernels of gated and of grouped products take neither.
    """
    # One executable for all layers.
    join = join or (lambda arrays, joint, sharding: joiner(joint._replace(names=()), sharding)(arrays))
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(cast(nnx.Module, model)))
    for _, module in modules:
        if hasattr(module, "fuse") and (gates or not module.is_gated):
            module.fuse(place, join)


def joints_of(model: Model) -> dict[str, Joint]:
    """Return the form of each leaf that replaces others, by the leaf's whole name. The joints have whole names, too."""
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(cast(nnx.Module, model)))
    joints = {}
    for path, module in modules:
        prefix, parent = ".".join(map(str, path)), ".".join(map(str, path[:-1]))
        for name, joint in getattr(module, "joints", {}).items():
            joints[f"{prefix}.{name}"] = joint._replace(names=tuple(f"{parent}.{each}" for each in joint.names))
    return joints


def fuse_linears(module: nnx.Module, name: str, members: Sequence[str], place: Place, join: Join) -> None:
    """Replace linear layers of a module by one layer called `name`.

    Nothing changes if their weights differ in form, or are not divided among equally many devices.
    """
    layers = [getattr(module, member, None) for member in members]
    if not all(isinstance(layer, Linear) for layer in layers):
        return
    separate = [{leaf: getattr(layer, leaf) for leaf in LEAVES if hasattr(layer, leaf)} for layer in layers]
    weights = [leaves["weight"] for leaves in separate]
    parts = {weight.shape[0] // place(weight).shard_shape(weight.shape)[0] for weight in weights}
    kinds = {tuple((name, str(leaf.dtype), leaf.shape[1:]) for name, leaf in leaves.items()) for leaves in separate}
    if len(parts) > 1 or len(kinds) > 1:
        return
    names, leaves, joints = weights[0].get_metadata()["out_sharding"], {}, {}
    for leaf in separate[0]:
        variables = [each[leaf] for each in separate]
        shapes = tuple(variable.shape for variable in variables)
        joints[leaf] = Joint(tuple(f"{member}.{leaf}" for member in members), shapes, *parts)
        leaves[leaf] = join_variables(variables, joints[leaf], names[: len(shapes[0])], place, join)
    for member in members:
        delattr(module, member)
    setattr(module, name, FusedLinear(leaves, joints))


def join_variables(
    variables: Sequence[Leaf], joint: Joint, names: Sequence[str | None], place: Place, join: Join
) -> Leaf:
    """Return a variable that replaces others, with these names of its axes."""
    arrays = [variable.get_value() for variable in variables]
    replacing: Leaf = nnx.Param(arrays[0], **axes(*names))
    return replacing.replace(join(arrays, joint, place(replacing)))


def joined(arrays: Sequence[jax.Array], joint: Joint) -> jax.Array:
    """Return the leaf that replaces others."""
    axis, split = joint.axis, []
    for array in arrays:
        array = jnp.swapaxes(array, -1, -2) if joint.swaps else array
        split.append(array.reshape(*array.shape[:axis], joint.parts, -1, *array.shape[axis + 1 :]))
    whole = jnp.concatenate(split, axis=axis + 1)
    return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])


@cache
def joiner(joint: Joint, sharding: Sharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Return `joined`, compiled, with its result in this place."""
    return jax.jit(partial(joined, joint=joint), out_shardings=sharding)
