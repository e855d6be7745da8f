"""Vectors of float32: conversions from the dtypes of parameters and pools, exp and tanh."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.code import F16, F32, I8, I16, I32, Code, Value

# Factors of P in `log`, the highest power first.
LOG = (
    -0.07362867891788483, 0.1262032687664032, -0.13202103972434998, 0.14227114617824554, -0.16621370613574982,
    0.19999825954437256, -0.2500085234642029, 0.3333335518836975,
)  # fmt: skip
LOADED = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


def loader(
    dtype: str, lanes: int, load_vector: Callable[..., Value] | None = None
) -> tuple[Any, Callable[[Code, Value, Value], Value]]:
    """Return LLVM's type of a dtype, one of `LOADED`, and the writer of a load of float32 from an array.

    Args:
        load_vector: as `Code.load_vector`, the default.
    """
    element = dict(zip(LOADED, (F32, I16, F16, I8, I8), strict=True))[dtype]

    def load(code: Code, array: Value, index: Value) -> Value:
        x = (load_vector or code.load_vector)(array, index, element, lanes)
        if dtype == "int8":
            return code.cast("sitofp", code.cast("sext", x, I32), F32)
        if dtype == "float32":
            return x
        if dtype == "float16":
            return code.cast("fpext", x, F32)
        if dtype == "bfloat16":
            return code.cast("bitcast", code.cast("zext", x, I32) << 16, F32)
        # The bits of float16, whose exponent is 8 more: 0 and subnormal numbers become right too.
        bits = code.cast("sext", x, I16)
        half = code.cast("bitcast", bits << 7 & 0xBFFF, F16)
        number = code.cast("fpext", half, F32) * 256.0
        nan = code.value(float("nan"), ir.VectorType(F32, lanes))
        return code.select((bits & 0x7F).compare("==", 0x7F), nan, number)

    return element, load


def storer(dtype: str, lanes: int) -> Callable[[Code, Value, Value, Value], None]:
    """Return the writer of a store of float32 into an array of one of the first dtypes of `LOADED`, to the nearest.

    Numbers past 448 become 448 in float8_e4m3fn.
    """

    def store(code: Code, x: Value, array: Value, index: Value) -> None:
        if dtype == "float16":
            x = code.cast("fptrunc", x, F16)
        elif dtype == "bfloat16":
            x = code.cast("trunc", bfloat16_bits(code, x), I16)
        elif dtype != "float32":
            x = code.cast("trunc", _fp8_bits(code, x), I8)
        code.store_vector(x, array, index)

    return store


def rounded(code: Code, dtype: str, x: Value) -> Value:
    """Return the nearest numbers of float32, bfloat16 or float16, as float32."""
    if dtype == "float16":
        return code.cast("fpext", code.cast("fptrunc", x, F16), F32)
    return code.cast("bitcast", bfloat16_bits(code, x) << 16, F32) if dtype == "bfloat16" else x


def store_part(code: Code, dtype: str, x: Value, array: Value, index: Value, count: Value) -> None:
    """Write the store of the first `count` float32 numbers of a vector into an array, as `storer` does."""
    lanes = x.llvm.type.count
    element, _ = loader(dtype, lanes)
    place = code.scratch(lanes, element)
    storer(dtype, lanes)(code, x, place, index * 0)
    with code.loop(0, count) as i:
        code.store(code.load(place, i, element), array, index + i)


def _bits(code: Code, x: Value) -> Value:
    return code.cast("bitcast", x, I32)


def bfloat16_bits(code: Code, x: Value) -> Value:
    """Return the nearest bfloat16 numbers of a vector of float32, in the lower halves of int32."""
    bits = _bits(code, x)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return code.select(x.compare("==", x), rounded, code.value(0x7FC0, rounded.llvm.type))


def _fp8_bits(code: Code, x: Value) -> Value:
    """Return the nearest float8_e4m3fn numbers of a vector of float32, in the lowest bytes of int32."""
    bits = _bits(code, x)
    sign, size = (bits >> 24) & 0x80, code.cast("bitcast", bits & 0x7FFFFFFF, F32)
    highest = code.value(448.0, x.llvm.type)
    size = code.select(size.compare(">", highest), highest, size)
    # The exponent is 120 less. The 20 lowest of 23 bits are rounded off, to even.
    number = _bits(code, size)
    normal = (number + (((number >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # Below 2^-6 the numbers are multiples of 2^-9, which the lowest bits of 2^14 + x count.
    subnormal = _bits(code, size + 2.0**14) & 0xFF
    result = code.select(size.compare("<", 2.0**-6), subnormal, normal)
    return code.select(x.compare("==", x), result, code.value(0x7F, result.llvm.type)) | sign


def float_of_e2m1(code: Code, x: Value) -> Value:
    """Return the numbers of e2m1 whose codes are the lowest 4 bits of int32, as float32.

    Float32 numbers of the same exponent and mantissa bits, made by a number of exponent 1 in front of subnormal ones.
    """
    size = x & 7
    whole = code.cast("bitcast", (size << 22) + (126 << 23), F32)
    subnormal = size.compare("<", 2)
    half = code.cast("bitcast", (size & 1) * 0x3F000000, F32)
    bits = code.cast("bitcast", code.select(subnormal, half, whole), I32) | (x & 8) << 28
    return code.cast("bitcast", bits, F32)


def exp2(code: Code, x: Value) -> Value:
    """Return 2^x of a vector of float32 up to 127, as 2^n 2^r with |r| <= 1/2, by the series for 2^r.

    It is 1 at 0, 0 below -126, and NaN for NaN.
    """
    magic = 12582912.0  # added to a number, it leaves the nearest whole number in the lowest bits
    shifted = x + magic
    r = x - (shifted - magic)
    y = code.value(math.log(2) ** 6 / 720, x.llvm.type)
    for power in range(5, -1, -1):
        y = code.fma(y, r, code.value(math.log(2) ** power / math.factorial(power), x.llvm.type))
    power_of_two = code.cast("bitcast", _bits(code, y) + (_bits(code, shifted) << 23), F32)
    return code.select(x.compare("<", -126.0), code.value(0.0, x.llvm.type), power_of_two)


def exp(code: Code, x: Value) -> Value:
    """Return e^x of a vector of float32 up to 88, as 2^n e^r with |r| < log(2) / 2, by the series for e^r.

    It is 0 below -87, and NaN for NaN.
    """
    magic = 12582912.0  # added to a number, it leaves the nearest whole number in the lowest bits
    shifted = x * 1.4426950408889634 + magic
    whole = shifted - magic
    r = code.fma(whole, code.value(-0.693145751953125, x.llvm.type), x)
    r = code.fma(whole, code.value(-1.428606765330187e-06, x.llvm.type), r)
    y = code.value(1 / 5040, x.llvm.type)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        y = code.fma(y, r, code.value(1 / factorial, x.llvm.type))
    power = code.cast("bitcast", (code.cast("bitcast", shifted, I32) << 23) + 0x3F800000, F32)
    return code.select(x.compare("<", -87.0), code.value(0.0, x.llvm.type), y * power)


def log(code: Code, x: Value) -> Value:
    """Return the natural logarithm of a vector of normal positive float32, with an error of at most 1 ulp.

    x is 2^n (1 + f) with 1 + f between the square roots of 1/2 and 2, and log(1 + f) is f - f^2 / 2 + f^3 P(f), P of
    degree 7 fitted to it by least squares.
    """
    root = 0x3F3504F3  # the bits of the square root of 1/2
    bits = _bits(code, x) + (0x3F800000 - root)
    f = code.cast("bitcast", (bits & 0x7FFFFF) + root, F32) - 1.0
    y = code.value(LOG[0], f.llvm.type)
    for factor in (*LOG[1:], -0.5):
        y = code.fma(y, f, code.value(factor, f.llvm.type))
    n = code.cast("sitofp", (bits >> 23) - 127, F32)
    low = code.fma(n, code.value(1.428606765330187e-06, f.llvm.type), f)
    return code.fma(n, code.value(0.693145751953125, f.llvm.type), code.fma(y, f * f, low))


def tanh(code: Code, x: Value) -> Value:
    """Return the hyperbolic tangent of a vector of float32, with an absolute error of about 1e-7."""
    kind = x.llvm.type
    limit = code.value(20.0, kind)
    x = code.select(x.compare(">", 20.0), limit, code.select(x.compare("<", -20.0), -1.0 * limit, x))
    return 1.0 - 2.0 / (exp(code, x * 2.0) + 1.0)
