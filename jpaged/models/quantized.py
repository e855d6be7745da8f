"""Quantized weights of modules: their forms, the conversion to them, and the leaves that hold them.

A quantized weight `w` of a module has the leaves `w`, `w_scale` and, if its form has minima, `w_min` (see
`pallas_kernels.Weight`). Activations are not quantized. Norms, routers, the head and embeddings stay as they are,
unless a checkpoint has the latter two in a quantized form.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Sharding

from jpaged.config import QUANTIZATIONS
from jpaged.models.base import LeafPath, Model, Place
from jpaged.models.layers import MINIMUM, SCALE, Embedding, Linear, axes, weight_of
from jpaged.models.moe import EXPERT_WEIGHTS, ExpertMlps
from pallas_kernels.weights import Format, Weight
from pallas_kernels.weights import quantize as quantize_weight

FORMATS = {
    "int8": Format("int8", "float32"),
    "fp8": Format("float8_e4m3fn", "float32"),
    "int4": Format("uint8", "float16", "float16", 32),
}
assert tuple(FORMATS) == QUANTIZATIONS
# The head, the routers of experts and the gates of shared experts: layers that `quantization` leaves as they are.
UNQUANTIZED = ("lm_head", "gate", "shared_expert_gate")

Formats = Mapping[LeafPath, Format]  # of quantized weights by path
Takes = Callable[[Format, tuple[int, ...]], bool]  # whether products take a weight [O, I] or [E, O, I] in a form
Convert = Callable[[jax.Array, Format], Weight]


@cache
def quantizer(form: Format, shardings: tuple[Sharding, ...] | None = None) -> Callable[[jax.Array], Weight]:
    """Return a compiled conversion to a form, with the arrays of its result in these places (None: the argument's)."""
    places = None if shardings is None else Weight._make((*shardings, *[None] * (4 - len(shardings))))
    return jax.jit(partial(quantize_weight, form=form), out_shardings=places)


def leaf_paths(path: LeafPath, form: Format) -> dict[str, LeafPath]:
    """Return the paths of a quantized weight's leaves, by the names of the fields of `Weight`."""
    *parents, name = path
    ends = {"values": "", "scales": SCALE, "minima": MINIMUM if form.minima else None}
    return {field: (*parents, f"{name}{end}") for field, end in ends.items() if end is not None}


def dense_leaf(values: Any, form: Format) -> jax.ShapeDtypeStruct:
    """Return the shape of a weight before it is quantized to these numbers."""
    *outer, inputs = values.shape
    return jax.ShapeDtypeStruct((*outer, inputs * (1 + form.is_packed)), values.dtype)


def weights_of(model: Any) -> Iterator[tuple[LeafPath, nnx.Module, str]]:
    """Return the weights of a model that may be quantized: path, module and name of each."""
    names = {Linear: ("weight",), Embedding: ("embedding",), ExpertMlps: EXPERT_WEIGHTS}
    for path, module in nnx.iter_modules(model):
        for name in names.get(type(module), ()):
            yield (*path, name), module, name


def quantizable(model: Model) -> list[LeafPath]:
    """Return the paths of the weights of a model that `quantization` applies to."""
    paths = [path for path, module, _ in weights_of(model) if not isinstance(module, Embedding)]
    return [path for path in paths if not set(path) & set(UNQUANTIZED)]


def quantize_weights(model: Any, formats: Formats, convert: Convert = quantize_weight) -> None:
    """Replace the weights at these paths of a module in place by the leaves of convert(weight, form)."""
    for path, module, name in list(weights_of(model)):
        if (form := formats.get(path)) is None:
            continue
        leaf = getattr(module, name)
        weight = convert(leaf[...], form)
        names = leaf.get_metadata().get("out_sharding") or (None,) * leaf.ndim
        setattr(module, name, leaf.replace(weight.values))
        for end, array in ((SCALE, weight.scales), (MINIMUM, weight.minima)):
            if array is not None:
                setattr(module, name + end, nnx.Param(array, **axes(*names[: array.ndim])))


def quantize(model: Model, quantization: str) -> Model:
    """Return a model whose linear layers and experts have quantized weights; its other arrays are those of the model.

    Args:
        quantization: "int8", "fp8" or "int4", as `EngineConfig.quantization`.

    Raises:
        ValueError: the model is quantized already, there is no such quantization, or a weight has no whole groups.
    """
    if quantization not in FORMATS:
        raise ValueError(f"quantization: must be one of {', '.join(FORMATS)}, not {quantization!r}")
    if is_quantized(model):
        raise ValueError("quantization: the model is quantized already")
    copied: Any = nnx.merge(*nnx.split(cast(nnx.Module, model)))
    quantize_weights(copied, formats_of(copied, quantization), lambda weight, form: quantizer(form)(weight))
    return cast(Model, copied)


def formats_of(model: Any, quantization: str | None) -> dict[LeafPath, Format]:
    """Return the forms of the weights that `quantization` applies to, by path.

    Raises:
        ValueError: the inputs of a weight are not whole groups.
    """
    if quantization is None:
        return {}
    form, quantized = FORMATS[quantization], set(quantizable(model))
    for path, module, name in weights_of(model):
        inputs = getattr(module, name).shape[-1]
        if path in quantized and form.group and inputs % form.group:
            where = ".".join(map(str, path))
            raise ValueError(
                f"quantization: {quantization} has groups of {form.group} inputs, and {where} has {inputs} inputs"
            )
    return dict.fromkeys(quantized, form)


def check_groups(leaves: Mapping[LeafPath, Any], place: Place) -> None:
    """Check that each device gets whole groups of each quantized weight. Raises ValueError with the weight's name."""
    for path, leaf in leaves.items():
        if not str(path[-1]).endswith(SCALE):
            continue
        try:
            place(leaf).shard_shape(leaf.shape)
        except ValueError as error:
            name = ".".join(map(str, path)).removesuffix(SCALE)
            raise ValueError(
                f"quantization: {name} has {leaf.shape[-1]} groups of inputs, which {place(leaf).num_devices} devices "
                "do not divide"
            ) from error


def is_quantized(model: Model) -> bool:
    """Return whether a model has quantized weights."""
    return any(str(path[-1]).endswith(SCALE) for path, _ in nnx.to_flat_state(nnx.state(model)))


def has_groups(model: Model, takes: Takes | None = None) -> bool:
    """Return whether a model has weights with scales of groups of inputs, except weights that products take."""
    weights = (weight_of(module, name) for _, module, name in weights_of(model))
    return any(each.has_groups and not (takes and takes(each.format, each.shape)) for each in weights)


def takes_int8_rows(model: Model) -> bool:
    """Return whether a model has weights next to which rows may be rounded to int8."""
    return any(weight_of(module, name).format.takes_int8_rows for _, module, name in weights_of(model))


def described(model: Model) -> str:
    """Return the bytes of a model's parameters by dtype, in words."""
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(nnx.state(cast(nnx.Module, model), nnx.Param)):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.nbytes
    parts = ", ".join(f"{size:,} of {dtype}" for dtype, size in sorted(sizes.items()))
    return f"{sum(sizes.values()):,} bytes ({parts})"
