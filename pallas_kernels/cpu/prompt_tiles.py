"""Attention of the tokens of prompts in the tile registers of AMX.

The rows of tiles are keys, or numbers of a head, and their columns are queries. The rest is `prompt`'s.
"""

from collections.abc import Callable

from pallas_kernels.cpu.amx import PAIR_BYTES, ROW_BYTES, SIZE, TILE_BYTES, TILE_INPUTS, Registers
from pallas_kernels.cpu.code import F32, I8, I32, I64, Machine, Value
from pallas_kernels.cpu.contexts import V_POOL, Spec
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.cpu.prompt import TILE, VECTORS, KeyTile, PromptWriter, Rows

SUMS, LEFT, RIGHT = range(VECTORS), VECTORS, range(VECTORS + 1, 2 * VECTORS + 1)  # numbers of registers
KEYS_OF_TILE = TILE // TILE_INPUTS  # tiles of the keys whose values are added


def in_tiles(spec: Spec) -> bool:
    """Return whether a call is computed in tile registers."""
    machine = Machine.host()
    has_tiles = machine.has_bf16_dot and machine.has_bf16_tiles
    return has_tiles and spec.dtype == "bfloat16" and spec.head_dim % TILE_INPUTS == 0


class TilePromptWriter(PromptWriter):
    """Writer of the code of prompts. In memory, values are [H, keys] bfloat16 in tiles of 16 and 32."""

    def __init__(self, spec: Spec, call: CallFrame):
        super().__init__(spec, call)
        self.keys = TILE_INPUTS
        self._registers = Registers(call.code)

    def write(self, s: Value, k_head: Value, number: Value) -> None:
        """Write the code of a unit."""
        self._registers.configure({}, {})
        super().write(s, k_head, number)
        self._registers.release()

    def _loaders(self, s: Value, k_head: Value) -> tuple[Callable[..., Value], Callable[..., Value]]:
        """Return the writers of the addresses of a tile's keys and values, which take its position, start and end."""
        code, size = self.code, self.spec.head_dim
        values, places = code.scratch(KEYS_OF_TILE * size * SIZE, I32), code.scratch(TILE, I64)

        def load_values(position: Value, low: Value, high: Value) -> Value:
            """Write the values of a tile; those of the first and last key of the range stand for others outside."""
            with code.loop(0, TILE) as c:
                key = code.maximum(code.minimum(c, high - 1), low)
                code.store(self.key_row(s, k_head, position + key), places, c)
            with code.loop(0, KEYS_OF_TILE) as part, code.loop(0, size, SIZE) as h:
                pairs = [self._pair(places, part * TILE_INPUTS + 2 * i, h) for i in range(SIZE)]
                tile = code.at(values, (h // SIZE * KEYS_OF_TILE + part) * TILE_BYTES // PAIR_BYTES, I32)
                for i, vector in enumerate(code.transposed(pairs)):
                    code.store_vector(vector, tile, i * SIZE)
            return values

        return super()._loaders(s, k_head)[0], load_values

    def _pair(self, places: Value, c: Value, h: Value) -> Value:
        """Return some numbers of the values of two keys, from the c-th of a tile on, as pairs."""
        first, second = (self._numbers(V_POOL, self.code.load(places, c + i, I64), h) for i in range(2))
        return first | second << 16

    def _scores(self, rows: Rows, tile: KeyTile, scores: Value, keys: tuple[Value, Value], factor: Value) -> None:
        """Write the scores of the keys from the first one to below another, [keys, rows]."""
        code, registers, size = self.code, self._registers, self.spec.head_dim
        row_bytes = code.value(self.width * PAIR_BYTES, I64)
        with code.loop(*keys, SIZE) as c:
            for register in SUMS:
                registers.clear(register)
            for h in range(0, size, TILE_INPUTS):
                registers.load(LEFT, code.at(tile.keys, (c * size + h) * 2, I8), code.value(2 * size, I64))
                for n, register in enumerate(RIGHT):
                    registers.load(register, code.at(rows.q, h // 2 * self.width + n * SIZE, I32), row_bytes)
                    registers.multiply(SUMS[n], LEFT, register)
            for n, register in enumerate(SUMS):
                registers.store(register, code.at(scores, c * self.width + n * SIZE, F32), row_bytes)
        if not self.scales_later:
            with code.loop(keys[0] * self.width, keys[1] * self.width, SIZE) as place:
                score = self._finished(code.load_vector(scores, place, F32, SIZE), factor)
                code.store_vector(score, scores, place)

    def _outputs(
        self, rows: Rows, tile: KeyTile, weights: Value, shrinks: list[Value], keys: tuple[Value, Value]
    ) -> None:
        """Add the values of a tile to the outputs."""
        code, registers, size = self.code, self._registers, self.spec.head_dim
        row_bytes = code.value(self.width * PAIR_BYTES, I64)
        with code.loop(0, size) as h:
            for n, shrink in enumerate(shrinks):
                place = h * self.width + n * SIZE
                code.store_vector(code.load_vector(rows.o, place, F32, SIZE) * shrink, rows.o, place)
        first, stop = keys[0] // TILE_INPUTS, (keys[1] + (TILE_INPUTS - 1)) // TILE_INPUTS
        with code.loop(0, size, SIZE) as h:
            places = [code.at(rows.o, h * self.width + n * SIZE, F32) for n in range(VECTORS)]
            for register, place in zip(SUMS, places):
                registers.load(register, place, row_bytes)
            with code.loop(first, stop) as part:
                values = code.at(tile.values, (h // SIZE * KEYS_OF_TILE + part) * TILE_BYTES, I8)
                registers.load(LEFT, values, code.value(ROW_BYTES, I64))
                for n, register in enumerate(RIGHT):
                    registers.load(register, code.at(weights, part * (SIZE * self.width) + n * SIZE, I32), row_bytes)
                    registers.multiply(SUMS[n], LEFT, register)
            for register, place in zip(SUMS, places):
                registers.store(register, place, row_bytes)
