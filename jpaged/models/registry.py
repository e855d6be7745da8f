"""Supported architectures, by Hugging Face's names."""

from pathlib import Path

from jpaged.config import CONFIG, ModelConfig, read_json
from jpaged.models import gemma, granite, llama, mistral, olmo2, opt, phi3, qwen, smollm3
from jpaged.models.base import Architecture

FAMILIES = (llama, mistral, qwen, gemma, phi3, olmo2, granite, smollm3, opt)
_ARCHITECTURES: dict[str, Architecture] = {
    architecture.config.architecture: architecture for family in FAMILIES for architecture in family.ARCHITECTURES
}


def register(architecture: Architecture) -> None:
    """Add an architecture, under the name in its config, for this process."""
    _ARCHITECTURES[architecture.config.architecture] = architecture


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model's config.

    Raises:
        ValueError: none is registered for it.
    """
    if config.architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture:.200} is not supported; supported: {_names()}")
    return _ARCHITECTURES[config.architecture]


def read_config(directory: Path) -> ModelConfig:
    """Read the config of a model, by its architecture.

    Raises:
        ValueError: the architecture is not registered, or a value is not possible; the message has the file's path.
    """
    if not (directory / CONFIG).is_file():
        raise ValueError(f"model: {directory} has no {CONFIG}")
    hf = read_json(directory / CONFIG)
    for architecture in _ARCHITECTURES.values():
        if architecture.config.describes(hf):
            return architecture.config.from_directory(directory)
    told = hf.get("architectures") or [hf.get("model_type")]
    named = ", ".join(map(str, told)) if isinstance(told, list) else str(told)
    raise ValueError(f"{directory / CONFIG}: architecture {named:.200} is not supported; supported: {_names()}")


def _names() -> str:
    return ", ".join(_ARCHITECTURES)
