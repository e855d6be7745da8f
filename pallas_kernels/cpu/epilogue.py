"""Activations of vectors of float32, by their names in `reference.ACTIVATIONS`."""

from collections.abc import Callable

from pallas_kernels.cpu.code import Code, Value
from pallas_kernels.cpu.numbers import exp, tanh

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


# GELU without approximation needs the error function, which XLA computes.
ACTIVATIONS: dict[str | None, Activation] = {
    None: lambda _, x: x, "silu": silu, "gelu_pytorch_tanh": gelu_tanh, "relu": relu,
}  # fmt: skip
