"""Sums of products of int8 weights in tile registers, with rows of x as whole numbers of two digits.

The inputs of a block share a power of two, of which x is a multiple from -32,640 to 32,639: a high digit times 256, and
a low digit, both from -128 to 127. A number of bfloat16 is exact if it has at least 1/128 of the largest exponent among
them, but 32,640 becomes 32,639. Products of digits with weights are added without error. The sum of a block becomes
float32, and blocks are added in the order of the inputs.
"""

import itertools

from llvmlite import ir

from pallas_kernels.cpu import strips
from pallas_kernels.cpu.amx import ROW_BYTES, SIZE
from pallas_kernels.cpu.code import F32, I8, I16, I32, I64, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.matrix import Matrix
from pallas_kernels.cpu.packed import HEAD_BYTES, Packed
from pallas_kernels.weights import Format

ROWS = 8  # rows of x of a tile, each with two columns
PAIR = 2  # strips, and tiles of rows, that are multiplied together
SUMS, WEIGHTS, X = ((0, 1), (2, 3)), (4, 5), (6, 7)  # numbers of registers
STEP = ROW_BYTES  # inputs of a tile
BLOCK = 512  # inputs of a block: sums of so many products of digits are exact in float32
FRACTION = 14  # the exponent of the largest number of a block, in units of their common power of two
LARGEST = 32639
LEAST, INFINITE = 27 << 23, 255 << 23  # exponents of float32
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000  # added to a number, it leaves the nearest whole number in the lowest bits


def has_code(form: Format, inputs: int) -> bool:
    """Return whether there is code for weights of a form."""
    return form == Format("int8", form.scales) and inputs % STEP == 0


