"""OLMo 2: norms after attention and MLP, and of all queries and keys of a token."""

from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.field_types import Hf
from jpaged.models.variation import POST_NORMS, Variation


class Olmo2Config(ModelConfig):
    """Llama's decoder with other norms."""

    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    defaults = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the norms."""
        return Variation(norms=POST_NORMS, qk_norm="projection")


ARCHITECTURES = (
    Architecture(
        Olmo2Config,
        Decoder,
        examples=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0425-1B"),
        features="norms after attention and MLP, norms of all queries and keys",
    ),
)
