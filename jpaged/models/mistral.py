"""Ministral and Mistral 3: windows in some layers, or queries that grow with their position."""

from dataclasses import replace

from jpaged.models.llama import MistralConfig
from jpaged.models.text_part import text_config
from jpaged.models.variation import Hf, Variation, windows_of


class MinistralConfig(MistralConfig):
    """Mistral's decoder with a window in some layers."""

    architecture = "MinistralForCausalLM"
    model_type = "ministral"

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows."""
        kind = "full_attention" if hf.get("sliding_window") is None else "sliding_attention"
        return Variation(windows=windows_of(hf, [kind] * hf["num_hidden_layers"]))


class Ministral3Config(MistralConfig):
    """Mistral's decoder with queries that grow by the logarithm of their position in original contexts."""

    architecture = "Ministral3ForCausalLM"
    model_type = "ministral3"
    defaults = MistralConfig.defaults | {
        "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "sliding_window": None,
        "eos_token_id": 2,
    }  # fmt: skip

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows and the factor on queries."""
        parameters = (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
        if missing := {"llama_4_scaling_beta", "original_max_position_embeddings"} - parameters.keys():
            raise ValueError(f"rope_parameters: {cls.architecture} needs {', '.join(sorted(missing))}")
        return replace(super().variation_of(hf), query_growth=parameters["llama_4_scaling_beta"])


class Mistral3TextPartConfig(MistralConfig):
    """Text part of a multimodal Mistral 3, which is a Mistral or a Ministral 3."""

    architecture = "Mistral3ForConditionalGeneration"
    model_type = "mistral3"

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields, from `text_config`."""
        text = text_config(hf)
        parts: dict[str, type[MistralConfig]] = {each.model_type: each for each in (MistralConfig, Ministral3Config)}
        if (kind := text.get("model_type", "mistral")) not in parts:
            raise ValueError(f"text_config: model_type {kind!r:.100} is not supported; supported: {', '.join(parts)}")
        return parts[kind].fields_of(text, generation)
