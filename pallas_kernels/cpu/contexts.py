"""The arguments of a call of attention, as its units see them: rows of queries, and keys in the blocks of the pool."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.code import F32, I8, I32, I64, VOID, Machine, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import exp2, loader, storer, tanh

# Arguments: q [T, N, H], both pools, block tables [S, W], lengths of contexts [S], first rows of sequences [S + 1],
# whether each may be a decode token [S] bool, the scales of keys and values [K] float32 of fp8 pools, and sinks [N]
# float32 if there are any. Other numbers are int32.
Q, K_POOL, V_POOL, TABLES, LENGTHS, STARTS, DECODES, K_SCALES, V_SCALES = range(9)
# Results: the output [T, N, H] in q's dtype, and the maxima and the sums of the softmax [T, N] float32.
OUTPUT, TOPS, TOTALS = range(3)
PART = 256  # tokens of a part of a decode token's context
LINE_BYTES = 64  # of a cache, at least
INFINITY = float("inf")


class Spec(NamedTuple):
    """The constants of a compiled function. `head_dim` is the pool's, a multiple of the lanes."""

    dtype: str
    pool_dtype: str
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    scale: float
    soft_cap: float | None
    window: int | None
    has_sinks: bool = False


class ContextsFrame:
    """Writer of the code that reads the arguments of a call and writes its results.

    Scores are in units of log(2), so that weights are powers of 2. Lengths, rows and block ids are clamped: no value
    reads or writes outside the arrays.
    """

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        self.machine = Machine.host()
        self.lanes = self.machine.lanes
        self.heads = spec.num_kv_heads * spec.group
        self.itemsize = jnp.dtype(spec.pool_dtype).itemsize
        self.pool_element, self.load = loader(spec.pool_dtype, self.lanes)
        _, self.load_query = loader(spec.dtype, self.lanes)
        self._store_output = storer(spec.dtype, self.lanes)
        self.num_sequences = call.size(LENGTHS, 0)

    def integer(self, argument: int, index: Value | int) -> Value:
        """Return a number of an int32 argument."""
        code = self.code
        return code.cast("sext", code.load(self.call.argument(argument), index, I32), I64)

    def _clamped(self, number: Value, highest: Value) -> Value:
        return self.code.maximum(self.code.minimum(number, highest), number * 0)

    def length(self, s: Value) -> Value:
        """Return the length of a sequence's context."""
        return self._clamped(self.integer(LENGTHS, s), self.call.size(TABLES, 1) * self.spec.block_size)

    def first_row(self, s: Value) -> Value:
        """Return the first row of a sequence."""
        return self._clamped(self.integer(STARTS, s), self.call.size(Q, 0))

    def num_rows(self, s: Value) -> Value:
        """Return the number of rows of a sequence."""
        return self.code.maximum(self.first_row(s + 1) - self.first_row(s), s * 0)

    def is_decode(self, s: Value) -> Value:
        """Return whether a sequence has a decode token."""
        flag = self.code.load(self.call.argument(DECODES), s, I8).compare("!=", 0)
        one = self.num_rows(s).compare("==", 1)
        return Value(self.code, self.code.builder.and_(flag.llvm, one.llvm))

    def first_key(self, s: Value) -> Value:
        """Return the first key that a decode token sees."""
        window = self.spec.window
        return s * 0 if window is None else self.code.maximum(self.length(s) - window, s * 0)

    def num_parts(self, s: Value) -> Value:
        """Return the number of parts of a decode token's context, at least 1."""
        parts = (self.length(s) + (PART - 1)) // PART - self.first_key(s) // PART
        return self.code.maximum(parts, s * 0 + 1)

    def key_row(self, s: Value, k_head: Value, position: Value) -> Value:
        """Return the number of a key among all keys of the pool."""
        block_size, width = self.spec.block_size, self.call.size(TABLES, 1)
        block = self._clamped(self.integer(TABLES, s * width + position // block_size), self.call.size(K_POOL, 0) - 1)
        return (block * self.spec.num_kv_heads + k_head) * block_size + position % block_size

    def prefetch(self, argument: int, row: Value) -> None:
        """Request a key or value before it is read. A processor's own prefetcher stops at the end of a page."""
        code, size = self.code, self.spec.head_dim
        options = [code.value(number, I32) for number in (0, 3, 1)]
        for i in range(0, size, LINE_BYTES // self.itemsize):
            place = code.at(self.call.argument(argument), row * size + i, self.pool_element)
            code.intrinsic("llvm.prefetch.p0", place, *options, result=VOID)

    def vector(self, number: float) -> Value:
        """Return a vector of one number."""
        return self.code.value(number, ir.VectorType(F32, self.lanes))

    def score_factor(self, k_head: Value) -> Value:
        """Return the factor of q k of a KV head, before `capped`."""
        soft_cap = self.spec.soft_cap
        factor = self.spec.scale * (math.log2(math.e) if soft_cap is None else 1 / soft_cap)
        return self._scaled(factor, K_SCALES, k_head)

    def _scaled(self, factor: float, argument: int, k_head: Value) -> Value:
        if "float8" not in self.spec.pool_dtype:
            return self.code.value(factor, F32)
        return self.code.load(self.call.argument(argument), k_head, F32) * factor

    def capped(self, score: Value) -> Value:
        """Return scores with the soft cap."""
        cap = self.spec.soft_cap
        return score if cap is None else tanh(self.code, score) * (cap * math.log2(math.e))

    def output_factor(self, k_head: Value, total: Value) -> Value:
        """Return the factor of the sums of values, one or a vector, for sums of weights."""
        factor = self._scaled(1.0, V_SCALES, k_head)
        none = total.compare("==", 0.0)
        return self.code.value(factor, total.llvm.type) / self.code.select(none, total * 0.0 + 1.0, total)

    def sink(self, row: Value) -> Value:
        """Return the sink of a row among the heads of all queries, in units of log(2)."""
        argument = V_SCALES + 1 if "float8" in self.spec.pool_dtype else K_SCALES
        return self.code.load(self.call.argument(argument), row % self.heads, F32) * math.log2(math.e)

    def with_sinks(self, sinks: Value, top: Value, total: Value) -> tuple[Value, Value, Value]:
        """Return the maxima and sums of softmaxes with their sinks, and the factors of their results.

        All are vectors. Nothing changes where there are no keys.
        """
        code, none = self.code, total.compare("==", 0.0)
        new_top = code.maximum(top, sinks)
        shrink = exp2(code, top - new_top)
        with_sink = total * shrink + exp2(code, sinks - new_top)
        return code.select(none, top, new_top), code.select(none, total, with_sink), shrink

    def store_output(self, x: Value, index: Value) -> None:
        """Write a vector of the output."""
        self._store_output(self.code, x, self.call.result(OUTPUT), index)

    def store_softmax(self, head: Value, top: Value, total: Value) -> None:
        """Write the maximum and the sum of a head."""
        self.code.store(top, self.call.result(TOPS), head)
        self.code.store(total, self.call.result(TOTALS), head)
