"""Weights of experts in MXFP4, as the checkpoints of gpt-oss store them: read as they are, or in float32.

A tensor `*_blocks` [E, n out, groups, 16] uint8 holds the codes of n weights, their outputs in turn: in each byte that
of an input in the low half, and that of the next input in the high half. `*_scales` [E, n out, groups] holds exponents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jpaged.models.safetensors_files import DerivedTensor, StoredTensor
from pallas_kernels.weights import E2M1, PACKED, Format, pack

BIAS = 127  # of the exponents
FORM = Format("uint8", "uint8", None, PACKED)

Read = Callable[[int, tuple[int, int]], np.ndarray]  # returns rows of an expert, by its number and their bounds


@dataclass(frozen=True)
class Mxfp4Weight:
    """Weight [E, out, in] of a checkpoint: a `KeptTensor`.

    Attributes:
        blocks, scales: the tensors that hold it.
        place: its number among the weights in them.
        parts: number of weights in them.
    """

    blocks: StoredTensor
    scales: StoredTensor
    place: int = 0
    parts: int = 1

    def get_shape(self) -> list[int]:
        """Return [E, out, in]."""
        experts, outputs, groups, _ = self.blocks.get_shape()
        return [experts, outputs // self.parts, groups * PACKED]

    def get_dtype(self) -> str:
        """Return safetensors' name of float32."""
        return "F32"

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        """Return a part of the weight in float32."""
        return self._by_expert(index, np.float32, self._dense)

    @property
    def kept(self) -> Format:
        """The form in which the weight can stay as it is."""
        return FORM

    def leaf(self, field: str, form: Format) -> DerivedTensor:
        """Return an array of the weight, by its name in `pallas_kernels.Weight`."""
        experts, outputs, inputs = self.get_shape()
        read: Read = self._packed if field == "values" else partial(self._stored, self.scales)
        width = inputs // 2 if field == "values" else inputs // PACKED
        shape = (experts, outputs, width)
        return DerivedTensor(shape, "", lambda index: self._by_expert(index, np.uint8, read))

    def _by_expert(self, index: Sequence[slice], dtype: type, read: Read) -> np.ndarray:
        """Return a part of an array [E, out, ...] whose rows of one expert `read` returns."""
        experts, outputs, columns = index
        shape = self.get_shape()
        low, high, _ = experts.indices(shape[0])
        bounds = outputs.indices(shape[1])[:2]
        parts: list[np.ndarray] = [
            read(expert, bounds)[:, columns].astype(dtype, copy=False) for expert in range(low, high)
        ]
        return np.stack(parts)

    def _stored(self, tensor: StoredTensor, expert: int, outputs: tuple[int, int]) -> np.ndarray:
        """Return the rows of an expert in one of the tensors."""
        low, high = (self.parts * bound for bound in outputs)
        rows = np.asarray(tensor[expert : expert + 1, low:high])[0]
        own: np.ndarray = rows[self.place :: self.parts]
        return own

    def _codes(self, expert: int, outputs: tuple[int, int]) -> np.ndarray:
        """Return the codes [out, in] of an expert in the order of the inputs."""
        pairs = self._stored(self.blocks, expert, outputs)
        return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)

    def _packed(self, expert: int, outputs: tuple[int, int]) -> np.ndarray:
        packed: np.ndarray = pack(self._codes(expert, outputs), np)
        return packed

    def _dense(self, expert: int, outputs: tuple[int, int]) -> np.ndarray:
        numbers = np.array(E2M1, np.float32)[self._codes(expert, outputs)]
        exponents = self._stored(self.scales, expert, outputs).astype(np.int32) - BIAS
        dense: np.ndarray = np.ldexp(numbers.reshape(*exponents.shape, PACKED), exponents[..., None])
        return dense.reshape(numbers.shape)
