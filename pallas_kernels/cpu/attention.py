"""Paged attention over the blocks of the pool, without copies of them.

A unit of work is one KV head of a sequence, with the queries of the decode token or of a tile of the prompt. The
softmax is computed online over tiles of keys (arXiv 1805.02867), which lie at fixed places within a context. Therefore
the result of a query has the same bits next to any other queries.

Decode tokens have the numbers of a head in the lanes of a vector, and prompts have queries there.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.cpu.code import F32, I32, I64, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import exp, loader, tanh
from pallas_kernels.cuts import decode_rows
from pallas_kernels.options import AttentionOptions, Contexts, OutputAndLse
from pallas_kernels.reference import pad_head_dim

MAX_TILE = 64  # keys of a tile
KEYS = 8  # keys whose scores a tile of a prompt computes at once
ROW_VECTORS = 2  # vectors of queries in a tile of a prompt
UNROLLED = 64  # vectors of keys and queries in a turn of the loop over the keys of a decode token
INFINITY = float("inf")
VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments


class Spec(NamedTuple):
    """The constants of a compiled function. `head_dim` is the pool's, a multiple of the lanes."""

    dtype: str
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    soft_cap: float | None
    window: int | None


class _Writer:
    """Writer of the code of a call.

    Its arguments are q [T, N, H] float32, which is scaled, the pools, the block tables [S, W], the lengths of contexts
    [S], the first rows of sequences [S + 1] and whether each is a decode token [S], int32. Its results are the output
    [T, N, H], and the maxima and the sums of the softmax [T, N].
    """

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        machine = Machine.host()
        self.lanes = machine.lanes
        self.rows = ROW_VECTORS * self.lanes  # of a tile of a prompt: queries x heads of a group
        # Keys of a tile, which lie in one block.
        self.tile = max(size for size in range(1, MAX_TILE + 1) if spec.block_size % size == 0)
        _, self.load = loader(spec.dtype, self.lanes)
        self.heads = spec.num_kv_heads * spec.group
        # The heads of a decode token are computed in parts, whose outputs fill half of the registers.
        most = min(self.lanes, max(1, machine.registers // 2 * self.lanes // spec.head_dim))
        self.part = max(heads for heads in range(1, most + 1) if spec.group % heads == 0)

    # Arguments.

    def _int(self, argument: int, index: Value | int) -> Value:
        code = self.code
        return code.cast("sext", code.load(self.call.argument(argument), index, I32), I64)

    # Lengths and block ids are clamped here, and rows before the call: no value reads or writes outside the arrays.

    def _clamped(self, number: Value, highest: Value) -> Value:
        return self.code.maximum(self.code.minimum(number, highest), number * 0)

    def _length(self, s: Value) -> Value:
        """Return the length of a sequence's context."""
        return self._clamped(self._int(4, s), self.call.size(3, 1) * self.spec.block_size)

    def _tiles(self, s: Value) -> Value:
        """Return the number of tiles of queries of a sequence: 1 of a decode token."""
        rows = (self._int(5, s + 1) - self._int(5, s)) * self.spec.group
        return self.code.select(self._int(6, s).compare("!=", 0), rows * 0 + 1, (rows + (self.rows - 1)) // self.rows)

    def units(self) -> Value:
        """Write the code that counts the units: of all sequences, and one for the rows that no sequence owns."""
        code = self.code
        total = Variable(code.value(0, I64))
        with code.loop(0, self.call.size(4, 0)) as s:
            total.set(total.get() + self._tiles(s))
        return total.get() * self.spec.num_kv_heads + 1

    def work(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, heads = self.code, self.spec.num_kv_heads
        k_head, left = unit % heads, Variable(unit // heads)
        sequences = self.call.size(4, 0)
        with code.loop(0, sequences) as s:
            tiles, at = self._tiles(s), left.get()
            with code.when(at.compare(">=", 0)), code.when(at.compare("<", tiles)):
                with code.when(self._int(6, s).compare("!=", 0)):
                    self._decode(s, k_head)
                with code.when(self._int(6, s).compare("==", 0)):
                    self._prompt(s, k_head, at)
            left.set(at - tiles)
        with code.when(left.get().compare("==", 0)):  # the results of rows that no sequence owns
            first, stop, row = self._int(5, sequences), self.call.size(0, 0), self.heads * self.spec.head_dim
            with code.loop(first * row, stop * row, self.lanes) as i:
                code.store_vector(self._vector(0.0), self.call.result(0), i)
            with code.loop(first * self.heads, stop * self.heads) as i:
                code.store(code.value(-INFINITY, F32), self.call.result(1), i)
                code.store(code.value(0.0, F32), self.call.result(2), i)

    def _vector(self, number: float) -> Value:
        return self.code.value(number, ir.VectorType(F32, self.lanes))

    def _key_tiles(self, s: Value, k_head: Value, first: Value, stop: Value, body: Callable[..., None]) -> None:
        """Write a loop over the tiles of the keys from `first` to below `stop`.

        `body` takes the position of the tile's first key, the first and the last key within it, and the number of the
        tile's first key among all keys of the pool.
        """
        code, tile, block_size = self.code, self.tile, self.spec.block_size
        width = self.call.size(3, 1)
        with code.loop(first // tile * tile, stop, tile) as position:
            block = self._clamped(self._int(3, s * width + position // block_size), self.call.size(1, 0) - 1)
            at = (block * self.spec.num_kv_heads + k_head) * block_size + position % block_size
            low = code.maximum(first - position, position * 0)
            body(position, low, code.minimum(stop - position, position * 0 + tile), at)

    def _capped(self, score: Value) -> Value:
        cap = self.spec.soft_cap
        return score if cap is None else tanh(self.code, score * (1 / cap)) * cap

    # A decode token.

    def _decode(self, s: Value, k_head: Value) -> None:
        code, lanes = self.code, self.lanes
        group, size, tile = self.spec.group, self.spec.head_dim, self.tile
        padded = -(-tile // lanes) * lanes
        row, length = self._int(5, s), self._length(s)
        head = row * self.heads + k_head * group
        q, o = code.at(self.call.argument(0), head * size, F32), code.at(self.call.result(0), head * size, F32)
        tops = code.at(self.call.result(1), head, F32)
        scores, totals = code.scratch(group * padded, F32), code.scratch(group * lanes, F32)
        with code.loop(0, group) as g:
            code.store(code.value(-INFINITY, F32), tops, g)
            code.store_vector(self._vector(0.0), totals, g * lanes)
        with code.loop(0, group * size, lanes) as i:
            code.store_vector(self._vector(0.0), o, i)

        def body(position: Value, low: Value, high: Value, at: Value) -> None:
            with code.loop(0, group * padded, lanes) as i:
                code.store_vector(self._vector(-INFINITY), scores, i)
            with code.loop(0, group, self.part) as g:
                self._decode_scores(code.at(q, g * size, F32), code.at(scores, g * padded, F32), padded, low, high, at)
            with code.loop(0, group) as g:
                self._decode_softmax(scores, padded, tops, totals, o, g)
            with code.loop(0, group, self.part) as g:
                self._decode_output(code.at(scores, g * padded, F32), padded, low, high, at, code.at(o, g * size, F32))

        first = length * 0
        if self.spec.window is not None:
            first = code.maximum(first, length - self.spec.window)
        self._key_tiles(s, k_head, first, length, body)
        with code.loop(0, group) as g:
            total = code.element(code.sums([code.load_vector(totals, g * lanes, F32, lanes)]), 0)
            divisor = code.select(total.compare("==", 0.0), code.value(1.0, F32), total)
            with code.loop(g * size, (g + 1) * size, lanes) as i:
                code.store_vector(code.load_vector(o, i, F32, lanes) / divisor, o, i)
            code.store(total, self.call.result(2), head + g)

    def _decode_scores(self, q: Value, scores: Value, padded: int, low: Value, high: Value, at: Value) -> None:
        """Write the scores [G, tile] of the heads of a part."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        keys, heads = self.call.argument(1), range(self.part)
        several = max(1, min(lanes, UNROLLED * lanes // size) // len(heads))

        def step(c: Value, count: int) -> None:
            sums = []
            for j in range(count):
                k = [self.load(code, keys, (at + c + j) * size + i) for i in range(0, size, lanes)]
                for g in heads:
                    q_g = [code.load_vector(q, g * size + i, F32, lanes) for i in range(0, size, lanes)]
                    total = q_g[0] * k[0]
                    for a, b in zip(q_g[1:], k[1:]):
                        total = code.fma(a, b, total)
                    sums.append(total)
            capped = self._capped(code.sums(sums))
            for place, (j, g) in enumerate((j, g) for j in range(count) for g in heads):
                code.store(code.element(capped, place), scores, c + (g * padded + j))

        whole = high - (high - low) % several
        with code.loop(low, whole, several) as c:
            step(c, several)
        with code.loop(whole, high) as c:
            step(c, 1)

    def _decode_softmax(self, scores: Value, padded: int, tops: Value, totals: Value, o: Value, g: Value) -> None:
        """Write the weights of a head in the place of its scores, and scale the results of earlier tiles."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        places = [g * padded + i for i in range(0, padded, lanes)]
        vectors = [code.load_vector(scores, place, F32, lanes) for place in places]
        highest = functools.reduce(code.maximum, vectors)
        top = code.load(tops, g, F32)
        new_top = code.maximum(top, code.highest(highest))
        safe = code.select(new_top.compare("==", -INFINITY), code.value(0.0, F32), new_top)
        shrink = code.element(exp(code, code.splat(top - safe, lanes)), 0)
        total = code.load_vector(totals, g * lanes, F32, lanes) * shrink
        for place, score in zip(places, vectors):
            weight = exp(code, score - safe)
            total = total + weight
            code.store_vector(weight, scores, place)
        code.store_vector(total, totals, g * lanes)
        code.store(new_top, tops, g)
        with code.loop(g * size, (g + 1) * size, lanes) as i:
            code.store_vector(code.load_vector(o, i, F32, lanes) * shrink, o, i)

    def _decode_output(self, weights: Value, padded: int, low: Value, high: Value, at: Value, o: Value) -> None:
        """Add the values of a tile to the outputs of the heads of a part."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        values, heads = self.call.argument(2), range(self.part)
        places = [(g, i) for g in heads for i in range(0, size, lanes)]
        sums = [Variable(code.load_vector(o, g * size + i, F32, lanes)) for g, i in places]
        with code.loop(low, high) as c:
            v = {i: self.load(code, values, (at + c) * size + i) for i in range(0, size, lanes)}
            weight = [code.splat(code.load(weights, c + g * padded, F32), lanes) for g in heads]
            for (g, i), total in zip(places, sums):
                total.set(code.fma(weight[g], v[i], total.get()))
        for (g, i), total in zip(places, sums):
            code.store_vector(total.get(), o, g * size + i)

    # A tile of a prompt: row r holds head r % G of query r // G.

    def _prompt(self, s: Value, k_head: Value, number: Value) -> None:
        code, spec, lanes, rows = self.code, self.spec, self.lanes, self.rows
        group, size, tile = spec.group, spec.head_dim, self.tile
        first_row, last_row, length = self._int(5, s), self._int(5, s + 1), self._length(s)
        first = number * rows
        stop = code.minimum(first + rows, (last_row - first_row) * group)
        before = length - (last_row - first_row)  # tokens before the sequence's queries
        q, o, weights = (code.scratch(count * rows, F32) for count in (size, size, tile))
        positions = code.scratch(rows, I32)

        with code.loop(0, size * rows, lanes) as i:
            code.store_vector(self._vector(0.0), q, i)
            code.store_vector(self._vector(0.0), o, i)
        with code.loop(0, rows) as r:
            code.store(code.value(-1, I32), positions, r)
        with code.loop(first, stop) as row:
            code.store(code.cast("trunc", before + row // group, I32), positions, row - first)
            source = ((first_row + row // group) * self.heads + k_head * group + row % group) * size
            with code.loop(0, size) as i:
                code.store(code.load(self.call.argument(0), source + i, F32), q, i * rows + (row - first))
        tops = [Variable(self._vector(-INFINITY)) for _ in range(ROW_VECTORS)]
        totals = [Variable(self._vector(0.0)) for _ in range(ROW_VECTORS)]
        converted = None if spec.dtype == "float32" else code.scratch(tile * size, F32)

        def matrix(argument: int, at: Value, low: Value, high: Value) -> Value:
            """Return the address of the tile's keys or values in float32."""
            pool = self.call.argument(argument)
            if converted is None:
                return code.at(pool, at * size, F32)
            with code.loop(low * size, high * size, lanes) as i:
                code.store_vector(self.load(code, pool, at * size + i), converted, i)
            return converted

        def body(position: Value, low: Value, high: Value, at: Value) -> None:
            keys = matrix(1, at, low, high)
            whole = high - (high - low) % KEYS
            tops_before = [top.get() for top in tops]
            with code.loop(low, whole, KEYS) as c:
                self._prompt_scores(q, keys, c, KEYS, position, positions, weights, tops)
            with code.loop(whole, high) as c:
                self._prompt_scores(q, keys, c, 1, position, positions, weights, tops)
            shrinks = []
            for n in range(ROW_VECTORS):
                top = tops[n].get()
                safe = code.select(top.compare("==", -INFINITY), self._vector(0.0), top)
                shrink = exp(code, tops_before[n] - safe)
                totals[n].set(totals[n].get() * shrink)
                with code.loop(low, high) as c:
                    weight = exp(code, code.load_vector(weights, c * rows + n * lanes, F32, lanes) - safe)
                    code.store_vector(weight, weights, c * rows + n * lanes)
                    totals[n].set(totals[n].get() + weight)
                shrinks.append(shrink)
            values = matrix(2, at, low, high)
            with code.loop(0, size, KEYS) as h:
                self._prompt_output(o, values, h, weights, shrinks, low, high)

        first_key, stop_key = first * 0, before + (stop - 1) // group + 1
        if spec.window is not None:
            first_key = code.maximum(first_key, before + first // group + 1 - spec.window)
        self._key_tiles(s, k_head, first_key, stop_key, body)
        sums = code.scratch(2 * rows, F32)
        for n in range(ROW_VECTORS):
            code.store_vector(tops[n].get(), sums, n * lanes)
            code.store_vector(totals[n].get(), sums, rows + n * lanes)
        with code.loop(first, stop) as row:
            target = (first_row + row // group) * self.heads + k_head * group + row % group
            top, total = code.load(sums, row - first, F32), code.load(sums, rows + (row - first), F32)
            code.store(top, self.call.result(1), target)
            code.store(total, self.call.result(2), target)
            divisor = code.select(total.compare("==", 0.0), code.value(1.0, F32), total)
            with code.loop(0, size) as i:
                number = code.load(o, i * rows + (row - first), F32) / divisor
                code.store(number, self.call.result(0), target * size + i)

    def _prompt_scores(
        self, q: Value, keys: Value, c: Value, count: int, position: Value, positions: Value, weights: Value,
        tops: Sequence[Variable],
    ) -> None:  # fmt: skip
        """Write the scores of some keys, [tile, rows], and update the maxima of the rows."""
        code, lanes, rows, size = self.code, self.lanes, self.rows, self.spec.head_dim
        sums = [[Variable(self._vector(0.0)) for _ in range(ROW_VECTORS)] for _ in range(count)]
        with code.loop(0, size) as h:
            q_n = [code.load_vector(q, h * rows + n * lanes, F32, lanes) for n in range(ROW_VECTORS)]
            for j in range(count):
                k = code.splat(code.load(keys, (c + j) * size + h, F32), lanes)
                for n in range(ROW_VECTORS):
                    sums[j][n].set(code.fma(q_n[n], k, sums[j][n].get()))
        for n in range(ROW_VECTORS):
            position_n = code.load_vector(positions, n * lanes, I32, lanes)
            top = tops[n].get()
            for j in range(count):
                key = code.splat(code.cast("trunc", position + c + j, I32), lanes)
                seen = key.compare("<=", position_n)
                score = code.select(seen, self._capped(sums[j][n].get()), self._vector(-INFINITY))
                if self.spec.window is not None:
                    score = code.select(key.compare(">", position_n - self.spec.window), score, self._vector(-INFINITY))
                top = code.maximum(top, score)
                code.store_vector(score, weights, (c + j) * rows + n * lanes)
            tops[n].set(top)

    def _prompt_output(
        self, o: Value, values: Value, h: Value, weights: Value, shrinks: Sequence[Value], low: Value, high: Value
    ) -> None:
        """Add the values of a tile to some numbers of the outputs [H, rows]."""
        code, lanes, rows, size = self.code, self.lanes, self.rows, self.spec.head_dim
        places = [(i, n) for i in range(KEYS) for n in range(ROW_VECTORS)]
        sums = {
            (i, n): Variable(code.load_vector(o, (h + i) * rows + n * lanes, F32, lanes) * shrinks[n])
            for i, n in places
        }
        with code.loop(low, high) as c:
            weight = [code.load_vector(weights, c * rows + n * lanes, F32, lanes) for n in range(ROW_VECTORS)]
            for i in range(KEYS):
                v = code.splat(code.load(values, c * size + h + i, F32), lanes)
                for n in range(ROW_VECTORS):
                    sums[i, n].set(code.fma(weight[n], v, sums[i, n].get()))
        for i, n in places:
            code.store_vector(sums[i, n].get(), o, (h + i) * rows + n * lanes)


def paged_decode_attention(q_snh: jax.Array, contexts: Contexts, options: AttentionOptions) -> OutputAndLse:
    """Implement `Ops.paged_decode_attention`."""
    num_seqs = contexts.context_lens_s.shape[0]
    rows_s1, decode_s = jnp.arange(num_seqs + 1, dtype=jnp.int32), jnp.ones(num_seqs, jnp.int32)
    return _attend(q_snh, contexts, rows_s1, decode_s, options)


def ragged_paged_attention(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array | None, options: AttentionOptions
) -> OutputAndLse:
    """Implement `Ops.ragged_paged_attention`."""
    cu_q_lens_s1 = jnp.clip(cu_q_lens_s1, 0, q_tnh.shape[0])
    decode_s, _ = decode_rows(cu_q_lens_s1, decode_s)
    return _attend(q_tnh, contexts, cu_q_lens_s1, decode_s.astype(jnp.int32), options)


def _attend(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array, options: AttentionOptions
) -> OutputAndLse:
    _, num_kv_heads, block_size, head_dim = contexts.k_pool.shape
    group = q_tnh.shape[1] // num_kv_heads
    if q_tnh.dtype == jnp.float64 or head_dim % Machine.host().lanes:
        raise NotImplementedError(f"CPU kernels: {q_tnh.dtype} over pools of head dim {head_dim} is not supported")
    spec = Spec(str(contexts.k_pool.dtype), num_kv_heads, group, head_dim, block_size, options.soft_cap, options.window)
    q = pad_head_dim(q_tnh.astype(jnp.float32) * options.scale, head_dim)
    if options.k_scale_k is not None:
        q *= jnp.repeat(options.k_scale_k, group)[:, None]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:2], q.shape[:2])]
    name = f"jpaged_attention_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}"
    target = register(name, lambda call: _Writer(spec, call).units(), lambda call, unit: _Writer(spec, call).work(unit))
    attend = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    o, top_tn, total_tn = attend(q, *contexts, cu_q_lens_s1, decode_s)
    if options.v_scale_k is not None:
        o *= jnp.repeat(options.v_scale_k, group)[:, None]
    return o[..., : q_tnh.shape[2]].astype(q_tnh.dtype), top_tn + jnp.log(total_tn)
