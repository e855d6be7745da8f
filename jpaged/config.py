"""Configuration of the model and of the engine: frozen, plain values, dtypes as strings, no device library."""

import difflib
import json
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from jpaged.checkpoint_files import MAX_CONFIG_BYTES, read_file
from jpaged.setting import check, documentation, setting

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PREEMPTION_MODES = ("auto", "recompute", "swap")
KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
QUANTIZATIONS = {"int8": "int8", "fp8": "float8_e4m3fn"}  # dtypes of the weights of linear layers
QUANTIZED_CHECKPOINTS = ("awq", "gptq", "fp8", "compressed-tensors")  # as config.json names their methods
KERNELS = ("auto", "reference", "mosaic", "triton", "cpu")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
DEFAULT_ROPE_THETA = 10000.0
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # fields of a config about its rotary embedding
EXTENDING = ("linear", "yarn")  # rope types after which sequences may pass max_position_embeddings
# Fields that change the computation of some architecture, with the values that change nothing. A config refuses other
# values unless its architecture reads the field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "layer_types": (None, "full_attention"),
    "no_rope_layers": (None, 1, True),
    "partial_rotary_factor": (None, 1),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "clip_qkv": (None,),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "attention_chunk_size": (None,),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "alibi": (None, False),
    "use_mrope": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}
# Bounds of a checkpoint's config: a model is traced layer by layer before its tensors are compared.
MAX_LAYERS, MAX_EXPERTS, MAX_SIZE = 512, 4096, 2**31 - 1
CONFIG, GENERATION = "config.json", "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # the latter's sampling parameters


def _check_types(config: Any) -> None:
    """Check the values that a file gives to a dataclass's fields.

    Raises:
        ValueError: a value has the wrong type.
    """
    kinds: dict[Any, tuple[str, Callable[[Any], bool]]] = {
        int: ("a whole number", lambda x: type(x) is int and abs(x) <= MAX_SIZE),
        float: ("a finite number", lambda x: type(x) in (int, float) and abs(x) <= sys.float_info.max),
        bool: ("true or false", lambda x: isinstance(x, bool)),
        str: ("a text", lambda x: isinstance(x, str)),
    }
    for each in fields(config):
        value, hint = getattr(config, each.name), each.type
        if hint == float | None:
            if value is None:
                continue
            hint = float
        if hint in kinds and not kinds[hint][1](value):
            raise ValueError(f"{each.name}: must be {kinds[hint][0]}, not {reprlib.repr(value)}")


