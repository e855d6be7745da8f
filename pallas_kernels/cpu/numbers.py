"""Vectors of float32: conversions from the dtypes of parameters and pools, exp and tanh."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.code import F16, F32, I8, I16, I32, Code, Value

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


def tanh(code: Code, x: Value) -> Value:
    """Return the hyperbolic tangent of a vector of float32, with an absolute error of about 1e-7."""
    kind = x.llvm.type
    limit = code.value(20.0, kind)
    x = code.select(x.compare(">", 20.0), limit, code.select(x.compare("<", -20.0), -1.0 * limit, x))
    return 1.0 - 2.0 / (exp(code, x * 2.0) + 1.0)
