"""Configuration of a model, with the field names of Hugging Face's `config.json`."""

import json
import reprlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from jpaged.config import DTYPES
from jpaged.models.variation import EXTENDING, FACTORS, MAX_SIZE, Hf, RopeConfig, Variation, check_types, require

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
# Fields that change the computation of some architecture, with the values that change nothing. A config refuses other
# values unless its architecture reads the field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,), "use_sliding_window": (None, False), "layer_types": (None, "full_attention"),
    "no_rope_layers": (None, 1, True), "partial_rotary_factor": (None, 1),
    "use_bidirectional_attention": (None, False), "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,), "query_pre_attn_scalar": (None,), "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1), "attention_multiplier": (None,), "logits_scaling": (None, 1),
    "logit_scale": (None, 1), "scale_emb": (None, 1), "scale_depth": (None,), "clip_qkv": (None,),
    "use_qk_norm": (None, False), "qk_layernorm": (None, False), "attention_chunk_size": (None,),
    "use_parallel_residual": (None, False), "parallel_attn": (None, False), "alibi": (None, False),
    "use_mrope": (None, False), "num_experts": (None, 0), "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}  # fmt: skip
# Fields of config.json with the defaults of `ModelConfig`.
OPTIONAL = (
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip
# A model is traced layer by layer before its tensors are compared.
MAX_LAYERS = 512


def _check_layers(count: object) -> None:
    require(type(count) is int, "num_hidden_layers", "a whole number", reprlib.repr(count))
    require(isinstance(count, int) and count <= MAX_LAYERS, "num_hidden_layers", f"at most {MAX_LAYERS}", count)


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a dense Llama, with the field names of its Hugging Face `config.json`.

    Configurations of other architectures derive from it. They have `defaults` for missing fields, list further fields
    that they read (`reads`, names in `NEUTRAL`), and return their `variation_of` Llama's decoder.
    """

    architecture: ClassVar[str] = "LlamaForCausalLM"  # as `architectures` names it
    model_type: ClassVar[str] = "llama"
    defaults: ClassVar[Hf] = {}
    reads: ClassVar[frozenset[str]] = frozenset()
    mlp_matrices: ClassVar[int] = 3  # with the gate

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    variation: Variation = field(default_factory=Variation)

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        require(not heads % kv_heads, "num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})", heads)
        _check_layers(self.num_hidden_layers)
        require(self.rms_norm_eps >= 0, "rms_norm_eps", "at least 0", self.rms_norm_eps)
        require(not self.head_dim % 2, "head_dim", "even for rotary embeddings", self.head_dim)
        if self.hidden_act not in ACTIVATIONS:
            act = reprlib.repr(self.hidden_act)
            raise ValueError(f"hidden_act: {act} is not supported; supported: {', '.join(ACTIVATIONS)}")
        fits = all(type(token) is int and token >= 0 for token in self.eos_token_ids)
        require(fits, "eos_token_id", "token ids", reprlib.repr(self.eos_token_ids))
        if (rotary_dim := int(self.head_dim * self.rope.partial_rotary_factor)) % 2:
            share = f"{self.rope.partial_rotary_factor:g} of head_dim ({self.head_dim})"
            raise ValueError(f"partial_rotary_factor: {share} must be even, not {rotary_dim}")
        for name in FACTORS if self.rope.type == "longrope" else ():
            length, half = len(getattr(self.rope, name)), rotary_dim // 2
            require(length == half, name, f"{half} numbers, half of the rotary dim", length)

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence: `linear` and `yarn` extend the original context by their factor, like vLLM."""
        if self.rope.type not in EXTENDING:
            return self.max_position_embeddings
        extended = min(self.rope.original_max_position_embeddings * self.rope.factor, MAX_SIZE)
        return max(self.max_position_embeddings, int(extended))

    def for_length(self, max_model_len: int) -> Self:
        """Return the config for sequences of at most `max_model_len` tokens.

        A cache holds rotated keys, which all requests share, so one choice of longrope's factors holds for all
        positions: the long factors if a sequence may pass the original context.
        """
        is_long = self.rope.type == "longrope" and max_model_len > self.rope.original_max_position_embeddings
        return replace(self, rope=replace(self.rope, is_long=is_long))

    @classmethod
    def describes(cls, hf: Hf) -> bool:
        """Return whether the content of a config.json is that of this architecture."""
        names = hf.get("architectures") or [hf.get("model_type")]
        named = isinstance(names, list) and (cls.architecture in names or cls.model_type in names)
        return named and hf.get("model_type", cls.model_type) == cls.model_type

    @classmethod
    def from_hf(cls, hf: Hf, generation: Hf | None = None) -> Self:
        """Return the config of config.json's content; end-of-sequence ids of generation_config.json take precedence.

        Raises ValueError for a value that the architecture does not support.
        """
        return cls(**cls.fields_of(hf, generation or {}))

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields. An architecture with more fields adds their values."""
        hf = cls.defaults | hf
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in required if name not in hf]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        _check_layers(hf["num_hidden_layers"])  # before the variations, which have a value for each
        for name, accepted in NEUTRAL.items():
            values = hf[name] if isinstance(hf.get(name), list) else [hf.get(name)]
            if name not in cls.reads and not all(value in accepted for value in values):
                error = f"{name}: {reprlib.repr(hf[name])} is not supported by {cls.architecture}"
                raise ValueError(f"{error}; supported: {', '.join(map(json.dumps, accepted))}")
        rope = RopeConfig.from_hf(hf)
        if rope.partial_rotary_factor != 1 and "partial_rotary_factor" not in cls.reads:
            raise ValueError(f"partial_rotary_factor: only 1.0 is supported by {cls.architecture}")
        heads = hf["num_attention_heads"]
        dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
        eos = generation.get("eos_token_id")
        eos = hf.get("eos_token_id") if eos is None else eos
        return dict(
            **{name: hf[name] for name in required},
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            **{name: hf[name] for name in OPTIONAL if name in hf},
            rope=rope,
            dtype=dtype if dtype in DTYPES else "float32",
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            variation=cls.variation_of(hf),
        )

    @classmethod
    def variation_of(cls, hf: Hf) -> Variation:
        """Return the differences from Llama's decoder, by config.json's content with the defaults."""
        return Variation()
