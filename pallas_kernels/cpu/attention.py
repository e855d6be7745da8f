"""Paged attention over the blocks of the pool, without copies of them.

The softmax is computed online over tiles of keys (arXiv 1805.02867), which lie at fixed places within a context.
Therefore the result of a query has the same bits next to any other queries.
"""

import hashlib
import math

import jax
import jax.numpy as jnp

from pallas_kernels.cpu.code import F32, I64, Machine, Value, Variable
from pallas_kernels.cpu.contexts import INFINITY, ContextsFrame, Q, Spec
from pallas_kernels.cpu.decode import DecodeWriter
from pallas_kernels.cpu.decode_tiles import TileDecodeWriter, fits
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.prompt import PromptWriter
from pallas_kernels.cpu.prompt_tiles import TilePromptWriter, in_tiles
from pallas_kernels.cpu.runs import WORDS, load_run, write_runs
from pallas_kernels.options import AttentionOptions, Contexts, OutputAndLse
from pallas_kernels.reference import pad_head_dim

VERSION = 5  # part of the targets' names: executables on disk must not call a function of other arguments
BYTES_PER_NS, FLOPS_PER_NS = 16, 128  # of one thread, about


class _Schedule(ContextsFrame):
    """Writer of the order of a call's units: those of prompts, longest first, then those of decode tokens.

    Memory that the units share begins with int64 numbers: the estimated nanoseconds, the first units of the prompts and
    of the runs [S + 1], the first part of each context that is cut into parts [S], the place of the parts' results, the
    number of runs, and the runs [R, WORDS]. The results follow.
    """

    def __init__(self, spec: Spec, call: CallFrame):
        super().__init__(spec, call)
        prompt = TilePromptWriter if in_tiles(spec) else PromptWriter
        decode = TileDecodeWriter if in_tiles(spec) and fits(spec) else DecodeWriter
        self.prompt, self.decode = prompt(spec, call), decode(spec, call)
        self.num_words = self.num_sequences * 2 + 4

    def _parts(self, s: Value) -> Value:
        """Return the number of parts of a sequence whose results are merged."""
        code, zero = self.code, s * 0
        parts = self.num_parts(s)
        return code.select(self.is_decode(s), code.select(parts.compare(">", 1), parts, zero), zero)

    def units(self) -> Value:
        """Write the code that counts the units, and the one for the rows that no sequence owns."""
        code, spec, sequences = self.code, self.spec, self.num_sequences
        parts, part_bytes = Variable(code.value(0, I64)), 4 * self.heads * self.decode.part_size
        with code.loop(0, sequences) as s:
            parts.set(parts.get() + self._parts(s))
        results = self.num_words + (parts.get() + sequences) * WORDS  # there are fewer runs
        words = self.call.allocate(results * 8 + parts.get() * part_bytes)
        unit, time = (Variable(code.value(0, I64)) for _ in range(2))
        token = spec.num_kv_heads * spec.head_dim * self.itemsize
        parts.set(sequences * 0)
        with code.loop(0, sequences) as s:
            code.store(unit.get(), words, s + 1)
            code.store(parts.get(), words, sequences + (s + 2))
            parts.set(parts.get() + self._parts(s))
            flops = self.num_rows(s) * self.length(s) * (4 * self.heads * spec.head_dim)
            reads = self.length(s) * (2 * token // BYTES_PER_NS)
            decode = self.is_decode(s)
            time.set(time.get() + code.select(decode, reads, flops // FLOPS_PER_NS))
            count = code.select(decode, s * 0, self.prompt.num_units(s))
            unit.set(unit.get() + count * spec.num_kv_heads)
        code.store(unit.get(), words, sequences + 1)
        code.store(results, words, sequences * 2 + 2)
        code.store(time.get(), words, 0)
        runs = write_runs(self, self.decode.most, code.at(words, self.num_words, I64))
        code.store(runs, words, sequences * 2 + 3)
        nobodys = self.first_row(sequences).compare("<", self.call.size(Q, 0))
        return unit.get() + runs * spec.num_kv_heads + code.cast("zext", nobodys, I64)

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        return self.code.load(self.call.scratch, 0, I64)

    def work(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, sequences, heads = self.code, self.num_sequences, self.spec.num_kv_heads
        firsts = code.at(self.call.scratch, 1, I64)
        low, high = Variable(sequences * 0), Variable(sequences + 1)
        with code.as_long_as(lambda: (low.get() + 1).compare("<", high.get())):  # by bisection
            middle = (low.get() + high.get()) // 2
            found = code.load(firsts, middle, I64).compare("<=", unit)
            low.set(code.select(found, middle, low.get()))
            high.set(code.select(found, high.get(), middle))
        s = low.get()
        number = unit - code.load(firsts, s, I64)
        k_head, rest = number % heads, number // heads
        with code.when(s.compare("<", sequences)):
            self.prompt.write(s, k_head, self.prompt.num_units(s) - 1 - rest)
        with code.when(s.compare("==", sequences)):
            runs = code.load(self.call.scratch, sequences * 2 + 3, I64)
            with code.when(rest.compare("<", runs)):
                run = load_run(self, code.at(self.call.scratch, self.num_words, I64), rest)
                self.decode.write(run, k_head, self._results)
            with code.when(rest.compare(">=", runs)):
                self._clear(self.first_row(sequences))

    def _results(self, s: Value) -> Value:
        """Return the address of the results of a sequence's parts."""
        code, scratch, sequences = self.code, self.call.scratch, self.num_sequences
        part = code.load(scratch, sequences + (s + 2), I64)
        results = code.at(scratch, code.load(scratch, sequences * 2 + 2, I64), I64)
        return code.at(results, part * (self.heads * self.decode.part_size), F32)

    def _clear(self, first: Value) -> None:
        """Write the results of rows that no sequence owns."""
        code, stop, row = self.code, self.call.size(Q, 0), self.heads * self.spec.head_dim
        with code.loop(first * row, stop * row, self.lanes) as i:
            self.store_output(self.vector(0.0), i)
        with code.loop(first * self.heads, stop * self.heads) as i:
            self.store_softmax(i, code.value(-INFINITY, F32), code.value(0.0, F32))

    def finish(self) -> None:
        """Write the code that merges the parts of contexts."""
        with self.code.loop(0, self.num_sequences) as s, self.code.when(self._parts(s).compare(">", 0)):
            self.decode.merge(s, self._results(s))


def paged_decode_attention(q_snh: jax.Array, contexts: Contexts, options: AttentionOptions) -> OutputAndLse:
    """Implement `Ops.paged_decode_attention`."""
    # One constant of all layers, where jnp.arange would be an operation of each.
    rows_s1 = jnp.array(list(range(contexts.context_lens_s.shape[0] + 1)), jnp.int32)
    return ragged_paged_attention(q_snh, contexts, rows_s1, None, options)


def ragged_paged_attention(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array | None, options: AttentionOptions
) -> OutputAndLse:
    """Implement `Ops.ragged_paged_attention`."""
    _, num_kv_heads, block_size, head_dim = contexts.k_pool.shape
    group = q_tnh.shape[1] // num_kv_heads
    if q_tnh.dtype == jnp.float64 or head_dim % Machine.host().lanes:
        raise NotImplementedError(f"CPU kernels: {q_tnh.dtype} over pools of head dim {head_dim} is not supported")
    if decode_s is None:
        decode_s = jnp.ones(contexts.context_lens_s.shape, bool)
    spec = Spec(
        str(q_tnh.dtype), str(contexts.k_pool.dtype), num_kv_heads, group, head_dim, block_size, float(options.scale),
        options.soft_cap, options.window, options.sinks_n is not None,
    )  # fmt: skip
    q_tnh, given_dim = pad_head_dim(q_tnh, head_dim), q_tnh.shape[2]
    statistics = jax.ShapeDtypeStruct(q_tnh.shape[:2], jnp.float32)
    results = [jax.ShapeDtypeStruct(q_tnh.shape, q_tnh.dtype), statistics, statistics]
    scales = () if options.k_scale_k is None else (options.k_scale_k, options.v_scale_k)
    sinks = () if options.sinks_n is None else (options.sinks_n,)
    attend = jax.ffi.ffi_call(target(spec), results, vmap_method="sequential")
    o_tnh, top_tn, total_tn = attend(q_tnh, *contexts, cu_q_lens_s1, decode_s, *scales, *sinks)
    return o_tnh[..., :given_dim], (top_tn + jnp.log2(total_tn)) * math.log(2)


def target(spec: Spec) -> str:
    """Make the target of a kind of attention, and return its name."""
    return register(
        f"jpaged_attention_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}",
        lambda call: _Schedule(spec, call).units(),
        lambda call, unit: _Schedule(spec, call).work(unit),
        nanoseconds=lambda call: _Schedule(spec, call).nanoseconds(),
        finish=lambda call: _Schedule(spec, call).finish(),
    )
