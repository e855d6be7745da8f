"""Attention of decode tokens in the tile registers of AMX.

A unit computes the heads of all sequences of a run, so that keys and values which they share are read and converted
once: those of drafts, forks, beams and common prefixes. First all scores of the part are computed, then its softmax,
with weights rounded to bfloat16, and then the sums of values.
"""

from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.cpu.amx import PAIR_BYTES, ROW_BYTES, SIZE, TILE_BYTES, TILE_INPUTS, Registers
from pallas_kernels.cpu.code import F32, I8, I16, I32, I64, Value, Variable
from pallas_kernels.cpu.contexts import INFINITY, K_POOL, PART, V_POOL, Q, Spec
from pallas_kernels.cpu.decode import DecodeWriter
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.numbers import exp2
from pallas_kernels.cpu.runs import Run

SUMS, LEFT, RIGHT = (0, 1, 2, 3), 4, (5, 6)  # numbers of registers
AHEAD = 2 * SIZE  # keys between the one that is read and the one that is requested


def fits(spec: Spec) -> bool:
    """Return whether the heads of a group fit into a tile, and 16 keys lie in one block."""
    return spec.group <= SIZE and spec.block_size % SIZE == 0


class TileDecodeWriter(DecodeWriter):
    """Writer of the code of decode tokens. Row r of a run is head r % G of sequence r // G."""

    def __init__(self, spec: Spec, call: CallFrame):
        super().__init__(spec, call)
        self.most = SIZE // spec.group
        self._registers = Registers(call.code)
        self._is_16_bits = spec.pool_dtype == "bfloat16"

    def write(self, run: Run, k_head: Value, results: Callable[[Value], Value]) -> None:
        """Write the code of a unit; `results` returns the address of the results of a sequence's parts."""
        code, spec, group = self.code, self.spec, self.spec.group
        rows = run.sequences * group
        start, length = run.part * PART, self.length(run.longest)
        stop = code.minimum(start + PART, length)
        first = start
        if spec.window is not None:
            oldest = Variable(length)
            with code.loop(run.first, run.first + run.sequences) as s:
                oldest.set(code.minimum(oldest.get(), self.length(s)))
            first = code.maximum(start, oldest.get() - spec.window)
        begin = (first - start) // TILE_INPUTS * TILE_INPUTS  # within the part, as `end`
        end = (stop - start + (TILE_INPUTS - 1)) // TILE_INPUTS * TILE_INPUTS
        places = self._places(run.longest, k_head, start, (first, stop))
        scores, weights = code.scratch(SIZE * PART, F32), code.scratch(PART // TILE_INPUTS * TILE_BYTES, I8)
        tops, totals = code.scratch(SIZE, F32), code.scratch(SIZE, F32)
        o = code.scratch(SIZE * spec.head_dim, F32)
        self._write_scores(run, k_head, places, (begin, end), scores)
        with code.loop(0, rows) as r:
            s = run.first + r // group
            row = code.at(scores, r * PART, F32), code.at(weights, r * ROW_BYTES, I8)
            top, total = self._write_weights(row, self.length(s) - start, (begin, end), self.score_factor(k_head))
            code.store(top, tops, r)
            code.store(total, totals, r)
        self._write_values(rows, places, (begin, end), (first - start, stop - start), weights, o)
        with code.loop(0, rows) as r:
            state = code.at(o, r * spec.head_dim, F32), code.load(tops, r, F32), code.load(totals, r, F32)
            self._deliver(run.first + r // group, run.part, k_head * group + r % group, state, results)

    def _places(self, s: Value, k_head: Value, start: Value, keys: tuple[Value, Value]) -> Value:
        """Write the numbers of the first ones of 16 keys of a part among all keys of the pool [PART / 16].

        Behind the last key stands the number of the last ones again.
        """
        code, places, (first, stop) = self.code, self.code.scratch(PART // SIZE, I64), keys
        with code.loop((first - start) // TILE_INPUTS * (TILE_INPUTS // SIZE), PART // SIZE) as n:
            position = code.minimum(start + n * SIZE, (stop - 1) // SIZE * SIZE)
            code.store(self.key_row(s, k_head, code.maximum(position, position * 0)), places, n)
        return places

    def _write_scores(self, run: Run, k_head: Value, places: Value, keys: tuple[Value, Value], scores: Value) -> None:
        """Write the scores [rows, PART] of some keys of a part, without their factor."""
        code, registers, size, rows = self.code, self._registers, self.spec.head_dim, run.sequences * self.spec.group
        q, sums = code.scratch(size // 2 * SIZE, I32), code.scratch(SIZE * SIZE, F32)
        copy = None if self._is_16_bits else code.scratch(SIZE * size, I16)
        with code.loop(keys[0], code.minimum(keys[0] + AHEAD, keys[1]), SIZE) as c:
            self._prefetch(K_POOL, places, c)
        heads = [self._query(run, k_head, code.minimum(rows * 0 + r, rows - 1)) for r in range(SIZE)]
        for h in range(0, size, TILE_INPUTS):
            for i, vector in enumerate(code.transposed([code.load_vector(head, h // 2, I32, SIZE) for head in heads])):
                code.store_vector(vector, q, (h // 2 + i) * SIZE)
        row_bytes, columns = code.value(ROW_BYTES, I64), rows * PAIR_BYTES
        registers.configure({}, {SUMS[0]: columns, **dict.fromkeys(RIGHT, columns)})
        with code.loop(*keys, SIZE) as c:
            at = code.load(places, c // SIZE, I64)
            self._prefetch(K_POOL, places, code.minimum(c + AHEAD, keys[1] - SIZE))
            self._prefetch(V_POOL, places, c)
            keys_at = code.at(self.call.argument(K_POOL), at * size, I16)
            if copy is not None:
                for i in range(SIZE):
                    for h in range(0, size, TILE_INPUTS):
                        code.store_vector(self._numbers(K_POOL, at + i, h), copy, i * size + h)
                keys_at = copy
            registers.clear(SUMS[0])
            for h in range(0, size, TILE_INPUTS):
                right = RIGHT[h // TILE_INPUTS % len(RIGHT)]
                registers.load(LEFT, code.at(keys_at, h, I16), code.value(2 * size, I64))
                registers.load(right, code.at(q, h // 2 * SIZE, I32), row_bytes)
                registers.multiply(SUMS[0], LEFT, right)
            with code.when(rows.compare("==", 1)):
                registers.store(SUMS[0], code.at(scores, c, F32), columns)
            with code.when(rows.compare(">", 1)):
                registers.store(SUMS[0], sums, row_bytes)
                vectors = [code.load_vector(sums, i * SIZE, F32, SIZE) for i in range(SIZE)]
                for r, vector in enumerate(code.transposed(vectors)):
                    code.store_vector(vector, scores, c + r * PART)

    def _prefetch(self, argument: int, places: Value, c: Value) -> None:
        """Request 16 keys or values of a part."""
        at = self.code.load(places, c // SIZE, I64)
        for i in range(SIZE):
            self.prefetch(argument, at + i)

    def _query(self, run: Run, k_head: Value, row: Value) -> Value:
        """Return the address of a row of q."""
        group, heads = self.spec.group, self.heads
        number = self.first_row(run.first + row // group) * heads + k_head * group + row % group
        return self.code.at(self.call.argument(Q), number * self.spec.head_dim, I16)

    def _write_weights(
        self, row: tuple[Value, Value], length: Value, keys: tuple[Value, Value], factor: Value
    ) -> tuple[Value, Value]:
        """Write the weights of a row in tiles [rows, 32], and return the maximum and the sum of its softmax.

        Args:
            row: the addresses of its scores, and of its weights in the first tile.
            length: keys of the part from its begin on that the row sees, without those before its window.
        """
        code, lanes, (scores, weights), window = self.code, self.lanes, row, self.spec.window
        numbers = Value(code, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))
        hidden, highest = self.vector(-INFINITY), Variable(self.vector(-INFINITY))
        stop = code.cast("trunc", length, I32)
        with code.loop(*keys, lanes) as c:
            score = self.capped(code.load_vector(scores, c, F32, lanes) * factor)
            position = numbers + code.splat(code.cast("trunc", c, I32), lanes)
            score = code.select(position.compare("<", stop), score, hidden)
            if window is not None:
                score = code.select(position.compare(">=", stop - window), score, hidden)
            highest.set(code.maximum(highest.get(), score))
            code.store_vector(score, scores, c)
        top, total = code.highest(highest.get()), Variable(self.vector(0.0))
        safe = self._safe(top)  # of a row that sees no key
        with code.loop(*keys, 2 * lanes) as c:
            pair = [exp2(code, code.load_vector(scores, c + n, F32, lanes) - safe) for n in (0, lanes)]
            for each in pair:
                total.set(total.get() + each)
            code.store_vector(code.bf16_vector(*pair), weights, c // TILE_INPUTS * (TILE_BYTES // 2))
        return top, code.element(code.sums([total.get()]), 0)

    def _write_values(
        self, rows: Value, places: Value, keys: tuple[Value, Value], seen: tuple[Value, Value], weights: Value, o: Value
    ) -> None:
        """Write the sums of values [rows, H]. `seen` are the first key that a row sees, and the one after the last."""
        code, registers, size = self.code, self._registers, self.spec.head_dim
        # The numbers of a head whose sums are in registers.
        part = next(several for several in (len(SUMS) * SIZE, TILE_INPUTS) if size % several == 0)
        values, row_bytes = code.scratch(part // SIZE * TILE_BYTES // 4, I32), code.value(ROW_BYTES, I64)
        registers.configure(dict.fromkeys((*SUMS, LEFT), rows), {})
        with code.loop(0, size, part) as first:
            for register in SUMS:
                registers.clear(register)
            with code.loop(*keys, TILE_INPUTS) as c:
                with code.loop(0, SIZE) as pair:
                    at = [self._place(places, c + pair * 2 + i, seen) for i in range(2)]
                    for h in range(0, part, TILE_INPUTS):
                        a, b = (self._numbers(V_POOL, each, first + h) for each in at)
                        for n in range(TILE_INPUTS // SIZE):
                            lanes = [n * SIZE + i // 2 + i % 2 * TILE_INPUTS for i in range(TILE_INPUTS)]
                            place = (h // SIZE + n) * (TILE_BYTES // 4) + pair * SIZE
                            mixed = code.shuffle(a, b, lanes)
                            code.store_vector(mixed, code.at(values, place, I32), 0)
                registers.load(LEFT, code.at(weights, c // TILE_INPUTS * TILE_BYTES, I8), row_bytes)
                for n, register in enumerate(SUMS[: part // SIZE]):
                    right = RIGHT[n % len(RIGHT)]
                    registers.load(right, code.at(values, n * (TILE_BYTES // 4), I32), row_bytes)
                    registers.multiply(register, LEFT, right)
            for n, register in enumerate(SUMS[: part // SIZE]):
                registers.store(register, code.at(o, first + n * SIZE, F32), code.value(size * 4, I64))
        registers.release()

    def _place(self, places: Value, c: Value, seen: tuple[Value, Value]) -> Value:
        """Return the number of a key of a part. The first and the last seen one stand for those around them."""
        c = self.code.maximum(self.code.minimum(c, seen[1] - 1), seen[0])
        return self.code.load(places, c // SIZE, I64) + c % SIZE

    def _numbers(self, argument: int, at: Value, h: Value | int) -> Value:
        """Return 32 numbers of a key or value, as the bits of bfloat16."""
        code, pool, index = self.code, self.call.argument(argument), at * self.spec.head_dim + h
        if self._is_16_bits:
            return code.load_vector(pool, index, I16, TILE_INPUTS)
        return code.bf16_vector(*(self.load(code, pool, index + n) for n in (0, self.lanes)))
