"""Tensors of Qwen 3.5's recurrent layers in a file in GGUF, in Hugging Face's form.

llama.cpp's converter stores -exp(A_log), drops an axis of the convolution, and orders the heads of values so that those
of one head of keys do not stand side by side: head j of head of keys i is head j K + i of K heads of keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jpaged.models.config import ModelConfig
from jpaged.models.gguf_tensor import GgufColumns, GgufWeight
from jpaged.models.safetensors_files import DerivedTensor, StoredTensor
from jpaged.models.variation import Recurrence


def recurrent(name: str, weight: GgufWeight, config: ModelConfig) -> StoredTensor:
    """Return a tensor with a name that contains `linear_attn`."""
    recurrence = config.variation.recurrence
    assert recurrence is not None, "only models with recurrent layers have such names"
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if part == "out_proj":
        return GgufColumns(weight, _heads(recurrence))
    if part in ROWS:
        order: np.ndarray = ROWS[part](recurrence)
        if weight.stored.shape[0] == len(order):  # otherwise the shape is refused
            weight = replace(weight, order=order)
    if part == "A_log":
        return DerivedTensor(tuple(weight.get_shape()), "F32", lambda index: np.log(-weight[index]))
    if part == "conv1d" and len(weight.get_shape()) == 2:
        channels, width = weight.get_shape()
        return DerivedTensor((channels, 1, width), weight.get_dtype(), lambda index: _with_axis(weight, index))
    return weight


def _with_axis(weight: GgufWeight, index: Any) -> np.ndarray:
    rows, middle, columns = index
    return weight[rows, columns][:, None][:, middle]


def _heads(recurrence: Recurrence, size: int = 1, before: int = 0) -> np.ndarray:
    """Return the row in the file of each row: `size` rows of each head of values, behind some other rows."""
    keys = recurrence.num_key_heads
    heads = np.arange(recurrence.num_value_heads).reshape(-1, keys).T.reshape(-1)
    rows = (heads[:, None] * size + np.arange(size)).reshape(-1)
    return np.concatenate([np.arange(before), before + rows])


def _keys_and_values(recurrence: Recurrence) -> np.ndarray:
    before = 2 * recurrence.num_key_heads * recurrence.key_dim  # rows of queries and keys
    return _heads(recurrence, recurrence.value_dim, before)


ROWS: dict[str, Callable[[Recurrence], np.ndarray]] = {
    "in_proj_qkv": _keys_and_values,
    "conv1d": _keys_and_values,
    "in_proj_z": lambda recurrence: _heads(recurrence, recurrence.value_dim),
    **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), _heads),
}
