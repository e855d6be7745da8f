"""Gemma 2 and 3: windows in most layers, capped or normed scores, four norms in a layer, scaled embeddings."""

from dataclasses import replace

from jpaged.models.config import ModelConfig
from jpaged.models.text_part import text_config
from jpaged.models.variation import Hf, RopeConfig, Variation, require, split_rope, windows_of


class Gemma2Config(ModelConfig):
    """Every second layer has a window, and the scores and the logits are capped."""

    architecture = "Gemma2ForCausalLM"
    model_type = "gemma2"
    defaults = {
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "eos_token_id": 1,
    }  # fmt: skip
    reads = frozenset({
        "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    })  # fmt: skip

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        activation = hf.get("hidden_activation") or cls.defaults["hidden_activation"]
        return super().fields_of(hf | {"hidden_act": activation}, generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return windows, norms, caps and factors."""
        pattern, layers = hf["sliding_window_pattern"], range(1, hf["num_hidden_layers"] + 1)
        require(type(pattern) is int and pattern >= 1, "sliding_window_pattern", "at least 1", repr(pattern))
        types = ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]
        norms = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        return Variation(
            norms=norms, unit_offset=True, windows=windows_of(hf, types), scale=hf["query_pre_attn_scalar"] ** -0.5,
            soft_cap=hf["attn_logit_softcapping"], final_soft_cap=hf["final_logit_softcapping"],
            embedding_multiplier=hf["hidden_size"] ** 0.5,
        )  # fmt: skip


class Gemma3Config(Gemma2Config):
    """Layers with a window have another rotary embedding, and queries and keys are normed per head."""

    architecture = "Gemma3ForCausalLM"
    model_type = "gemma3_text"
    defaults = Gemma2Config.defaults | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    }  # fmt: skip

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence: `max_position_embeddings` includes the factor."""
        return self.max_position_embeddings

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        return super().fields_of(split_rope(hf), generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return Gemma 2's variation with the rotary embedding of layers with a window and norms of heads."""
        parameters = {"rope_theta": hf["rope_local_base_freq"]} | hf.get("local_rope_parameters", {})
        local = RopeConfig.from_hf({"rope_parameters": parameters})
        return replace(super().variation_of(hf), qk_norm="head", local_rope=local)


class Gemma3TextPartConfig(Gemma3Config):
    """Text part of a multimodal Gemma 3."""

    architecture = "Gemma3ForConditionalGeneration"
    model_type = "gemma3"

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields, from `text_config`."""
        return super().fields_of(text_config(hf), generation)
