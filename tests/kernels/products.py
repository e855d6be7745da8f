"""Weights in every form, with their exact numbers."""

import functools
import math

import jax
import numpy as np

from pallas_kernels import Weight
from pallas_kernels.weights import E2M1, MIDDLE, Format

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


@functools.cache
def x_of(rows: int, inputs: int, dtype: str = "float32") -> np.ndarray:
    """Return random rows [T, I]; in bfloat16 multiples of 1/32, which whole numbers of 15 bits stand for exactly."""
    exact = np.random.default_rng(rows).standard_normal((rows, inputs))
    return _constant((np.round(exact * 32) / 32 if dtype == "bfloat16" else exact).astype(np.dtype(dtype)))


@functools.cache
def weight_in(form: Format, *shape: int, bias: str | None = None) -> Weight:
    """Return a random weight of a shape [O, I] or [E, O, I] in a form, with a bias of a dtype.

    Its numbers are about as large as those of a normal distribution, and use all values that the form has.
    """
    rng, (*outputs, inputs) = np.random.default_rng(sum(shape)), shape
    if form.scales is None:
        values, factors = rng.standard_normal(shape).astype(np.dtype(form.dtype)), []
    else:
        groups = outputs if form.group is None else [*outputs, inputs // form.group]
        values = _numbers(rng, form, shape)
        if form.is_mxfp4:
            factors = [rng.integers(124, 127, groups).astype(np.uint8)]
        else:
            scales = rng.uniform(0.5, 1.5, groups) / SPREAD[form.dtype]
            middle = MIDDLE if form.is_packed else 0
            factors = [scales, rng.uniform(-0.5, 0.5, groups) - middle * scales][: 2 if form.minima else 1]
            factors = [x.astype(dtype) for x, dtype in zip(factors, (form.scales, form.minima))]
    weight = Weight(_constant(values), *map(_constant, factors))
    assert weight.format == form
    if bias is None:
        return weight
    return weight._replace(
        bias=_constant(np.linspace(-1, 1, math.prod(outputs)).reshape(outputs).astype(np.dtype(bias)))
    )


# The root of the mean square of the numbers that a weight of a dtype has here.
SPREAD = {"int8": 74, "float8_e4m3fn": 100, "uint8": 4.6}


def _numbers(rng: np.random.Generator, form: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Return random numbers of a quantized form: all whole numbers equally often."""
    if form.is_packed:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    if form.dtype == "int8":
        return rng.integers(-128 if form.minima else -127, 128, shape, np.int8)
    return np.clip(rng.normal(0, SPREAD[form.dtype], shape), -448, 448).astype(np.dtype(form.dtype))


def _constant(array: np.ndarray) -> np.ndarray:
    """Return the array, which tests share, as a read-only one."""
    array.flags.writeable = False
    return array


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
