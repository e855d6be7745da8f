"""Quantized checkpoints of the hub: weights are kept as they are stored, or computed in float32 when they are read.

The quantization of activations and of the KV cache that a checkpoint may describe is not applied. The function of a
format reads `quantization_config`, and returns the function that reads a layer. The former raises ValueError with the
name of a field whose value is not supported, the latter with that of a tensor that does not fit.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpaged.checkpoint_files import read_json
from jpaged.models.config_file import CONFIG
from jpaged.models.mxfp4 import Mxfp4Weight
from jpaged.models.quantized_weight import Bounds, Grid, QuantizedWeight, unpacked
from jpaged.models.safetensors_files import FLOAT8, DerivedTensor, KeptTensor, StoredTensor, StoredTensors
from pallas_kernels.weights import PACKED

BYTES, WORDS, INTEGERS, FLOATS = ("U8",), ("I32",), ("I32", "I64"), ("F32", "F16", "BF16")
COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}  # all but the last are defaults
# Tensors about activations and the KV cache, which are not quantized as a checkpoint describes.
UNUSED = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale", ".k_zero_point", ".v_zero_point", ".activation_scale",
)  # fmt: skip

Described = Mapping[str, object]  # the content of `quantization_config`
Block = tuple[int, int]  # rows and columns of a block with one scale


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of a layer, by the last part of their names. A tensor that does not fit is a ValueError.

    Attributes:
        tensors: all tensors of the checkpoint.
        prefix: the part of a name before the last one, with the dot.
        used: names of the tensors that were read; methods add to it.
    """

    tensors: StoredTensors
    prefix: str
    used: set[str]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def tensor(self, name: str, dtypes: Collection[str]) -> StoredTensor:
        """Return a tensor of one of the dtypes."""
        name = self.prefix + name
        if name not in self.tensors:
            raise ValueError(f"model: the quantized checkpoint lacks {name}")
        self.used.add(name)
        if (dtype := self.tensors[name].get_dtype()) not in dtypes:
            raise ValueError(f"model: {name} is {dtype}, and must be {' or '.join(dtypes)}")
        return self.tensors[name]

    def matrix(self, name: str, dtypes: Collection[str]) -> tuple[StoredTensor, int, int]:
        """Return a matrix of one of the dtypes, and its numbers of rows and columns."""
        tensor = self.tensor(name, dtypes)
        if len(shape := tensor.get_shape()) != 2:
            raise ValueError(f"model: {self.prefix}{name} has shape {shape}, and must be a matrix")
        return tensor, shape[0], shape[1]

    def check_shape(self, name: str, *expected: int) -> None:
        """Check the shape of a tensor."""
        if (shape := self.tensors[self.prefix + name].get_shape()) != [*expected]:
            raise ValueError(f"model: {self.prefix}{name} has shape {shape}, expected {[*expected]}")

    def group_size(self, name: str, size: int, groups: int) -> int:
        """Return the number of inputs in a group, for a weight of `size` inputs with these scales."""
        if not groups or size % groups:
            error = f"{self.prefix}{name} has {groups} groups, which do not divide the weight's {size} inputs"
            raise ValueError(f"model: {error}")
        return size // groups

    def group_of_inputs(self, name: str, size: int, groups: int) -> Callable[[], np.ndarray] | None:
        """Return a function that reads the group of each of `size` inputs; None without this tensor."""
        if name not in self:
            return None
        tensor = self.tensor(name, INTEGERS)
        self.check_shape(name, size)

        def read() -> np.ndarray:
            order = tensor[()]
            if order.size and not 0 <= order.min() <= order.max() < groups:
                raise ValueError(f"model: {self.prefix}{name} must be between 0 and {groups - 1}")
            return order

        return read


class Scheme(NamedTuple):
    """Quantization of a checkpoint.

    Attributes:
        method: its name in config.json, one of `jpaged.config.QUANTIZED_CHECKPOINTS`.
        marks: names of tensors that only quantized layers have; each of these layers has one of them.
        read: return the weights of a layer, by the last part of their names.
        weights: "int8" if all are described as int8 with one scale for each output.
    """

    method: str
    marks: tuple[str, ...]
    read: Callable[[LayerTensors], Mapping[str, KeptTensor]]
    weights: str | None = None


