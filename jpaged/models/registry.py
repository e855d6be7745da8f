"""Supported architectures, by Hugging Face's names."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.checkpoint_files import read_json
from jpaged.models import gemma, gpt_oss, llama, opt, qwen
from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.config_file import CONFIG, GENERATION, read_hf
from jpaged.models.decoder import Decoder
from jpaged.models.variation import Hf

# In the order of messages and documents.
_ARCHITECTURES: dict[str, Architecture] = {each.config.architecture: each for each in (
    Architecture(
        ModelConfig, llama.Llama,
        examples=("meta-llama/Llama-3.2-1B-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        features="biases, RoPE scaled by linear, llama3, yarn or longrope",
    ),
    Architecture(
        llama.MistralConfig, Decoder,
        examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        features="sliding window",
    ),
    Architecture(
        llama.MixtralConfig, Decoder, llama.mixtral_source, examples=("mistralai/Mixtral-8x7B-Instruct-v0.1",),
        features="mixture of experts, sliding window",
    ),
    Architecture(
        qwen.Qwen2Config, Decoder, examples=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2-0.5B"),
        features="biases of queries, keys and values; sliding windows",
    ),
    Architecture(
        qwen.Qwen3Config, Decoder, examples=("Qwen/Qwen3-8B",), features="norms of heads, sliding windows",
    ),
    Architecture(
        qwen.Qwen3MoeConfig, Decoder, qwen.moe_source, examples=("Qwen/Qwen3-30B-A3B",),
        features="mixture of experts, also in some layers only; norms of heads",
    ),
    Architecture(
        gemma.Gemma2Config, Decoder, examples=("google/gemma-2-2b-it", "google/gemma-2-9b-it"),
        features="windows in every second layer, soft caps of scores and logits",
    ),
    Architecture(
        gemma.Gemma3Config, Decoder, examples=("google/gemma-3-1b-it",),
        features="windows in most layers, a rotary embedding of their own, norms of heads",
    ),
    Architecture(
        gemma.Gemma3TextPartConfig, Decoder, gemma.text_part_source, gemma.is_derived, gemma.text_part_name,
        examples=("google/gemma-3-4b-it", "google/gemma-3-27b-it"), features="the text part; no images",
    ),
    Architecture(
        llama.Phi3Config, Decoder, llama.phi3_source,
        examples=("microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct", "microsoft/phi-4"),
        features="longrope, partial rotary embedding, sliding window",
    ),
    Architecture(
        llama.Olmo2Config, Decoder, examples=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0425-1B"),
        features="norms after attention and MLP, norms of all queries and keys",
    ),
    Architecture(
        llama.GraniteConfig, Decoder,
        examples=("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
        features="factors on embeddings, scores, residuals and logits",
    ),
    Architecture(
        llama.SmolLM3Config, Decoder, examples=("HuggingFaceTB/SmolLM3-3B",),
        features="layers without rotary embedding, sliding windows",
    ),
    Architecture(
        gpt_oss.GptOssConfig, Decoder, gpt_oss.source, interleaved=gpt_oss.interleaved,
        examples=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
        features="attention sinks, windows in every second layer, experts with biases, weights in MXFP4",
    ),
    Architecture(
        opt.OPTConfig, opt.OPT, opt.source, rename=opt.full_name, examples=("facebook/opt-125m", "facebook/opt-13b"),
        features="norms before or after attention and MLP, projected embeddings (opt-350m)",
    ),
)}  # fmt: skip


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
    """Read the config of a model, by its architecture, with the overrides of `EngineConfig.hf_overrides`.

    Args:
        directory: the model's directory, or its file in GGUF.

    Raises:
        ValueError: the architecture is not registered, or a value is not supported; the message has the file's path.
    """
    path = directory if directory.is_file() else directory / CONFIG
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
    if any(field in (hf or {}) for field in ("vision_config", "audio_config", "thinker_config")):
        error += "; of multimodal models, only the text part of Gemma 3 is supported"
    return error
