"""Attention of the tokens of prompts, with queries in the lanes of vectors.

A unit is one KV head with some queries of a sequence. Each tile of keys is converted once for all of them. Two products
of a tile keep their sums in registers: q k^T [keys, rows], and the weights times v [H, rows].

With bfloat16 dot instructions, queries, keys, weights and values are pairs of bfloat16: the weights are rounded before
they meet the values. The sums are float32.
"""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from pallas_kernels.cpu.code import F32, I16, I32, I64, Value, Variable
from pallas_kernels.cpu.contexts import INFINITY, K_POOL, V_POOL, ContextsFrame, Q, Spec
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import exp2

TILE = 64  # keys of a tile, a multiple of the keys in registers
VECTORS = 3  # of rows whose sums are in registers
UNIT = 192  # rows of a unit at most
STATE = 24576  # numbers of its output at most: they stay in a second cache with the queries


class Rows(NamedTuple):
    """Rows of a unit whose sums are in registers together, with their state.

    Attributes:
        q: [H, rows], with dot instructions [H/2, rows] pairs.
        o, tops, totals: [H, rows], [rows] and [rows] float32.
        places: [rows] int64, the number of each row's head among all heads of q.
        positions: [rows] int32.
    """

    q: Value
    o: Value
    tops: Value
    totals: Value
    places: Value
    positions: Value


class KeyTile(NamedTuple):
    """Keys and values of a tile: its first position, and the addresses [TILE, H], of pairs of values [TILE/2, H]."""

    position: Value
    keys: Value
    values: Value


