"""Sums of products of bfloat16 numbers in the tile registers of AMX, which hold 16 rows of 64 bytes.

A tile of weights has 32 inputs of 16 outputs, as they lie in memory. A tile of x has the same inputs of 16 rows; in its
own rows lie pairs of inputs of all 16, as `pack` writes them once for a call. A single row is such a tile as it is. A
third tile has the sums of 16 outputs for these rows. The order of a sum depends only on the number of its inputs.
"""

from pallas_kernels.cpu.code import F32, I8, I32, I64, VOID, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.matrix import Matrix

SIZE = 16  # outputs, rows of x, and pairs of inputs of a tile
ROW_BYTES, PAIR_BYTES = 64, 4  # of a row of a tile, and of each of its pairs of inputs or sums
NUM_REGISTERS = 8
SUMS, WEIGHTS, PACKED = (0, 1, 2, 3), (4,), (5, 6, 7)  # their numbers
MOST_TILES = len(SUMS)  # of rows, that are multiplied by the same weights
WIDTHS = 768  # outputs whose sums are computed together, for one tile of rows; a part of it for several
SMALL_T, UNIT_O = MOST_TILES * SIZE, 96  # rows of a small call; outputs of a unit of a large one
PALETTE, BYTES, ROWS = 0, 16, 48  # offsets of the registers' configuration, which has CONFIG_BYTES
CONFIG_BYTES = 64
AHEAD = 512  # prefetch distance of each stream of weights in bytes


