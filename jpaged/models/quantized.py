"""Weights of linear layers in 8 bits: number formats, the conversion to them, and modules that hold them.

A quantized weight [out, in] is int8 or float8_e4m3fn, with a factor for each row: W = weight * weight_scale[:, None].
Activations are not quantized: a product converts the weight to the dtype of its other operand (`layers.product`).
Embeddings, the head and norms stay as they are.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jpaged.config import QUANTIZATIONS
from jpaged.models.base import LeafPath, Model
from jpaged.models.layers import Linear, axes

WEIGHT, SCALE = "weight", "weight_scale"  # leaves of a quantized layer
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # number of a dtype that the largest of a row is mapped to
SMALLEST = 1e-30  # rows with smaller numbers become zeros; the reciprocals of their scales would overflow
UNQUANTIZED = ("lm_head", "gate")  # the head and the routers of experts: layers that `quantization` leaves as they are


def round_weight(weight_oi: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Return a weight [out, in] in "int8" or "float8_e4m3fn", and its scale [out] float32.

    The scale maps the largest magnitude of a row to the largest number of the dtype. Numbers are rounded to the nearest
    one, ties to even.
    """
    exact_oi = weight_oi.astype(jnp.float32)
    largest_o = jnp.max(jnp.abs(exact_oi), axis=1)
    # Products with reciprocals, because XLA turns some divisions into these, depending on the context.
    scale_o = jnp.where(largest_o > SMALLEST, largest_o * (1 / LARGEST[dtype]), 1.0)
    scaled_oi = jnp.clip(exact_oi * (1 / scale_o)[:, None], -LARGEST[dtype], LARGEST[dtype])
    return (jnp.round(scaled_oi) if dtype == "int8" else scaled_oi).astype(dtype), scale_o


@cache
def rounder(dtype: str, shardings: tuple[Sharding, Sharding] | None = None) -> Callable[..., Any]:
    """Return `round_weight` to a dtype, compiled, with results in these places (None: those of the argument)."""
    return jax.jit(partial(round_weight, dtype=dtype), out_shardings=shardings)


def quantizable(model: Model) -> list[LeafPath]:
    """Return the paths of the weights of a model that `quantization` applies to."""
    linear = [path for path, layer in nnx.iter_modules(cast(nnx.Module, model)) if isinstance(layer, Linear)]
    return [(*path, WEIGHT) for path in linear if not set(path) & set(UNQUANTIZED)]


def quantize_weights(
    module: nnx.Module, dtypes: Mapping[LeafPath, str], convert: Callable[..., Any] = round_weight
) -> None:
    """Replace the weights at these paths of a module in place by weight and scale of convert(weight, dtype)."""
    layers: list[tuple[LeafPath, Any]] = list(nnx.iter_modules(module))
    for path, layer in layers:
        if dtype := dtypes.get((*path, WEIGHT)):
            weight = layer.weight
            values, scale = convert(weight[...], dtype)
            layer.weight = weight.replace(values)
            layer.weight_scale = nnx.Param(scale, **axes((weight.get_metadata().get("out_sharding") or (None,))[0]))


def quantize(model: Model, quantization: str) -> Model:
    """Return a model whose linear layers have weights of 8 bits; its other arrays are those of the given model.

    Args:
        quantization: "int8" or "fp8", as `EngineConfig.quantization`.

    Raises:
        ValueError: the model is quantized already, or there is no such quantization.
    """
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: must be one of {', '.join(QUANTIZATIONS)}, not {quantization!r}")
    if is_quantized(model):
        raise ValueError("quantization: the model is quantized already")
    copied: Any = nnx.merge(*nnx.split(cast(nnx.Module, model)))
    dtypes = dict.fromkeys(quantizable(copied), QUANTIZATIONS[quantization])
    quantize_weights(copied, dtypes, lambda weight, dtype: rounder(dtype)(weight))
    return cast(Model, copied)


def is_quantized(model: Model) -> bool:
    """Return whether a model has weights of 8 bits."""
    return any(path[-1] == SCALE for path, _ in nnx.to_flat_state(nnx.state(model)))