def _check_layers(count: Any) -> None:
    if type(count) is not int:
        raise ValueError(f"num_hidden_layers: must be a whole number, not {reprlib.repr(count)}")
    if count > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers: must be at most {MAX_LAYERS}, not {count}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding as a Hugging Face config gives it: `rope_parameters`, or `rope_theta` and `rope_scaling`."""

    type: str = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False  # whether longrope takes the long factors

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor: must be above 0 and at most 1, not {self.partial_rotary_factor:g}"
            )
        for name in ("short_factor", "long_factor"):
            if not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in getattr(self, name)):
                raise ValueError(f"{name}: must be numbers above 0, not {reprlib.repr(getattr(self, name))}")
        if not (self.theta > 1 and self.factor > 0 and self.beta_fast > 0 and self.beta_slow > 0):
            raise ValueError(
                "rope_scaling: rope_theta must be above 1, and factor, beta_fast and beta_slow above 0, not "
                f"{self.theta:g}, {self.factor:g}, {self.beta_fast:g} and {self.beta_slow:g}"
            )
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: must exceed low_freq_factor ({self.low_freq_factor:g}), "
                f"not {self.high_freq_factor:g}"
            )
        if self.original_max_position_embeddings < (self.type != "default"):
            raise ValueError(
                f"original_max_position_embeddings: must be at least 1, not {self.original_max_position_embeddings}"
            )

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "RopeConfig":
        """Return the rotary embedding of a config.json's content.

        Raises:
            ValueError: the rope type is not supported, or a value is invalid.
        """
        parts = [hf.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"rope_scaling, rope_parameters: must be JSON objects, not {reprlib.repr(parts)}")
        parameters = parts[0] | parts[1]
        if any(isinstance(value, dict) for value in parameters.values()) or parameters.get("mrope_section"):
            raise ValueError("rope_parameters: only one rotary embedding of whole positions is supported")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "dynamic":
            raise ValueError(
                "rope_type: 'dynamic' is not supported, because its frequencies change as a sequence grows and "
                f"cached keys would have to be rotated again; supported: {', '.join(ROPE_TYPES)}"
            )
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: {reprlib.repr(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
        parameters.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor"))
        parameters.setdefault("rope_theta", hf.get("rope_theta", DEFAULT_ROPE_THETA))
        parameters.setdefault("original_max_position_embeddings", hf.get("original_max_position_embeddings"))
        original = parameters["original_max_position_embeddings"] or hf.get("max_position_embeddings", 2048)
        factor = parameters.get("factor")
        if factor is None and kind in ("yarn", "longrope"):
            factor = hf.get("max_position_embeddings", 2048) / original
        if factor is None and kind != "default":
            raise ValueError(f"rope_type: {kind!r} needs 'factor'")
        if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= parameters.keys():
            raise ValueError("rope_type: 'llama3' needs 'low_freq_factor' and 'high_freq_factor'")
        if kind == "longrope":
            if not all(isinstance(parameters.get(name), list) for name in ("short_factor", "long_factor")):
                raise ValueError("rope_type: 'longrope' needs 'short_factor' and 'long_factor'")
            parameters = parameters | {name: tuple(parameters[name]) for name in ("short_factor", "long_factor")}
            parameters["is_long"] = hf.get("max_position_embeddings", 2048) > original
        names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
        further = ("mscale_all_dim", "truncate", "partial_rotary_factor", "short_factor", "long_factor", "is_long")
        given = {name: parameters[name] for name in (*names, *further) if parameters.get(name) is not None}
        return cls(
            type=kind,
            theta=parameters["rope_theta"],
            factor=1.0 if factor is None else factor,
            original_max_position_embeddings=original,
            **given,
        )


# Names of a layer's norms before attention, after attention, before the MLP and after the MLP; None: no norm there.
Norms = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ALL_NORMS: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """Mixture of experts instead of the MLP of some layers.

    Attributes:
        num_experts: number of experts of a layer.
        num_experts_per_tok: number of experts that compute a token.
        intermediate_size: MLP dim of an expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        dense_layers: layers with an MLP.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        if self.num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: must be at most {MAX_EXPERTS}, not {self.num_experts}")
        if self.intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size: must be at least 1, not {self.intermediate_size}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: must be between 1 and the number of experts ({self.num_experts}), "
                f"not {self.num_experts_per_tok}"
            )


@dataclass(frozen=True)
class Variation:
    """Differences between a decoder and Llama's.

    Attributes:
        norms: names of the norms of a layer.
        qk_norm: None; "head": queries and keys are normed per head; "projection": over all heads.
        unit_offset: whether norms multiply by 1 + weight.
        output_bias: whether the attention's output has a bias if `attention_bias` is set.
        windows: number of tokens up to its own that a query of each layer sees, None: all; (): all in every layer.
        local_rope: rotary embedding of the layers with a window, if they have another one.
        no_rope: layers without rotary embedding.
        scale: factor on q·k; None: head_dim ** -0.5.
        soft_cap: c where attention scores x become c * tanh(x / c).
        final_soft_cap: likewise for logits.
        embedding_multiplier: factor on embeddings.
        residual_multiplier: factor on the outputs of attention and MLP.
        logits_divisor: divisor of logits.
        experts: mixture of experts.
    """

    norms: Norms = PRE_NORMS
    qk_norm: str | None = None
    unit_offset: bool = False
    output_bias: bool = True
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    no_rope: tuple[int, ...] = ()
    scale: float | None = None
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not all(window is None or (type(window) is int and window > 0) for window in self.windows):
            raise ValueError(f"sliding_window: must be at least 1, not {reprlib.repr(self.windows)}")
        positive = {
            "attention_multiplier": self.scale, "attn_logit_softcapping": self.soft_cap,
            "final_logit_softcapping": self.final_soft_cap, "logits_scaling": self.logits_divisor,
        }  # fmt: skip
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}: must be above 0, not {value}")


