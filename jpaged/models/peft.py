"""Adapters as PEFT saves them: a directory with `adapter_config.json` and `adapter_model.safetensors`."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.checkpoint_files import read_json
from jpaged.models.adapters import Adapter, Pair, SlotsForm
from jpaged.models.base import Part
from jpaged.models.config import ModelConfig
from jpaged.models.registry import architecture_of
from jpaged.models.safetensors_files import FLOATS, StoredTensor, open_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
# Fields whose other values would be another computation, each with the only value that is read.
FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False, None), "bias": ("none", None), "modules_to_save": (None, []),
    "fan_in_fan_out": (False, None), "lora_bias": (False, None), "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,), "target_parameters": (None, []), "use_bdlora": (None, False),
}  # fmt: skip


def read_adapter(directory: Path, config: ModelConfig, form: SlotsForm) -> Adapter:
    """Return the adapter of a directory, for a model with this config. Its arrays are in NumPy, as they are stored.

    Raises:
        ValueError: the adapter can't be served; the message names the field, the tensor or the module.
    """
    if not (directory / CONFIG).is_file():
        raise ValueError(f"adapter: {directory} has no {CONFIG}")
    if not (directory / TENSORS).is_file():
        pickled = "; files in PyTorch's format (*.bin) are not read" * (directory / "adapter_model.bin").exists()
        raise ValueError(f"adapter: {directory} has no {TENSORS}{pickled}")
    fields = read_json(directory / CONFIG)
    for name, allowed in FIELDS.items():
        if (value := fields.get(name)) not in allowed and name in fields:
            raise ValueError(f"adapter: {name} is {value!r} in {CONFIG}; only {allowed[0]!r} is supported")
    places = places_of(config, form)
    with open_tensors(directory) as tensors:
        matrices = dict(_matrices(tensors, architecture_of(config).rename))
        for module, pair in matrices.items():
            if module not in places:
                raise ValueError(f"adapter: {module} is no linear layer of the model that an adapter may change")
            if pair.keys() != {"A", "B"}:
                raise ValueError(f"adapter: {module} lacks lora_{'B' if 'A' in pair else 'A'}")
        pairs, scales = {}, {}
        for module, pair in matrices.items():
            a, b = _array(pair["A"]), _array(pair["B"])
            scale = _scale(fields, module, len(a) if a.ndim == 2 else 0)
            for name, part in places[module]:
                rows = slice(part.start, None if part.rows is None else part.start + part.rows)
                pairs[name], scales[name] = Pair(a, np.ascontiguousarray(b[rows].T)), scale
    return Adapter(pairs, scales)


def places_of(config: ModelConfig, form: SlotsForm) -> dict[str, list[tuple[str, Part]]]:
    """Return the layers that each module of transformers stands for, with the rows of its output that are theirs."""
    architecture, places = architecture_of(config), dict[str, list[tuple[str, Part]]]()
    for name in form.layers:
        path = tuple(int(each) if each.isdigit() else each for each in name.split("."))
        source = architecture.source((*path, "weight"), config)
        if not source.stacked and len(source.parts) == 1:
            (part,) = source.parts
            places.setdefault(part.name.removesuffix(".weight"), []).append((name, part))
    return places


def _matrices(tensors: Mapping[str, StoredTensor], rename: Any) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Yield the matrices A and B of each module."""
    found = dict[str, dict[str, StoredTensor]]()
    for name, tensor in tensors.items():
        match = MATRIX.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise ValueError(f"adapter: {name} is neither lora_A nor lora_B of a linear layer")
        module = rename(f"{match['module']}.weight").removesuffix(".weight")
        found.setdefault(module, {})[match["matrix"]] = tensor
    yield from found.items()


def _array(tensor: StoredTensor) -> np.ndarray:
    """Return a matrix in its own dtype; ValueError if that is no floating-point one."""
    if tensor.get_dtype() not in FLOATS:
        raise ValueError(f"adapter: a matrix is {tensor.get_dtype()}, expected one of {', '.join(FLOATS)}")
    array: np.ndarray = tensor[:]
    return array if array.dtype != np.uint16 else array.view(ml_dtypes.bfloat16)


def _scale(fields: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of a module's product: alpha / r, or alpha / sqrt(r) of rsLoRA."""
    alpha, wanted = (_of_module(fields, name, pattern, module) for name, pattern in
                     (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern")))  # fmt: skip
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ValueError(f"adapter: lora_alpha must be a finite number, not {alpha!r}")
    if wanted != rank:
        raise ValueError(f"adapter: {module} has rank {rank} in its tensors, and {wanted!r} in {CONFIG}")
    if not rank:
        raise ValueError(f"adapter: {module} has rank 0")
    return float(alpha / math.sqrt(rank) if fields.get("use_rslora") else alpha / rank)


def _of_module(fields: Mapping[str, Any], name: str, pattern: str, module: str) -> Any:
    """Return a value for a module, which PEFT's pattern of the longest matching end may replace."""
    patterns = fields.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"adapter: {pattern} must be an object, not {patterns!r}")
    for key, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return fields.get(name)
