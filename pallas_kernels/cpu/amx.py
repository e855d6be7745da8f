"""The tile registers of AMX, which hold 16 rows of 64 bytes, and rows of x for them.

An instruction multiplies a tile of 16 rows and 32 inputs by one of the same inputs and 16 columns, and adds the
products to a third tile of 16 x 16 sums. In the rows of the second one lie pairs of inputs of all columns. Either of
them can be x, or the weights: the order of a sum is the same, and depends only on the number of its inputs.
"""

from pallas_kernels.cpu.code import I8, I32, I64, VOID, Code, Value
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.packed import HEAD_BYTES, Packed

SIZE = 16  # rows and columns of sums, and pairs of inputs of a tile
ROW_BYTES, PAIR_BYTES = 64, 4  # of a row of a tile, and of each of its pairs of inputs or sums
TILE_BYTES, TILE_INPUTS = SIZE * ROW_BYTES, 2 * SIZE
NUM_REGISTERS = 8
PALETTE, BYTES, ROWS = 0, 16, 48  # offsets of the registers' configuration, which has CONFIG_BYTES
CONFIG_BYTES = 64


class Registers:
    """Writer of the instructions for tiles, which are called by the numbers of their registers."""

    def __init__(self, code: Code):
        self.code, self._config = code, code.scratch(CONFIG_BYTES, I8)
        for at in range(CONFIG_BYTES // 8):
            code.store(code.value(0, I64), self._config, at)
        code.store(code.value(1, I8), self._config, PALETTE)

    def configure(self, rows: dict[int, Value], row_bytes: dict[int, Value]) -> None:
        """Write the sizes of all registers: 16 rows of 64 bytes, or those of some of them."""
        code = self.code
        whole = code.value(SIZE, I64), code.value(ROW_BYTES, I64)
        for register in range(NUM_REGISTERS):
            for sizes, place, usual in ((rows, ROWS, whole[0]), (row_bytes, BYTES, whole[1])):
                size = code.cast("trunc", sizes.get(register, usual), I8)
                code.store(size, self._config, place + register * (2 if sizes is row_bytes else 1))
        self._call("ldtilecfg", self._config)

    def release(self) -> None:
        """Write the end of the registers' use."""
        self._call("tilerelease")

    def clear(self, register: int) -> None:
        """Write zeros."""
        self._call("tilezero", register)

    def load(self, register: int, address: Value, stride: Value) -> None:
        """Write a load of rows that lie `stride` bytes apart."""
        self._call("tileloadd64", register, address, stride)

    def store(self, register: int, address: Value, stride: Value) -> None:
        """Write a store of rows that lie `stride` bytes apart."""
        self._call("tilestored64", register, address, stride)

    def multiply(self, sums: int, a: int, b: int, name: str = "tdpbf16ps") -> None:
        """Write the addition of products of numbers, of bfloat16 or those of another instruction."""
        self._call(name, sums, a, b)

    def _call(self, name: str, *arguments: Value | int) -> None:
        values = [self.code.value(each, I8) if isinstance(each, int) else each for each in arguments]
        self.code.intrinsic(f"llvm.x86.{name}", *values, result=VOID)


class Input(Packed):
    """The packed rows of x, in tiles of 16 rows. A single row stays as it is.

    Args:
        x: number of the argument x [T, I] bfloat16.
        packed: number of the result for the tiles, of `packed_shape`.

    Attributes:
        row_bytes: of a tile's rows.
    """

    def __init__(self, call: CallFrame, x: int, packed: int):
        super().__init__(call, x, packed, SIZE)
        self.row_bytes = self.code.select(self.is_single, self.rows * PAIR_BYTES, self.rows * 0 + ROW_BYTES)
        self._tile_bytes = self.inputs * (2 * SIZE) + HEAD_BYTES

    def pack(self, first: Value, stop: Value, start: Value) -> None:
        """Write the packing as `Packed.pack` does, except for a single row."""
        super().pack(first, self.code.select(self.is_single, first, stop), start)

    def address(self, tile: Value) -> Value:
        """Return the address of a packed tile of rows."""
        return self.code.select(self.is_single, self._x, self._packed_at(tile))

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
    return -(-rows // SIZE), HEAD_BYTES // 4 + (inputs * SIZE // 2 if rows > 1 else 0)
