"""gpt-oss: attention sinks, alternating windows, and a mixture of experts with biases and a clamped activation."""

from jpaged.models.base import Interleaved, LeafPath, LeafSource, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.variation import ROPE, Experts, Hf, Variation, require, windows_of
from pallas_kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOssConfig(ModelConfig):
    """Llama's decoder with sinks, windows in every second layer, and experts in all layers."""

    architecture = "GptOssForCausalLM"
    model_type = "gpt_oss"
    defaults = {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "attention_bias": True,
        "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT,
    }  # fmt: skip
    reads = frozenset({"sliding_window", "layer_types", "num_local_experts", "num_experts"})

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        has_rope = any(hf.get(name) for name in ROPE[1:])
        return super().fields_of(hf if has_rope else hf | {"rope_scaling": YARN}, generation)

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the windows, the sinks and the experts."""
        for name in ("swiglu_alpha", "swiglu_limit"):
            require(hf[name] == cls.defaults[name], name, str(cls.defaults[name]), hf[name])
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(hf["num_hidden_layers"])]
        sizes = hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"]
        experts = Experts(*sizes, biases=True, activation="swiglu_oai")
        return Variation(windows=windows_of(hf, types), sinks=True, experts=experts)


def source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf."""
    if "gate" not in path:
        return same_name(path, config)
    return same_name(tuple("router" if name == "gate" else name for name in path), config)


def interleaved(name: str) -> Interleaved | None:
    """Return the place of a weight or bias of all experts in a tensor of transformers' checkpoints."""
    prefix, found, leaf = name.rpartition(".mlp.experts.")
    kind, _, end = leaf.partition("_proj")
    if not found or kind not in ("gate", "up", "down") or end not in ("", "_bias"):
        return None
    if kind == "down":
        return Interleaved(name) if not end else None
    return Interleaved(f"{prefix}{found}gate_up_proj{end}", ("gate", "up").index(kind), 2)
