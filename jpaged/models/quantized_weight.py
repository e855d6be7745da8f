"""Weight of a quantized checkpoint, read in float32 from its stored numbers and their scales, or in a kept form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from jpaged.models.safetensors_files import DerivedTensor, StoredTensor
from pallas_kernels.weights import MIDDLE, PACKED, Format, pack

CHUNK_ROWS = 1024  # rows that are dequantized at a time

PACKED_DTYPE = "uint8"  # of numbers of 4 bits

Bounds = tuple[int, int]


class Grid(NamedTuple):
    """Scales of a weight, each of a block; they are read when they are needed.

    Attributes:
        scales: return [R, C] float32.
        dtype: the dtype in which they are kept.
        zeros: return [R, C] float32, subtracted from the numbers; None: 0.
        rows, columns: size of a block.
        groups: return [in], the column of the grid for each column of the weight; None: they follow from `columns`.
    """

    scales: Callable[[], np.ndarray]
    dtype: str
    zeros: Callable[[], np.ndarray] | None
    rows: int
    columns: int
    groups: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight [out, in] of a checkpoint: a `StoredTensor` of float32.

    Attributes:
        shape: [out, in].
        dtype: the dtype of its numbers if they are kept, as in `Format`.
        numbers: return the numbers between bounds of rows and of columns; those of 4 bits are from -8 to 7.
        grid: its scales.
    """

    shape: tuple[int, int]
    dtype: str
    numbers: Callable[[Bounds, Bounds], np.ndarray]
    grid: Grid

    def get_shape(self) -> list[int]:
        """Return [out, in]."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of float32."""
        return "F32"

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Return a part of the weight in float32."""
        ((low, high), columns), grid = _bounds(index, self.shape), self.grid
        scales, zeros = grid.scales(), grid.zeros() if grid.zeros else None
        along = np.arange(*columns) // grid.columns if grid.groups is None else grid.groups()[slice(*columns)]
        values = np.empty((high - low, columns[1] - columns[0]), np.float32)
        for start in range(low, high, CHUNK_ROWS):
            stop = min(high, start + CHUNK_ROWS)
            at = np.ix_(np.arange(start, stop) // grid.rows, along)
            chunk = values[start - low : stop - low]
            chunk[:] = self.numbers((start, stop), columns)
            if zeros is not None:
                chunk -= zeros[at]
            chunk *= scales[at]
        return values

    @cached_property
    def kept(self) -> Format | None:
        """The form in which the weight can stay as it is; None: it can't."""
        grid, (_, size) = self.grid, self.shape
        if grid.groups is not None and not np.array_equal(grid.groups(), np.arange(size) // grid.columns):
            return None  # the inputs of a group do not lie one after another
        has_zeros = grid.zeros is not None and bool(grid.zeros().any())
        if grid.columns >= size and not has_zeros and self.dtype != PACKED_DTYPE:
            return Format(self.dtype, "float32")
        group = min(grid.columns, size)
        if size % group or group % PACKED:
            return None
        return Format(self.dtype, grid.dtype, "float32" if has_zeros else None, group)

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weight in a form, by its name in `pallas_kernels.Weight`.

        Args:
            form: `kept`, or the same with minima.
        """
        out, size = self.shape
        if field == "values":
            width, values = (size // 2, self._packed) if form.is_packed else (size, self._values)
            return DerivedTensor((out, width), "", values)
        return DerivedTensor(
            (out, size // form.group) if form.group else (out,), "", partial(self._scales, field, form)
        )

    def _values(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.numbers(*_bounds(index, self.shape))

    def _packed(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the numbers, packed, in chunks of rows."""
        out, size = self.shape
        (low, high), columns = _bounds(index, (out, size // 2))
        values = np.empty((high - low, columns[1] - columns[0]), np.uint8)
        for start in range(low, high, CHUNK_ROWS):
            stop = min(high, start + CHUNK_ROWS)
            numbers = self.numbers((start, stop), (0, size)) + np.int8(MIDDLE)
            values[start - low : stop - low] = pack(numbers, np)[:, slice(*columns)]
        return values

    def _scales(self, field: str, form: Format, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the scales or of the minima, -scale * zero, of a form."""
        grid, (low, high) = self.grid, index[0].indices(self.shape[0])[:2]
        rows = np.arange(low, high) // grid.rows
        scales = grid.scales()[rows]
        if field == "minima":
            zeros = grid.zeros()[rows] if grid.zeros else np.float32(0)
            scales = -scales * (zeros + MIDDLE if form.is_packed else zeros)
        return scales[(slice(None), *index[1:])] if form.group else scales[:, 0]


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
