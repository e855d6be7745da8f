"""Activations of vectors of float32, by their names in `reference.ACTIVATIONS`."""

from collections.abc import Callable

from pallas_kernels.cpu.code import Code, Value
from pallas_kernels.cpu.numbers import exp, tanh
from pallas_kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

Activation = Callable[[Code, Value], Value]


def silu(code: Code, x: Value) -> Value:
    """Return x / (1 + e^-x)."""
    lowest = code.maximum(x, code.value(-88.0, x.llvm.type))  # further below, e^-x is infinite
    return x / (exp(code, code.minimum(-1.0 * lowest, code.value(88.0, x.llvm.type))) + 1.0)


def gelu_tanh(code: Code, x: Value) -> Value:
    """Return the approximation of GELU by tanh (arXiv 1606.08415)."""
    inner = (x + x * x * x * 0.044715) * 0.7978845608028654
    return x * 0.5 * (tanh(code, inner) + 1.0)


def relu(code: Code, x: Value) -> Value:
    """Return the positive part."""
    return code.select(x.compare("<", 0.0), code.value(0.0, x.llvm.type), x)


def swiglu_oai(code: Code, x: Value) -> Value:
    """Return y / (1 + e^(-a y)) of y = min(x, limit)."""
    x = code.minimum(x, code.value(SWIGLU_LIMIT, x.llvm.type))
    lowest = code.maximum(x * SWIGLU_ALPHA, code.value(-88.0, x.llvm.type))
    return x / (exp(code, -1.0 * lowest) + 1.0)


def gated(code: Code, activation: str | None, gate: Value, up: Value) -> Value:
    """Return the result of a gated product as `reference.gated` does."""
    if activation == "swiglu_oai":
        limit = code.value(SWIGLU_LIMIT, up.llvm.type)
        up = code.minimum(code.maximum(up, -1.0 * limit), limit) + 1.0
    return ACTIVATIONS[activation](code, gate) * up


# GELU without approximation needs the error function, which XLA computes.
ACTIVATIONS: dict[str | None, Activation] = {
    None: lambda _, x: x, "silu": silu, "gelu_pytorch_tanh": gelu_tanh, "relu": relu,
    "swiglu_oai": swiglu_oai,
}  # fmt: skip
