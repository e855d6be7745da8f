"""Weights in every form, with their exact numbers."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Weight
from pallas_kernels.weights import E2M1, Format, quantize

FORMS = {
    "float32": Format("float32"),
    "bfloat16": Format("bfloat16"),
    "float16": Format("float16"),
    "int8": Format("int8", "float32"),
    "fp8": Format("float8_e4m3fn", "float32"),
    "int8 in groups of 16": Format("int8", "float16", "float16", 16),
    "int8 in groups of 32": Format("int8", "float16", None, 32),
    "int8 in groups of 128": Format("int8", "float32", None, 128),
    "fp8 in groups of 128": Format("float8_e4m3fn", "float32", None, 128),
    "int4 in groups of 32": Format("uint8", "float16", "float16", 32),
    "int4 without minima": Format("uint8", "float16", None, 32),
    "mxfp4": Format("uint8", "uint8", None, 32),
    "int4 in groups of 128": Format("uint8", "float16", "float32", 128),
}


def x_of(rows: int, inputs: int, dtype: str = "float32") -> jax.Array:
    """Return random rows [T, I]."""
    return jax.random.normal(jax.random.key(rows), (rows, inputs), dtype)


def weight_in(form: Format, *shape: int, bias: str | None = None) -> Weight:
    """Return a random weight of a shape [O, I] or [E, O, I] in a form, with a bias of a dtype."""
    exact = jax.random.normal(jax.random.key(sum(shape)), shape)
    weight = Weight(exact.astype(form.dtype)) if form.scales is None else quantize(exact, form)
    assert weight.format == form
    outputs = shape[:-1]
    return weight._replace(bias=bias and jnp.linspace(-1, 1, math.prod(outputs), dtype=bias).reshape(outputs))


def described_weight(form: Format, *shape: int) -> Weight:
    """Return a weight of a shape [O, I] or [E, O, I] in a form, without arrays."""
    *outer, inputs = shape
    values = jax.ShapeDtypeStruct((*outer, inputs // (1 + form.is_packed)), form.dtype)
    of_scales = tuple(outer) if form.group is None else (*outer, inputs // form.group)
    factors = [dtype and jax.ShapeDtypeStruct(of_scales, dtype) for dtype in (form.scales, form.minima)]
    return Weight(values, *factors)


def exact_up(activation: str | None, up: np.ndarray) -> np.ndarray:
    """Return the second factor of a gated product from its sums."""
    return np.clip(up, -7, 7) + 1 if activation == "swiglu_oai" else up


def exact_matrix(weight: Weight) -> np.ndarray:
    """Return the matrix [..., O, I] in float64, computed with NumPy from the definition of a weight."""
    values, scales, minima, _ = (None if array is None else np.asarray(array) for array in weight)
    numbers = values.astype(np.float64)
    if weight.is_packed:
        halves = values.reshape(*values.shape[:-1], -1, 16)
        numbers = np.stack([halves % 16, halves // 16], axis=-2).reshape(*values.shape[:-1], -1).astype(np.float64)
        if scales.dtype == np.uint8:
            numbers, scales = np.array(E2M1)[numbers.astype(int)], np.ldexp(1.0, scales.astype(int) - 127)
        elif minima is None:
            numbers = numbers - 8
    if scales is None:
        return numbers
    scales = scales if scales.ndim == values.ndim else scales[..., None]
    group = numbers.shape[-1] // scales.shape[-1]
    matrix = numbers * np.repeat(scales.astype(np.float64), group, axis=-1)
    return matrix if minima is None else matrix + np.repeat(minima.astype(np.float64), group, axis=-1)
