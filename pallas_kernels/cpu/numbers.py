"""Vectors of float32: conversions from the dtypes of parameters and pools, exp and tanh."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.code import F16, F32, I8, I16, I32, Code, Value

LOADED = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def loader(dtype: str, lanes: int) -> tuple[Any, Callable[[Code, Value, Value], Value]]:
    """Return LLVM's type of a dtype, one of `LOADED`, and the writer of a load of float32 from an array."""

    def float32(code: Code, array: Value, index: Value) -> Value:
        return code.load_vector(array, index, F32, lanes)

    def float16(code: Code, array: Value, index: Value) -> Value:
        return code.cast("fpext", code.load_vector(array, index, F16, lanes), F32)

    def bfloat16(code: Code, array: Value, index: Value) -> Value:
        return as_float(code, code.cast("zext", code.load_vector(array, index, I16, lanes), I32) << 16)

    def float8_e4m3fn(code: Code, array: Value, index: Value) -> Value:
        # The bits of float16, whose exponent is 8 more: 0 and subnormal numbers become right too.
        bits = code.cast("zext", code.load_vector(array, index, I8, lanes), I16)
        half = (bits & 0x7F) << 7 | (bits & 0x80) << 8
        halves = Value(code, code.builder.bitcast(half.llvm, ir.VectorType(F16, lanes)))
        number = code.cast("fpext", halves, F32) * 256.0
        nan = code.value(float("nan"), ir.VectorType(F32, lanes))
        return code.select((bits & 0x7F).compare("==", 0x7F), nan, number)

    kinds = (F32, float32), (I16, bfloat16), (F16, float16), (I8, float8_e4m3fn)
    return dict(zip(LOADED, kinds, strict=True))[dtype]


def as_float(code: Code, bits: Value) -> Value:
    """Return the float32 numbers with the given bits."""
    return Value(code, code.builder.bitcast(bits.llvm, ir.VectorType(F32, bits.llvm.type.count)))


def exp(code: Code, x: Value) -> Value:
    """Return e^x of a vector of float32 up to 88, as 2^n e^r with |r| < log(2) / 2, by the series for e^r.

    It is 0 below -87, and NaN for NaN.
    """
    lanes = x.llvm.type.count
    magic = 12582912.0  # added to a number, it leaves the nearest whole number in the lowest bits
    shifted = x * 1.4426950408889634 + magic
    whole = shifted - magic
    r = code.fma(whole, code.value(-0.693145751953125, x.llvm.type), x)
    r = code.fma(whole, code.value(-1.428606765330187e-06, x.llvm.type), r)
    y = code.value(1 / 5040, x.llvm.type)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        y = code.fma(y, r, code.value(1 / factorial, x.llvm.type))
    bits = Value(code, code.builder.bitcast(shifted.llvm, ir.VectorType(I32, lanes)))
    power = as_float(code, (bits << 23) + 0x3F800000)
    return code.select(x.compare("<", -87.0), code.value(0.0, x.llvm.type), y * power)


def tanh(code: Code, x: Value) -> Value:
    """Return the hyperbolic tangent of a vector of float32, with an absolute error of about 1e-7."""
    kind = x.llvm.type
    limit = code.value(20.0, kind)
    x = code.select(x.compare(">", 20.0), limit, code.select(x.compare("<", -20.0), -1.0 * limit, x))
    return 1.0 - 2.0 / (exp(code, x * 2.0) + 1.0)
