"""Parts of a model's config: the rotary embedding, and the decoder's differences from Llama's."""

import math
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

MAX_SIZE = 2**31 - 1

Hf = dict[str, Any]  # the content of a config.json
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
DEFAULT_ROPE_THETA = 10000.0
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # fields of a config about its rotary embedding
FACTORS = ("short_factor", "long_factor")  # lists of longrope
EXTENDING = ("linear", "yarn")  # rope types after which sequences may pass max_position_embeddings
MAX_EXPERTS = 4096

# Names of a layer's norms before attention, after attention, before the MLP and after the MLP; None: no norm there.
Norms = tuple[str | None, str | None, str | None, str | None]


def require(fits: bool, name: str, rule: str, value: object) -> None:
    """Raise ValueError if a value does not fit; the message has the field's name, its rule and the value."""
    if not fits:
        raise ValueError(f"{name}: must be {rule}, not {value}")


def check_types(config: Any) -> None:
    """Check the types of the values that a file gives to a dataclass's fields. Raises ValueError."""
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
        if hint in kinds:
            rule, fits = kinds[hint]
            require(fits(value), each.name, rule, reprlib.repr(value))


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
        check_types(self)
        share = self.partial_rotary_factor
        require(0 < share <= 1, "partial_rotary_factor", "above 0 and at most 1", f"{share:g}")
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            fits = all(type(factor) in (int, float) and 0 < factor < math.inf for factor in factors)
            require(fits, name, "numbers above 0", reprlib.repr(factors))
        if not (self.theta > 1 and self.factor > 0 and self.beta_fast > 0 and self.beta_slow > 0):
            values = f"{self.theta:g}, {self.factor:g}, {self.beta_fast:g} and {self.beta_slow:g}"
            rule = "rope_theta must be above 1, and factor, beta_fast and beta_slow above 0"
            raise ValueError(f"rope_scaling: {rule}, not {values}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.type == "llama3" and not high > low:
            raise ValueError(f"high_freq_factor: must exceed low_freq_factor ({low:g}), not {high:g}")
        original = self.original_max_position_embeddings
        require(original >= (self.type != "default"), "original_max_position_embeddings", "at least 1", original)

    @classmethod
    def from_hf(cls, hf: Hf) -> "RopeConfig":
        """Return the rotary embedding of a config.json's content. Raises ValueError."""
        parameters = _parameters(hf)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "dynamic":
            raise ValueError(
                "rope_type: 'dynamic' is not supported, because its frequencies change as a sequence grows and "
                f"cached keys would have to be rotated again; supported: {', '.join(ROPE_TYPES)}"
            )
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: {reprlib.repr(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
        maximum = hf.get("max_position_embeddings", 2048)
        original = parameters["original_max_position_embeddings"] or maximum
        if parameters.get("factor") is None and kind in ("yarn", "longrope"):
            parameters["factor"] = maximum / original
        if parameters.get("factor") is None and kind != "default":
            raise ValueError(f"rope_type: {kind!r} needs 'factor'")
        if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= parameters.keys():
            raise ValueError("rope_type: 'llama3' needs 'low_freq_factor' and 'high_freq_factor'")
        if kind == "longrope":
            if not all(isinstance(parameters.get(name), list) for name in FACTORS):
                raise ValueError("rope_type: 'longrope' needs 'short_factor' and 'long_factor'")
            parameters |= {name: tuple(parameters[name]) for name in FACTORS}
        names = {each.name for each in fields(cls)} & parameters.keys()
        values = {name: parameters[name] for name in names if parameters[name] is not None}
        values |= {"type": kind, "theta": parameters["rope_theta"], "original_max_position_embeddings": original}
        return cls(**values | {"is_long": kind == "longrope" and maximum > original})


def _parameters(hf: Hf) -> Hf:
    """Return the parameters of the rotary embedding, wherever a config.json has them. Raises ValueError."""
    parts = [hf.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"rope_scaling, rope_parameters: must be JSON objects, not {reprlib.repr(parts)}")
    parameters = parts[0] | parts[1]
    if any(isinstance(value, dict) for value in parameters.values()) or parameters.get("mrope_section"):
        raise ValueError("rope_parameters: only one rotary embedding of whole positions is supported")
    names = ("partial_rotary_factor", "original_max_position_embeddings")
    outer = {"rope_theta": hf.get("rope_theta", DEFAULT_ROPE_THETA)} | {name: hf.get(name) for name in names}
    return outer | parameters


def split_rope(hf: Hf) -> Hf:
    """Return a config.json's content with `rope_parameters` of layers that see all tokens.

    Files of transformers 5 have them by the type of layer. Those of layers with a window become
    `local_rope_parameters`.
    """
    parameters = hf.get("rope_parameters")
    if not isinstance(parameters, dict) or "full_attention" not in parameters:
        return hf
    local = parameters.get("sliding_attention") or {}
    return hf | {"rope_parameters": parameters["full_attention"], "local_rope_parameters": local}


@dataclass(frozen=True)
class Experts:
    """Mixture of experts instead of the MLP of some layers.

    Attributes:
        num_experts: number of experts of a layer.
        num_experts_per_tok: number of experts that compute a token.
        intermediate_size: MLP dim of an expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        dense_layers: layers with an MLP.
        shared_size: MLP dim of the expert that computes all tokens; 0: there is none.
        shared_gate: whether this expert's output is multiplied by a sigmoid of a linear layer.
        router: "softmax", or "sigmoid": with a bias that counts only for the choice of experts.
        groups: number of groups of experts, of which a token chooses some by their best two experts.
        groups_per_tok: number of groups that a token chooses.
        scale: factor on the weights of a token's experts.
        biases: whether the router and the experts have biases.
        activation: activation of the experts; None: the config's `hidden_act`.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    shared_gate: bool = False
    router: str = "softmax"
    groups: int = 1
    groups_per_tok: int = 1
    scale: float = 1.0
    biases: bool = False
    activation: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        count, used = self.num_experts, self.num_experts_per_tok
        require(count <= MAX_EXPERTS, "num_experts", f"at most {MAX_EXPERTS}", count)
        require(self.intermediate_size >= 1, "moe_intermediate_size", "at least 1", self.intermediate_size)
        require(self.shared_size >= 0, "shared_expert_intermediate_size", "at least 0", self.shared_size)
        groups, chosen = self.groups, self.groups_per_tok
        fits = groups == 1 or (groups > 1 and not count % groups and count // groups > 1)
        require(fits, "n_group", f"1, or a number of groups of the {count} experts with two or more", groups)
        require(1 <= chosen <= groups, "topk_group", f"between 1 and the number of groups ({groups})", chosen)
        count = count // groups * chosen
        require(1 <= used <= count, "num_experts_per_tok", f"between 1 and the number of experts ({count})", used)


@dataclass(frozen=True)
class Recurrence:
    """Gated delta rule instead of attention in some layers.

    Attributes:
        layers: layers without attention.
        num_key_heads, num_value_heads: heads of keys, and of values, a multiple.
        key_dim, value_dim: dims of a head of keys, and of values.
        taps: inputs of the causal convolution.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        check_types(self)
        names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
        sizes = self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim
        for name, size in zip(names, sizes):
            require(size >= 1, name, "at least 1", size)
        require(self.taps >= 2, "linear_conv_kernel_dim", "at least 2", self.taps)
        rule = f"a multiple of linear_num_key_heads ({self.num_key_heads})"
        require(not self.num_value_heads % self.num_key_heads, "linear_num_value_heads", rule, self.num_value_heads)

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class Variation:
    """Differences between a decoder and Llama's.

    Attributes:
        norms: names of the norms of a layer.
        qk_norm: None; "head": queries and keys are normed per head; "projection": over all heads.
        unit_offset: whether norms multiply by 1 + weight.
        output_bias: whether the attention's output has a bias if `attention_bias` is set.
        windows: number of tokens that a query of each layer sees, including the query's token; None: all tokens; ():
            all tokens in every layer.
        local_rope: rotary embedding of the layers with a window; None: that of the other layers.
        no_rope: layers without rotary embedding.
        adjacent_rope: whether the rotary embedding turns adjacent dims, and not the two halves of a head.
        sinks: whether each query head has a sink, a learned score without a value.
        scale: factor on q·k; None: head_dim ** -0.5.
        query_growth: g where the query at position p of an original context of c tokens has the factor
            1 + g * log(1 + floor(p / c)).
        soft_cap: c where attention scores x become c * tanh(x / c).
        final_soft_cap: soft cap of logits.
        embedding_multiplier: factor on embeddings.
        residual_multiplier: factor on the outputs of attention and MLP.
        logits_divisor: divisor of logits.
        experts: mixture of experts.
        gated: whether the output of attention is multiplied by the sigmoid of a gate.
        recurrence: gated delta rule in some layers.
    """

    norms: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
    qk_norm: str | None = None
    unit_offset: bool = False
    output_bias: bool = True
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    no_rope: tuple[int, ...] = ()
    adjacent_rope: bool = False
    sinks: bool = False
    scale: float | None = None
    query_growth: float = 0.0
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    experts: Experts | None = None
    gated: bool = False
    recurrence: Recurrence | None = None

    def __post_init__(self) -> None:
        check_types(self)
        fits = all(window is None or (type(window) is int and window > 0) for window in self.windows)
        require(fits, "sliding_window", "at least 1", reprlib.repr(self.windows))
        names = ("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling")
        for name, value in zip(names, (self.scale, self.soft_cap, self.final_soft_cap, self.logits_divisor)):
            require(value is None or value > 0, name, "above 0", value)


def windows_of(hf: Hf, layer_types: list[str]) -> tuple[int | None, ...]:
    """Return the window of each layer: `sliding_window` where its type is "sliding_attention".

    The `layer_types` of a config.json, `hf`, take precedence over the argument.

    Raises:
        ValueError: a type is unknown, their number is not that of the layers, or the window is missing.
    """
    kinds = hf.get("layer_types") or layer_types
    types = {"full_attention": None, "sliding_attention": hf.get("sliding_window")}
    if not isinstance(kinds, list) or not all(isinstance(name, str) and name in types for name in kinds):
        raise ValueError(f"layer_types: {reprlib.repr(kinds)} is not supported; supported: {', '.join(types)}")
    if len(kinds) != (count := hf["num_hidden_layers"]):
        raise ValueError(f"layer_types: must name num_hidden_layers ({count}) layers, not {len(kinds)}")
    if "sliding_attention" in kinds and types["sliding_attention"] is None:
        raise ValueError("sliding_window: must be a number of tokens for layers of sliding_attention, not null")
    return tuple(types[name] for name in kinds)
