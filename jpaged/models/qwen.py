"""Qwen 2, 2.5 and 3: biases of queries, keys and values, norms of heads, and mixtures of experts."""

from dataclasses import replace

from jpaged.models.base import LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.variation import Experts, Hf, Variation, require, windows_of


class Qwen2Config(ModelConfig):
    """Queries, keys and values have biases, and the layers from `max_window_layers` on may have a window."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    defaults = {
        "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
    }  # fmt: skip
    reads = frozenset({"sliding_window", "use_sliding_window", "layer_types"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        return super().fields_of(hf, generation) | {"attention_bias": True}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows, with biases except for the attention's output."""
        hf = hf if hf.get("use_sliding_window") else hf | {"sliding_window": None}
        full = hf["num_hidden_layers"] if hf["sliding_window"] is None else hf["max_window_layers"]
        types = ["full_attention" if i < full else "sliding_attention" for i in range(hf["num_hidden_layers"])]
        return Variation(output_bias=False, windows=windows_of(hf, types))


class Qwen3Config(Qwen2Config):
    """Queries and keys are normed per head, and biases are optional."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    defaults = Qwen2Config.defaults | {"head_dim": 128}

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        return super().fields_of(hf, generation) | {"attention_bias": hf.get("attention_bias", False)}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows and the norms of heads."""
        return replace(super().variation_of(hf), output_bias=True, qk_norm="head")


class Qwen3MoeConfig(Qwen3Config):
    """Qwen 3 with a mixture of experts in some layers, and a window in all layers or none."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    defaults = Qwen3Config.defaults | {
        "num_key_value_heads": 4, "head_dim": None, "max_window_layers": 0, "decoder_sparse_step": 1,
        "mlp_only_layers": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    }  # fmt: skip
    reads = (Qwen3Config.reads - {"layer_types"}) | {"num_experts", "num_local_experts"}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows, the norms of heads and the experts."""
        # Transformers ignores this field for the mixture: a window is in every layer.
        return replace(super().variation_of(hf | {"max_window_layers": 0}), experts=experts_of(hf))


class Qwen2MoeConfig(Qwen2Config):
    """Qwen 2 with a mixture of experts in some layers, an expert that all tokens share, and windows in some layers."""

    architecture = "Qwen2MoeForCausalLM"
    model_type = "qwen2_moe"
    defaults = Qwen2Config.defaults | {
        "num_key_value_heads": 16, "decoder_sparse_step": 1, "mlp_only_layers": None, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False, "qkv_bias": True,
    }  # fmt: skip
    reads = Qwen2Config.reads | {"num_experts", "num_local_experts"}

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        return super().fields_of(hf, generation) | {"attention_bias": (cls.defaults | hf)["qkv_bias"]}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows and the experts. By default every second layer below `max_window_layers` has a window."""
        hf = hf if hf.get("use_sliding_window") else hf | {"sliding_window": None}
        windowed = hf["max_window_layers"] if hf["sliding_window"] is not None else 0
        layers = range(hf["num_hidden_layers"])
        types = ["sliding_attention" if i < windowed and i % 2 == 0 else "full_attention" for i in layers]
        experts = replace(experts_of(hf), shared_size=hf["shared_expert_intermediate_size"], shared_gate=True)
        return Variation(output_bias=False, windows=windows_of(hf, types), experts=experts)


def experts_of(hf: Hf) -> Experts:
    """Return the experts of a Qwen's config.json. Raises ValueError."""
    step, only = hf["decoder_sparse_step"], hf["mlp_only_layers"] or []
    require(type(step) is int and step >= 1, "decoder_sparse_step", "at least 1", repr(step))
    dense = tuple(i for i in range(hf["num_hidden_layers"]) if i in only or (i + 1) % step)
    count = hf.get("num_local_experts") or hf["num_experts"]  # the name in files of transformers 5, and before
    return Experts(count, hf["num_experts_per_tok"], hf["moe_intermediate_size"], hf["norm_topk_prob"], dense)


def moe_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: experts are separate tensors."""
    if "experts" not in path:
        return same_name(path, config)
    assert config.variation.experts is not None
    block = f"model.layers.{path[1]}.mlp.experts"
    names = [f"{block}.{i}.{path[-1]}.weight" for i in range(config.variation.experts.num_experts)]
    return LeafSource(tuple(map(Part, names)), stacked=True)
