"""Supported architectures, by Hugging Face's names."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.checkpoint_files import read_json
from jpaged.models import gemma, granite, llama, mistral, olmo2, opt, phi3, qwen, smollm3
from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import CONFIG, GENERATION, read_hf
from jpaged.models.field_types import Hf

FAMILIES = (llama, mistral, qwen, gemma, phi3, olmo2, granite, smollm3, opt)
_ARCHITECTURES: dict[str, Architecture] = {
    architecture.config.architecture: architecture for family in FAMILIES for architecture in family.ARCHITECTURES
}
MULTIMODAL = ("vision_config", "audio_config", "thinker_config")  # fields of configs with several parts


def architectures() -> Iterator[Architecture]:
    """Return all architectures."""
    return iter(_ARCHITECTURES.values())


def register(architecture: Architecture) -> None:
    """Add an architecture, under the name in its config, for this process."""
    _ARCHITECTURES[architecture.config.architecture] = architecture


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model's config.

    Raises:
        ValueError: the config's architecture is not registered.
    """
    if config.architecture not in _ARCHITECTURES:
        raise ValueError(_unsupported(config.architecture))
    return _ARCHITECTURES[config.architecture]


def read_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the config of a model, by its architecture.

    Args:
        overrides: as `EngineConfig.hf_overrides`.

    Raises:
        ValueError: the architecture is not registered, or a value is not supported; the message has the file's path.
    """
    path = directory / CONFIG
    if not path.exists():
        raise ValueError(f"model: {directory} has no {CONFIG}")
    hf, generation = read_hf(directory, overrides), read_json(directory / GENERATION, missing_ok=True)
    for architecture in _ARCHITECTURES.values():
        if architecture.config.describes(hf):
            try:
                return architecture.config.from_hf(hf, generation)
            # The last two: a value of a wrong type was computed with.
            except (ValueError, TypeError, ArithmeticError) as error:
                where = f"{path}{', ' + GENERATION if generation else ''}{', hf_overrides' if overrides else ''}"
                raise ValueError(f"{where}: {error}") from error
    names = hf.get("architectures") or [hf.get("model_type")]
    name = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
    raise ValueError(f"{path}: {_unsupported(name, hf)}")


def _unsupported(name: str, hf: Hf | None = None) -> str:
    """Return the error of an architecture that is not registered, with the one whose name is most similar."""
    (closest,) = difflib.get_close_matches(name[:200], _ARCHITECTURES, n=1, cutoff=0)
    error = f"architecture {name:.200} is not supported; supported: {', '.join(_ARCHITECTURES)}; closest: {closest}"
    if any(field in (hf or {}) for field in MULTIMODAL):
        error += "; of multimodal models, only the text part of Gemma 3 is supported"
    return error
