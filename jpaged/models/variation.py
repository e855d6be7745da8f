"""Differences between a decoder and Llama's: norms, windows, factors and experts."""

import reprlib
from dataclasses import dataclass

from jpaged.models.field_types import Hf, check_types, require
from jpaged.models.rope_config import RopeConfig

MAX_EXPERTS = 4096

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
        check_types(self)
        count, used = self.num_experts, self.num_experts_per_tok
        require(count <= MAX_EXPERTS, "num_experts", f"at most {MAX_EXPERTS}", count)
        require(self.intermediate_size >= 1, "moe_intermediate_size", "at least 1", self.intermediate_size)
        require(1 <= used <= count, "num_experts_per_tok", f"between 1 and the number of experts ({count})", used)


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
        scale: factor on q·k; None: head_dim ** -0.5.
        soft_cap: c where attention scores x become c * tanh(x / c).
        final_soft_cap: soft cap of logits.
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
        check_types(self)
        fits = all(window is None or (type(window) is int and window > 0) for window in self.windows)
        require(fits, "sliding_window", "at least 1", reprlib.repr(self.windows))
        names = ("attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling")
        for name, value in zip(names, (self.scale, self.soft_cap, self.final_soft_cap, self.logits_divisor)):
            require(value is None or value > 0, name, "above 0", value)


def windows_of(hf: Hf, layer_types: list[str]) -> tuple[int | None, ...]:
    """Return the window of each layer: `sliding_window` where its type is "sliding_attention".

    Args:
        hf: content of a config.json; its `layer_types` take precedence over the argument.

    Raises:
        ValueError: a type is unknown, their number is not that of the layers, or the window is missing.
    """
    kinds = hf.get("layer_types") or layer_types
    types = {"full_attention": None, "sliding_attention": hf.get("sliding_window")}
    if not isinstance(kinds, list) or not all(isinstance(name, str) and name in types for name in kinds):
        raise ValueError(f"layer_types: {reprlib.repr(kinds)} is not supported; supported: {', '.join(types)}")
    if len(kinds) != hf["num_hidden_layers"]:
        raise ValueError(
            f"layer_types: must name num_hidden_layers ({hf['num_hidden_layers']}) layers, not {len(kinds)}"
        )
    if "sliding_attention" in kinds and types["sliding_attention"] is None:
        raise ValueError("sliding_window: must be a number of tokens for layers of sliding_attention, not null")
    return tuple(types[name] for name in kinds)
