"""Attention of decode tokens, with the numbers of a head in the lanes of vectors.

A unit is one KV head of a run of sequences over a part of their contexts. The parts begin at fixed places, and their
results are merged in order.
"""

import functools
from collections.abc import Callable

from pallas_kernels.cpu.code import F32, Value, Variable
from pallas_kernels.cpu.contexts import INFINITY, K_POOL, PART, V_POOL, ContextsFrame, Q, Spec
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import exp2
from pallas_kernels.cpu.runs import Run

MAX_TILE = 64  # keys of a tile, which lie in one block
UNROLLED = 64  # vectors of keys and queries in a turn of the loop over the keys


class DecodeWriter(ContextsFrame):
    """Writer of the code of decode tokens.

    The result of a part are the sums of values [H], the maximum and the sum of the softmax of each head.

    Attributes:
        most: sequences of a run.
    """

    most = 1

    def __init__(self, spec: Spec, call: CallFrame):
        super().__init__(spec, call)
        self.part_size = spec.head_dim + 2
        self.tile = max(size for size in range(1, MAX_TILE + 1) if spec.block_size % size == 0)
        self.padded = -(-self.tile // self.lanes) * self.lanes
        # The heads of a group are computed together, as far as their outputs fill half of the registers.
        registers = self.machine.registers
        most = min(self.lanes, max(1, registers // 2 * self.lanes // spec.head_dim))
        self.together = max(heads for heads in range(1, most + 1) if spec.group % heads == 0)

    def write(self, run: Run, k_head: Value, results: Callable[[Value], Value]) -> None:
        """Write the code of a unit; `results` returns the address of the results of a sequence's parts."""
        s = run.first
        code, lanes, group, size = self.code, self.lanes, self.spec.group, self.spec.head_dim
        row = self.first_row(s) * self.heads + k_head * group
        q, o = code.scratch(group * size, F32), code.scratch(group * size, F32)
        tops, totals = code.scratch(group, F32), code.scratch(group * lanes, F32)
        scores, factor = code.scratch(group * self.padded, F32), self.score_factor(k_head)
        with code.loop(0, group) as g:
            code.store(code.value(-INFINITY, F32), tops, g)
            code.store_vector(self.vector(0.0), totals, g * lanes)
        with code.loop(0, group * size, lanes) as i:
            code.store_vector(self.load_query(code, self.call.argument(Q), row * size + i) * factor, q, i)
            code.store_vector(self.vector(0.0), o, i)

        def body(low: Value, high: Value, at: Value, ahead: Value) -> None:
            with code.loop(0, group * self.padded, lanes) as i:
                code.store_vector(self.vector(-INFINITY), scores, i)
            with code.loop(0, group, self.together) as g:
                self._scores(code.at(q, g * size, F32), code.at(scores, g * self.padded, F32), low, high, at, ahead)
            with code.loop(0, group) as g:
                self._softmax(scores, tops, totals, o, g)
            with code.loop(0, group, self.together) as g:
                o_g = code.at(o, g * size, F32)
                self._output(code.at(scores, g * self.padded, F32), low, high, at, ahead, o_g)

        first = code.maximum(self.first_key(s), run.part * PART)
        self._key_tiles(s, k_head, first, code.minimum(self.length(s), (run.part + 1) * PART), body)
        with code.loop(0, group) as g:
            total = code.element(code.sums([code.load_vector(totals, g * lanes, F32, lanes)]), 0)
            state = code.at(o, g * size, F32), code.load(tops, g, F32), total
            self._deliver(s, run.part, k_head * group + g, state, results)

    def _deliver(
        self, s: Value, part: Value, head: Value, state: tuple[Value, Value, Value], results: Callable[[Value], Value]
    ) -> None:
        """Write the result of a head over a part: the address of its sums, its maximum, and the sum of its softmax."""
        code, size, lanes, (o, top, total) = self.code, self.spec.head_dim, self.lanes, state
        alone = self.num_parts(s).compare("==", 1)
        with code.when(alone):
            self._finish(o, self.first_row(s) * self.heads + head, head // self.spec.group, top, total)
        with code.when(alone.compare("==", 0)):
            number = part - self.first_key(s) // PART
            result = code.at(results(s), (number * self.heads + head) * self.part_size, F32)
            with code.loop(0, size, lanes) as i:
                code.store_vector(code.load_vector(o, i, F32, lanes), result, i)
            code.store(top, result, size)
            code.store(total, result, size + 1)

    def _finish(self, o: Value, row: Value, k_head: Value, top: Value, total: Value) -> None:
        """Write the results of a head, by its number among those of all rows."""
        code, size, shrink = self.code, self.spec.head_dim, None
        if self.spec.has_sinks:
            vectors = [code.splat(x, self.lanes) for x in (self.sink(row), top, total)]
            top, total, shrink = (code.element(x, 0) for x in self.with_sinks(*vectors))
        factor = self.output_factor(k_head, total)
        factor = factor if shrink is None else factor * shrink
        with code.loop(0, size, self.lanes) as i:
            self.store_output(code.load_vector(o, i, F32, self.lanes) * factor, row * size + i)
        self.store_softmax(row, top, total)

    def merge(self, s: Value, parts: Value) -> None:
        """Write the code that merges the parts of a sequence; `parts` is the address of their results."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        o, count = code.scratch(size, F32), self.num_parts(s)
        with code.loop(0, self.heads) as n:
            top, total = Variable(code.value(-INFINITY, F32)), Variable(code.value(0.0, F32))

            def part(number: Value, n: Value = n) -> Value:
                return code.at(parts, (number * self.heads + n) * self.part_size, F32)

            with code.loop(0, count) as number:
                top.set(code.maximum(top.get(), code.load(part(number), size, F32)))
            with code.loop(0, size, lanes) as i:
                code.store_vector(self.vector(0.0), o, i)
            safe = self._safe(top.get())
            with code.loop(0, count) as number:
                weight = self._power(code.load(part(number), size, F32) - safe)
                total.set(total.get() + code.load(part(number), size + 1, F32) * weight)
                with code.loop(0, size, lanes) as i:
                    o_i = code.load_vector(part(number), i, F32, lanes)
                    code.store_vector(code.load_vector(o, i, F32, lanes) + o_i * weight, o, i)
            self._finish(o, self.first_row(s) * self.heads + n, n // self.spec.group, top.get(), total.get())

    def _safe(self, top: Value) -> Value:
        return self.code.select(top.compare("==", -INFINITY), self.code.value(0.0, F32), top)

    def _power(self, x: Value) -> Value:
        return self.code.element(exp2(self.code, self.code.splat(x, self.lanes)), 0)

    def _key_tiles(self, s: Value, k_head: Value, first: Value, stop: Value, body: Callable[..., None]) -> None:
        """Write a loop over the tiles of the keys from `first` to below `stop`.

        `body` takes the first key within the tile, the end within it, and the numbers of the first keys of this tile
        and of the next one among all keys of the pool.
        """
        code, tile = self.code, self.tile
        with code.loop(first // tile * tile, stop, tile) as position:
            low = code.maximum(first - position, position * 0)
            high = code.minimum(stop - position, position * 0 + tile)
            following = code.select((position + tile).compare("<", stop), position + tile, position)
            body(low, high, self.key_row(s, k_head, position), self.key_row(s, k_head, following))

    def _scores(self, q: Value, scores: Value, low: Value, high: Value, at: Value, ahead: Value) -> None:
        """Write the scores [G, tile] of the heads that are computed together."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        keys, heads = self.call.argument(K_POOL), range(self.together)
        several = max(1, min(lanes, UNROLLED * lanes // size) // len(heads))

        def step(c: Value, count: int) -> None:
            sums = []
            for j in range(count):
                self.prefetch(K_POOL, ahead + c + j)
                k = [self.load(code, keys, (at + c + j) * size + i) for i in range(0, size, lanes)]
                for g in heads:
                    q_g = [code.load_vector(q, g * size + i, F32, lanes) for i in range(0, size, lanes)]
                    total = q_g[0] * k[0]
                    for a, b in zip(q_g[1:], k[1:]):
                        total = code.fma(a, b, total)
                    sums.append(total)
            capped = self.capped(code.sums(sums))
            for place, (j, g) in enumerate((j, g) for j in range(count) for g in heads):
                code.store(code.element(capped, place), scores, c + (g * self.padded + j))

        whole = high - (high - low) % several
        with code.loop(low, whole, several) as c:
            step(c, several)
        with code.loop(whole, high) as c:
            step(c, 1)

    def _softmax(self, scores: Value, tops: Value, totals: Value, o: Value, g: Value) -> None:
        """Write the weights of a head in the place of its scores, and scale the results of earlier tiles."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        places = [g * self.padded + i for i in range(0, self.padded, lanes)]
        vectors = [code.load_vector(scores, place, F32, lanes) for place in places]
        highest = functools.reduce(code.maximum, vectors)
        top = code.load(tops, g, F32)
        new_top = code.maximum(top, code.highest(highest))
        safe = self._safe(new_top)
        shrink = self._power(top - safe)
        total = code.load_vector(totals, g * lanes, F32, lanes) * shrink
        for place, score in zip(places, vectors):
            weight = exp2(code, score - safe)
            total = total + weight
            code.store_vector(weight, scores, place)
        code.store_vector(total, totals, g * lanes)
        code.store(new_top, tops, g)
        with code.loop(g * size, (g + 1) * size, lanes) as i:
            code.store_vector(code.load_vector(o, i, F32, lanes) * shrink, o, i)

    def _output(self, weights: Value, low: Value, high: Value, at: Value, ahead: Value, o: Value) -> None:
        """Add the values of a tile to the outputs of the heads that are computed together."""
        code, lanes, size = self.code, self.lanes, self.spec.head_dim
        values, heads = self.call.argument(V_POOL), range(self.together)
        places = [(g, i) for g in heads for i in range(0, size, lanes)]
        sums = [Variable(code.load_vector(o, g * size + i, F32, lanes)) for g, i in places]
        with code.loop(low, high) as c:
            self.prefetch(V_POOL, ahead + c)
            v = {i: self.load(code, values, (at + c) * size + i) for i in range(0, size, lanes)}
            weight = [code.splat(code.load(weights, c + g * self.padded, F32), lanes) for g in heads]
            for (g, i), total in zip(places, sums):
                total.set(code.fma(weight[g], v[i], total.get()))
        for (g, i), total in zip(places, sums):
            code.store_vector(total.get(), o, g * size + i)
