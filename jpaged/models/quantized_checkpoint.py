"""Quantized checkpoints of the hub: their weights as slices of float32, computed from the stored numbers when read.

Formats: AWQ (gemm), GPTQ (v1 and v2), FP8 (a scale for each tensor, channel or block) and compressed-tensors (8 bits,
and packed integers of 4 or 8 bits). The quantization of activations and of the KV cache that a checkpoint may describe
is not applied.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jpaged.checkpoint_files import read_json
from jpaged.config import QUANTIZED_CHECKPOINTS
from jpaged.models.config_file import CONFIG

PACKED_FORMAT = "pack-quantized"
COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", PACKED_FORMAT)
FLOAT8 = "F8_E4M3"  # safetensors' name
WORDS, INTEGERS, FLOATS = ("I32",), ("I32", "I64"), ("F32", "F16", "BF16")
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # bits below each of the 8 numbers of a word
CHUNK_ROWS = 1024  # rows that are dequantized at a time
# Tensors about activations and the KV cache, which are not quantized as a checkpoint describes.
UNUSED = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip

Bounds = tuple[int, int]
Tensors = Mapping[str, Any]  # slices of safetensors by name


class Scheme(NamedTuple):
    """Quantization of a checkpoint, as config.json describes it.

    Attributes:
        method: one of `QUANTIZED_CHECKPOINTS`.
        bits: number of bits of GPTQ's numbers.
        zero_offset: number to add to GPTQ's zero points.
        block: rows and columns of a block with one scale; None: the shape of the scales says.
    """

    method: str
    bits: int = 4
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def read_scheme(directory: Path) -> Scheme | None:
    """Return the quantization of a directory's checkpoint; None if it is not quantized.

    Raises:
        ValueError: the quantization is not supported; the message has the field of config.json.
    """
    hf = read_json(directory / CONFIG, missing_ok=True)
    described = hf.get("quantization_config") or hf.get("compression_config")
    if not described:
        return None
    try:
        if not isinstance(described, dict):
            raise ValueError(f"must be a JSON object, not {described!r:.100}")
        method = described.get("quant_method")
        if method not in QUANTIZED_CHECKPOINTS:
            supported = ", ".join(QUANTIZED_CHECKPOINTS)
            raise ValueError(f"quant_method {method!r:.100} is not supported; supported: {supported}")
        return {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}[method](described)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: quantization_config: {error}") from error


def _awq(described: Mapping[str, Any]) -> Scheme:
    _check(described, "bits", 4)
    _check(described, "version", "gemm", "GEMM")
    _check(described, "zero_point", True)
    return Scheme("awq")


def _gptq(described: Mapping[str, Any]) -> Scheme:
    _check(described, "bits", 4, 8)
    _check(described, "checkpoint_format", "gptq", "gptq_v2")
    return Scheme("gptq", described.get("bits", 4), zero_offset=described.get("checkpoint_format") != "gptq_v2")


def _fp8(described: Mapping[str, Any]) -> Scheme:
    _check(described, "fmt", "e4m3")
    return Scheme("fp8", block=_block_of("weight_block_size", described.get("weight_block_size")))


def _compressed(described: Mapping[str, Any]) -> Scheme:
    groups = described.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"config_groups must be JSON objects, not {groups!r:.100}")
    formats = [group.get("format") or described.get("format") for group in groups.values()]
    if unknown := [name for name in formats if name not in COMPRESSED_FORMATS]:
        raise ValueError(f"format {unknown[0]!r:.100} is not supported; supported: {', '.join(COMPRESSED_FORMATS)}")
    for name in ("sparsity_config", "transform_config"):
        inner = described.get(name)
        if inner and not (isinstance(inner, dict) and inner.get("format") == "dense"):
            raise ValueError(f"{name} is not supported")
    weights = [group["weights"] for group in groups.values() if isinstance(group.get("weights"), dict)]
    for each in weights:
        _check(each, "num_bits", *((8,) if each.get("type", "int") == "float" else (4, 8)))
    blocks = {_block_of("block_structure", each["block_structure"]) for each in weights if each.get("block_structure")}
    if len(blocks) > 1:
        raise ValueError("config_groups with different block_structures are not supported")
    return Scheme("compressed-tensors", block=blocks.pop() if blocks else None)


def _check(described: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Raise ValueError if a field has another value than the allowed ones; the first of them is its default."""
    value = described.get(name, allowed[0])
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name} {value!r:.100} is not supported; supported: {', '.join(map(str, allowed))}")