def _one_weight(read: Callable[..., QuantizedWeight], layer: LayerTensors, **options: Any) -> dict[str, KeptTensor]:
    """Return the weight of a linear layer by its name."""
    return {"weight": read(layer, **options)}


def awq(described: Described) -> Scheme:
    """AWQ: numbers of 4 bits, eight of which are a word along the outputs (gemm)."""
    _check(described, "bits", 4)
    _check(described, "version", "gemm", "GEMM")
    _check(described, "zero_point", True)
    return Scheme(
        "awq", ("qweight",), partial(_one_weight, grouped_weight, axis=1, shifts=(0, 16, 4, 20, 8, 24, 12, 28))
    )


def gptq(described: Described) -> Scheme:
    """GPTQ: numbers of 4 or 8 bits in words along the inputs; the first version stores zero points less 1."""
    _check(described, "bits", 4, 8)
    _check(described, "checkpoint_format", "gptq", "gptq_v2")
    bits, zero_offset = 8 if described.get("bits") == 8 else 4, int(described.get("checkpoint_format") != "gptq_v2")
    return Scheme(
        "gptq", ("qweight",), partial(_one_weight, grouped_weight, axis=0, bits=bits, zero_offset=zero_offset)
    )


def fp8(described: Described) -> Scheme:
    """FP8: numbers of float8_e4m3fn with scales of the tensor, of rows or of blocks."""
    _check(described, "fmt", "e4m3")
    block = _block_of("weight_block_size", described.get("weight_block_size"))
    return Scheme("fp8", ("weight_scale", "weight_scale_inv"), partial(_one_weight, scaled_weight, block=block))


def compressed_tensors(described: Described) -> Scheme:
    """compressed-tensors, as LLM Compressor writes them: numbers of 8 bits, and packed integers of 4 or 8 bits."""
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
    read = partial(_one_weight, compressed_weight, block=blocks.pop() if blocks else None)
    is_int8 = bool(weights) and all(INT8.items() <= {**INT8, "strategy": None, **each}.items() for each in weights)
    return Scheme("compressed-tensors", ("weight_scale",), read, "int8" if is_int8 else None)


def mxfp4(described: Described) -> Scheme:
    """MXFP4 of gpt-oss: codes of e2m1 with exponents of groups of 32, in the experts."""
    return Scheme("mxfp4", ("down_proj_blocks",), mxfp4_weights)


FORMATS = {  # by `quant_method`
    "awq": awq, "gptq": gptq, "fp8": fp8, "compressed-tensors": compressed_tensors, "mxfp4": mxfp4,
}  # fmt: skip


def read_scheme(directory: Path) -> Scheme | None:
    """Return the quantization of a directory's checkpoint; None if it is not quantized.

    Raises:
        ValueError: the quantization is not supported; the message has the field of config.json.
    """
    hf = read_json(directory / CONFIG, missing_ok=True)
    described = hf.get("quantization_config") or hf.get("compression_config")
    try:
        return scheme_of(described) if described else None
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: quantization_config: {error}") from error


def scheme_of(described: object) -> Scheme:
    """Return the quantization that `quantization_config` describes. Raises ValueError if it is not supported."""
    if not isinstance(described, dict):
        raise ValueError(f"must be a JSON object, not {described!r:.100}")
    method = described.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(f"quant_method {method!r:.100} is not supported; supported: {', '.join(FORMATS)}")
    return FORMATS[method](described)


