"""Phi-3 and Phi-4-mini: fused tensors in the checkpoint, partial rotary embedding and longrope."""

from jpaged.models.base import Architecture, LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.field_types import Hf
from jpaged.models.variation import Variation, windows_of


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


def source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: queries, keys and values are one tensor, and gate and up are another one."""
    *_, name, leaf = path
    q, k = (config.head_dim * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    f = config.intermediate_size
    places = {
        "q_proj": ("self_attn.qkv_proj", 0, q),
        "k_proj": ("self_attn.qkv_proj", q, k),
        "v_proj": ("self_attn.qkv_proj", q + k, k),
        "gate_proj": ("mlp.gate_up_proj", 0, f),
        "up_proj": ("mlp.gate_up_proj", f, f),
    }
    if name not in places:
        return same_name(path, config)
    fused, start, rows = places[name]
    return LeafSource((Part(f"model.layers.{path[1]}.{fused}.{leaf}", start, rows),))


ARCHITECTURES = (
    Architecture(
        Phi3Config, Decoder, source,
        examples=("microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct", "microsoft/phi-4"),
        features="longrope, partial rotary embedding, sliding window",
    ),
)  # fmt: skip
