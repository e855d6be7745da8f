"""Quantized checkpoints in the forms of the hub, packed one number at a time, with the weights that they stand for."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pallas_kernels.weights import Format
from tests.support import checkpoints

# All sizes are multiples of the groups and of the numbers in a word.
HF = checkpoints.BASE | {"vocab_size": 96, "intermediate_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 2}
FLOAT8 = ml_dtypes.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, from the lowest on
GROUP = 32


def packed(numbers: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """Words of 32 bits along an axis; `order` gives the number in each place of a word."""
    per_word = 32 // bits
    numbers = np.moveaxis(numbers, axis, 0)
    words = np.zeros((-(-len(numbers) // per_word), numbers.shape[1]), np.uint32)
    for i in range(len(words) * per_word):
        word, place = divmod(i, per_word)
        source = word * per_word + (order[place] if order else place)
        for j in range(numbers.shape[1]):
            if source < len(numbers):
                words[word, j] |= np.uint32(int(numbers[source, j]) << (bits * place))
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def drawn(shape, low, high, rng) -> np.ndarray:
    return rng.integers(low, high, shape)


def awq(shape, rng):
    out, size = shape
    numbers, zeros = drawn(shape, 0, 16, rng), drawn((out, size // GROUP), 0, 16, rng)
    scales = rng.uniform(1e-3, 2e-2, zeros.shape).astype(np.float16)
    tensors = {
        "qweight": packed(numbers.T, 4, 1, AWQ_ORDER), "qzeros": packed(zeros.T, 4, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(scales.T),
    }  # fmt: skip
    return tensors, grouped(numbers, scales, zeros)


def gptq(shape, rng, *, bits=4, order=False, version=1):
    out, size = shape
    numbers, zeros = drawn(shape, 0, 2**bits, rng), drawn((out, size // GROUP), 1, 2**bits, rng)
    scales = rng.uniform(1e-3, 2e-2, zeros.shape).astype(np.float16)
    groups = rng.permutation(size) // GROUP if order else np.arange(size) // GROUP
    tensors = {
        "qweight": packed(numbers.T, bits, 0), "qzeros": packed(zeros.T - (version == 1), bits, 1),
        "scales": np.ascontiguousarray(scales.T), "g_idx": groups.astype(np.int32), "bias": np.zeros(out, np.float16),
    }  # fmt: skip
    return tensors, grouped(numbers, scales, zeros, groups)


def grouped(numbers, scales, zeros, groups=None) -> np.ndarray:
    """(number - zero) * scale, one column after the other."""
    found = np.zeros(numbers.shape, np.float32)
    for column in range(numbers.shape[1]):
        group = column * scales.shape[1] // numbers.shape[1] if groups is None else groups[column]
        found[:, column] = (numbers[:, column] - zeros[:, group]).astype(np.float32) * scales[:, group]
    return found


def scaled(shape, rng, *, stored, scales, name="weight_scale", block=None):
    """8 bits with scales of a shape."""
    weight = rng.standard_normal(shape) * 30
    weight = np.rint(weight).astype(np.int8) if stored == np.int8 else weight.astype(stored)
    grid = rng.uniform(1e-4, 1e-3, scales(shape)).astype(ml_dtypes.bfloat16 if block is None else np.float32)
    found, wide = weight.astype(np.float32), np.asarray(grid, np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            if grid.size == 1:
                scale = wide.item()
            elif block:
                scale = wide[row // block[0], column // block[1]]
            else:
                scale = wide[row, column * wide.shape[1] // shape[1]]
            found[row, column] *= scale
    return {"weight": weight, name: grid, "input_scale": np.ones(1, np.float32)}, found


def pack_quantized(shape, rng, *, bits, group=None, asymmetric=False, order=False):
    out, size = shape
    groups = size // group if group else 1
    half = 2 ** (bits - 1)
    numbers = drawn(shape, -half, half, rng)
    zeros = drawn((out, groups), -half, half, rng) if asymmetric else np.zeros((out, groups), int)
    scales = rng.uniform(1e-3, 2e-2, zeros.shape).astype(ml_dtypes.bfloat16)
    tensors = {
        "weight_packed": packed(numbers + half, bits, 1), "weight_scale": scales,
        "weight_shape": np.asarray(shape, np.int64),
    }  # fmt: skip
    if asymmetric:
        tensors["weight_zero_point"] = packed(zeros + half, bits, 0)
    index = None
    if order:
        index = rng.permutation(size) // group
        tensors["weight_g_idx"] = index.astype(np.int32)
    return tensors, grouped(numbers, scales.astype(np.float32), zeros, index)


def compressed(format, num_bits, type, **further):
    weights = {"num_bits": num_bits, "type": type, "symmetric": True, **further}
    return {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


CHANNEL, TENSOR = (lambda shape: (shape[0], 1)), (lambda shape: (1,))
BLOCK, ODD_BLOCK = (48, 32), (48, 40)  # inputs are no multiple of 40
BLOCKS, ODD_BLOCKS = (
    lambda shape, block=block: tuple(-(-size // each) for size, each in zip(shape, block))
    for block in (BLOCK, ODD_BLOCK)
)
GROUPS = lambda shape: (shape[0], shape[1] // GROUP)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

INT4 = Format("uint8", "float16", "float32", GROUP)
FP8_ROWS, INT8_ROWS = Format("float8_e4m3fn", "float32"), Format("int8", "float32")

# The quantization_config, the function that makes a layer, its options, and the form that is kept; None: none.
CASES = {
    "awq": (AWQ, awq, {}, INT4),
    "gptq": (GPTQ, gptq, {}, INT4),
    "gptq-8": (GPTQ | {"bits": 8}, gptq, {"bits": 8}, INT4._replace(dtype="int8")),
    "gptq-act-order": (GPTQ | {"desc_act": True}, gptq, {"order": True}, None),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"version": 2}, INT4),
    "fp8-tensor": (FP8 | {"activation_scheme": "static"}, scaled, {"stored": FLOAT8, "scales": TENSOR}, FP8_ROWS),
    "fp8-block": (FP8 | {"weight_block_size": list(BLOCK)}, scaled,
                  {"stored": FLOAT8, "scales": BLOCKS, "name": "weight_scale_inv", "block": BLOCK},
                  FP8_ROWS._replace(group=BLOCK[1])),
    "float-channel": (compressed("float-quantized", 8, "float", strategy="channel"), scaled,
                      {"stored": FLOAT8, "scales": CHANNEL}, FP8_ROWS),
    "float-block": (compressed("float-quantized", 8, "float", strategy="block", block_structure=list(ODD_BLOCK)),
                    scaled, {"stored": FLOAT8, "scales": ODD_BLOCKS, "block": ODD_BLOCK}, None),
    "int-channel": (compressed("int-quantized", 8, "int", strategy="channel"), scaled,
                    {"stored": np.int8, "scales": CHANNEL}, INT8_ROWS),
    "naive-group": (compressed("naive-quantized", 8, "int", strategy="group", group_size=GROUP), scaled,
                    {"stored": np.int8, "scales": GROUPS}, INT8_ROWS._replace(group=GROUP)),
    "packed-4": (compressed("pack-quantized", 4, "int", strategy="group", group_size=GROUP), pack_quantized,
                 {"bits": 4, "group": GROUP}, INT4._replace(scales="float32", minima=None)),
    "packed-4-asymmetric": (compressed("pack-quantized", 4, "int", strategy="group", group_size=GROUP), pack_quantized,
                            {"bits": 4, "group": GROUP, "asymmetric": True}, INT4._replace(scales="float32")),
    "packed-4-act-order": (compressed("pack-quantized", 4, "int", strategy="group", actorder="group"), pack_quantized,
                           {"bits": 4, "group": GROUP, "order": True}, None),
    "packed-8": (compressed("pack-quantized", 8, "int", strategy="channel"), pack_quantized, {"bits": 8}, INT8_ROWS),
}  # fmt: skip


def write(directory: Path, name: str) -> dict[str, np.ndarray]:
    """Write a checkpoint, and return the tensors of the checkpoint without quantization that it stands for."""
    described, make, options, _ = CASES[name]
    rng, expected = np.random.default_rng(0), checkpoints.tensors(HF)
    stored = dict(expected)
    for tensor in expected:
        if "_proj.weight" in tensor:
            del stored[tensor]
            prefix = tensor.removesuffix("weight")
            parts, expected[tensor] = make(expected[tensor].shape, rng, **options)
            stored |= {prefix + part: array for part, array in parts.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF | {"quantization_config": described}))
    save_file(stored, directory / "model.safetensors")
    return expected
