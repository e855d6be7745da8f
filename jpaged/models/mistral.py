"""Mistral and Mixtral: a window in every layer, and a mixture of experts."""

from jpaged.models.base import Architecture, LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.field_types import Hf
from jpaged.models.variation import Experts, Variation, windows_of


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


# Mixtral's names of the matrices of an expert.
MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def mixtral_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: experts are separate tensors."""
    if "mlp" not in path:
        return same_name(path, config)
    block = f"model.layers.{path[1]}.block_sparse_moe"
    if "gate" in path:
        return LeafSource((Part(f"{block}.gate.weight"),))
    assert config.variation.experts is not None
    matrix = MATRICES[path[-1]]
    names = [f"{block}.experts.{i}.{matrix}.weight" for i in range(config.variation.experts.num_experts)]
    return LeafSource(tuple(map(Part, names)), stacked=True)


ARCHITECTURES = (
    Architecture(
        MistralConfig, Decoder,
        examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        features="sliding window",
    ),
    Architecture(
        MixtralConfig, Decoder, mixtral_source, examples=("mistralai/Mixtral-8x7B-Instruct-v0.1",),
        features="mixture of experts, sliding window",
    ),
)  # fmt: skip
