"""Rows of x in another form, into which the threads of a call bring them together."""

from abc import ABC, abstractmethod

from pallas_kernels.cpu.code import I8, I64, Value
from pallas_kernels.cpu.ffi import CallFrame

HEAD_BYTES = 64  # of a tile, a cache line


class Packed(ABC):
    """Tiles of rows of x, each behind a cache line that tells whether it is packed.

    Args:
        x: number of the argument x [T, I] bfloat16.
        packed: number of the result for the tiles.
        size: rows of a tile.
    """

    _tile_bytes: Value

    def __init__(self, call: CallFrame, x: int, packed: int, size: int):
        self.code, self._x, self._packed, self.rows_of_tile = call.code, call.argument(x), call.result(packed), size
        self.rows, self.inputs = call.size(x, 0), call.size(x, 1)
        self.is_single = self.rows.compare("==", 1)

    def clear(self) -> None:
        """Write the state of a call's begin: no tile is packed."""
        with self.code.loop(0, (self.rows + (self.rows_of_tile - 1)) // self.rows_of_tile) as tile:
            self.code.store(self.code.value(0, I64), self._state(tile), 0)

    def pack(self, first: Value, stop: Value, start: Value) -> None:
        """Write the packing of the tiles from `first` to below `stop` that are not packed, beginning with `start`.

        Threads that begin with different tiles share the work. If two pack the same tile, they write the same numbers.
        """
        code, count = self.code, stop - first
        with code.loop(0, count) as i:
            tile = first + (i + start) % count
            with code.when(code.load_atomic(self._state(tile), 0).compare("==", 0)):
                self._pack(tile)
                code.exchange(self._state(tile), 0, code.value(1, I64))

    def _packed_at(self, tile: Value) -> Value:
        return self.code.at(self._state(tile), HEAD_BYTES, I8)

    def _state(self, tile: Value) -> Value:
        return self.code.at(self._packed, tile * self._tile_bytes, I8)

    @abstractmethod
    def _pack(self, tile: Value) -> None:
        """Write the packing of a tile."""
