"""Dense Llama in Flax NNX. It holds parameters and no cache: attention is an argument."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jpaged.config import ModelConfig
from jpaged.models.base import Architecture, Attend, AttentionSpec
from jpaged.models.layers import Linear, axes, product, rms_norm
from jpaged.models.rope import angles, inverse_frequencies
from pallas_kernels import rotate

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Attention(nnx.Module):
    """Self-attention with rotary embedding; `attend` does the attention itself."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.head_dim
        options: Any = dict(bias=config.attention_bias, dtype=dtype, rngs=rngs)
        n, k = config.num_attention_heads * h, config.num_key_value_heads * h
        self.head_dim = h
        self.q_proj = Linear(d, n, ("heads", None), **options)
        self.k_proj = Linear(d, k, ("kv_heads", None), **options)
        self.v_proj = Linear(d, k, ("kv_heads", None), **options)
        self.o_proj = Linear(n, d, (None, "heads"), **options)

    def __call__(self, x_td: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D], with rotation angles [T, H/2]."""
        t = x_td.shape[0]
        q_tnh = rotate(self.q_proj(x_td).reshape(t, -1, self.head_dim), cos, sin)
        k_tkh = self.k_proj(x_td).reshape(t, -1, self.head_dim)
        v_tkh = self.v_proj(x_td).reshape(t, -1, self.head_dim)
        return self.o_proj(attend(layer, q_tnh, k_tkh, v_tkh, cos, sin).reshape(t, -1))


class Mlp(nnx.Module):
    """Gated MLP."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        options: Any = dict(bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation = config.hidden_act
        self.gate_proj = Linear(d, f, ("mlp", None), **options)
        self.up_proj = Linear(d, f, ("mlp", None), **options)
        self.down_proj = Linear(f, d, (None, "mlp"), **options)

    def __call__(self, x_td: jax.Array) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D]."""
        return self.down_proj(self.gate_proj(x_td, ACTIVATIONS[self.activation]) * self.up_proj(x_td))


class Layer(nnx.Module):
    """Decoder layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = rms_norm(size, epsilon, dtype=dtype, rngs=rngs)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = rms_norm(size, epsilon, dtype=dtype, rngs=rngs)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x_td: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend) -> jax.Array:
        """Return the hidden states [T, D] after the layer."""
        x_td = x_td + self.self_attn(self.input_layernorm(x_td), cos, sin, layer, attend)
        return x_td + self.mlp(self.post_attention_layernorm(x_td))


class Llama(nnx.Module):
    """Llama family: 1, 2, 3, 3.1, 3.2, TinyLlama and other models that its config describes.

    `dtype` ("float32", "bfloat16" or "float16") is that of parameters and activations; norms, angles and logits are
    float32 inside. Attributes are named as in Hugging Face checkpoints.
    """

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs):
        self.config = config
        d, v = config.hidden_size, config.vocab_size
        self.embed_tokens = nnx.Embed(
            v, d, dtype=dtype, param_dtype=dtype, rngs=rngs, embedding_metadata=axes("vocab", None),
            embedding_init=nnx.initializers.normal(0.02),
        )  # fmt: skip
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = rms_norm(d, config.rms_norm_eps, dtype=dtype, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(d, v, ("vocab", None), bias=False, dtype=dtype, rngs=rngs)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Causal attention over the whole context, in every layer."""
        return (AttentionSpec(self.config.head_dim**-0.5),) * self.config.num_hidden_layers

    def __call__(self, tokens_t: jax.Array, positions_t: jax.Array, attend: Attend) -> jax.Array:
        """Return the final hidden states [T, D] of tokens [T] int32 at positions [T] int32."""
        cos, sin = angles(positions_t, *inverse_frequencies(self.config.rope, self.config.head_dim))
        x_td = self.embed_tokens(tokens_t)
        for index, layer in enumerate(self.layers):
            x_td = layer(x_td, cos, sin, index, attend)
        normed_td: jax.Array = self.norm(x_td)
        return normed_td

    def logits(self, x_sd: jax.Array) -> jax.Array:
        """Return the logits [S, V] float32 of hidden states [S, D]."""
        tied = self.config.tie_word_embeddings
        weight_vd = self.embed_tokens.embedding[...] if tied else self.lm_head.weight[...]
        return product(x_sd, weight_vd, jnp.float32)


ARCHITECTURE = Architecture(ModelConfig, Llama)
