"""Llama and architectures with small differences from it: OLMo 2 and 3, Granite, SmolLM3, Mistral, Phi-3."""

from dataclasses import replace

from jpaged.models.base import LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.variation import Experts, Hf, RopeConfig, Variation, split_rope, windows_of


class Llama(Decoder):
    """Llama family: 1, 2, 3, 3.1, 3.2, TinyLlama and other models that its config describes."""


class Olmo2Config(ModelConfig):
    """Llama's decoder with other norms."""

    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    defaults = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the norms."""
        norms = None, "post_attention_layernorm", None, "post_feedforward_layernorm"
        return Variation(norms=norms, qk_norm="projection")


class Olmo3Config(Olmo2Config):
    """OLMo 2 with a window in three of four layers. The scaling of the rotary embedding is for the other layers."""

    architecture = "Olmo3ForCausalLM"
    model_type = "olmo3"
    defaults = Olmo2Config.defaults | {"rope_theta": 5e5, "sliding_window": 4096}
    reads = frozenset({"sliding_window", "layer_types"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        return super().fields_of(split_rope(hf), generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the norms and the windows, with the rotary embedding of their layers."""
        types = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(hf["num_hidden_layers"])]
        parameters = {"rope_theta": hf["rope_theta"]} | hf.get("local_rope_parameters", {})
        local = RopeConfig.from_hf({"rope_parameters": parameters})
        return replace(super().variation_of(hf), windows=windows_of(hf, types), local_rope=local)


class GraniteConfig(ModelConfig):
    """Llama's decoder with factors."""

    architecture = "GraniteForCausalLM"
    model_type = "granite"
    defaults = {
        "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        "eos_token_id": 2,
    }  # fmt: skip
    reads = frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"})

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the factors."""
        return Variation(
            scale=hf["attention_multiplier"], embedding_multiplier=hf["embedding_multiplier"],
            residual_multiplier=hf["residual_multiplier"], logits_divisor=hf["logits_scaling"],
        )  # fmt: skip


class SmolLM3Config(ModelConfig):
    """Llama's decoder, in which every fourth layer by default has no rotary embedding."""

    architecture = "SmolLM3ForCausalLM"
    model_type = "smollm3"
    defaults = {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 2e6,
        "no_rope_layer_interval": 4, "eos_token_id": 128_001,
    }  # fmt: skip
    reads = frozenset({"sliding_window", "use_sliding_window", "layer_types", "no_rope_layers"})

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the layers without rotary embedding. If the model has windows, only these layers have them."""
        count, interval = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
        has_rope = hf.get("no_rope_layers")
        if has_rope is None:
            has_rope = [int((layer + 1) % interval != 0) for layer in range(count)]
        if not isinstance(has_rope, list) or len(has_rope) < count or not all(flag in (0, 1) for flag in has_rope):
            raise ValueError(f"no_rope_layers: must be 0 or 1 for each of {count} layers, not {has_rope!r:.100}")
        no_rope = tuple(layer for layer in range(count) if not has_rope[layer])
        hf = hf if hf.get("use_sliding_window") else hf | {"sliding_window": None}
        windowed = no_rope if hf.get("sliding_window") is not None else ()
        types = ["sliding_attention" if layer in windowed else "full_attention" for layer in range(count)]
        return Variation(no_rope=no_rope, windows=windows_of(hf, types))


class MistralConfig(ModelConfig):
    """Llama's decoder with a window in every layer, unless `sliding_window` is null."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    reads = frozenset({"sliding_window", "layer_types"})

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows."""
        kind = "full_attention" if hf.get("sliding_window") is None else "sliding_attention"
        if set(hf.get("layer_types") or [kind]) != {kind}:
            raise ValueError(f"layer_types: must be {kind} in every layer, as sliding_window is {hf['sliding_window']}")
        return Variation(windows=windows_of(hf, [kind] * hf["num_hidden_layers"]))


class MixtralConfig(MistralConfig):
    """Mistral's decoder with a mixture of experts in every layer."""

    architecture = "MixtralForCausalLM"
    model_type = "mixtral"
    defaults = MistralConfig.defaults | {
        "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2,
        "num_local_experts": 8,
    }  # fmt: skip
    reads = MistralConfig.reads | {"num_local_experts"}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows and the experts."""
        windows = super().variation_of(hf).windows
        sizes = hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"]
        return Variation(windows=windows, experts=Experts(*sizes))


def mixtral_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: experts are separate tensors."""
    if "mlp" not in path:
        return same_name(path, config)
    block = f"model.layers.{path[1]}.block_sparse_moe"
    if "gate" in path:
        return LeafSource((Part(f"{block}.gate.weight"),))
    assert config.variation.experts is not None
    matrix = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[path[-1]]
    names = [f"{block}.experts.{i}.{matrix}.weight" for i in range(config.variation.experts.num_experts)]
    return LeafSource(tuple(map(Part, names)), stacked=True)


class Phi3Config(ModelConfig):
    """Llama's decoder with a window in every layer, unless `sliding_window` is null."""

    architecture = "Phi3ForCausalLM"
    model_type = "phi3"
    defaults = {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    }  # fmt: skip
    reads = frozenset({"sliding_window", "layer_types", "partial_rotary_factor"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        scaling = hf.get("rope_scaling")
        if isinstance(scaling, dict) and scaling.get("type") in ("su", "yarn"):  # earlier names
            hf = hf | {"rope_scaling": scaling | {"type": "longrope"}}
        return super().fields_of(hf, generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows."""
        kind = "full_attention" if hf.get("sliding_window") is None else "sliding_attention"
        return Variation(windows=windows_of(hf, [kind] * hf["num_hidden_layers"]))


def phi3_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: queries, keys and values are one tensor, and gate and up are another one."""
    *_, name, leaf = path
    q, k = (config.head_dim * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    places = {"q_proj": (0, q), "k_proj": (q, k), "v_proj": (q + k, k)}
    if name not in places:
        return gate_up_source(path, config)
    return LeafSource((Part(f"model.layers.{path[1]}.self_attn.qkv_proj.{leaf}", *places[name]),))


def gate_up_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: gate and up are one tensor."""
    *_, name, leaf = path
    f = config.intermediate_size
    places = {"gate_proj": (0, f), "up_proj": (f, f)}
    if name not in places:
        return same_name(path, config)
    return LeafSource((Part(f"model.layers.{path[1]}.mlp.gate_up_proj.{leaf}", *places[name]),))