def _block_of(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = map(int, sizes)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be two numbers, not {value!r:.100}") from error
    if min(rows, columns) < 1:
        raise ValueError(f"{name} must be at least 1, not {value!r:.100}")
    return rows, columns


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


class QuantizedWeight:
    """Weight [out, in] of a checkpoint with the interface of a slice of safetensors, in float32.

    Args:
        numbers: return the stored numbers between bounds of rows and of columns.
        grid: return the scales.
        kept: "int8" or "float8_e4m3fn" if the numbers have this dtype and each row has one scale and no zero point;
            the weight can then stay as it is.
    """

    def __init__(
        self, shape: tuple[int, int], numbers: Callable[[Bounds, Bounds], np.ndarray], grid: Callable[[], Grid],
        kept: str | None = None,
    ):  # fmt: skip
        self._shape, self._numbers, self._grid, self.kept = shape, numbers, grid, kept

    def get_shape(self) -> list[int]:
        """Return [out, in]."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of float32."""
        return "F32"

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Return a part of the weight in float32."""
        (low, high), columns = _bounds(index, self._shape)
        grid, values = self._grid(), np.empty((high - low, columns[1] - columns[0]), np.float32)
        along = np.arange(*columns) // grid.columns if grid.groups is None else grid.groups[slice(*columns)]
        for start in range(low, high, CHUNK_ROWS):
            stop = min(high, start + CHUNK_ROWS)
            at = np.ix_(np.arange(start, stop) // grid.rows, along)
            chunk = values[start - low : stop - low]
            chunk[:] = self._numbers((start, stop), columns)
            if grid.zeros is not None:
                chunk -= grid.zeros[at]
            chunk *= grid.scales[at]
        return values

    @property
    def stored(self) -> "Lazy":
        """The numbers [out, in] of a weight that can be kept."""
        return Lazy(self._shape, lambda index: self._numbers(*_bounds(index, self._shape)))

    @property
    def row_scales(self) -> "Lazy":
        """The scales [out] of a weight that can be kept."""
        out = self._shape[0]
        return Lazy((out,), lambda index: np.broadcast_to(self._grid().scales[:, 0], out)[index[0]])


class Lazy(NamedTuple):
    """Array that is computed when it is read, with the interface of a slice of safetensors."""

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:  # type: ignore[override]
        """Return a part of the array."""
        return self.read(index)


def dequantized(tensors: Tensors, scheme: Scheme, expected: Collection[str]) -> dict[str, Any]:
    """Return the tensors of a quantized checkpoint with a `QuantizedWeight` for each quantized weight.

    The tensors that belong to it are left out, and so are those about activations and the KV cache.

    Args:
        expected: names of the model's tensors. GPTQ writes zeros as biases of layers that have none.

    Raises:
        ValueError: a tensor is missing or misshapen.
    """
    found: dict[str, Any] = {}
    used: set[str] = set()
    layer = _Layers(tensors, scheme, used)
    for name in tensors:
        *_, leaf = name.rpartition(".")
        if builder := layer.builders.get(leaf):
            prefix = name.removesuffix(leaf)
            found[prefix + "weight"] = builder(prefix)
            bias = prefix + "bias"
            if bias in tensors and bias not in expected and not tensors[bias][:].any():
                used.add(bias)
    unused = {name for name in tensors if name.endswith(UNUSED)}
    return {name: tensor for name, tensor in tensors.items() if name not in used | unused} | found


class _Layers:
    """Builders of weights from the tensors of a layer, by the name of one of these.

    Args:
        used: names of the tensors that the builders have used; they are added to it.
    """

    def __init__(self, tensors: Tensors, scheme: Scheme, used: set[str]):
        self._tensors, self._scheme, self._used = tensors, scheme, used
        self.builders: Mapping[str, Callable[[str], QuantizedWeight]] = {
            "awq": {"qweight": self._awq},
            "gptq": {"qweight": self._gptq},
            "fp8": {"weight_scale": self._scaled, "weight_scale_inv": self._scaled},
            "compressed-tensors": {"weight_scale": self._scaled_or_packed},
        }[scheme.method]

    def _awq(self, prefix: str) -> QuantizedWeight:
        """Words along the outputs: qweight [in, out / 8], qzeros [in / g, out / 8]; scales [in / g, out]."""
        qweight, qzeros = (self._matrix(prefix + name, WORDS) for name in ("qweight", "qzeros"))
        scales = self._matrix(prefix + "scales", FLOATS)
        (rows, words), (groups, _) = qweight.get_shape(), scales.get_shape()
        shape = (8 * words, rows)
        self._expect(prefix + "scales", [groups, shape[0]])
        self._expect(prefix + "qzeros", [groups, words])
        size = self._group_size(prefix + "scales", rows, groups)

        def numbers(out: Bounds, within: Bounds) -> np.ndarray:
            return unpacked(qweight, 4, 1, (within, out), AWQ_SHIFTS).T

        def grid() -> Grid:
            zeros = unpacked(qzeros, 4, 1, ((0, groups), (0, shape[0])), AWQ_SHIFTS)
            return Grid(_floats(scales[:]).T, _floats(zeros).T, 1, size)

        return QuantizedWeight(shape, numbers, grid)

    def _gptq(self, prefix: str) -> QuantizedWeight:
        """Words along the inputs: qweight [in * b / 32, out]; and along the outputs: qzeros [in / g, out * b / 32]."""
        bits, per_word = self._scheme.bits, 32 // self._scheme.bits
        qweight, qzeros = (self._matrix(prefix + name, WORDS) for name in ("qweight", "qzeros"))
        scales = self._matrix(prefix + "scales", FLOATS)
        (words, out), (groups, _) = qweight.get_shape(), scales.get_shape()
        size = words * per_word
        self._expect(prefix + "scales", [groups, out])
        self._expect(prefix + "qzeros", [groups, -(-out // per_word)])
        order = self._groups(prefix + "g_idx", size, groups) if prefix + "g_idx" in self._tensors else None
        columns = size if order is not None else self._group_size(prefix + "scales", size, groups)

        def numbers(rows: Bounds, within: Bounds) -> np.ndarray:
            return unpacked(qweight, bits, 0, (within, rows)).T

        def grid() -> Grid:
            zeros = _floats(unpacked(qzeros, bits, 1, ((0, groups), (0, out)))) + self._scheme.zero_offset
            return Grid(_floats(scales[:]).T, zeros.T, 1, columns, order() if order else None)

        return QuantizedWeight((out, size), numbers, grid)

    def _scaled_or_packed(self, prefix: str) -> QuantizedWeight:
        return (self._packed if prefix + "weight_packed" in self._tensors else self._scaled)(prefix)

    def _scaled(self, prefix: str) -> QuantizedWeight:
        """Numbers of 8 bits: weight [out, in], with scales of the tensor, of rows, of groups or of blocks."""
        weight = self._matrix(prefix + "weight", (FLOAT8, "I8"))
        shape = tuple(weight.get_shape())
        name = next(n for n in ("weight_scale", "weight_scale_inv") if prefix + n in self._tensors)
        zeros = self._optional(prefix + "weight_zero_point", (FLOAT8, "I8", *FLOATS))

        def numbers(rows: Bounds, columns: Bounds) -> np.ndarray:
            part: np.ndarray = weight[slice(*rows), slice(*columns)]
            return part

        return self._with_grid(shape, prefix + name, numbers, zeros and (lambda: zeros[()]), prefix + "weight_g_idx",
                               kept="int8" if weight.get_dtype() == "I8" else "float8_e4m3fn")  # fmt: skip

    def _packed(self, prefix: str) -> QuantizedWeight:
        """Words of integers of 4 or 8 bits along the inputs; zero points are packed along the outputs."""
        packed, sizes = self._matrix(prefix + "weight_packed", WORDS), self._tensor(prefix + "weight_shape", INTEGERS)
        found = sizes[()].tolist() if sizes.get_shape() == [2] else []
        rows, words = packed.get_shape()
        bits = next((b for b in (4, 8) if len(found) == 2 and found[0] == rows and -(-found[1] * b // 32) == words), 0)
        if not bits:
            raise ValueError(
                f"model: {prefix}weight_packed has shape {[rows, words]}, and {prefix}weight_shape {found}"
            )
        shape, middle = (rows, found[1]), 1 << (bits - 1)
        zeros = self._optional(prefix + "weight_zero_point", WORDS)

        def numbers(rows: Bounds, columns: Bounds) -> np.ndarray:
            return (unpacked(packed, bits, 1, (rows, columns)).astype(np.int16) - middle).astype(np.int8)

        def zero_points() -> np.ndarray:
            assert zeros is not None
            groups = zeros.get_shape()[-1]
            return unpacked(zeros, bits, 0, ((0, rows), (0, groups))).astype(np.int16) - middle

        return self._with_grid(shape, prefix + "weight_scale", numbers, zeros and zero_points, prefix + "weight_g_idx",
                               kept="int8" if bits == 8 else None)  # fmt: skip

    def _with_grid(
        self, shape: tuple[int, ...], name: str, numbers: Callable[[Bounds, Bounds], np.ndarray],
        zeros: Callable[[], np.ndarray] | None, g_idx: str, kept: str | None,
    ) -> QuantizedWeight:  # fmt: skip
        """Return a weight whose scales have one of the shapes of compressed-tensors."""
        scales, (out, size) = self._tensor(name, FLOATS), shape
        given, block = scales.get_shape(), self._scheme.block
        if math.prod(given) == 1:
            rows, columns, grid_shape = out, size, (1, 1)
        elif given[0] == out and len(given) <= 2 and not (block and len(given) == 2 and given[1] > 1):
            groups = given[1] if len(given) == 2 else 1
            rows, columns, grid_shape = 1, self._group_size(name, size, groups), (out, groups)
        elif block:
            (rows, columns), grid_shape = block, (-(-out // block[0]), -(-size // block[1]))
            self._expect(name, list(grid_shape))
        else:
            raise ValueError(f"model: {name} has shape {given}, which does not fit a weight of shape {list(shape)}")
        order = self._groups(g_idx, size, grid_shape[1]) if g_idx in self._tensors else None
        if zeros is not None or order is not None or grid_shape[1] > 1 or rows not in (1, out):
            kept = None

        def grid() -> Grid:
            zero_points = None if zeros is None else _floats(zeros()).reshape(grid_shape)
            groups = None if order is None else order()
            return Grid(_floats(scales[()]).reshape(grid_shape), zero_points, rows, columns, groups)

        return QuantizedWeight((out, size), numbers, grid, kept)

    def _groups(self, name: str, size: int, groups: int) -> Callable[[], np.ndarray]:
        """Return a reader of the groups of the inputs."""
        tensor = self._tensor(name, INTEGERS)
        self._expect(name, [size])

        def read() -> np.ndarray:
            order: np.ndarray = tensor[()]
            if order.size and not 0 <= order.min() <= order.max() < groups:
                raise ValueError(f"model: {name} must be between 0 and {groups - 1}")
            return order

        return read

    def _group_size(self, name: str, size: int, groups: int) -> int:
        if not groups or size % groups:
            raise ValueError(f"model: {name} has {groups} groups, which do not divide the weight's {size} inputs")
        return size // groups

    def _tensor(self, name: str, dtypes: Collection[str] = ()) -> Any:
        if name not in self._tensors:
            raise ValueError(f"model: the quantized checkpoint lacks {name}")
        self._used.add(name)
        tensor = self._tensors[name]
        if dtypes and (found := tensor.get_dtype()) not in dtypes:
            raise ValueError(f"model: {name} is {found}, and must be {' or '.join(dtypes)}")
        return tensor

    def _optional(self, name: str, dtypes: Collection[str]) -> Any:
        return self._tensor(name, dtypes) if name in self._tensors else None

    def _matrix(self, name: str, dtypes: Collection[str]) -> Any:
        tensor = self._tensor(name, dtypes)
        if len(tensor.get_shape()) != 2:
            raise ValueError(f"model: {name} has shape {tensor.get_shape()}, and must be a matrix")
        return tensor

    def _expect(self, name: str, shape: list[int]) -> None:
        if (found := self._tensor(name).get_shape()) != shape:
            raise ValueError(f"model: {name} has shape {found}, expected {shape}")


def unpacked(
    tensor: Any, bits: int, axis: int, bounds: tuple[Bounds, Bounds], shifts: Sequence[int] | None = None
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


class Float8:
    """Tensor of float8_e4m3fn in a file, which the safetensors library does not read for numpy."""

    def __init__(self, data: np.ndarray):
        self._data = data

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self._data.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype."""
        return FLOAT8

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return a copy of a part."""
        return np.array(self._data[index])


def float8_tensors(file: Path) -> dict[str, Float8]:
    """Return the tensors of float8_e4m3fn in a file that safetensors has opened, and thereby checked.

    The file begins with the length of a JSON header, in 8 bytes; offsets count from its end.
    """
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
    data = np.memmap(file, np.uint8, "r", offset=8 + length) if file.stat().st_size > 8 + length else np.empty(0)
    return {
        name: Float8(data[slice(*entry["data_offsets"])].view(ml_dtypes.float8_e4m3fn).reshape(entry["shape"]))
        for name, entry in header.items()
        if entry.get("dtype") == FLOAT8
    }


def _floats(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[Bounds, Bounds]:
    """Return the bounds of the rows and columns of a part."""
    rows, columns = (part.indices(size)[:2] for part, size in zip(index, shape))
    return rows, columns
