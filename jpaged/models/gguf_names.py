"""Tensors of a file in GGUF by Hugging Face's names, in Hugging Face's order of rows.

Names are those of llama.cpp's `tensor_mapping.py`, in the package `gguf`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

from jpaged.gguf_file import GgufFile, GgufTensor
from jpaged.models.config import ModelConfig
from jpaged.models.gguf_recurrence import recurrent
from jpaged.models.gguf_tensor import GgufJoin, GgufStack, GgufWeight, Scales
from jpaged.models.safetensors_files import StoredTensor

# Architectures whose rotary embedding turns adjacent dims in llama.cpp: rows of queries and keys lie in that order.
ADJACENT = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
WITH_OFFSET = ("gemma2", "gemma3", "qwen35", "qwen35moe")  # their norms are stored as the factor 1 + weight
OFFSET = re.compile(r"(?<!\.linear_attn\.)norm\.weight$")  # such norms
# Names that the package's map has under others.
ALIASES = {
    "linear_attn.A_log": "linear_attn.A_log.weight", "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction.bias",
}  # fmt: skip
# Granite's checkpoints hold gate and up in one tensor.
JOINS = {
    "block_sparse_moe.input_linear.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
}
IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+\.weight)")
WITHOUT_DOT = re.compile(r"\.(sinks|experts\.(gate|up|down)_proj(_bias)?)$")  # Hugging Face's names in gpt-oss
QUERIES_OR_KEYS = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config


def named_tensors(
    file: GgufFile, config: ModelConfig, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """Return the tensors of a model by Hugging Face's names, and unknown tensors by their names in the file.

    Args:
        expected: shapes of the model's tensors. A tensor of another shape is returned with its own.
    """
    (architecture,) = [each for each, name in MODEL_ARCH_NAMES.items() if name == file.architecture]
    names, used = get_tensor_name_map(architecture, config.num_hidden_layers), set(DERIVED)
    named: dict[str, StoredTensor] = {}
    scales = {name: Scales(tensor) for name, tensor in file.tensors.items()}
    if file.number(f"{file.architecture}.nextn_predict_layers", 0):  # the last layers predict several tokens
        used |= {name for name in file.tensors if _layer(name) >= config.num_hidden_layers}
    for name, shape in expected.items():
        if parts := _parts(file, name):
            used.update(parts)
            members = tuple(_weight(file.tensors[part], scales[part]) for part in parts)
            named[name] = GgufJoin(members, len(shape) - 2)
            continue
        own, tensor = _find(file, names, name)
        if tensor is None:
            continue
        used.add(own)
        if shape == (1, *tensor.shape):  # the gate of a shared expert
            tensor = GgufTensor(tensor.kind, shape, tensor.data[None])
        weight: StoredTensor = _weight(tensor, scales[own])
        if isinstance(weight, GgufWeight):
            offset = -1.0 if file.architecture in WITH_OFFSET and OFFSET.search(name) else 0.0
            weight = replace(weight, order=_order(file, config, name, tensor, shape), offset=offset)
            weight = recurrent(name, weight, config) if ".linear_attn." in name else weight
        named[name] = weight
    others = {name: GgufWeight(tensor, scales[name]) for name, tensor in file.tensors.items() if name not in used}
    return named | others


def _layer(name: str) -> int:
    """Return the number of the layer in a tensor's name in the file; -1 if there is none."""
    found = re.match(r"blk\.(\d{1,9})\.", name)
    return int(found[1]) if found else -1


def _parts(file: GgufFile, name: str) -> list[str]:
    """Return the tensors of equal shapes that one of Hugging Face's consists of; none if it is no such tensor."""
    found = IN_LAYER.fullmatch(name)
    parts = [f"blk.{found[1]}.{part}" for part in JOINS.get(found[2], ())] if found else []
    shapes = {file.tensors[part].shape if part in file.tensors else None for part in parts}
    return parts if len(shapes) == 1 and None not in shapes else []


def _weight(tensor: GgufTensor, scales: Scales) -> GgufWeight | GgufStack:
    """Return a matrix or vector, or the matrices of all experts."""
    if len(tensor.shape) < 3:
        return GgufWeight(tensor, scales)
    matrices = (GgufTensor(tensor.kind, tensor.shape[1:], data) for data in tensor.data)
    return GgufStack(tuple(GgufWeight(matrix, scales) for matrix in matrices))


def _find(file: GgufFile, names: TensorNameMap, name: str) -> tuple[str, GgufTensor | None]:
    """Return the name and the tensor, or the matrix of an expert within it, that has one of Hugging Face's names."""
    for alias, other in ALIASES.items():
        name = name.removesuffix(alias) + other if name.endswith(alias) else name
    if WITHOUT_DOT.search(name):
        name = name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else ".weight")
    expert = EXPERT.fullmatch(name)
    own = names.get_name(f"{expert[1]}.{expert[3]}" if expert else name, try_suffixes=(".weight", ".bias")) or ""
    tensor = file.tensors.get(own)
    if not expert:
        bare = own.removesuffix(".weight")  # Qwen 3.5's ssm_a
        return (own, tensor) if tensor is not None else (bare, file.tensors.get(bare))
    index = int(expert[2])
    if tensor is None:  # files of 2024 have a tensor for each expert
        own = own.replace("_exps.", f".{index}.")
        return own, file.tensors.get(own)
    if len(tensor.shape) == 3 and index < tensor.shape[0]:
        tensor = GgufTensor(tensor.kind, tensor.shape[1:], tensor.data[index])
    return own, tensor


def _order(
    file: GgufFile, config: ModelConfig, name: str, tensor: GgufTensor, shape: tuple[int, ...]
) -> np.ndarray | None:
    """Return the rows of a tensor in Hugging Face's order, the two halves of each head; None: they are in it.

    Row 2 j + i of a head is row j of half i.
    """
    found = QUERIES_OR_KEYS.search(name)
    if found is None or file.architecture not in ADJACENT or tensor.shape[0] != shape[0]:
        return None
    heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
    order: np.ndarray = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return order
