"""Sums of products in tile registers, with a stream of weights for each output of a tile."""

from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.cpu.amx import ROW_BYTES, SIZE, Input, Registers
from pallas_kernels.cpu.code import F32, I8, I64, Value
from pallas_kernels.cpu.matrix import Matrix

SUMS, WEIGHTS, PACKED = (0, 1, 2, 3), 4, (5, 6, 7)  # numbers of registers
SMALL_T, UNIT_O = len(SUMS) * SIZE, 96  # rows of a small call; outputs of a unit of a large one
WIDTH = 768  # outputs whose sums are computed together, for one tile of rows; a part of it for several
AHEAD = 512  # prefetch distance of each stream of weights in bytes


class _Part(NamedTuple):
    """Some strips, each of which has the outputs of a tile.

    Attributes:
        first: the first output of the first strip; those of the others follow.
        distance: that of the outputs of a strip.
        outputs: their number.
        strips: number of strips.
    """

    first: Value
    distance: Value
    outputs: Value
    strips: Value

    def output(self, strip: Value, i: Value | int) -> Value:
        """Return an output of a strip."""
        return self.first + strip + self.distance * i


class Strips:
    """Writer of the sums of a block: the rows of tiles are outputs, their columns packed rows of x.

    Args:
        x: rows, of which the block has those from `start_t` to below `stop_t`. They are packed.
        first: number of the tile with which the packing begins.

    Attributes:
        width: most outputs that are computed at once.
    """

    def __init__(self, x: Input, start_t: Value, stop_t: Value, first: Value):
        self.code, self._x, self._start = x.code, x, start_t // SIZE
        stop = (stop_t + (SIZE - 1)) // SIZE
        x.pack(self._start, stop, first)
        self._count = stop - self._start
        self.width = x.code.value(WIDTH, I64) // self._count // SIZE * SIZE
        self._sums = x.code.scratch(WIDTH * SIZE, F32)
        self._registers = Registers(x.code)

    def place(self, r: Value, t: Value) -> Value:
        """Return the place of the sums of row t, the r-th one of the block."""
        return t - self._start * SIZE

    def write(self, matrix: Matrix, outputs: tuple[Value, Value, Value], sums_to: Value) -> None:
        """Write sums [rows of the tiles, width] of some outputs.

        Weights are read from memory once: the outputs of a tile lie far apart, so that each has a stream of its own,
        with requests that go on in its next row. The outputs that are left are in a last tile.

        Args:
            outputs: the first one, the one after the last, and the one after the last of the unit.
        """
        code, start, num_o = self.code, outputs[0], outputs[1] - outputs[0]
        is_single, count = self._x.is_single, self._count
        sums = code.select(is_single, sums_to, self._sums)  # [tiles, outputs, rows]
        distance = num_o // SIZE
        whole = distance * SIZE
        one = distance * 0 + 1
        for part in (
            _Part(start, distance, one * SIZE, distance),
            _Part(start + whole, one, num_o - whole, code.minimum(num_o - whole, one)),
        ):
            with code.when(part.outputs.compare(">", 0)):
                narrow = dict.fromkeys((*SUMS, *PACKED), self._x.row_bytes)
                self._registers.configure(dict.fromkeys((*SUMS, WEIGHTS), part.outputs), narrow)
            self._add(matrix, part, code.at(sums, (part.first - start) * self._x.row_bytes, I8))
        with code.loop(0, code.select(is_single, count * 0, count)) as tile, code.loop(0, num_o, SIZE) as o:
            of_tile = tile * self.width
            self._transpose(code.at(self._sums, (of_tile + o) * SIZE, F32), code.at(sums_to, of_tile * SIZE + o, F32))
        self._registers.release()

    def _add(self, matrix: Matrix, part: _Part, sums: Value) -> None:
        """Write the sums [tiles, outputs, rows] of some strips."""
        code, row_bytes = self.code, matrix.row_bytes
        with code.loop(0, self._count, len(SUMS)) as first, code.loop(0, part.strips) as strip:
            for register in SUMS:
                self._registers.clear(register)
            with code.loop(0, row_bytes, ROW_BYTES) as at:
                for i in range(SIZE):
                    matrix.prefetch_soon(part.output(strip, i) * row_bytes + (at + AHEAD))
                weights = code.at(matrix.address(part.output(strip, 0)), at, I8)
                self._multiply(weights, part.distance * row_bytes, at // 2, first)
            for sums_of, tile in self._tiles(first):
                place = (self.width * tile + strip) * self._x.row_bytes
                self._registers.store(sums_of, code.at(sums, place, I8), part.distance * self._x.row_bytes)

    def _multiply(self, weights: Value, stride: Value, k: Value, first: Value) -> None:
        """Write the addition of the products of a tile of weights with inputs from k on, for several tiles."""
        row_bytes = self._x.row_bytes
        self._registers.load(WEIGHTS, weights, stride)
        for register, tile in self._tiles(first):
            packed, address = PACKED[register % len(PACKED)], self._x.address(self._start + tile)
            self._registers.load(packed, self.code.at(address, k // 2 * row_bytes, I8), row_bytes)
            self._registers.multiply(register, WEIGHTS, packed)

    def _tiles(self, first: Value) -> Iterator[tuple[int, Value]]:
        """Write code for the tiles of rows from one on: yield the registers of their sums, and their numbers."""
        for register in SUMS:
            with self.code.when((first + register).compare("<", self._count)):
                yield register, first + register

    def _transpose(self, sums: Value, to: Value) -> None:
        """Write sums [outputs, rows] into memory [rows, width]."""
        vectors = [self.code.load_vector(sums, o * SIZE, F32, SIZE) for o in range(SIZE)]
        for r, vector in enumerate(self.code.transposed(vectors)):
            self.code.store_vector(vector, to, self.width * r)
