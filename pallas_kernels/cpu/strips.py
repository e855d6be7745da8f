"""Sums of products in tile registers, with a stream of weights for each output of a tile."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from pallas_kernels.cpu.amx import ROW_BYTES, SIZE, Input, Registers
from pallas_kernels.cpu.code import F32, I8, I64, Value
from pallas_kernels.cpu.matrix import Matrix
from pallas_kernels.cpu.packed import Packed

SUMS, WEIGHTS, PACKED = (0, 1, 2, 3), 4, (5, 6, 7)  # numbers of registers
SMALL_T, UNIT_O = len(SUMS) * SIZE, 96  # rows of a small call; outputs of a unit of a large one
WIDTH = 768  # outputs whose sums are computed together, for one tile of rows; a part of it for several
AHEAD = 512  # prefetch distance of each stream of weights in bytes


class Part(NamedTuple):
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


class TileStrips(ABC):
    """Writer of the sums of a block: the rows of tiles are outputs, their columns packed rows of x.

    Args:
        x: rows, of which the block has those from `start_t` to below `stop_t`. They are packed.
        first: number of the tile with which the packing begins.

    Attributes:
        width: most outputs that are computed at once.
    """

    def __init__(self, x: Packed, start_t: Value, stop_t: Value, first: Value):
        self.code, self._is_single, self._rows = x.code, x.is_single, x.rows_of_tile
        self._start = start_t // self._rows
        stop = (stop_t + (self._rows - 1)) // self._rows
        x.pack(self._start, stop, first)
        self._count = stop - self._start
        self.width = x.code.value(WIDTH, I64) // self._count // SIZE * SIZE
        self._sums = x.code.scratch(WIDTH * SIZE, F32)
        self._registers = Registers(x.code)
        self._sum_bytes = x.code.select(x.is_single, x.code.value(4, I64), x.code.value(4 * self._rows, I64))

    def place(self, r: Value, t: Value) -> Value:
        """Return the place of the sums of row t, the r-th one of the block."""
        return t - self._start * self._rows

    def write(self, matrix: Matrix, outputs: tuple[Value, Value, Value], sums_to: Value) -> None:
        """Write sums [rows of the tiles, width] of some outputs.

        Weights are read from memory once: the outputs of a tile lie far apart, so that each has a stream of its own,
        with requests that go on in its next row. The outputs that are left are in a last tile.

        Args:
            outputs: the first one, the one after the last, and the one after the last of the unit.
        """
        code, start, num_o = self.code, outputs[0], outputs[1] - outputs[0]
        is_single, count = self._is_single, self._count
        sums = code.select(is_single, sums_to, self._sums)  # [tiles, outputs, rows]
        distance = num_o // SIZE
        whole = distance * SIZE
        one = distance * 0 + 1
        for part in (
            Part(start, distance, one * SIZE, distance),
            Part(start + whole, one, num_o - whole, code.minimum(num_o - whole, one)),
        ):
            with code.when(part.outputs.compare(">", 0)):
                self._configure(part.outputs)
            self._add(matrix, part, code.at(sums, (part.first - start) * self._sum_bytes, I8))
        with code.loop(0, code.select(is_single, count * 0, count)) as tile, code.loop(0, num_o, SIZE) as o:
            of_tile = tile * self.width
            sums_of = code.at(self._sums, (of_tile + o) * self._rows, F32)
            self._transpose(sums_of, code.at(sums_to, of_tile * self._rows + o, F32))
        self._registers.release()

    @abstractmethod
    def _configure(self, outputs: Value) -> None:
        """Write the sizes of the registers for tiles of some outputs."""

    @abstractmethod
    def _add(self, matrix: Matrix, part: Part, sums: Value) -> None:
        """Write the sums [tiles, outputs, rows] of some strips."""

    @abstractmethod
    def _transpose(self, sums: Value, to: Value) -> None:
        """Write sums [outputs, rows] into memory [rows, width]."""


class Strips(TileStrips):
    """Writer of sums of products of bfloat16, for several tiles of rows at a time."""

    def __init__(self, x: Input, start_t: Value, stop_t: Value, first: Value):
        super().__init__(x, start_t, stop_t, first)
        self._x = x

    def _configure(self, outputs: Value) -> None:
        narrow = dict.fromkeys((*SUMS, *PACKED), self._x.row_bytes)
        self._registers.configure(dict.fromkeys((*SUMS, WEIGHTS), outputs), narrow)

    def _add(self, matrix: Matrix, part: Part, sums: Value) -> None:
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
        vectors = [self.code.load_vector(sums, o * SIZE, F32, SIZE) for o in range(SIZE)]
        for r, vector in enumerate(self.code.transposed(vectors)):
            self.code.store_vector(vector, to, self.width * r)
