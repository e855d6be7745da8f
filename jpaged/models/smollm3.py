"""SmolLM3: layers without rotary embedding."""

from jpaged.models.base import Architecture
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.field_types import Hf
from jpaged.models.variation import Variation, windows_of


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


ARCHITECTURES = (
    Architecture(
        SmolLM3Config, Decoder, examples=("HuggingFaceTB/SmolLM3-3B",),
        features="layers without rotary embedding, sliding windows",
    ),
)  # fmt: skip
