"""Files of a model: its directory, its config, its tokenizer and its default sampling parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.core.params import SamplingParams
from jpaged.demo import DIRECTORY as DEMO
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import GENERATION, SAMPLING, sampling_defaults
from jpaged.models.quantized_checkpoint import read_scheme
from jpaged.models.registry import read_config
from jpaged.tokenizer import TOKENIZER_FILES, has_tokenizer, load_tokenizer

WEIGHTS = ["*.safetensors"]
SECOND_COPIES = ["consolidated*"]  # the same weights under Mistral's own names
SMALL_FILES = ["*.json", "*.model", "*.jinja", *TOKENIZER_FILES]  # config, tokenizer and chat templates


def find_model(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Return the directory of a model: "demo", a path, or a hub id.

    A model that is not in the hub's cache is downloaded.

    Args:
        revision: a branch, tag or commit of a hub id.
        weights: False leaves the weights of a hub id out: its config and its tokenizer can be checked before a long
            download.

    Raises:
        ValueError: there is no such model.
    """
    if revision is not None and (name == "demo" or Path(name).expanduser().is_dir()):
        raise ValueError(f"revision: only a hub id has revisions, and {name} is a directory")
    if name == "demo":
        return DEMO
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ValueError(f"model: {name} is not a directory")
    from huggingface_hub import snapshot_download

    try:
        patterns = [*SMALL_FILES, *(WEIGHTS if weights else ())]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=SECOND_COPIES))
    except Exception as error:  # the hub's library has a dozen ways to say no
        raise ValueError(f"model: {name} is neither a directory nor a model on the hub: {error}") from error


def read_checkpoint(
    directory: Path, overrides: Mapping[str, Any] | None = None, *, has_weights: bool = True
) -> tuple[ModelConfig, str | None]:
    """Return the config of a checkpoint, and the method by which its weights are quantized; None: they are not.

    Args:
        overrides: as `EngineConfig.hf_overrides`.
        has_weights: False: the weights are not those of the checkpoint.

    Raises:
        ValueError: a file is missing or invalid, or the model or the quantization is not supported.
    """
    model = read_config(directory, overrides)
    scheme = read_scheme(directory) if has_weights else None
    return model, scheme.method if scheme else None


def find_tokenizer(tokenizer: Any, directory: Path | None = None) -> Any:
    """Return a tokenizer; None if there is none.

    Args:
        tokenizer: a tokenizer, or the name of a directory or hub id; None: that of the model.
        directory: the directory of the model.
    """
    if isinstance(tokenizer, str):
        return load_tokenizer(find_model(tokenizer, weights=False))
    if tokenizer is not None or directory is None:
        return tokenizer
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def default_sampling(directory: Path | None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return default sampling parameters: those in a model's directory, and the overrides.

    Args:
        directory: None: use no parameters of the model.
        overrides: as `EngineConfig.override_generation_config`.

    Raises:
        ValueError: a value is invalid, or an override is not one of these parameters.
    """
    defaults = {} if directory is None else sampling_defaults(directory)
    _check_sampling(defaults, f"{directory}/{GENERATION}")
    overrides = overrides or {}
    if unknown := overrides.keys() - set(SAMPLING):
        raise ValueError(
            f"override_generation_config: {', '.join(sorted(unknown))} is not supported; "
            f"supported: {', '.join(SAMPLING)}"
        )
    _check_sampling(overrides, "override_generation_config")
    return {**defaults, **overrides}


def _check_sampling(values: Mapping[str, Any], source: str) -> None:
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
