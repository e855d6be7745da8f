"""Tensor of a file in GGUF as a `StoredTensor`: quantized weights are read as they are stored, or in float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from jpaged.gguf_file import GgufTensor
from jpaged.models.gguf_blocks import LAYOUTS, blocks_of
from jpaged.models.safetensors_files import DerivedTensor, StoredTensor
from pallas_kernels.weights import MIDDLE, Format, Weight

CHUNK_ROWS = 1024  # rows that are converted at a time
FLOATS = {Kind.F32: ("F32", np.float32), Kind.F16: ("F16", np.float16), Kind.BF16: ("BF16", ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Scales:
    """Dtype of the scales of a tensor, which the matrices of all its experts share."""

    tensor: GgufTensor

    @cached_property
    def dtype(self) -> str:
        """Return float16, or float32 if the scales exceed the range of float16; uint8 of exponents."""
        if LAYOUTS[self.tensor.kind].is_mxfp4:
            return "uint8"
        fits = LAYOUTS[self.tensor.kind].fits_float16(blocks_of(self.tensor.data, self.tensor.kind))
        return "float16" if fits else "float32"


@dataclass(frozen=True)
class GgufWeight:
    """Matrix, or vector, in a file: a `StoredTensor`.

    Attributes:
        stored: [out, in], or [out].
        scales: dtype of the scales of a quantized tensor.
        order: row of `stored` that is each row; None: they are the same.
        offset: number added to each element, which makes the dtype float32.
    """

    stored: GgufTensor
    scales: Scales
    order: np.ndarray | None = None
    offset: float = 0.0

    def get_shape(self) -> list[int]:
        """Return [out, in], or [out]."""
        rows, *inputs = self.stored.shape
        return [rows if self.order is None else len(self.order), *inputs]

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype of the elements; quantized ones are float32."""
        return "F32" if self.offset else FLOATS.get(self.stored.kind, ("F32",))[0]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the tensor."""
        if len(self.stored.shape) == 1:
            vector = self._dense(self.stored.data[None])[0]
            return np.asarray(vector if self.order is None else vector[self.order])[index[0]]
        low, high, _ = index[0].indices(self.get_shape()[0])
        chunks = range(low, max(high, low + 1), CHUNK_ROWS)
        parts = [self._dense(self._rows(slice(at, min(high, at + CHUNK_ROWS))))[:, *index[1:]] for at in chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def kept(self) -> Format | None:
        """Form in which the weight can stay as it is; None if it is not quantized, or a vector."""
        layout = LAYOUTS.get(self.stored.kind)
        if layout is None or len(self.stored.shape) == 1:
            return None
        dtype = self.scales.dtype
        return Format(
            "uint8" if layout.is_packed else "int8", dtype, dtype if layout.has_minima else None, layout.group
        )

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weight in a form, by its name in `pallas_kernels.Weight`.

        Args:
            form: `kept`, or the same with minima.
        """
        (outputs, inputs), place = self.get_shape(), Weight._fields.index(field)
        assert form.group is not None, "this weight is not quantized"
        width = inputs // (1 + form.is_packed) if field == "values" else inputs // form.group
        dtype = form.dtype if field == "values" else getattr(form, field)

        def read(index: Any) -> np.ndarray:
            low, high, _ = index[0].indices(outputs)
            found = np.empty((high - low, width), dtype)
            for at in range(low, high, CHUNK_ROWS):
                rows = self._rows(slice(at, min(high, at + CHUNK_ROWS)))
                parts = LAYOUTS[self.stored.kind].parts(blocks_of(rows, self.stored.kind))
                part = parts[place]
                if part is None:  # minima of a kind without them
                    part = parts[1] * -float(MIDDLE * form.is_packed)
                found[at - low :][: len(rows)] = part.reshape(len(rows), width)
            return found[:, *index[1:]]

        return DerivedTensor((outputs, width), "", read)

    def _rows(self, part: slice) -> np.ndarray:
        """Return the bytes of some rows."""
        data: np.ndarray = self.stored.data
        return data[part] if self.order is None else data[self.order[part]]

    def _dense(self, rows: np.ndarray) -> np.ndarray:
        """Return the elements of rows of bytes."""
        if (layout := LAYOUTS.get(self.stored.kind)) is None:
            exact: np.ndarray = np.ascontiguousarray(rows).view(FLOATS[self.stored.kind][1])
            return exact.astype(np.float32) + np.float32(self.offset) if self.offset else exact
        weight = Weight(*cast(Any, layout.parts(blocks_of(rows, self.stored.kind))))
        return np.asarray(weight.dense(np)).reshape(len(rows), -1) + np.float32(self.offset)