class Input:
    """The packed rows of x, each tile of 16 rows behind a cache line that tells whether it is packed.

    Args:
        x: number of the argument x [T, I] bfloat16.
        packed: number of the result for the tiles, of `packed_shape`.

    Attributes:
        row_bytes: of a tile's rows.
    """

    def __init__(self, call: CallFrame, x: int, packed: int):
        self.code, self._x, self._packed = call.code, call.argument(x), call.result(packed)
        self.rows, self.inputs = call.size(x, 0), call.size(x, 1)
        self.is_single = self.rows.compare("==", 1)
        self.row_bytes = self.code.select(self.is_single, self.rows * PAIR_BYTES, self.rows * 0 + ROW_BYTES)
        self._tile_bytes = self.inputs * (2 * SIZE) + ROW_BYTES

    def clear(self) -> None:
        """Write the state of a call's begin: no tile is packed."""
        with self.code.loop(0, (self.rows + (SIZE - 1)) // SIZE) as tile:
            self.code.store(self.code.value(0, I64), self._state(tile), 0)

    def pack(self, first: Value, stop: Value, start: Value) -> None:
        """Write the packing of the tiles from `first` to below `stop` that are not packed, beginning with `start`.

        Threads that begin with different tiles share the work. If two pack the same tile, they write the same numbers.
        """
        code, count = self.code, stop - first
        with code.loop(0, code.select(self.is_single, count * 0, count)) as i:
            tile = first + (i + start) % count
            with code.when(code.load_atomic(self._state(tile), 0).compare("==", 0)):
                self._pack(tile)
                code.exchange(self._state(tile), 0, code.value(1, I64))

    def address(self, tile: Value) -> Value:
        """Return the address of a tile of rows."""
        return self.code.select(self.is_single, self._x, self._packed_at(tile))

    def _packed_at(self, tile: Value) -> Value:
        return self.code.at(self._state(tile), ROW_BYTES, I8)

    def _state(self, tile: Value) -> Value:
        return self.code.at(self._packed, tile * self._tile_bytes, I8)

    def _pack(self, tile: Value) -> None:
        """Write the packing of a tile; behind the last row of x, it stands again."""
        code, pairs = self.code, self.inputs // 2
        rows = [code.minimum(tile * SIZE + i, self.rows - 1) * pairs for i in range(SIZE)]
        with code.loop(0, pairs, SIZE) as pair:
            vectors = [code.load_vector(self._x, row + pair, I32, SIZE) for row in rows]
            for i, vector in enumerate(code.transposed(vectors)):
                code.store_vector(vector, self._packed_at(tile), (pair + i) * SIZE)


def packed_shape(rows: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the int32 array for the packed rows of x."""
    return -(-rows // SIZE), ROW_BYTES // 4 + (inputs * SIZE // 2 if rows > 1 else 0)


class Tiles:
    """Writer of the sums of a block in tile registers.

    Args:
        x: rows, of which the block has those from `start_t` to below `stop_t`. They are packed.
        first: number of the tile with which the packing begins.

    Attributes:
        width: most outputs that are computed at once.
    """

    def __init__(self, x: Input, start_t: Value, stop_t: Value, first: Value):
        self.code, self._x = x.code, x
        self._start, self._stop = start_t // SIZE, (stop_t + (SIZE - 1)) // SIZE
        x.pack(self._start, self._stop, first)
        self.width = x.code.value(WIDTHS, I64) // (self._stop - self._start) // SIZE * SIZE
        self._config, self._sums = x.code.scratch(CONFIG_BYTES, I8), x.code.scratch(WIDTHS * SIZE, F32)
        for at in range(CONFIG_BYTES // 8):
            x.code.store(x.code.value(0, I64), self._config, at)
        x.code.store(x.code.value(1, I8), self._config, PALETTE)
        for register in range(NUM_REGISTERS):
            size = x.code.value(ROW_BYTES, I64) if register in WEIGHTS else x.row_bytes
            x.code.store(x.code.cast("trunc", size, I8), self._config, BYTES + 2 * register)

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
        sums = code.select(self._x.is_single, sums_to, self._sums)  # [tiles, outputs, rows]
        distance = num_o // SIZE
        whole = distance * SIZE
        for first, stop, stride, rows in (
            (distance * 0, distance, distance, code.value(SIZE, I64)),
            (whole, code.minimum(num_o, whole + 1), distance * 0 + 1, num_o - whole),
        ):
            with code.when(rows.compare(">", 0)):
                self._configure(rows)
            with code.loop(self._start, self._stop, MOST_TILES) as tile:
                count = code.minimum(self._stop - tile, code.value(MOST_TILES, I64))
                for num_t in range(1, MOST_TILES + 1):
                    with code.when(count.compare("==", num_t)), code.loop(first, stop) as o:
                        self._sum(matrix, start + o, stride, tile, num_t)
                        for t in range(num_t):
                            place = ((tile + t - self._start) * self.width + o) * self._x.row_bytes
                            self._call("tilestored64", SUMS[t], code.at(sums, place, I8), stride * self._x.row_bytes)
        count = self._stop - self._start
        with (
            code.loop(0, code.select(self._x.is_single, count * 0, count)) as tile,
            code.loop(0, num_o, SIZE) as o,
        ):
            of_tile = tile * self.width
            self._transpose(code.at(self._sums, (of_tile + o) * SIZE, F32), code.at(sums_to, of_tile * SIZE + o, F32))
        self._call("tilerelease")

    def _configure(self, outputs: Value) -> None:
        """Write the registers' sizes: a tile of weights, and its sums, have a number of outputs."""
        code = self.code
        for register in range(NUM_REGISTERS):
            rows = outputs if register in (*WEIGHTS, *SUMS) else code.value(SIZE, I64)
            code.store(code.cast("trunc", rows, I8), self._config, ROWS + register)
        self._call("ldtilecfg", self._config)

    def _sum(self, matrix: Matrix, output: Value, stride: Value, tile: Value, num_t: int) -> None:
        """Write the sums of a tile of outputs, `stride` rows apart, for some tiles of rows into the registers."""
        code, row_bytes = self.code, self._x.row_bytes
        x = [self._x.address(tile + t) for t in range(num_t)]
        for t in range(num_t):
            self._call("tilezero", SUMS[t])
        with code.loop(0, matrix.row_bytes, ROW_BYTES) as at:
            for i in range(SIZE):
                matrix.prefetch_soon((output + stride * i) * matrix.row_bytes + (at + AHEAD))
            self._load(WEIGHTS[0], code.at(matrix.address(output), at, I8), stride * matrix.row_bytes)
            for t, address in enumerate(x):
                packed = PACKED[t % len(PACKED)]
                self._load(packed, code.at(address, at // PAIR_BYTES * row_bytes, I8), row_bytes)
                self._call("tdpbf16ps", SUMS[t], WEIGHTS[0], packed)

    def _transpose(self, sums: Value, to: Value) -> None:
        """Write sums [outputs, rows] into memory [rows, width]."""
        vectors = [self.code.load_vector(sums, o * SIZE, F32, SIZE) for o in range(SIZE)]
        for r, vector in enumerate(self.code.transposed(vectors)):
            self.code.store_vector(vector, to, self.width * r)

    def _load(self, register: int, address: Value, stride: Value) -> None:
        self._call("tileloadd64", register, address, stride)

    def _call(self, name: str, *arguments: Value | int) -> None:
        """Write an instruction, by the numbers of its registers and its operands in memory."""
        values = [self.code.value(each, I8) if isinstance(each, int) else each for each in arguments]
        self.code.intrinsic(f"llvm.x86.{name}", *values, result=VOID)