class PromptWriter(ContextsFrame):
    """Writer of the code of prompts. Row r of a sequence is head r % G of query r // G."""

    def __init__(self, spec: Spec, call: CallFrame):
        super().__init__(spec, call)
        size, machine = spec.head_dim, self.machine
        self.width = VECTORS * self.lanes
        self.unit = max(1, min(UNIT, STATE // size) // self.width) * self.width
        self.sums = 8 if machine.registers == 32 else 4  # keys, or numbers of a head, whose sums are in registers
        self.keys = self.sums  # keys that are computed together
        self.dot = machine.has_bf16_dot and spec.dtype == "bfloat16" and size % (2 * self.lanes) == 0
        self.step = 2 if self.dot else 1  # numbers in an element
        self.element = I32 if self.dot else F32
        # Whether scores wait for their factor in the softmax. It may be 0 for a scale of fp8.
        self.scales_later = self.dot and spec.soft_cap is None and "float8" not in spec.pool_dtype

    def num_units(self, s: Value) -> Value:
        """Return the number of units of a KV head of a sequence."""
        return (self.num_rows(s) * self.spec.group + (self.unit - 1)) // self.unit

    def write(self, s: Value, k_head: Value, number: Value) -> None:
        """Write the code of a unit."""
        code, spec = self.code, self.spec
        group, first = spec.group, number * self.unit
        stop = code.minimum(first + self.unit, self.num_rows(s) * group)
        before = self.length(s) - self.num_rows(s)  # tokens before the sequence's queries
        rows_of = self._rows(s, k_head, first, stop, before)
        factor = self.score_factor(k_head)
        with code.loop(0, stop - first, self.width) as r:
            self._start(rows_of(r), factor)
        first_key, stop_key = first * 0, before + (stop - 1) // group + 1
        if spec.window is not None:
            first_key = code.maximum(first_key, before + first // group + 1 - spec.window)
        load_keys, load_values = self._loaders(s, k_head)
        with code.loop(first_key // TILE * TILE, stop_key, TILE) as position:
            low = code.maximum(first_key - position, position * 0)
            high = code.minimum(stop_key - position, position * 0 + TILE)
            tile = KeyTile(position, load_keys(position, low, high), load_values(position, low, high))
            with code.loop(0, stop - first, self.width) as r:
                self._add(rows_of(r), tile, factor)
                # Meanwhile a part of the next tile comes from memory.
                ends = [position + TILE + (r + rows) * TILE // self.unit for rows in (0, self.width)]
                with code.loop(ends[0], code.minimum(ends[1], stop_key)) as following:
                    for pool in (K_POOL, V_POOL):
                        self.prefetch(pool, self.key_row(s, k_head, following))
        with code.loop(0, stop - first, self.width) as r:
            self._finish(rows_of(r), k_head, stop - first - r)

    def _rows(self, s: Value, k_head: Value, first: Value, stop: Value, before: Value) -> Callable[[Value], Rows]:
        """Write the places and positions of the unit's rows; rows past the end are the last row again."""
        code, unit, size, group = self.code, self.unit, self.spec.head_dim, self.spec.group
        places, positions = code.scratch(unit, I64), code.scratch(unit, I32)
        with code.loop(0, unit) as r:
            row = code.minimum(first + r, stop - 1)
            place = (self.first_row(s) + row // group) * self.heads + k_head * group + row % group
            code.store(place, places, r)
            code.store(code.cast("trunc", before + row // group, I32), positions, r)
        q, o = code.scratch(unit * size // self.step, self.element), code.scratch(unit * size, F32)
        tops, totals = code.scratch(unit, F32), code.scratch(unit, F32)

        def rows_of(r: Value) -> Rows:
            return Rows(
                code.at(q, r * (size // self.step), self.element), code.at(o, r * size, F32), code.at(tops, r, F32),
                code.at(totals, r, F32), code.at(places, r, I64), code.at(positions, r, I32),
            )  # fmt: skip

        return rows_of

    def _start(self, rows: Rows, factor: Value) -> None:
        """Write the state before any key, and the queries of some rows."""
        code, lanes, size, step = self.code, self.lanes, self.spec.head_dim, self.step
        source = self.call.argument(Q)

        def load(index: Value) -> Value:
            if not self.dot:
                return self.load_query(code, source, index) * factor
            return code.cast("bitcast", code.load_vector(code.at(source, index, I16), 0, I32, lanes), I32)

        with code.loop(0, self.width, lanes) as n:
            code.store_vector(self.vector(-INFINITY), rows.tops, n)
            code.store_vector(self.vector(0.0), rows.totals, n)
            with code.loop(0, size, step * lanes) as h:
                vectors = [load(code.load(rows.places, n + r, I64) * size + h) for r in range(lanes)]
                for i, vector in enumerate(code.transposed(vectors)):
                    code.store_vector(vector, rows.q, (h // step + i) * self.width + n)
        with code.loop(0, size * self.width, lanes) as place:
            code.store_vector(self.vector(0.0), rows.o, place)

    # The keys and values of a tile, where they lie or converted.

    def _loaders(self, s: Value, k_head: Value) -> tuple[Callable[..., Value], Callable[..., Value]]:
        """Return the writers of the addresses of a tile's keys and values, which take its position, start and end."""
        code, spec, size, lanes = self.code, self.spec, self.spec.head_dim, self.lanes
        in_place = spec.block_size % TILE == 0 and spec.pool_dtype == ("bfloat16" if self.dot else "float32")
        element = I16 if self.dot else F32

        def plain(argument: int) -> Callable[..., Value]:
            copy = None if in_place else code.scratch(TILE * size, element)

            def load(position: Value, low: Value, high: Value) -> Value:
                if copy is None:
                    at = self.key_row(s, k_head, position)
                    return code.at(self.call.argument(argument), at * size, self.pool_element)
                with code.loop(low, high) as c:
                    at = self.key_row(s, k_head, position + c)
                    with code.loop(0, size, lanes) as h:
                        x = self._numbers(argument, at, h)
                        code.store_vector(code.cast("trunc", x, I16) if self.dot else x, copy, c * size + h)
                return copy

            return load

        pairs = code.scratch(TILE // 2 * size, I32) if self.dot else None

        def load_pairs(position: Value, low: Value, high: Value) -> Value:
            """Write the pairs of values; values outside the range are 0."""
            assert pairs
            zero = code.value(0, ir.VectorType(I32, lanes))
            with code.loop(low // 2 * 2, high, 2) as c:
                places = [code.minimum(c + i, high - 1) for i in range(2)]
                at = [self.key_row(s, k_head, position + place) for place in places]
                with code.loop(0, size, lanes) as h:
                    a, b = (self._numbers(V_POOL, each, h) for each in at)
                    a = code.select(c.compare(">=", low), a, zero)
                    b = code.select((c + 1).compare("<", high), b, zero)
                    code.store_vector(a | b << 16, pairs, c // 2 * size + h)
            return pairs

        return plain(K_POOL), load_pairs if self.dot else plain(V_POOL)

    def _numbers(self, argument: int, at: Value, h: Value) -> Value:
        """Return a vector of a key or value as float32, or with dot instructions the bits of bfloat16 in int32."""
        code, lanes, pool, index = self.code, self.lanes, self.call.argument(argument), at * self.spec.head_dim + h
        if not self.dot:
            return self.load(code, pool, index)
        if self.spec.pool_dtype == "bfloat16":
            return code.cast("zext", code.load_vector(pool, index, I16, lanes), I32)
        return code.cast("bitcast", self.load(code, pool, index), I32) >> 16

    # The softmax over the keys of a tile.

    def _add(self, rows: Rows, tile: KeyTile, factor: Value) -> None:
        """Write the addition of a tile to the state of some rows, if any of them sees one of its keys."""
        code, window = self.code, self.spec.window
        oldest, newest = (code.cast("sext", code.load(rows.positions, r, I32), I64) for r in (0, self.width - 1))
        low, high = tile.position * 0, code.minimum(newest + 1 - tile.position, tile.position * 0 + TILE)
        if window is not None:
            low = code.maximum(oldest + 1 - window - tile.position, low)
        # Whole groups of keys are computed. The mask hides the others.
        start, stop = low // self.keys * self.keys, (high + (self.keys - 1)) // self.keys * self.keys
        with code.when(low.compare("<", high)):
            weights = code.scratch(TILE * self.width, F32)
            self._scores(rows, tile, weights, (start, stop), factor)
            hidden = (tile.position + stop - 1).compare(">", oldest)
            if window is not None:
                early = (tile.position + start).compare("<=", newest - window)
                hidden = Value(code, code.builder.or_(hidden.llvm, early.llvm))
            with code.when(hidden), code.loop(start, stop) as c:
                self._mask(rows, weights, c, tile.position + c)
            shrinks = [self._softmax(rows, weights, n * self.lanes, (start, stop), factor) for n in range(VECTORS)]
            self._outputs(rows, tile, weights, shrinks, (low, high))

    def _multiply(
        self, sums: list[list[Variable]], a: Value, b: Value, start: Value | int, stop: Value | int,
        place: Callable[[int, Value], Value],
    ) -> None:  # fmt: skip
        """Write the addition of vectors a[i, rows] times b[place(j, i)] to sums[j]."""
        code, lanes = self.code, self.lanes
        add = code.dot_bf16 if self.dot else code.fma
        with code.loop(start, stop) as i:
            vectors = [code.load_vector(a, i * self.width + n * lanes, self.element, lanes) for n in range(VECTORS)]
            for j, each in enumerate(sums):
                factor = code.splat(code.load(b, place(j, i), self.element), lanes)
                for vector, total in zip(vectors, each):
                    total.set(add(vector, factor, total.get()))

    def _scores(self, rows: Rows, tile: KeyTile, scores: Value, keys: tuple[Value, Value], factor: Value) -> None:
        """Write the scores of the keys from the first one to below another, [keys, rows]."""
        code, elements = self.code, self.spec.head_dim // self.step
        with code.loop(*keys, self.sums) as c:
            sums = [[Variable(self.vector(0.0)) for _ in range(VECTORS)] for _ in range(self.sums)]
            self._multiply(sums, rows.q, tile.keys, 0, elements, lambda j, h: (c + j) * elements + h)
            for j, each in enumerate(sums):
                for n, total in enumerate(each):
                    score = self._finished(total.get(), factor)
                    code.store_vector(score, scores, (c + j) * self.width + n * self.lanes)

    def _finished(self, score: Value, factor: Value) -> Value:
        """Return scores as `_softmax` takes them."""
        return score if self.scales_later else self.capped(score * factor if self.dot else score)

    def _mask(self, rows: Rows, scores: Value, c: Value, position: Value) -> None:
        """Write the scores of one key again, -inf for the rows that do not see it."""
        code, lanes = self.code, self.lanes
        key, hidden = code.splat(code.cast("trunc", position, I32), lanes), self.vector(-INFINITY)
        for n in range(VECTORS):
            positions = code.load_vector(rows.positions, n * lanes, I32, lanes)
            place = c * self.width + n * lanes
            score = code.load_vector(scores, place, F32, lanes)
            score = code.select(key.compare("<=", positions), score, hidden)
            if self.spec.window is not None:
                score = code.select(key.compare(">", positions - self.spec.window), score, hidden)
            code.store_vector(score, scores, place)

    def _softmax(self, rows: Rows, scores: Value, n: int, keys: tuple[Value, Value], factor: Value) -> Value:
        """Write the weights in the place of the scores of some keys for a vector of rows.

        Returns:
            The factor of the results of earlier tiles.
        """
        code, lanes, width, step = self.code, self.lanes, self.width, self.step
        before = code.load_vector(rows.tops, n, F32, lanes)
        highest = Variable(self.vector(-INFINITY))
        with code.loop(*keys) as c:
            highest.set(code.maximum(highest.get(), code.load_vector(scores, c * width + n, F32, lanes)))
        factors = code.splat(factor, lanes) if self.scales_later else self.vector(1.0)
        top = code.maximum(before, highest.get() * factors)
        code.store_vector(top, rows.tops, n)
        safe = code.select(top.compare("==", -INFINITY), self.vector(0.0), top)
        shrink = exp2(code, before - safe)
        total = Variable(code.load_vector(rows.totals, n, F32, lanes) * shrink)
        with code.loop(*keys, step) as c:
            weights = []
            for i in range(step):
                score = code.load_vector(scores, (c + i) * width + n, F32, lanes)
                weights.append(exp2(code, code.fma(score, factors, 0.0 - safe) if self.scales_later else score - safe))
                total.set(total.get() + weights[-1])
            if self.dot:
                code.store_vector(code.bf16_pairs(*weights), scores, c // 2 * width + n)
            else:
                code.store_vector(weights[0], scores, c * width + n)
        code.store_vector(total.get(), rows.totals, n)
        return shrink

    def _outputs(
        self, rows: Rows, tile: KeyTile, weights: Value, shrinks: list[Value], keys: tuple[Value, Value]
    ) -> None:
        """Add the values of a tile to the outputs."""
        code, size, step = self.code, self.spec.head_dim, self.step
        start, stop = keys[0] // step, (keys[1] + (step - 1)) // step
        with code.loop(0, size, self.sums) as h:
            places = [[(h + j) * self.width + n * self.lanes for n in range(VECTORS)] for j in range(self.sums)]
            sums = [
                [
                    Variable(code.load_vector(rows.o, place, F32, self.lanes) * shrink)
                    for place, shrink in zip(each, shrinks)
                ]
                for each in places
            ]
            self._multiply(sums, weights, tile.values, start, stop, lambda j, c: c * size + (h + j))
            for each, totals in zip(places, sums):
                for place, total in zip(each, totals):
                    code.store_vector(total.get(), rows.o, place)

    def _finish(self, rows: Rows, k_head: Value, count: Value) -> None:
        """Write the results of some rows, the first `count` of them."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        with code.loop(0, self.width, lanes) as n:
            total, shrink = code.load_vector(rows.totals, n, F32, lanes), None
            if self.spec.has_sinks:
                total, shrink = self._add_sinks(rows, n)
            factor = self.output_factor(k_head, total)
            factor = factor if shrink is None else factor * shrink
            with code.loop(0, size, lanes) as h:
                columns = [
                    code.load_vector(rows.o, (h + i) * self.width + n, F32, lanes) * factor for i in range(lanes)
                ]
                for r, vector in enumerate(code.transposed(columns)):
                    with code.when((n + r).compare("<", count)):
                        self.store_output(vector, code.load(rows.places, n + r, I64) * size + h)
        with code.loop(0, code.minimum(count, count * 0 + self.width)) as row:
            top, total = code.load(rows.tops, row, F32), code.load(rows.totals, row, F32)
            self.store_softmax(code.load(rows.places, row, I64), top, total)

    def _add_sinks(self, rows: Rows, n: Value) -> tuple[Value, Value]:
        """Write the addition of sinks to a vector of rows, and return their sums and the factors of their outputs."""
        code, lanes = self.code, self.lanes
        sinks = code.scratch(lanes, F32)
        with code.loop(0, lanes) as r:
            code.store(self.sink(code.load(rows.places, n + r, I64)), sinks, r)
        states = (code.load_vector(each, n, F32, lanes) for each in (rows.tops, rows.totals))
        top, total, shrink = self.with_sinks(code.load_vector(sinks, 0, F32, lanes), *states)
        code.store_vector(top, rows.tops, n)
        code.store_vector(total, rows.totals, n)
        return total, shrink
