"""Tensors that hold weights of all experts, in the place of tensors of each expert."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np

from jpaged.models.safetensors_files import DerivedTensor, StoredTensor, StoredTensors

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def of_each_expert(tensors: StoredTensors, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, with those of these names in the place of joint ones.

    A tensor `experts.gate_up_proj` [E, 2 out, in] holds gate and then up of each expert, `experts.down_proj` the rest.
    """
    found, used = {}, set()
    for name in names:
        expert = None if name in tensors else EXPERT.fullmatch(name)
        if expert is None:
            continue
        block, number, weight = expert[1], int(expert[2]), expert[3]
        joint = f"{block}.{'down_proj' if weight == 'down_proj' else 'gate_up_proj'}"
        tensor = tensors.get(joint)
        if tensor is None or len(shape := tensor.get_shape()) != 3 or number >= shape[0]:
            continue
        used.add(joint)
        size = shape[1] if weight == "down_proj" else shape[1] // 2
        read = partial(_read, tensor, number, size * (weight == "up_proj"), size)
        found[name] = DerivedTensor((size, shape[2]), tensor.get_dtype(), read)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | found


def _read(tensor: StoredTensor, number: int, first: int, size: int, index: Sequence[slice]) -> np.ndarray:
    """Return a part of an expert's weight, whose rows begin at one of the joint tensor's."""
    rows, columns = index
    low, high, _ = rows.indices(size)
    (own,) = np.asarray(tensor[(slice(number, number + 1), slice(first + low, first + high), columns)])
    return cast(np.ndarray, own)
