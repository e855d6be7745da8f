"""Products of rows with the matrices of low rank of their slots, each of which is read from memory once.

The rows of a slot are divided into blocks. Units first compute z = x A^T of each block, in parts of its ranks, then the
outputs z B, in parts. Units are begun in their order, so that one of the second kind may wait for all of the first.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels import lora, reference
from pallas_kernels.cpu import team
from pallas_kernels.cpu.code import F32, I32, I64, Machine, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame, register
from pallas_kernels.cpu.numbers import loader, store_part
from pallas_kernels.options import LowRank
from pallas_kernels.transforms import with_derivatives

VERSION = 1  # part of the targets' names: executables on disk must not call a function of other arguments
BLOCK = 32  # rows of a block
UNIT_R, UNIT_O = 8, 512  # ranks and outputs of a unit, about
ALIGNED_O = 64  # outputs of a unit are a multiple of it, but for the last one
TILE_O = 4  # vectors of outputs of a tile
SPINS = 1000  # looks at the number of finished units before a waiting thread lets others run
FLOPS_PER_NS, BYTES_PER_NS = 32, 8  # of one thread, about
# Arguments: x [T, I], the slots [T] int32, and the matrices of each pair. Results: [T, O] float32 for each pair.
X, SLOTS, FIRST = range(3)
# Numbers at the start of the memory that units share: finished units of the first kind, and blocks. The blocks follow,
# with their slot, their first place in the order of the rows, and the place after their last one; then that order, and
# z [T, R] float32 of each pair.
DONE, COUNT, BLOCKS = range(3)
SLOT, START, STOP, BLOCK_SIZE = range(4)


class Spec(NamedTuple):
    """The constants of a compiled function: the dtypes of x and of all matrices, and the number of pairs."""

    dtype: str
    matrix_dtype: str
    pairs: int


class _Block(NamedTuple):
    """Some rows of a slot: their places in the order of the rows, from `start` to below `stop`.

    `is_of_slot`: whether they have a slot.
    """

    slot: Value
    start: Value
    stop: Value
    is_of_slot: Value


class _Writer:
    """Writer of the code of a call."""

    def __init__(self, spec: Spec, call: CallFrame):
        self.spec, self.call, self.code = spec, call, call.code
        machine = Machine.host()
        self.lanes = machine.lanes
        # Rows and ranks of a tile of z, and rows of a tile of outputs: one sum in each of most registers.
        self.tile_z, self.tile_t = ((3, UNIT_R), 4) if machine.registers == 32 else ((2, UNIT_R // 2), 2)
        self.num_rows, self.inputs = call.size(X, 0), call.size(X, 1)
        self.num_slots, self.rank = call.size(FIRST, 0), call.size(FIRST, 1)
        self.parts_r = (self.rank + (UNIT_R - 1)) // UNIT_R
        self.most_blocks = self.num_rows // BLOCK + self.num_slots + 1

    def _place(self, numbers: Value) -> Value:
        """Return the address of the shared memory after some int64."""
        return self.code.at(self.call.scratch, numbers, I64)

    @property
    def _order(self) -> Value:
        return self._place(self.most_blocks * BLOCK_SIZE + BLOCKS)

    @property
    def _counts(self) -> Value:
        """The first place of each slot, and of rows without one, and the number of rows."""
        return self._place(self.most_blocks * BLOCK_SIZE + BLOCKS + self.num_rows)

    @property
    def _z(self) -> Value:
        return self._place(self.most_blocks * BLOCK_SIZE + BLOCKS + self.num_rows + self.num_slots + 2)

    def _outputs(self, pair: Value | int) -> Value:
        return self.call.size(pair * 2 + (FIRST + 1), 2)

    def _parts_o(self, pair: Value | int) -> Value:
        """Return the number of units of a block's outputs."""
        return (self._outputs(pair) + (UNIT_O - 1)) // UNIT_O

    def _count(self) -> Value:
        return self.code.load(self.call.scratch, COUNT, I64)

    def _units_of_z(self) -> Value:
        return self._count() * self.parts_r * self.spec.pairs

    def num_units(self) -> Value:
        """Return the number of units, after the rows have been divided into blocks."""
        integers = self.most_blocks * BLOCK_SIZE + BLOCKS + self.num_rows + self.num_slots + 2
        self.call.allocate(integers * 8 + self.num_rows * self.rank * (4 * self.spec.pairs))
        self._sort()
        self._make_blocks()
        parts = sum((self._parts_o(pair) for pair in range(self.spec.pairs)), self.code.value(0, I64))
        return self._units_of_z() + self._count() * parts

    def nanoseconds(self) -> Value:
        """Return the estimated time of all units."""
        outputs = sum((self._outputs(pair) for pair in range(self.spec.pairs)), self.code.value(0, I64))
        numbers = self.rank * (self.inputs * self.spec.pairs + outputs)
        size = jnp.dtype(self.spec.matrix_dtype).itemsize
        return self.num_rows * numbers // FLOPS_PER_NS + self._count() * numbers * size // BYTES_PER_NS

    def _slot(self, row: Value) -> Value:
        """Return the slot of a row, or the number of slots if it has none."""
        slot = self.code.cast("sext", self.code.load(self.call.argument(SLOTS), row, I32), I64)
        return self.code.select(slot.compare("<", 0), self.num_slots, self.code.minimum(slot, self.num_slots))

    def _sort(self) -> None:
        """Write the order of the rows: those of the first slot, of the next ones, and of none."""
        code, counts = self.code, self._counts
        with code.loop(0, self.num_slots + 2) as slot:
            code.store(code.value(0, I64), counts, slot)
        with code.loop(0, self.num_rows) as row:
            following = self._slot(row) + 1
            code.store(code.load(counts, following, I64) + 1, counts, following)
        with code.loop(1, self.num_slots + 2) as slot:
            code.store(code.load(counts, slot, I64) + code.load(counts, slot - 1, I64), counts, slot)
        with code.loop(0, self.num_rows) as row:
            slot = self._slot(row)
            place = code.load(counts, slot, I64)
            code.store(row, self._order, place)
            code.store(place + 1, counts, slot)

    def _make_blocks(self) -> None:
        """Write the blocks, from the places after the last row of each slot."""
        code, number, start = self.code, Variable(self.code.value(0, I64)), Variable(self.code.value(0, I64))
        with code.loop(0, self.num_slots + 1) as slot:
            stop = code.load(self._counts, slot, I64)
            with code.loop(start.get(), stop, BLOCK) as first:
                block = self._place(number.get() * BLOCK_SIZE + BLOCKS)
                for index, value in ((SLOT, slot), (START, first), (STOP, code.minimum(first + BLOCK, stop))):
                    code.store(value, block, index)
                number.set(number.get() + 1)
            start.set(stop)
        code.store(number.get(), self.call.scratch, COUNT)
        code.store(code.value(0, I64), self.call.scratch, DONE)

    def _block(self, number: Value) -> _Block:
        block = self._place(number * BLOCK_SIZE + BLOCKS)
        slot, start, stop = (self.code.load(block, index, I64) for index in (SLOT, START, STOP))
        return _Block(slot, start, stop, slot.compare("<", self.num_slots))

    def write(self, unit: Value) -> None:
        """Write the code of a unit."""
        code, units_of_z = self.code, self._units_of_z()
        with code.when(unit.compare("<", units_of_z)):
            part, rest = unit % self.parts_r, unit // self.parts_r
            block = self._block(rest % self._count())
            with code.when(block.is_of_slot):
                self._reduce(block, rest // self._count(), part * UNIT_R)
            code.add(self.call.scratch, DONE, 1)
        with code.when(unit.compare(">=", units_of_z)):
            pair, left = Variable(unit * 0), Variable(unit - units_of_z)
            for _ in range(self.spec.pairs - 1):
                units = self._count() * self._parts_o(pair.get())
                with code.when(left.get().compare(">=", units)):
                    left.set(left.get() - units)
                    pair.set(pair.get() + 1)
            parts, outputs = self._parts_o(pair.get()), self._outputs(pair.get())
            size = (outputs + (parts * ALIGNED_O - 1)) // (parts * ALIGNED_O) * ALIGNED_O
            first = left.get() % parts * size
            self._wait(units_of_z)
            self._expand(self._block(left.get() // parts), pair.get(), first, code.minimum(first + size, outputs))

    def _wait(self, units: Value) -> None:
        """Write the wait for z of all blocks."""
        code, spins = self.code, Variable(self.code.value(0, I64))
        with code.as_long_as(lambda: code.load_atomic(self.call.scratch, DONE).compare("<", units)):
            spins.set(spins.get() + 1)
            team.pause(code)
            with code.when((spins.get() % SPINS).compare("==", 0)):
                code.intrinsic("sched_yield", result=I32)

    def _tiles(self, block: _Block, size: int) -> Iterator[list[Value]]:
        """Write code for the rows of a block, `size` at once; yield their places."""
        code = self.code
        left = (block.stop - block.start) % size
        with code.loop(block.start, block.stop - left, size) as place:
            yield [place + j for j in range(size)]
        for num_t in range(1, size):
            with code.when(left.compare("==", num_t)):
                yield [block.stop - left + j for j in range(num_t)]

    def _row(self, place: Value) -> Value:
        return self.code.load(self._order, place, I64)

    def _z_at(self, pair: Value, place: Value) -> Value:
        """Return the index of a row's numbers of a pair in z."""
        return (pair * self.num_rows + place) * self.rank

    def _reduce(self, block: _Block, pair: Value, first_r: Value) -> None:
        """Write a part of the ranks of z = x A^T for the rows of a block."""
        code = self.code
        stop_r = code.minimum(first_r + UNIT_R, self.rank)
        a, (num_t, num_r) = self.call.argument(pair * 2 + FIRST), self.tile_z
        left = (stop_r - first_r) % num_r
        for places in self._tiles(block, num_t):
            rows = [self._row(place) for place in places]
            for begin, end, several in ((first_r, stop_r - left, num_r), (stop_r - left, stop_r, 1)):
                with code.loop(begin, end, several) as r:
                    totals = self._dots(a, [(block.slot * self.rank + r + i) for i in range(several)], rows)
                    for (j, i), total in totals:
                        code.store(total, self._z, self._z_at(pair, places[j]) + r + i)

    def _dots(self, a: Value, columns: list[Value], rows: list[Value]) -> list[tuple[tuple[int, int], Value]]:
        """Return the products of some rows of x with some rows of A, by their numbers in these lists."""
        code, lanes, spec = self.code, self.lanes, self.spec
        kind = ir.VectorType(F32, lanes)
        sums = {(j, i): Variable(code.value(0.0, kind)) for j in range(len(rows)) for i in range(len(columns))}

        def add(k: Value, load_vector: Callable[..., Value] | None = None) -> None:
            (_, load_x), (_, load_a) = (loader(each, lanes, load_vector) for each in (spec.dtype, spec.matrix_dtype))
            inputs = [load_x(code, self.call.argument(X), row * self.inputs + k) for row in rows]
            for i, column in enumerate(columns):
                factors = load_a(code, a, column * self.inputs + k)
                for j, x in enumerate(inputs):
                    sums[j, i].set(code.fma(x, factors, sums[j, i].get()))

        whole = self.inputs - self.inputs % lanes
        with code.loop(0, whole, lanes) as k:
            add(k)
        with code.when(whole.compare("<", self.inputs)):
            add(whole, partial(code.load_part, count=self.inputs - whole))
        pairs, totals = list(sums), []
        for first in range(0, len(pairs), lanes):
            several = pairs[first : first + lanes]
            vector = code.sums([sums[pair].get() for pair in several])
            totals += [(pair, code.element(vector, lane)) for lane, pair in enumerate(several)]
        return totals

    def _expand(self, block: _Block, pair: Value, first: Value, stop: Value) -> None:
        """Write the outputs from `first` to below `stop` of the rows of a block: z B, or -0 without a slot."""
        code, lanes, outputs = self.code, self.lanes, self._outputs(pair)
        y, width = self.call.result(pair), TILE_O * lanes
        with code.when(code.invert(block.is_of_slot)), code.loop(block.start, block.stop) as place:
            row = self._row(place)
            with code.loop(first, stop) as o:
                code.store(code.value(-0.0, F32), y, row * outputs + o)
        with code.when(block.is_of_slot):
            whole = stop - (stop - first) % width
            vectors = stop - (stop - first) % lanes
            with code.loop(first, whole, width) as o:
                self._write(block, pair, [o + n * lanes for n in range(TILE_O)])
            with code.loop(whole, vectors, lanes) as o:
                self._write(block, pair, [o])
            with code.when(vectors.compare("<", stop)):
                self._write(block, pair, [vectors], stop - vectors)

    def _write(self, block: _Block, pair: Value, starts: Sequence[Value], left: Value | None = None) -> None:
        """Write vectors of outputs for the rows of a block; of the last vector `left` outputs."""
        code, lanes, outputs = self.code, self.lanes, self._outputs(pair)
        y, b = self.call.result(pair), self.call.argument(pair * 2 + (FIRST + 1))
        _, load = loader(self.spec.matrix_dtype, lanes, None if left is None else partial(code.load_part, count=left))
        for places in self._tiles(block, self.tile_t):
            zero = code.value(0.0, ir.VectorType(F32, lanes))
            sums = {(j, n): Variable(zero) for j in range(len(places)) for n in range(len(starts))}
            with code.loop(0, self.rank) as r:
                factors = [load(code, b, (block.slot * self.rank + r) * outputs + start) for start in starts]
                for j, place in enumerate(places):
                    z = code.splat(code.load(self._z, self._z_at(pair, place) + r, F32), lanes)
                    for n, vector in enumerate(factors):
                        sums[j, n].set(code.fma(z, vector, sums[j, n].get()))
            for j, place in enumerate(places):
                row = self._row(place)
                for n, start in enumerate(starts):
                    at, vector = row * outputs + start, sums[j, n].get()
                    if left is None:
                        code.store_vector(vector, y, at)
                    else:
                        store_part(code, "float32", vector, y, at, left)


@with_derivatives(partial(lora.low_rank, reference.product))
def low_rank(x_ti: jax.Array, pairs: Sequence[LowRank], slots_t: jax.Array) -> tuple[jax.Array, ...]:
    """Implement `Ops.low_rank`. Derivatives are those of the reference."""
    spec = Spec(str(x_ti.dtype), str(pairs[0].a.dtype), len(pairs))
    results = [jax.ShapeDtypeStruct((len(x_ti), b.shape[2]), jnp.float32) for _, b in pairs]
    target = register(
        f"jpaged_low_rank_{hashlib.sha256(repr((spec, VERSION)).encode()).hexdigest()[:16]}",
        lambda call: _Writer(spec, call).num_units(),
        lambda call, unit: _Writer(spec, call).write(unit),
        nanoseconds=lambda call: _Writer(spec, call).nanoseconds(),
    )
    run = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    return tuple(run(x_ti, slots_t, *(array for pair in pairs for array in pair)))
