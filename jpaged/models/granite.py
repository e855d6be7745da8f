"""Granite's mixtures of experts, whose checkpoints hold the experts of a layer in one tensor."""

from dataclasses import replace

from jpaged.models.base import LeafPath, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.llama import GraniteConfig
from jpaged.models.variation import Experts, Hf, Variation


class GraniteMoeConfig(GraniteConfig):
    """Granite with a mixture of experts in every layer."""

    architecture = "GraniteMoeForCausalLM"
    model_type = "granitemoe"
    defaults = GraniteConfig.defaults | {"num_local_experts": 8, "num_experts_per_tok": 2}
    reads = GraniteConfig.reads | {"num_local_experts"}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the factors and the experts."""
        experts = Experts(hf["num_local_experts"], hf["num_experts_per_tok"], hf["intermediate_size"])
        return replace(super().variation_of(hf), experts=experts)


class GraniteMoeSharedConfig(GraniteMoeConfig):
    """Granite's mixture with an expert that all tokens share."""

    architecture = "GraniteMoeSharedForCausalLM"
    model_type = "granitemoeshared"
    defaults = GraniteMoeConfig.defaults | {"shared_intermediate_size": 0}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the factors and the experts."""
        variation = super().variation_of(hf)
        assert variation.experts is not None
        return replace(variation, experts=replace(variation.experts, shared_size=hf["shared_intermediate_size"]))


def moe_source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf: gate and up are one tensor, with the matrices of all experts."""
    if "mlp" not in path:
        return same_name(path, config)
    layer, experts = f"model.layers.{path[1]}", config.variation.experts
    assert experts is not None
    if "gate" in path:
        return LeafSource((Part(f"{layer}.block_sparse_moe.router.layer.weight"),))
    is_shared = "shared_expert" in path
    block, size = ("shared_mlp", experts.shared_size) if is_shared else ("block_sparse_moe", experts.intermediate_size)
    if "down_proj" in path:
        return LeafSource((Part(f"{layer}.{block}.output_linear.weight"),))
    part = Part(f"{layer}.{block}.input_linear.weight", size * ("up_proj" in path), size)
    return LeafSource((part,), axis=0 if is_shared else 1)
