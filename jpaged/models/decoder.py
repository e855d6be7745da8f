"""Decoder of most architectures in Flax NNX, as a config and its `Variation` describe it.

The module holds parameters and no cache, because attention is an argument.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.base import Attend, AttentionSpec, LayerSpec, Place, RecurrentSpec
from jpaged.models.config import ModelConfig
from jpaged.models.delta import GatedDeltaNet
from jpaged.models.fused import Join, fuse_linears
from jpaged.models.layers import Embedding, Linear, RMSNorm, axes
from jpaged.models.mlp import Mlp
from jpaged.models.moe import MixtureOfExperts
from jpaged.models.rope import angles, inverse_frequencies
from pallas_kernels import rotate

Rotation = tuple[jax.Array, jax.Array]  # cos and sin [T, R/2] of the rotary dim R
Norm = Callable[[jax.Array], jax.Array]
Block = Callable[..., jax.Array]  # as `Mlp`


class Attention(nnx.Module):
    """Self-attention with rotary embedding; `attend` does the attention itself."""

    is_gated = False  # see `fuse`

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d, h, variation = config.hidden_size, config.head_dim, config.variation
        linear = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        n, k = config.num_attention_heads * h, config.num_key_value_heads * h
        self.head_dim, self.gated = h, variation.gated
        self.qk_norm, self.adjacent_rope = variation.qk_norm, variation.adjacent_rope
        self.q_proj = linear(d, n * (1 + self.gated), ("heads", None))
        self.k_proj = linear(d, k, ("kv_heads", None))
        self.v_proj = linear(d, k, ("kv_heads", None))
        self.o_proj = linear(n, d, (None, "heads"), bias=config.attention_bias and variation.output_bias)
        if variation.sinks:
            sinks = nnx.initializers.normal(1.0)(rngs.params(), (config.num_attention_heads,), dtype)
            self.sinks = nnx.Param(sinks, **axes("heads"))
        if self.qk_norm == "head":
            self.q_norm, self.k_norm = (norm_of(config, h, dtype) for _ in range(2))
        elif self.qk_norm == "projection":
            self.q_norm = norm_of(config, n, dtype, "heads")
            self.k_norm = norm_of(config, k, dtype, "kv_heads")

    def __call__(
        self, x_td: jax.Array, rotation: Rotation | None, layer: int, attend: Attend,
        residual_td: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return the output [T, D] of hidden states [T, D], added to a residual if there is one."""
        t = x_td.shape[0]
        if hasattr(self, "qkv_proj"):
            q_tnh, k_tkh, v_tkh = self.qkv_proj(x_td, self.head_dim)
        else:
            projected = self.q_proj.together(x_td, self.k_proj, self.v_proj)
            q_tnh, k_tkh, v_tkh = (y_to.reshape(t, -1, self.head_dim) for y_to in projected)
        if self.gated:  # each head's query is followed by its gate
            q_tnh, gate_tnh = jnp.moveaxis(q_tnh.reshape(t, -1, 2, self.head_dim), 2, 0)
        if self.qk_norm is not None:
            q_tnh, k_tkh = self._normed(q_tnh, self.q_norm), self._normed(k_tkh, self.k_norm)
        cos = sin = None
        if rotation is not None:
            if self.adjacent_rope:
                q_tnh, k_tkh = (_halved(x, 2 * rotation[0].shape[1]) for x in (q_tnh, k_tkh))
            if 2 * rotation[0].shape[1] == self.head_dim:
                cos, sin = rotation
            else:  # `attend` rotates only whole heads
                q_tnh, k_tkh = (_rotate_first(x, *rotation) for x in (q_tnh, k_tkh))
        sinks: dict[str, jax.Array] = {}
        if hasattr(self, "sinks"):
            sinks["sinks_n"] = self.sinks[...].astype(jnp.float32)
        o_tnh = attend(layer, q_tnh, k_tkh, v_tkh, cos, sin, **sinks)
        if self.gated:
            o_tnh = o_tnh * jax.nn.sigmoid(gate_tnh)
        return self.o_proj(o_tnh.reshape(t, -1), residual_to=residual_td)

    def fuse(self, place: Place, join: Join) -> None:
        """Fuse the projections of queries, keys and values."""
        fuse_linears(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"), place, join)

    def _normed(self, x_tnh: jax.Array, norm: Norm) -> jax.Array:
        """Return heads [T, N, H], normed."""
        shape = (-1, self.head_dim) if self.qk_norm == "head" else (len(x_tnh), -1)
        return norm(x_tnh.reshape(shape)).reshape(x_tnh.shape)


class Layer(nnx.Module):
    """Decoder layer: attention or recurrence, and MLP, with their norms, each with a residual connection."""

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike, rngs: nnx.Rngs):
        variation, experts, recurrence = config.variation, config.variation.experts, config.variation.recurrence
        self.norms, self.multiplier = variation.norms, variation.residual_multiplier

        def add_norm(place: int) -> None:
            if (name := self.norms[place]) is not None:
                setattr(self, name, norm_of(config, config.hidden_size, dtype))

        add_norm(0)
        if recurrence is not None and layer in recurrence.layers:
            self.linear_attn = GatedDeltaNet(config, recurrence, dtype, rngs)
        else:
            self.self_attn = Attention(config, dtype, rngs)
        add_norm(1)
        add_norm(2)
        if experts is not None and layer not in experts.dense_layers:
            self.mlp: Any = MixtureOfExperts(config, experts, dtype, rngs)
        else:
            self.mlp = Mlp(config, config.intermediate_size, dtype, rngs)
        add_norm(3)

    def __call__(self, x_td: jax.Array, rotation: Rotation | None, layer: int, attend: Attend) -> jax.Array:
        """Return the hidden states [T, D] after the layer."""
        if hasattr(self, "linear_attn"):
            block: Block = lambda y_td, **residual: self.linear_attn(y_td, layer, attend, **residual)
        else:
            block = lambda y_td, **residual: self.self_attn(y_td, rotation, layer, attend, **residual)
        return self._added(self._added(x_td, 0, block), 2, self.mlp)

    def _added(self, x_td: jax.Array, place: int, block: Block) -> jax.Array:
        """Return x plus the result of a block, between the norms at `place` and after it."""
        normed_td = self._normed(place, x_td)
        if self.norms[place + 1] is None and self.multiplier == 1:
            return block(normed_td, residual_td=x_td)
        return x_td + _scaled(self._normed(place + 1, block(normed_td)), self.multiplier)

    def _normed(self, place: int, x_td: jax.Array) -> jax.Array:
        name = self.norms[place]
        return x_td if name is None else getattr(self, name)(x_td)


