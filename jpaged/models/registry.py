"""Supported architectures, by Hugging Face's names."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.checkpoint_files import read_json
from jpaged.models import gemma, glm, gpt_oss, granite, llama, mistral, opt, qwen, text_part
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
        mistral.MinistralConfig, Decoder, examples=("mistralai/Ministral-8B-Instruct-2410",),
        features="sliding windows in some layers",
    ),
    Architecture(
        mistral.Ministral3Config, Decoder, examples=("mistralai/Ministral-3-8B-Instruct-2512",),
        features="queries that grow with their position",
    ),
    Architecture(
        mistral.Mistral3TextPartConfig, Decoder, text_part.source, text_part.is_derived, text_part.rename,
        examples=("mistralai/Ministral-3-8B-Instruct-2512", "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
        features="the text part, a Mistral or a Ministral 3; no images",
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
        qwen.Qwen35Config, Decoder, is_derived=text_part.is_derived, examples=("Qwen/Qwen3.5-0.8B",),
        features="the gated delta rule in most layers, gated attention in the others, partial rotary embedding",
    ),
    Architecture(
        qwen.Qwen35TextPartConfig, Decoder, qwen.text_part_source, text_part.is_derived,
        examples=("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"), features="the text part; no images",
    ),
    Architecture(
        qwen.Qwen35MoeConfig, Decoder, qwen.moe_source, text_part.is_derived, examples=("Qwen/Qwen3.5-35B-A3B",),
        features="as `Qwen3_5ForCausalLM`, with a mixture of experts and a gated expert that all tokens share",
    ),
    Architecture(
        qwen.Qwen35MoeTextPartConfig, Decoder, qwen.moe_text_part_source, text_part.is_derived,
        examples=("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"), features="the text part; no images",
    ),
    Architecture(
        qwen.Qwen2MoeConfig, Decoder, qwen.moe_source, examples=("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen2-57B-A14B"),
        features="mixture of experts, also in some layers only; a gated expert that all tokens share",
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
        gemma.Gemma3TextPartConfig, Decoder, text_part.source, text_part.is_derived, text_part.rename,
        examples=("google/gemma-3-4b-it", "google/gemma-3-27b-it"), features="the text part; no images",
    ),
    Architecture(
        llama.Phi3Config, Decoder, llama.phi3_source,
        examples=("microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct", "microsoft/phi-4"),
        features="longrope, partial rotary embedding, sliding window",
    ),
    Architecture(
        glm.GlmConfig, Decoder, llama.gate_up_source, examples=("zai-org/glm-4-9b-chat-hf",),
        features="partial rotary embedding of adjacent dims; biases of queries, keys and values",
    ),
    Architecture(
        glm.Glm4Config, Decoder, llama.gate_up_source, examples=("zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"),
        features="as GLM, with norms after attention and MLP, too",
    ),
    Architecture(
        glm.Glm4MoeConfig, Decoder, glm.moe_source, glm.is_derived, examples=("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        features="mixture of experts with sigmoids and groups in the router, an expert that all tokens share",
    ),
    Architecture(
        llama.Olmo2Config, Decoder, examples=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0425-1B"),
        features="norms after attention and MLP, norms of all queries and keys",
    ),
    Architecture(
        llama.Olmo3Config, Decoder, examples=("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-1125-32B"),
        features="windows in most layers, a rotary embedding of their own, norms as in OLMo 2",
    ),
    Architecture(
        llama.GraniteConfig, Decoder,
        examples=("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
        features="factors on embeddings, scores, residuals and logits",
    ),
    Architecture(
        granite.GraniteMoeConfig, Decoder, granite.moe_source,
        examples=("ibm-granite/granite-3.1-3b-a800m-instruct", "ibm-granite/granite-3.1-1b-a400m-instruct"),
        features="Granite's factors, mixture of experts",
    ),
    Architecture(
        granite.GraniteMoeSharedConfig, Decoder, granite.moe_source,
        examples=("ibm-research/moe-7b-1b-active-shared-experts",),
        features="Granite's factors, mixture of experts, an expert that all tokens share",
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

CHUNKED = (
    "its layers see chunks of attention_chunk_size tokens, and attention knows windows only, whose ends would be wrong "
    "after the first chunk"
)
REFUSED = {"Llama4ForCausalLM": CHUNKED, "Llama4ForConditionalGeneration": CHUNKED}  # with the reason


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
    """Return the error of an architecture that is not registered: a known reason, or the most similar name."""
    if name in REFUSED:
        return f"architecture {name} is not supported: {REFUSED[name]}"
    (closest,) = difflib.get_close_matches(name[:200], _ARCHITECTURES, n=1, cutoff=0)
    error = f"architecture {name:.200} is not supported; supported: {', '.join(_ARCHITECTURES)}; closest: {closest}"
    if any(field in (hf or {}) for field in ("vision_config", "audio_config", "thinker_config")):
        error += "; of multimodal models, only the text parts of Gemma 3, Mistral 3 and Qwen 3.5 are supported"
    return error