def packed_shape(rows: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the int32 array for the digits of x."""
    columns = 2 if rows == 1 else 2 * ROWS
    return -(-rows // ROWS), HEAD_BYTES // 4 + columns * (inputs // 4 + -(-inputs // BLOCK))


class Digits(Packed):
    """The rows of x in digits: tiles of [inputs / 4, columns, 4] digits, and the factors of blocks [blocks, columns].

    The first half of the columns has the high digits of the rows, the other half their low digits. Factors are float32,
    in the first half of the columns.

    Attributes:
        row_bytes: of the columns of four inputs.
    """

    def __init__(self, call: CallFrame, x: int, packed: int):
        super().__init__(call, x, packed, ROWS)
        self._columns = self.code.select(self.is_single, self.rows * 2, self.rows * 0 + 2 * ROWS)
        self.row_bytes = self._columns * 4
        self._tile_bytes = (self.inputs // 4 + (self.inputs + (BLOCK - 1)) // BLOCK) * self.row_bytes + HEAD_BYTES

    def address(self, tile: Value, k: Value) -> Value:
        """Return the address of the digits of a tile from input k on."""
        return self.code.at(self._packed_at(tile), k // 4 * self.row_bytes, I8)

    def factors(self, tile: Value, begin: Value) -> Value:
        """Return the address of the factors of the block that begins with an input."""
        return self.code.at(self._packed_at(tile), (self.inputs // 4 + begin // BLOCK) * self.row_bytes, I8)

    def _pack(self, tile: Value) -> None:
        code = self.code
        for num_rows, is_case in ((1, self.is_single), (ROWS, code.invert(self.is_single))):
            with code.when(is_case), code.loop(0, self.inputs, BLOCK) as begin:
                self._pack_block(tile, num_rows, begin)

    def _pack_block(self, tile: Value, num_rows: int, begin: Value) -> None:
        """Write the digits of a block; behind the last row of x, it stands again."""
        code, end = self.code, self.code.minimum(begin + BLOCK, self.inputs)
        rows = [code.minimum(tile * ROWS + r, self.rows - 1) * self.inputs for r in range(num_rows)]
        zero = code.value(0, ir.VectorType(I32, SIZE))
        largest = [Variable(zero) for _ in rows]
        with code.loop(begin, end, SIZE) as k:
            for row, size in zip(rows, largest):
                size.set(code.maximum(size.get(), self._bits(row + k) & 0x7FFFFFFF))
        inverses = []
        for r, size in enumerate(largest):
            exponent = code.maximum(code.highest(size.get()) & INFINITE, code.value(LEAST, I32))
            factor = code.cast("bitcast", exponent - (FRACTION << 23), F32)
            factor = code.select(exponent.compare("==", INFINITE), code.value(float("nan"), F32), factor)
            code.store(factor, self.factors(tile, begin), r)
            inverses.append(code.splat(code.cast("bitcast", ((254 + FRACTION) << 23) - exponent, F32), SIZE))
        with code.loop(begin, end, STEP) as k:
            high, low = zip(*(self._digits(row + k, inverse) for row, inverse in zip(rows, inverses)))
            if num_rows == 1:
                mixed = [[half + i // 2 + i % 2 * SIZE for i in range(SIZE)] for half in (0, SIZE // 2)]
                vectors = [code.shuffle(high[0], low[0], lanes) for lanes in mixed]
            else:
                vectors = code.transposed([*high, *low])
            for n, vector in enumerate(vectors):
                code.store_vector(vector, self.address(tile, k), n * SIZE)

    def _bits(self, at: Value) -> Value:
        """Return the bits of numbers of x as float32."""
        return self.code.cast("zext", self.code.load_vector(self._x, at, I16, SIZE), I32) << 16

    def _digits(self, at: Value, inverse: Value) -> tuple[Value, Value]:
        """Return the high and the low digits of a row for the inputs of a step, in the lanes of int32."""
        code, digits = self.code, []
        for n in range(0, STEP, SIZE):
            number = code.cast("bitcast", self._bits(at + n), F32)
            whole = code.cast("bitcast", number * inverse + MAGIC, I32) - MAGIC_BITS
            digits.append(code.minimum(whole, code.value(LARGEST, whole.llvm.type)))
        high, low = (
            code.as_vector(code.joined([code.cast("trunc", each, I8) for each in of]), I32, SIZE)
            for of in ([(each + 128) >> 8 for each in digits], digits)
        )
        return high, low


class DigitStrips(strips.TileStrips):
    """Writer of sums of products of digits: the columns of tiles are those of `Digits`."""

    def __init__(self, x: Digits, start_t: Value, stop_t: Value, first: Value):
        super().__init__(x, start_t, stop_t, first)
        self._x, self._wholes = x, self.code.scratch(PAIR * PAIR * SIZE * SIZE, I32)

    def _configure(self, outputs: Value) -> None:
        columns = (*itertools.chain(*SUMS), *X)
        rows = dict.fromkeys((*itertools.chain(*SUMS), *WEIGHTS), outputs)
        self._registers.configure(rows, dict.fromkeys(columns, self._x.row_bytes))

    def _add(self, matrix: Matrix, part: strips.Part, sums: Value) -> None:
        code = self.code
        # A single tile leaves the multiplications of a second strip nothing to share.
        at_once = code.select(self._count.compare("==", 1), code.value(1, I64), code.value(PAIR, I64))
        with (
            code.loop(0, part.strips, at_once) as strip,
            code.loop(0, matrix.inputs, BLOCK) as begin,
            code.loop(0, self._count, PAIR) as tile,
        ):
            for sizes in itertools.product((1, PAIR), (1, PAIR)):
                numbers = code.minimum(part.strips - strip, at_once), self._count - tile
                fits = [left.compare(">=" if size == PAIR else "==", size) for left, size in zip(numbers, sizes)]
                with code.when(code.both(*fits)):
                    self._multiply(matrix, part, sums, (strip, tile), sizes, begin)

    def _multiply(
        self, matrix: Matrix, part: strips.Part, sums: Value, firsts: tuple[Value, Value], sizes: tuple[int, int],
        begin: Value,
    ) -> None:  # fmt: skip
        """Write the addition of the products of a block of inputs, for some strips and some tiles of rows."""
        code, registers, (strip, tile), (num_strips, num_tiles) = self.code, self._registers, firsts, sizes
        end = code.minimum(begin + BLOCK, matrix.inputs)
        pairs = list(itertools.product(range(num_strips), range(num_tiles)))
        for i, j in pairs:
            registers.clear(SUMS[i][j])
        with code.loop(begin, end, STEP) as k:
            with code.when(tile.compare("==", 0)):
                self._request(matrix, part, strip, num_strips, k)
            for i in range(num_strips):
                weights = code.at(matrix.address(part.output(strip + i, 0)), k, I8)
                registers.load(WEIGHTS[i], weights, part.distance * matrix.row_bytes)
            for j in range(num_tiles):
                registers.load(X[j], self._x.address(self._start + tile + j, k), self._x.row_bytes)
            for i, j in pairs:
                registers.multiply(SUMS[i][j], WEIGHTS[i], X[j], "tdpbssd")
        wholes = {pair: code.at(self._wholes, n * SIZE * SIZE, I32) for n, pair in enumerate(pairs)}
        for i, j in pairs:
            registers.store(SUMS[i][j], wholes[i, j], self._x.row_bytes)
        for i, j in pairs:
            place = self.width * (tile + j) + strip + i
            factors = self._x.factors(self._start + tile + j, begin)
            for lanes, is_case in ((1, self._x.is_single), (ROWS, code.invert(self._x.is_single))):
                with code.when(is_case), code.loop(0, part.outputs) as o:
                    of_o = code.at(wholes[i, j], 2 * o * lanes, I32)
                    self._add_block(of_o, factors, sums, (place + part.distance * o) * lanes, begin, lanes)

    def _request(self, matrix: Matrix, part: strips.Part, strip: Value, num_strips: int, k: Value) -> None:
        """Request the weights of the streams; the last strip of a pair is followed by the first one of the next."""
        ahead = k + strips.AHEAD
        past = self.code.select(ahead.compare("<", matrix.inputs), k * 0, matrix.row_bytes * (num_strips - 1))
        for i, j in itertools.product(range(num_strips), range(SIZE)):
            matrix.prefetch_soon(part.output(strip + i, j) * matrix.row_bytes + (ahead + past))

    def _add_block(self, wholes: Value, factors: Value, sums: Value, at: Value, begin: Value, lanes: int) -> None:
        """Write the addition of a block's whole sums of an output to its sums for some rows."""
        code = self.code
        high, low = (code.load_vector(wholes, n * lanes, I32, lanes) for n in range(2))
        so_far = code.load_vector(sums, at, F32, lanes)
        so_far = code.select(begin.compare("==", 0), code.value(0.0, so_far.llvm.type), so_far)
        high, low = (code.cast("sitofp", each, F32) for each in (high, low))
        whole = code.fma(high, code.value(256.0, high.llvm.type), low)
        code.store_vector(code.fma(whole, code.load_vector(factors, 0, F32, lanes), so_far), sums, at)

    def _transpose(self, sums: Value, to: Value) -> None:
        for first in range(0, SIZE, ROWS):
            vectors = [self.code.load_vector(sums, (first + o) * ROWS, F32, ROWS) for o in range(ROWS)]
            for r, vector in enumerate(self.code.transposed(vectors)):
                self.code.store_vector(vector, to, self.width * r + first)
