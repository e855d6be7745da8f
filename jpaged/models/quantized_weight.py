"""Weight of a quantized checkpoint, computed in float32 from its stored numbers and their scales when it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jpaged.models.safetensors_files import DerivedTensor, StoredTensor
from pallas_kernels.weights import Format

CHUNK_ROWS = 1024  # rows that are dequantized at a time

Bounds = tuple[int, int]


class Grid(NamedTuple):
    """Scales of a weight, each of a block.

    Attributes:
        scales: [R, C] float32.
        zeros: [R, C] float32, subtracted from the numbers; None: 0.
        rows, columns: size of a block.
        groups: [in] column of the grid for each column of the weight; None: they follow from `columns`.
    """

    scales: np.ndarray
    zeros: np.ndarray | None
    rows: int
    columns: int
    groups: np.ndarray | None = None


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight [out, in] of a checkpoint: a `StoredTensor` of float32.

    Attributes:
        shape: [out, in].
        numbers: return the stored numbers between bounds of rows and of columns.
        grid: return the scales.
        kept: the form in which the weight can stay as it is; None: it can't.
    """

    shape: tuple[int, int]
    numbers: Callable[[Bounds, Bounds], np.ndarray]
    grid: Callable[[], Grid]
    kept: Format | None = None

    def get_shape(self) -> list[int]:
        """Return [out, in]."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of float32."""
        return "F32"

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Return a part of the weight in float32."""
        (low, high), columns = _bounds(index, self.shape)
        grid, values = self.grid(), np.empty((high - low, columns[1] - columns[0]), np.float32)
        along = np.arange(*columns) // grid.columns if grid.groups is None else grid.groups[slice(*columns)]
        for start in range(low, high, CHUNK_ROWS):
            stop = min(high, start + CHUNK_ROWS)
            at = np.ix_(np.arange(start, stop) // grid.rows, along)
            chunk = values[start - low : stop - low]
            chunk[:] = self.numbers((start, stop), columns)
            if grid.zeros is not None:
                chunk -= grid.zeros[at]
            chunk *= grid.scales[at]
        return values

    def leaf(self, field: str) -> DerivedTensor:
        """Return an array of a weight that can be kept, by its name in `pallas_kernels.Weight`."""
        if field == "values":
            return DerivedTensor(self.shape, "", lambda index: self.numbers(*_bounds(index, self.shape)))
        out = self.shape[:1]
        return DerivedTensor(out, "F32", lambda index: np.broadcast_to(self.grid().scales[:, 0], out)[index[0]])


def unpacked(
    tensor: StoredTensor, bits: int, axis: int, bounds: tuple[Bounds, Bounds], shifts: Sequence[int] | None = None
) -> np.ndarray:
    """Return numbers of a matrix of words of 32 bits, as uint8.

    Args:
        axis: the numbers of a word lie along this axis of the result.
        bounds: rows and columns of the result.
        shifts: bits below each number in a word; None: the first number has the lowest bits.
    """
    per_word, (low, high) = 32 // bits, bounds[axis]
    words = tuple((low // per_word, -(-high // per_word)) if i == axis else b for i, b in enumerate(bounds))
    packed = np.asarray(tensor[tuple(slice(*each) for each in words)]).view(np.uint32)
    each = [
        ((packed >> np.uint32(shift)) & np.uint32((1 << bits) - 1)).astype(np.uint8)
        for shift in (shifts or range(0, 32, bits))
    ]
    shape = [len * per_word if i == axis else len for i, len in enumerate(packed.shape)]
    numbers = np.stack(each, axis + 1).reshape(shape)
    start = low - low // per_word * per_word
    return numbers[start : start + high - low] if axis == 0 else numbers[:, start : start + high - low]


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[Bounds, Bounds]:
    """Return the bounds of the rows and columns of a part."""
    rows, columns = (part.indices(size)[:2] for part, size in zip(index, shape))
    return rows, columns