def windows_of(hf: dict[str, Any], layer_types: list[str]) -> tuple[int | None, ...]:
    """Return the window of each layer: `sliding_window` where its type is "sliding_attention".

    Args:
        hf: content of a config.json; its `layer_types` take precedence over the argument.

    Raises:
        ValueError: a type is unknown, their number is not that of the layers, or the window is missing.
    """
    found = hf.get("layer_types") or layer_types
    types = {"full_attention": None, "sliding_attention": hf.get("sliding_window")}
    if not isinstance(found, list) or not all(isinstance(name, str) and name in types for name in found):
        raise ValueError(f"layer_types: {reprlib.repr(found)} is not supported; supported: {', '.join(types)}")
    if len(found) != hf["num_hidden_layers"]:
        raise ValueError(
            f"layer_types: must name num_hidden_layers ({hf['num_hidden_layers']}) layers, not {len(found)}"
        )
    if "sliding_attention" in found and types["sliding_attention"] is None:
        raise ValueError("sliding_window: must be a number of tokens for layers of sliding_attention, not null")
    return tuple(types[name] for name in found)


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a dense Llama, with the field names of its Hugging Face `config.json`.

    Configurations of other architectures derive from it: they name their `defaults` of missing fields, the further
    fields that they read (`reads`, names in `NEUTRAL`), and return their `variation_of` Llama's decoder.
    """

    architecture: ClassVar[str] = "LlamaForCausalLM"  # as `architectures` names it
    model_type: ClassVar[str] = "llama"
    defaults: ClassVar[dict[str, Any]] = {}
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
        _check_types(self)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads: must be a multiple of num_key_value_heads ({self.num_key_value_heads}), "
                f"not {self.num_attention_heads}"
            )
        _check_layers(self.num_hidden_layers)
        if self.rms_norm_eps < 0:
            raise ValueError(f"rms_norm_eps: must be at least 0, not {self.rms_norm_eps}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: must be even for rotary embeddings, not {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act: {reprlib.repr(self.hidden_act)} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if not all(type(token) is int and token >= 0 for token in self.eos_token_ids):
            raise ValueError(f"eos_token_id: must be token ids, not {reprlib.repr(self.eos_token_ids)}")
        if (rotary_dim := int(self.head_dim * self.rope.partial_rotary_factor)) % 2:
            raise ValueError(
                f"partial_rotary_factor: {self.rope.partial_rotary_factor:g} of head_dim ({self.head_dim}) must be "
                f"even, not {rotary_dim}"
            )
        for name in ("short_factor", "long_factor") if self.rope.type == "longrope" else ():
            if len(getattr(self.rope, name)) != rotary_dim // 2:
                raise ValueError(
                    f"{name}: must be {rotary_dim // 2} numbers, half of the rotary dim, "
                    f"not {len(getattr(self.rope, name))}"
                )

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
    def describes(cls, hf: dict[str, Any]) -> bool:
        """Return whether the content of a config.json is that of this architecture."""
        names = hf.get("architectures") or [hf.get("model_type")]
        own = {cls.architecture, cls.model_type}
        named = isinstance(names, list) and any(isinstance(name, str) and name in own for name in names)
        return named and hf.get("model_type", cls.model_type) == cls.model_type

    @classmethod
    def from_hf(cls, hf: dict[str, Any], generation: dict[str, Any] | None = None) -> Self:
        """Return the config of config.json's content; end-of-sequence ids of generation_config.json take precedence.

        Raises:
            ValueError: the architecture does not support a value.
        """
        return cls(**cls.fields_of(hf, generation or {}))

    @classmethod
    def fields_of(cls, hf: dict[str, Any], generation: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields. An architecture with more fields adds their values."""
        hf = cls.defaults | hf
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in required if name not in hf]:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        _check_layers(hf["num_hidden_layers"])  # before the variations, which have a value for each
        for name, accepted in NEUTRAL.items():
            values = hf[name] if isinstance(hf.get(name), list) else [hf.get(name)]
            if name not in cls.reads and not all(value in accepted for value in values):
                raise ValueError(
                    f"{name}: {reprlib.repr(hf[name])} is not supported by {cls.architecture}; "
                    f"supported: {', '.join(map(json.dumps, accepted))}"
                )
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
            max_position_embeddings=hf.get("max_position_embeddings", 2048),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            hidden_act=hf.get("hidden_act", "silu"),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            attention_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
            rope=rope,
            dtype=dtype if dtype in DTYPES else "float32",
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            variation=cls.variation_of(hf),
        )

    @classmethod
    def variation_of(cls, hf: dict[str, Any]) -> Variation:
        """Return the differences from Llama's decoder, by config.json's content with the defaults."""
        return Variation()

    @classmethod
    def from_directory(cls, directory: Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read config.json and, if it exists, generation_config.json.

        Args:
            overrides: as `EngineConfig.hf_overrides`.

        Raises:
            ValueError: a file is invalid; the message has its path.
        """
        path = directory / CONFIG
        hf, generation = read_hf(directory, overrides), read_json(directory / GENERATION, missing_ok=True)
        try:
            return cls.from_hf(hf, generation)
        except (
            ValueError,
            TypeError,
            ArithmeticError,
        ) as error:  # the last two: a value of a wrong type was computed with
            where = (f"{path}, {GENERATION}" if generation else str(path)) + ", hf_overrides" * bool(overrides)
            raise ValueError(f"{where}: {error}") from error


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Return generation_config.json's sampling parameters, the defaults of requests to the server."""
    generation = read_json(directory / GENERATION, missing_ok=True)
    return {name: generation[name] for name in SAMPLING if generation.get(name) is not None}


def read_hf(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of config.json with the overrides of `EngineConfig.hf_overrides`.

    An override of `rope_scaling` or `rope_parameters` replaces both. Of `text_config`, the named fields are replaced.

    Raises:
        ValueError: the file is invalid, or an override is not a field of such a file.
    """
    hf = read_json(directory / CONFIG)
    return _overridden(hf, overrides, "hf_overrides") if overrides else hf


def _overridden(hf: dict[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = set(hf) - {"quantization_config", "compression_config"}  # which belong to the tensors
    if "text_config" not in hf:  # it has the fields of the model
        known |= {each.name for each in fields(ModelConfig)} | set(NEUTRAL) | set(ROPE)
        known |= {"architectures", "model_type", "eos_token_id", "original_max_position_embeddings"}
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{where}: {name} is not a field of the model's {CONFIG} that can be replaced{hint}")
    kept, new = dict(hf), dict(overrides)
    if set(ROPE) & overrides.keys() and isinstance(rope := kept.get("rope_parameters"), dict):
        kept |= {"rope_theta": rope.get("rope_theta", kept.get("rope_theta", DEFAULT_ROPE_THETA))}
        kept["rope_parameters"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if {"rope_scaling", "rope_parameters"} & overrides.keys():
        kept = {name: value for name, value in kept.items() if name not in ("rope_scaling", "rope_parameters")}
    if isinstance(text := hf.get("text_config"), dict) and isinstance(given := overrides.get("text_config"), Mapping):
        new["text_config"] = _overridden(text, given, f"{where}.text_config")
    return kept | new


def read_json(path: Path, *, missing_ok: bool = False, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint; {} if it is missing and `missing_ok`.

    Raises:
        ValueError: the file does not contain a JSON object, or may not be opened; the message has its path.
    """
    if missing_ok and not path.exists():
        return {}
    data = read_file(path, max_bytes)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of a sequence, a step, a KV block and a list of logprobs, after all None are resolved."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    max_logprobs: int = 20


MODEL, MEMORY, SCHEDULING = "model", "memory", "scheduling"  # the groups of settings


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. None means that the model and the device decide when the engine is built."""

    model: str = setting("demo", "a directory, a Hugging Face hub id, or demo", group=MODEL, unit="MODEL")
    revision: str | None = setting(None, "branch, tag or commit of a hub id", by="main", group=MODEL, unit="NAME")
    tokenizer: str | None = setting(
        None, "directory or hub id of a tokenizer", by="the model's", group=MODEL, unit="MODEL"
    )
    skip_tokenizer_init: bool = setting(
        False, "load no tokenizer; requests and responses then hold token ids", group=MODEL
    )
    load_format: str = setting(
        "auto", "format of the checkpoint; dummy: random weights", group=MODEL, choices=LOAD_FORMATS
    )
    dtype: str = setting(
        "auto", "dtype of parameters and activations; auto: float32 on a CPU, otherwise the checkpoint's (bfloat16 for "
        "float32)", group=MODEL, choices=("auto", *DTYPES, *DTYPE_ALIASES),
    )  # fmt: skip
    hf_overrides: Mapping[str, Any] | None = setting(
        None, "fields that replace those of the model's config.json", by="none", group=MODEL, unit="JSON"
    )
    generation_config: str = setting(
        "auto", "source of default sampling parameters; auto: the model's files; vllm: the API", group=MODEL,
        choices=("auto", "vllm"),
    )  # fmt: skip
    override_generation_config: Mapping[str, Any] | None = setting(
        None, "default sampling parameters in place of those of generation_config", by="none", group=MODEL, unit="JSON"
    )
    quantization: str | None = setting(
        None, "int8, fp8: weights of linear layers in 8 bits, quantized while they are loaded; other methods are "
        "accepted for checkpoints that are quantized so, which need no setting", by="as in the checkpoint",
        group=MODEL, choices=tuple(dict.fromkeys((*QUANTIZATIONS, *QUANTIZED_CHECKPOINTS))),
    )  # fmt: skip
    kv_cache_dtype: str = setting(
        "auto", "dtype of the KV pool; auto: that of the keys; fp8 holds twice as many tokens as 16 bits, less exactly",
        group=MODEL, choices=tuple(KV_CACHE_DTYPES),
    )  # fmt: skip
    logprobs_mode: str = setting(
        "raw_logprobs", "logprobs of samples: the model's own, or those after masks, penalties, temperature and "
        "filters", group=MODEL, choices=LOGPROBS_MODES,
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "maximum tokens of a sequence, prompt and output", by="the model's", group=MODEL, low=2, unit="TOKENS"
    )
    seed: int = setting(0, "seed of requests without a seed, and of dummy weights", group=MODEL, unit="SEED")
    tensor_parallel_size: int | None = setting(
        None, "number of devices that share the model, its heads and the KV pool", by="1; for a module, the number of "
        "its devices", group=MODEL, low=1, unit="DEVICES",
    )  # fmt: skip
    kernels: str = setting(
        "auto", "attention kernels; auto: the fastest that the device and the model allow", group=MODEL,
        choices=KERNELS,
    )  # fmt: skip

    gpu_memory_utilization: float = setting(
        0.92, "share of jax's memory on the device (XLA_PYTHON_CLIENT_MEM_FRACTION) for parameters, KV pool and "
        "temporaries", group=MEMORY, above=0, high=1, unit="SHARE",
    )  # fmt: skip
    num_gpu_blocks_override: int | None = setting(
        None, "number of KV blocks, instead of measuring memory", group=MEMORY, low=1, unit="BLOCKS"
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "bytes of the KV pool on each device, such as 1G, instead of measuring memory", group=MEMORY, low=1,
        unit="BYTES",
    )  # fmt: skip
    block_size: int | None = setting(
        None, "tokens of a KV block", by="16; 64 on a CPU for sequences of 2,048 tokens and more", group=MEMORY,
        low=1, high=256, power_of_two=True, unit="TOKENS",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of prompts with a common prefix", group=MEMORY)
    swap_space: float = setting(
        4.0, "host memory for KV blocks of preempted requests, in GiB", group=MEMORY, low=0, unit="GIB"
    )

    max_num_seqs: int | None = setting(
        None, "maximum sequences in a step", by="64 on a CPU, 256 on a GPU", group=SCHEDULING, low=1, unit="SEQS"
    )
    max_num_batched_tokens: int | None = setting(
        None, "maximum tokens in a step; longer prompts are computed in chunks", by="256 on a CPU, 2,048 on a GPU; "
        "fewer in steps with decodes if a step of that size takes more than 2.5 decode steps (3.5 on a CPU)",
        group=SCHEDULING, low=1, unit="TOKENS",
    )  # fmt: skip
    warm_up: bool = setting(
        True, "compile every shape of a step before the first request; otherwise each one when it is first needed, for "
        "short starts while a program is debugged", group=SCHEDULING,
    )  # fmt: skip
    max_logprobs: int = setting(
        20, "maximum logprobs and prompt_logprobs of a request; -1: the whole vocabulary. Every step has room for so "
        "many for each sample", group=SCHEDULING, low=-1, unit="TOKENS",
    )  # fmt: skip
    async_scheduling: bool = setting(
        True, "dispatch a step before the tokens of the previous one are known", group=SCHEDULING
    )
    scheduling_policy: str = setting(
        "fcfs", "order of waiting requests; priority: lower priorities first", group=SCHEDULING,
        choices=SCHEDULING_POLICIES,
    )  # fmt: skip
    preemption_mode: str = setting(
        "auto", "treatment of a preempted request's KV blocks: compute them again, or swap them to the host; auto: the "
        "cheaper one by the measured speed of the device", group=SCHEDULING, choices=PREEMPTION_MODES,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.skip_tokenizer_init and self.tokenizer:
            raise ValueError(f"skip_tokenizer_init: can't be combined with tokenizer ({self.tokenizer!r})")
        if self.kv_cache_memory_bytes and self.num_gpu_blocks_override:
            raise ValueError("kv_cache_memory_bytes: can't be combined with num_gpu_blocks_override")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: must be at least max_num_seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}"
            )

    def pool_dtype(self, dtype: str) -> str:
        """Return the dtype of the KV pool for parameters of `dtype`."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype] or dtype


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n{documentation(EngineConfig)}"
