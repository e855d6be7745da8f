"""The files of a checkpoint that describe its model: config.json and generation_config.json."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jpaged.checkpoint_files import read_json
from jpaged.models.config import NEUTRAL, ModelConfig
from jpaged.models.variation import DEFAULT_ROPE_THETA, ROPE, Hf

CONFIG, GENERATION = "config.json", "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # the latter's sampling parameters


def sampling_defaults(directory: Path) -> Hf:
    """Return generation_config.json's sampling parameters, the defaults of requests to the server."""
    generation = read_json(directory / GENERATION, missing_ok=True)
    return {name: generation[name] for name in SAMPLING if generation.get(name) is not None}


def read_hf(directory: Path, overrides: Mapping[str, Any] | None = None) -> Hf:
    """Return the content of config.json with the overrides of `EngineConfig.hf_overrides`.

    A file in GGUF instead of a directory has the content in its metadata.

    An override of `rope_scaling` or `rope_parameters` replaces both. Of `text_config`, the named fields are replaced.

    Raises:
        ValueError: the file is invalid, or an override is not a field of such a file.
    """
    if directory.is_file():
        from jpaged.models.gguf_config import read_gguf_config  # it loads numpy

        hf = read_gguf_config(directory)
    else:
        hf = read_json(directory / CONFIG)
    return _overridden(hf, overrides, "hf_overrides") if overrides else hf


def _overridden(hf: Hf, overrides: Mapping[str, Any], where: str) -> Hf:
    known = set(hf) - {"quantization_config", "compression_config"}  # these describe the tensors
    if "text_config" not in hf:  # otherwise text_config has the fields of the model
        known |= {each.name for each in fields(ModelConfig)} | set(NEUTRAL) | set(ROPE)
        known |= {"architectures", "model_type", "eos_token_id", "original_max_position_embeddings"}
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{where}: {name} is not a field of the model's {CONFIG} that can be replaced{hint}")
    kept, new = dict(hf), dict(overrides)
    if set(ROPE) & overrides.keys() and isinstance(rope := kept.get("rope_parameters"), dict):
        kept |= {"rope_theta": rope.get("rope_theta", kept.get("rope_theta", DEFAULT_ROPE_THETA))}
        kept["rope_parameters"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if {"rope_scaling", "rope_parameters"} & overrides.keys():
        kept = {name: value for name, value in kept.items() if name not in ("rope_scaling", "rope_parameters")}
    text, new_text = hf.get("text_config"), overrides.get("text_config")
    if isinstance(text, dict) and isinstance(new_text, Mapping):
        new["text_config"] = _overridden(text, new_text, f"{where}.text_config")
    return kept | new