@dataclass(frozen=True)
class GgufStack:
    """Matrices of all experts in a file: a `StoredTensor` [E, out, in]."""

    members: tuple[GgufWeight, ...]

    def get_shape(self) -> list[int]:
        """Return [E, out, in]."""
        return [len(self.members), *self.members[0].get_shape()]

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype of the elements."""
        return self.members[0].get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the tensor."""
        return _stacked(self.members, index)

    @property
    def kept(self) -> Format | None:
        """Form in which the weights can stay as they are; None if they are not quantized."""
        return self.members[0].kept

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weights in a form, by its name in `pallas_kernels.Weight`."""
        members = tuple(member.leaf(field, form) for member in self.members)
        shape = (len(members), *members[0].get_shape())
        return DerivedTensor(shape, "", lambda index: _stacked(members, index))


@dataclass(frozen=True)
class GgufColumns:
    """Matrix in a file whose columns, in equal parts, stand in another order: a `StoredTensor` [out, in].

    Attributes:
        order: part of `stored` that is each part.
    """

    stored: GgufWeight
    order: np.ndarray

    def get_shape(self) -> list[int]:
        """Return [out, in]."""
        return self.stored.get_shape()

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype of the elements."""
        return self.stored.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the tensor."""
        return self._ordered(self.stored, index)

    @property
    def kept(self) -> Format | None:
        """Form in which the weight can stay as it is; None if it is not quantized, or parts cut its groups."""
        form = self.stored.kept
        width = self.get_shape()[1] // len(self.order)
        return form if form and form.group and width % form.group == 0 else None

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weight in a form, by its name in `pallas_kernels.Weight`."""
        stored = self.stored.leaf(field, form)
        return DerivedTensor(stored.shape, stored.dtype, lambda index: self._ordered(stored, index))

    def _ordered(self, stored: StoredTensor, index: tuple[slice, ...]) -> np.ndarray:
        rows = stored[index[0], slice(None)]
        parts = rows.reshape(len(rows), len(self.order), -1)[:, self.order]
        return parts.reshape(rows.shape)[:, *index[1:]]


@dataclass(frozen=True)
class GgufJoin:
    """Tensors of a file one after the other: a `StoredTensor`.

    Attributes:
        axis: of the join.
    """

    members: "tuple[GgufWeight | GgufStack, ...]"
    axis: int

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self._shape(self.members)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype of the elements."""
        dtypes = {member.get_dtype() for member in self.members}
        return dtypes.pop() if len(dtypes) == 1 else "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the tensor."""
        return self._joined(self.members, index)

    @property
    def kept(self) -> Format | None:
        """Form in which the weights can stay as they are; None if they have none in common."""
        forms = {member.kept for member in self.members}
        return forms.pop() if len(forms) == 1 else None

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weights in a form, by its name in `pallas_kernels.Weight`."""
        members = tuple(member.leaf(field, form) for member in self.members)
        return DerivedTensor(tuple(self._shape(members)), "", lambda index: self._joined(members, index))

    def _shape(self, members: Sequence[StoredTensor]) -> list[int]:
        shapes = [member.get_shape() for member in members]
        return [sum(sizes) if axis == self.axis else sizes[0] for axis, sizes in enumerate(zip(*shapes, strict=True))]

    def _joined(self, members: Sequence[StoredTensor], index: tuple[slice, ...]) -> np.ndarray:
        index += (slice(None),) * (self.axis + 1 - len(index))
        low, high, _ = index[self.axis].indices(sum(member.get_shape()[self.axis] for member in members))
        parts, begin = list[np.ndarray](), 0
        for member in members:
            end = begin + member.get_shape()[self.axis]
            if low < end and begin < high:
                own = slice(max(low, begin) - begin, min(high, end) - begin)
                parts.append(member[(*index[: self.axis], own, *index[self.axis + 1 :])])
            begin = end
        return np.concatenate(parts, self.axis)


def _stacked(members: Sequence[StoredTensor], index: tuple[slice, ...]) -> np.ndarray:
    """Return a part of the tensor whose first axis is that of the members."""
    experts, *rest = index
    return np.stack([member[tuple(rest)] for member in members[experts]])
