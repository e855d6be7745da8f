"""Gumbel noise of tokens, from the bits of `jax.random.fold_in` with threefry (Salmon et al., Random123, SC 2011)."""

from llvmlite import ir

from pallas_kernels.cpu.code import F32, I32, Code, Value
from pallas_kernels.cpu.numbers import log

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA
ONE, TINIEST = 0x3F800000, 2.0**-126  # the bits of 1, and the least normal number

Key = tuple[Value, Value]


def fold_in(code: Code, key: Key, number: Value) -> Key:
    """Return the key that `jax.random.fold_in` makes of a key and a number, both int32, or vectors of as many lanes."""
    keys = *key, key[0] ^ key[1] ^ PARITY
    a, b = key[0], number + key[1]
    for turn in range(5):
        for distance in ROTATIONS[turn % 2]:
            a = a + b
            b = _rotated(code, b, distance) ^ a
        a, b = a + keys[(turn + 1) % 3], b + keys[(turn + 2) % 3] + (turn + 1)
    return a, b


def gumbel(code: Code, key: Key, tokens: Value) -> Value:
    """Return the noise of a vector of int32 tokens, float32; `key` is that of the row, folded with the position."""
    lanes = tokens.llvm.type.count
    first, second = fold_in(code, (code.splat(key[0], lanes), code.splat(key[1], lanes)), tokens)
    bits = (first ^ second) >> 9 | ONE
    uniform = code.cast("bitcast", bits, F32) - 1.0
    return 0.0 - log(code, 0.0 - log(code, code.maximum(uniform, code.value(TINIEST, uniform.llvm.type))))


def _rotated(code: Code, x: Value, distance: int) -> Value:
    kind = x.llvm.type
    name = f"llvm.fshl.v{kind.count}i32" if isinstance(kind, ir.VectorType) else "llvm.fshl.i32"
    return code.intrinsic(name, x, x, code.value(distance, I32 if kind == I32 else kind))
