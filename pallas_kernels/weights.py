"""Weights of products as values: numbers of 32, 16, 8 or 4 bits, with the factors of groups of inputs.

A quantized weight is W = scale q + minimum, with one scale and one minimum for each group of inputs of an output.
Weights of 4 bits are packed in pairs: of each 32 inputs, byte j holds the number of input j in its low half and that of
input j + 16 in its high half, as in the formats Q4_0 and Q4_1 of llama.cpp.

Weights in MXFP4 (OCP Microscaling Formats 1.0) are packed codes of e2m1 numbers, with scales that are powers of two: a
scale of uint8 is the exponent x of 2^(x - 127). An exponent of 0 counts as the scale 0, where XLA flushes 2^-127 to 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PACKED = 32  # inputs whose numbers of 4 bits lie in 16 bytes
# Numbers of e2m1, by their codes: one bit for the sign, two for the exponent, one for the mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MIDDLE = 8  # number of 4 bits that stands for 0 where a weight has no minima
# Number of a dtype to which the largest of a group is mapped.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "uint8": 15.0}
SMALLEST = 1e-30  # groups with smaller numbers become zeros; the reciprocals of their scales would overflow
ROW_GROUP = 32  # inputs with one scale in rows of int8


class Format(NamedTuple):
    """Form of a weight.

    Attributes:
        dtype: dtype of its numbers; uint8: packed numbers of 4 bits.
        scales, minima: their dtypes; None: there are none; uint8: the weight is MXFP4.
        group: number of inputs with one scale; None: each output has one scale or none.
    """

    dtype: str
    scales: str | None = None
    minima: str | None = None
    group: int | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the numbers have 4 bits."""
        return self.dtype == "uint8"

    @property
    def is_mxfp4(self) -> bool:
        """Whether the numbers are codes of e2m1, and the scales exponents."""
        return self.scales == "uint8"

    @property
    def takes_int8_rows(self) -> bool:
        """Whether rows may be rounded to int8: the numbers have 8 or 4 bits, in whole groups of a row's."""
        is_whole = self.is_packed or self.dtype == "int8"
        return is_whole and self.group is not None and self.group % ROW_GROUP == 0


