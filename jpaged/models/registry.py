"""The architectures that can be served, by the names that Hugging Face gives them."""

from pathlib import Path

from jpaged.config import CONFIG, ModelConfig, read_json
from jpaged.models import llama
from jpaged.models.base import Architecture

_ARCHITECTURES: dict[str, Architecture] = {llama.ARCHITECTURE.config.architecture: llama.ARCHITECTURE}


def register(architecture: Architecture) -> None:
    """Serve another architecture, under the name that its config has, from now on and in this process."""
    _ARCHITECTURES[architecture.config.architecture] = architecture


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model's config. Raises ValueError if none is registered for it."""
    if config.architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture {config.architecture:.200} is not supported; supported: {_names()}")
    return _ARCHITECTURES[config.architecture]


def read_config(directory: Path) -> ModelConfig:
    """Read the config of a model, by its architecture.

    Raises ValueError, with the file's path, for an architecture that is not registered, and for a value that is not
    possible.
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
