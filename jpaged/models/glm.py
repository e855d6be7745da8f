"""GLM-4, GLM-4-0414 and GLM-4.5: half of each head is rotated, and a mixture whose router has sigmoids."""

from jpaged.models import base, qwen
from jpaged.models.base import LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.variation import Experts, Hf, Variation


class GlmConfig(ModelConfig):
    """Llama's decoder with adjacent dims rotated, and biases of queries, keys and values."""

    architecture = "GlmForCausalLM"
    model_type = "glm"
    defaults = {
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7,
        "attention_bias": True, "partial_rotary_factor": 0.5, "eos_token_id": [151_329, 151_336, 151_338],
    }  # fmt: skip
    reads = frozenset({"partial_rotary_factor"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        ends = hf.get("eos_token_id") or cls.defaults["eos_token_id"]
        return super().fields_of(hf | {"eos_token_id": ends}, generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the kind of rotation."""
        return Variation(adjacent_rope=True, output_bias=False)


class Glm4Config(GlmConfig):
    """GLM with norms after attention and MLP, too."""

    architecture = "Glm4ForCausalLM"
    model_type = "glm4"

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the kind of rotation and the norms."""
        norms = "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        return Variation(norms=norms, adjacent_rope=True, output_bias=False)


class Glm4MoeConfig(ModelConfig):
    """Mixture of experts in all layers but the first, with an expert that all tokens share."""

    architecture = "Glm4MoeForCausalLM"
    model_type = "glm4_moe"
    defaults = {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    }  # fmt: skip
    reads = frozenset({"partial_rotary_factor", "n_routed_experts", "num_local_experts", "use_qk_norm"})

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the experts and the norms of heads."""
        size, dense = hf["moe_intermediate_size"], range(min(hf["first_k_dense_replace"], hf["num_hidden_layers"]))
        experts = Experts(
            hf["n_routed_experts"], hf["num_experts_per_tok"], size, hf["norm_topk_prob"], tuple(dense),
            shared_size=hf["n_shared_experts"] * size, router="sigmoid", groups=hf["n_group"],
            groups_per_tok=hf["topk_group"], scale=hf["routed_scaling_factor"],
        )  # fmt: skip
        return Variation(output_bias=False, qk_norm="head" if hf["use_qk_norm"] else None, experts=experts)


def moe_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf of a mixture: experts are separate tensors."""
    if "gate_bias" in path:
        return LeafSource((Part(f"model.layers.{path[1]}.mlp.gate.e_score_correction_bias"),))
    if "shared_expert" in path:
        return same_name(tuple("shared_experts" if name == "shared_expert" else name for name in path), config)
    return qwen.moe_source(path, config)


def is_derived(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is not used: it belongs to a layer that predicts several tokens, or follows from others.

    Such layers are numbered after the others.
    """
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return (layer.isdecimal() and int(layer) >= config.num_hidden_layers) or base.is_derived(name, config)