class Weight(NamedTuple):
    """Matrix of a product, or the matrices of E experts, with bias.

    Attributes:
        values: [O, I] or [E, O, I] float32, bfloat16, float16, int8 or float8_e4m3fn; [..., I/2] uint8: numbers of 4
            bits, packed.
        scales: [..., O] or [..., O, groups] float32 or float16; None: 1. [..., O] is one group of all inputs. [..., O,
            groups] uint8: the weight is MXFP4.
        minima: as scales, with groups; None: 0, and numbers of 4 bits are from -8 to 7.
        bias: [O], of experts [E, O].
    """

    values: jax.Array
    scales: jax.Array | None = None
    minima: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the numbers have 4 bits."""
        return self.values.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        *_, outputs, inputs = self.values.shape
        return outputs, inputs * (1 + self.is_packed)

    @property
    def format(self) -> Format:
        """The form of the weight."""
        scales, minima = (None if array is None else str(array.dtype) for array in (self.scales, self.minima))
        group = self.shape[1] // self.scales.shape[-1] if self.scales is not None and self.has_groups else None
        return Format(str(self.values.dtype), scales, minima, group)

    @property
    def has_groups(self) -> bool:
        """Whether there are scales of groups of inputs."""
        return self.scales is not None and self.scales.ndim == self.values.ndim

    def numbers(self, xp: Any = jnp) -> jax.Array:
        """Return the stored numbers [..., O, I], float32 if they are packed."""
        if not self.is_packed:
            return self.values
        if self.format.is_mxfp4:
            table = xp.asarray(E2M1, xp.float32)
            return table[unpack(self.values, xp)]  # type: ignore[no-any-return]
        numbers: jax.Array = unpack(self.values, xp).astype(xp.float32)
        return numbers - MIDDLE if self.minima is None else numbers

    def dense(self, xp: Any = jnp) -> jax.Array:
        """Return the matrix [..., O, I] float32, or in its dtype if it is not quantized."""
        if self.scales is None:
            return self.values
        if self.format.is_mxfp4:
            scales = (self.scales.astype(xp.int32) << 23).view(xp.float32)
        else:
            scales = self.scales.astype(xp.float32)
        scales = scales if self.has_groups else scales[..., None]
        numbers = self.numbers(xp).astype(xp.float32)
        grouped = numbers.reshape(*scales.shape, -1) * scales[..., None]
        if self.minima is not None:
            grouped = grouped + self.minima.astype(xp.float32)[..., None]
        return grouped.reshape(numbers.shape)


def pack(numbers: Any, xp: Any = jnp) -> Any:
    """Return numbers from 0 to 15, [..., I], in pairs, [..., I/2] uint8; I is a multiple of 32."""
    halves = numbers.astype(xp.uint8).reshape(*numbers.shape[:-1], -1, 2, PACKED // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*numbers.shape[:-1], -1)


def unpack(packed: Any, xp: Any = jnp) -> Any:
    """Return packed numbers, [..., I] uint8."""
    halves = packed.reshape(*packed.shape[:-1], -1, PACKED // 2)
    return xp.stack([halves & 15, halves >> 4], axis=-2).reshape(*packed.shape[:-1], -1)


def quantize(weight: jax.Array, form: Format) -> Weight:
    """Return a matrix [..., O, I] in a quantized form, whose groups divide I.

    Without minima the scale maps the largest magnitude of a group to the largest number of the dtype. With minima, the
    least and the greatest number of a group become 0 and 15, or -128 and 127. Numbers are rounded to the nearest one,
    ties to even. In MXFP4, the scale is the power of two by which the largest magnitude of a group is between 4 and 8,
    and numbers above 6 become 6.
    """
    exact = weight.astype(jnp.float32)
    grouped = exact if form.group is None else exact.reshape(*exact.shape[:-1], -1, form.group)
    if form.is_mxfp4:
        return _quantize_mxfp4(grouped)
    largest = 7.0 if form.is_packed and form.minima is None else LARGEST[form.dtype]
    if form.minima is None:
        magnitude, minima = jnp.max(jnp.abs(grouped), axis=-1), None
        # Products with reciprocals, because XLA turns some divisions into these, depending on the context.
        scales = jnp.where(magnitude > SMALLEST, magnitude * (1 / largest), 1.0).astype(form.scales)
        scaled = grouped * (1 / scales.astype(jnp.float32))[..., None]
        low, offset = -largest, MIDDLE if form.is_packed else 0
    else:
        low = 0 if form.is_packed else -largest - 1
        minimum, offset = grouped.min(axis=-1), 0
        exact_scales = (grouped.max(axis=-1) - minimum) * (1 / (largest - low))
        scales = jnp.where(exact_scales > SMALLEST, exact_scales, 1.0).astype(form.scales)
        minima = (minimum - low * scales.astype(jnp.float32)).astype(form.minima)
        scaled = (grouped - minima.astype(jnp.float32)[..., None]) * (1 / scales.astype(jnp.float32))[..., None]
    whole = scaled if form.dtype == "float8_e4m3fn" else jnp.round(scaled)
    numbers = (jnp.clip(whole, low, largest) + offset).reshape(exact.shape)
    return Weight(pack(numbers) if form.is_packed else numbers.astype(form.dtype), scales, minima)


def rounded_rows(x_ti: jax.Array) -> jax.Array:
    """Return rows [T, I] float32 whose groups of 32 inputs are multiples of a scale, from -127 to 127.

    Infinite numbers become NaN.
    """
    rounded = quantize(x_ti, Format("int8", "float32", group=ROW_GROUP)).dense()
    return jnp.where(jnp.isfinite(x_ti), rounded, jnp.nan)


def _quantize_mxfp4(grouped: jax.Array) -> Weight:
    """Return a matrix [..., O, groups, 32] in MXFP4."""
    magnitude = jnp.max(jnp.abs(grouped), axis=-1)
    exponents = jnp.clip((magnitude.view(jnp.int32) >> 23) - 2, 1, 254)
    scaled = grouped * ((254 - exponents) << 23).view(jnp.float32)[..., None]
    sizes, code = jnp.abs(scaled), jnp.zeros(grouped.shape, jnp.uint8)
    for lower in range(7):
        middle = (E2M1[lower] + E2M1[lower + 1]) / 2
        above = sizes >= middle if lower % 2 else sizes > middle  # ties to the even code
        code += above.astype(jnp.uint8)
    code |= jnp.signbit(scaled).astype(jnp.uint8) << 3
    return Weight(pack(code.reshape(*grouped.shape[:-2], -1)), exponents.astype(jnp.uint8))