def dequantized(tensors: StoredTensors, scheme: Scheme, expected: Collection[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a quantized checkpoint with a `QuantizedWeight` for each quantized weight.

    The tensors that belong to it are left out, and so are those about activations and the KV cache.

    Args:
        expected: names of the model's tensors. GPTQ writes zeros as biases of layers that have none.

    Raises:
        ValueError: a tensor is missing or misshapen.
    """
    weights: dict[str, StoredTensor] = {}
    used = {name for name in tensors if name.endswith(UNUSED)}
    for name in tensors:
        *_, leaf = name.rpartition(".")
        if leaf in scheme.marks:
            layer = LayerTensors(tensors, name.removesuffix(leaf), used)
            weights |= {layer.prefix + name: weight for name, weight in scheme.read(layer).items()}
            bias = layer.prefix + "bias"
            if bias in tensors and bias not in expected and not tensors[bias][:].any():
                used.add(bias)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | weights


def grouped_weight(
    layer: LayerTensors, *, axis: int, bits: int = 4, shifts: Sequence[int] | None = None, zero_offset: int = 0
) -> QuantizedWeight:
    """Return a weight of integers with scales and zero points of groups of inputs.

    Words of 32 bits hold b bits of each number: qweight [in * b / 32, out] (axis 0) or [in, out * b / 32] (axis 1),
    and qzeros [in / g, out * b / 32]. Scales are [in / g, out]. With axis 0, inputs may be in any order of groups.

    Args:
        shifts: as in `unpacked`.
        zero_offset: number to add to zero points.
    """
    per_word, middle = 32 // bits, 1 << (bits - 1)
    qweight, *sizes = layer.matrix("qweight", WORDS)
    qzeros, *_ = layer.matrix("qzeros", WORDS)
    scales, groups, _ = layer.matrix("scales", FLOATS)
    size, out = (per_word * n if i == axis else n for i, n in enumerate(sizes))
    layer.check_shape("scales", groups, out)
    layer.check_shape("qzeros", groups, -(-out // per_word))
    order = layer.group_of_inputs("g_idx", size, groups) if axis == 0 else None
    columns = size if order and size % groups else layer.group_size("scales", size, groups)

    def numbers(rows: Bounds, within: Bounds) -> np.ndarray:
        return _centered(unpacked(qweight, bits, axis, (within, rows), shifts).T, middle)

    def zeros() -> np.ndarray:
        stored = unpacked(qzeros, bits, 1, ((0, groups), (0, out)), shifts)
        return _float32(stored).T + (zero_offset - middle)

    grid = Grid(lambda: _float32(scales[:]).T, _kept_dtype(scales), zeros, 1, columns, order)
    return QuantizedWeight((out, size), "uint8" if bits == 4 else "int8", numbers, grid)


def scaled_weight(layer: LayerTensors, *, block: Block | None = None) -> QuantizedWeight:
    """Return a weight [out, in] of numbers of 8 bits, with scales of the tensor, of rows, of groups or of blocks."""
    weight, out, size = layer.matrix("weight", (FLOAT8, "I8"))
    name = "weight_scale" if "weight_scale" in layer else "weight_scale_inv"
    has_zeros = "weight_zero_point" in layer
    zeros = layer.tensor("weight_zero_point", (FLOAT8, "I8", *FLOATS)) if has_zeros else None
    dtype = "int8" if weight.get_dtype() == "I8" else "float8_e4m3fn"
    numbers = lambda rows, columns: weight[slice(*rows), slice(*columns)]
    return QuantizedWeight((out, size), dtype, numbers, _grid(layer, name, (out, size), block, zeros))


def compressed_weight(layer: LayerTensors, *, block: Block | None = None) -> QuantizedWeight:
    """Return a weight of 8 bits, or of integers in words along the inputs, with zero points along the outputs."""
    if "weight_packed" not in layer:
        return scaled_weight(layer, block=block)
    packed, out, words = layer.matrix("weight_packed", WORDS)
    sizes, prefix = layer.tensor("weight_shape", INTEGERS), layer.prefix
    shape = sizes[()].tolist() if sizes.get_shape() == [2] else []
    bits = next((b for b in (4, 8) if len(shape) == 2 and shape[0] == out and -(-shape[1] * b // 32) == words), 0)
    if not bits:
        raise ValueError(f"model: {prefix}weight_packed has shape {[out, words]}, and {prefix}weight_shape {shape}")
    middle, zeros = 1 << (bits - 1), None
    if "weight_zero_point" in layer:
        points = layer.tensor("weight_zero_point", WORDS)
        whole = (0, out), (0, points.get_shape()[-1])
        zeros = DerivedTensor((), "", lambda _: _centered(unpacked(points, bits, 0, whole), middle))
    grid = _grid(layer, "weight_scale", (out, shape[1]), block, zeros)
    numbers = lambda rows, columns: _centered(unpacked(packed, bits, 1, (rows, columns)), middle)
    return QuantizedWeight((out, shape[1]), "uint8" if bits == 4 else "int8", numbers, grid)


def mxfp4_weights(layer: LayerTensors) -> dict[str, KeptTensor]:
    """Return the weights [E, out, in] of experts: gate and up from one tensor, in turn, and down."""
    weights: dict[str, KeptTensor] = {}
    for name, members in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        blocks = layer.tensor(f"{name}_blocks", BYTES)
        if len(shape := blocks.get_shape()) != 4 or shape[1] % len(members) or shape[3] != PACKED // 2:
            expected = f"[E, {'outputs' if len(members) == 1 else '2 outputs'}, groups, {PACKED // 2}]"
            raise ValueError(f"model: {layer.prefix}{name}_blocks has shape {shape}, expected {expected}")
        scales = layer.tensor(f"{name}_scales", BYTES)
        layer.check_shape(f"{name}_scales", *shape[:3])
        weights |= {each: Mxfp4Weight(blocks, scales, i, len(members)) for i, each in enumerate(members)}
    return weights


def _grid(
    layer: LayerTensors, name: str, shape: tuple[int, int], block: Block | None, zeros: StoredTensor | None
) -> Grid:
    """Return the scales of a weight."""
    scales, (out, size) = layer.tensor(name, FLOATS), shape
    stored = scales.get_shape()
    if math.prod(stored) == 1:
        rows, columns, grid_shape = out, size, (1, 1)
    elif stored[0] == out and len(stored) <= 2 and not (block and len(stored) == 2 and stored[1] > 1):
        groups = stored[1] if len(stored) == 2 else 1
        rows, columns, grid_shape = 1, layer.group_size(name, size, groups), (out, groups)
    elif block:
        (rows, columns), grid_shape = block, (-(-out // block[0]), -(-size // block[1]))
        layer.check_shape(name, *grid_shape)
    else:
        error = f"{layer.prefix}{name} has shape {stored}, which does not fit a weight of shape {list(shape)}"
        raise ValueError(f"model: {error}")
    order = layer.group_of_inputs("weight_g_idx", size, grid_shape[1])
    read: Callable[[StoredTensor], Callable[[], np.ndarray]] = lambda tensor: (
        lambda: _float32(tensor[()]).reshape(grid_shape)
    )
    return Grid(read(scales), _kept_dtype(scales), read(zeros) if zeros else None, rows, columns, order)


def _centered(numbers: np.ndarray, middle: int) -> np.ndarray:
    """Return numbers of 4 or 8 bits less their middle, int8."""
    return (numbers - np.uint8(middle)).view(np.int8)


def _kept_dtype(scales: StoredTensor) -> str:
    """Return the dtype of kept scales of groups: that of the stored ones, if products have code for it."""
    return "float16" if scales.get_dtype() == "F16" else "float32"


def _check(described: Described, name: str, *allowed: object) -> None:
    """Check that a field has an allowed value; the first of them is its default. Raises ValueError."""
    value = described.get(name, allowed[0])
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name} {value!r:.100} is not supported; supported: {', '.join(map(str, allowed))}")


def _block_of(name: str, value: object) -> Block | None:
    """Return the block in a field, a list or a text like 128x128; None if it is null. Raises ValueError."""
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        rows, columns = map(int, sizes)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be two numbers, not {value!r:.100}") from error
    if min(rows, columns) < 1:
        raise ValueError(f"{name} must be at least 1, not {value!r:.100}")
    return rows, columns


def _float32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
