"""Sums of products of many rows in tile registers, whose weights are packed once for all of them."""

from pallas_kernels.cpu.amx import PAIR_BYTES, ROW_BYTES, SIZE, TILE_BYTES, TILE_INPUTS, Input, Registers
from pallas_kernels.cpu.code import F32, I8, I32, I64, Value
from pallas_kernels.cpu.matrix import Matrix

SIDE = 2  # tiles of rows, and of outputs, that are multiplied together
SUMS, ROWS, PANELS = ((0, 1), (2, 3)), (4, 5), (6, 7)  # numbers of registers
WIDTH, MOST_T = 96, 256  # outputs and rows of a block
CHUNK = 1024  # inputs of a panel, so that it and the rows for it stay in the second cache
PANEL = CHUNK * SIZE // 2  # pairs of a panel


class Panels:
    """Writer of the sums of a block: the rows of tiles are those of x, their columns packed outputs.

    Args:
        x: rows, of which the block has those from `start_t` to below `stop_t`, at least as many as two tiles have.

    Attributes:
        width: outputs that are computed at once.
    """

    def __init__(self, x: Input, start_t: Value, stop_t: Value):
        self.code, self._x, self._start, self._stop = x.code, x, start_t, stop_t
        self.width = x.code.value(WIDTH, I64)
        self._last = start_t + (stop_t - start_t - 1) // (SIDE * SIZE) * (SIDE * SIZE)
        self._registers = Registers(x.code)

    def place(self, t: Value) -> Value:
        """Return the place of the sums of a row. The last tiles begin with earlier rows, so that they are whole."""
        again = self._last - (self._stop - SIDE * SIZE)
        return t - self._start + self.code.select(t.compare(">=", self._last), again, again * 0)

    def write(self, matrix: Matrix, outputs: tuple[Value, Value], sums_to: Value) -> None:
        """Write sums [rows, width] of the outputs from the first one to below another."""
        code, inputs = self.code, matrix.inputs
        panels = code.scratch(SIDE * PANEL, I32)
        self._registers.configure({}, {})
        with (
            code.loop(0, inputs, CHUNK) as begin,
            code.loop(0, outputs[1] - outputs[0], SIDE * SIZE) as o,
        ):
            end = code.minimum(begin + CHUNK, inputs)
            for i in range(SIDE):
                panel = code.at(panels, i * PANEL, I32)
                self._pack(matrix, outputs[0] + o + i * SIZE, outputs[1] - 1, (begin, end), panel)
            with code.loop(self._start, self._stop, SIDE * SIZE) as t:
                row = code.minimum(t, self._stop - SIDE * SIZE)
                self._add(matrix, row, (begin, end), panels, code.at(sums_to, (t - self._start) * WIDTH + o, F32))
        self._registers.release()

    def _pack(self, matrix: Matrix, first: Value, last: Value, part: tuple[Value, Value], panel: Value) -> None:
        """Write a part of the inputs of 16 outputs into a panel; behind the last output, it stands again."""
        code, (begin, end) = self.code, part
        rows = [matrix.address(code.minimum(first + i, last)) for i in range(SIZE)]
        with code.loop(begin, end, TILE_INPUTS) as k:
            vectors = [code.load_vector(row, k >> 1, I32, SIZE) for row in rows]
            for pair, vector in enumerate(code.transposed(vectors)):
                code.store_vector(vector, panel, ((k - begin) // 2 + pair) * SIZE)

    def _add(self, matrix: Matrix, row: Value, part: tuple[Value, Value], panels: Value, sums_to: Value) -> None:
        """Write the addition of a part of the sums of two tiles of rows with two of outputs."""
        code, registers, (begin, end) = self.code, self._registers, part
        stride, sums_stride = matrix.inputs * 2, code.value(WIDTH * PAIR_BYTES, I64)
        places = {
            SUMS[i][j]: code.at(sums_to, i * SIZE * WIDTH + j * SIZE, F32) for i in range(SIDE) for j in range(SIDE)
        }
        with code.when(begin.compare("==", 0)):
            for register in places:
                registers.clear(register)
        with code.when(begin.compare(">", 0)):
            for register, place in places.items():
                registers.load(register, place, sums_stride)
        x = self._x.row(row)
        with code.loop(0, (end - begin) // TILE_INPUTS) as n:
            for j, register in enumerate(PANELS):
                place = code.at(panels, n * TILE_BYTES + j * PANEL * PAIR_BYTES, I8)
                registers.load(register, place, code.value(ROW_BYTES, I64))
            for i, register in enumerate(ROWS):
                registers.load(register, code.at(x, stride * (i * SIZE) + (begin * 2 + n * ROW_BYTES), I8), stride)
                for j, panel in enumerate(PANELS):
                    registers.multiply(SUMS[i][j], register, panel)
        for register, place in places.items():
            registers.store(register, place, sums_stride)
