"""Granite 3: factors on embeddings, scores, residuals and logits."""

from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.field_types import Hf
from jpaged.models.variation import Variation


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


ARCHITECTURES = (
    Architecture(
        GraniteConfig, Decoder, examples=("ibm-granite/granite-3.3-2b-instruct", "ibm-granite/granite-3.3-8b-instruct"),
        features="factors on embeddings, scores, residuals and logits",
    ),
)  # fmt: skip
