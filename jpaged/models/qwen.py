"""Qwen 2 to 3.6: biases of queries, keys and values, norms of heads, mixtures of experts, recurrent layers."""

from dataclasses import replace

from jpaged.models.base import LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.text_part import text_config
from jpaged.models.variation import Experts, Hf, Recurrence, Variation, require, windows_of

LINEAR, FULL = "linear_attention", "full_attention"  # types of layers


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


class Qwen35Config(Qwen3Config):
    """The gated delta rule in three of four layers, and gates on the output of attention in the others."""

    architecture = "Qwen3_5ForCausalLM"
    model_type = "qwen3_5_text"
    defaults = {
        "vocab_size": 248_320, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }  # fmt: skip
    reads = frozenset({"layer_types", "partial_rotary_factor"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields. The three positions of a token of text are equal, so that one is enough."""
        parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if isinstance(parameters, dict):
            rope = {name: value for name, value in parameters.items() if not name.startswith("mrope_")}
            hf = hf | {"rope_parameters": rope, "rope_scaling": None}
        return super().fields_of(hf, generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return norms, gates and the recurrent layers."""
        count, interval = hf["num_hidden_layers"], hf["full_attention_interval"]
        require(type(interval) is int and interval >= 1, "full_attention_interval", "at least 1", repr(interval))
        types = hf.get("layer_types")
        if types is None:
            types = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
        if not isinstance(types, list) or len(types) != count or not {*map(str, types)} <= {LINEAR, FULL}:
            raise ValueError(f"layer_types: must be {LINEAR} or {FULL} for each of {count} layers, not {types!r:.100}")
        if FULL not in types:
            raise ValueError(f"layer_types: at least one layer must be {FULL}")
        sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
        layers = tuple(layer for layer, kind in enumerate(types) if kind == LINEAR)
        recurrence = Recurrence(layers, *(hf[f"linear_{name}"] for name in sizes)) if layers else None
        return Variation(qk_norm="head", unit_offset=True, gated=True, recurrence=recurrence)


class Qwen35TextPartConfig(Qwen35Config):
    """Text part of a multimodal Qwen 3.5 or 3.6."""

    architecture = "Qwen3_5ForConditionalGeneration"
    model_type = "qwen3_5"

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields, from `text_config`."""
        return super().fields_of(text_config(hf), generation)


class Qwen35MoeConfig(Qwen35Config):
    """Qwen 3.5 with a mixture of experts in every layer, and an expert that all tokens share."""

    architecture = "Qwen3_5MoeForCausalLM"
    model_type = "qwen3_5_moe_text"
    defaults = Qwen35Config.defaults | {
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "intermediate_size": 512,  # of the mixture: no layer has another MLP
    }  # fmt: skip
    reads = Qwen35Config.reads | {"num_experts", "num_local_experts"}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return norms, gates, the recurrent layers and the experts."""
        count = hf.get("num_local_experts") or hf["num_experts"]
        experts = Experts(
            count, hf["num_experts_per_tok"], hf["moe_intermediate_size"],
            shared_size=hf["shared_expert_intermediate_size"], shared_gate=True,
        )  # fmt: skip
        return replace(super().variation_of(hf), experts=experts)


class Qwen35MoeTextPartConfig(Qwen35MoeConfig):
    """Text part of a multimodal Qwen 3.5 or 3.6 with a mixture of experts."""

    architecture = "Qwen3_5MoeForConditionalGeneration"
    model_type = "qwen3_5_moe"

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields, from `text_config`."""
        return super().fields_of(text_config(hf), generation)


def nested(source: LeafSource) -> LeafSource:
    """Return a place in a text model as a place in a multimodal Qwen 3.5."""
    parts = (part._replace(name=part.name.replace("model.", "model.language_model.", 1)) for part in source.parts)
    return source._replace(parts=tuple(parts))


def text_part_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf of the text part."""
    return nested(same_name(path, config))


def moe_text_part_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf of the text part with a mixture of experts."""
    return nested(moe_source(path, config))


def moe_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: experts are separate tensors."""
    if "experts" not in path:
        return same_name(path, config)
    assert config.variation.experts is not None
    block = f"model.layers.{path[1]}.mlp.experts"
    names = [f"{block}.{i}.{path[-1]}.weight" for i in range(config.variation.experts.num_experts)]
    return LeafSource(tuple(map(Part, names)), stacked=True)