class Decoder(nnx.Module):
    """Decoder that a config describes.

    `dtype` ("float32", "bfloat16" or "float16") is the dtype of parameters, and thereby of activations. Norms, angles,
    routing and logits are computed in float32. Attributes are named as in Hugging Face checkpoints.
    """

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs):
        self.config = config
        d, v = config.hidden_size, config.vocab_size
        self.embed_tokens = Embedding(v, d, "vocab", dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, dtype, rngs) for i in range(config.num_hidden_layers)])
        self.norm = norm_of(config, d, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(d, v, ("vocab", None), bias=False, dtype=dtype, rngs=rngs)

    @property
    def attention_specs(self) -> tuple[LayerSpec, ...]:
        """Causal attention of each layer, with its window, or its recurrence."""
        return layer_specs(self.config)

    def __call__(self, tokens_t: jax.Array, positions_t: jax.Array, attend: Attend) -> jax.Array:
        """Return the final hidden states [T, D] of tokens [T] int32 at positions [T] int32."""
        config, variation = self.config, self.config.variation
        frequencies = partial(inverse_frequencies, head_dim=config.head_dim)
        rotation = angles(positions_t, *frequencies(config.rope))
        local = rotation if variation.local_rope is None else angles(positions_t, *frequencies(variation.local_rope))
        if variation.query_growth:
            attend = _growing(attend, positions_t, config)
        x_td = self.embed_tokens(tokens_t)
        if variation.embedding_multiplier != 1:
            # In the dtype of the embedding: Gemma was trained with the factor rounded to it.
            x_td = x_td * jnp.asarray(variation.embedding_multiplier, x_td.dtype)
        for index, (layer, spec) in enumerate(zip(self.layers, self.attention_specs, strict=True)):
            rotation_of_layer = local if isinstance(spec, AttentionSpec) and spec.window is not None else rotation
            x_td = layer(x_td, None if index in variation.no_rope else rotation_of_layer, index, attend)
        normed_td: jax.Array = self.norm(x_td)
        return normed_td

    def logits(self, x_sd: jax.Array) -> jax.Array:
        """Return the logits [S, V] float32 of hidden states [S, D]."""
        variation, tied = self.config.variation, self.config.tie_word_embeddings
        logits_sv = self.embed_tokens.logits(x_sd) if tied else self.lm_head(x_sd, dtype=jnp.float32)
        if variation.logits_divisor != 1:
            logits_sv = logits_sv / variation.logits_divisor
        if variation.final_soft_cap is not None:
            logits_sv = variation.final_soft_cap * jnp.tanh(logits_sv / variation.final_soft_cap)
        return logits_sv


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the attention or the recurrence of each layer of a decoder."""
    variation, at = config.variation, config.variation.recurrence
    scale = config.head_dim**-0.5 if variation.scale is None else variation.scale
    specs: list[LayerSpec] = [
        AttentionSpec(scale, window, variation.soft_cap)
        for window in variation.windows or (None,) * config.num_hidden_layers
    ]
    if at is not None:
        for layer in at.layers:
            specs[layer] = RecurrentSpec(at.num_value_heads, at.key_dim, at.value_dim, at.channels, at.taps)
    return tuple(specs)


def norm_of(config: ModelConfig, size: int, dtype: DTypeLike, name: str | None = None) -> Norm:
    """Return the config's kind of root-mean-square norm of the last axis, whose name is `name`."""
    return RMSNorm(size, config.rms_norm_eps, dtype=dtype, offset=float(config.variation.unit_offset), name=name)


def _rotate_first(x_tnh: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first R dims of each head by cos and sin [T, R/2], half against half."""
    rotary_dim = 2 * cos.shape[1]
    return jnp.concatenate([rotate(x_tnh[..., :rotary_dim], cos, sin), x_tnh[..., rotary_dim:]], axis=-1)


def _halved(x_tnh: jax.Array, rotary_dim: int) -> jax.Array:
    """Return heads whose first dims are in another order, the even ones before the odd ones.

    A rotation of halves then turns adjacent dims. Scores do not depend on an order that queries and keys share.
    """
    rotated_tnhi = x_tnh[..., :rotary_dim].reshape(*x_tnh.shape[:2], -1, 2)
    return jnp.concatenate([rotated_tnhi[..., 0], rotated_tnhi[..., 1], x_tnh[..., rotary_dim:]], axis=-1)


def _growing(attend: Attend, positions_t: jax.Array, config: ModelConfig) -> Attend:
    """Return `attend` with queries multiplied by factors that grow with their positions."""
    original = config.rope.original_max_position_embeddings
    steps = np.arange(1 + config.context_length // original)
    factors = (1 + config.variation.query_growth * np.log1p(steps)).astype(np.float32)
    factors_t = jnp.asarray(factors)[positions_t // original]

    def grow(layer: int, q_tnh: jax.Array, *others: Any, **options: Any) -> jax.Array:
        return attend(layer, q_tnh * factors_t[:, None, None].astype(q_tnh.dtype), *others, **options)

    return grow


def _scaled(x_td: jax.Array, multiplier: float) -> jax.Array:
    """Multiply in float32; the dtype is kept."""
    return x_td if multiplier == 1 else (x_td.astype(jnp.float32) * multiplier).astype(x_td.dtype)
