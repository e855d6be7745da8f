"""A dense Llama in Flax NNX. It holds parameters and no cache: attention is a function that the caller passes in."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jpaged.config import ModelConfig
from jpaged.model.rope import angles, inverse_frequencies
from pallas_kernels import rotate

# attend(layer, q [T, N, H], k [T, K, H], v [T, K, H], cos, sin [T, H/2]) -> [T, N, H]; q is rotated, k is not: it is
# rotated where it is written to the cache.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def _axes(*names: str | None) -> dict:
    """Metadata that names a parameter's axes; a mesh maps "heads", "mlp" and "vocab" to its own axes."""
    return {"out_sharding": names, "eager_sharding": False}


def _linear(
    fan_in: int, fan_out: int, axes: tuple[str | None, str | None], bias: bool, dtype, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        fan_in, fan_out, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs,
        kernel_metadata=_axes(*axes), bias_metadata=_axes(axes[1]),
    )  # fmt: skip


def _norm(config: ModelConfig, dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, param_dtype=dtype, rngs=rngs,
        scale_metadata=_axes(None),
    )  # fmt: skip


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        d, h, bias = config.hidden_size, config.head_dim, config.attention_bias
        n, k = config.num_attention_heads * h, config.num_key_value_heads * h
        self.head_dim = h
        self.q_proj = _linear(d, n, (None, "heads"), bias, dtype, rngs)
        self.k_proj = _linear(d, k, (None, "heads"), bias, dtype, rngs)
        self.v_proj = _linear(d, k, (None, "heads"), bias, dtype, rngs)
        self.o_proj = _linear(n, d, ("heads", None), bias, dtype, rngs)

    def __call__(self, x_td: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend) -> jax.Array:
        t = x_td.shape[0]
        q_tnh = rotate(self.q_proj(x_td).reshape(t, -1, self.head_dim), cos, sin)
        k_tkh = self.k_proj(x_td).reshape(t, -1, self.head_dim)
        v_tkh = self.v_proj(x_td).reshape(t, -1, self.head_dim)
        return self.o_proj(attend(layer, q_tnh, k_tkh, v_tkh, cos, sin).reshape(t, -1))


class Mlp(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        d, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.hidden_act
        self.gate_proj = _linear(d, f, (None, "mlp"), bias, dtype, rngs)
        self.up_proj = _linear(d, f, (None, "mlp"), bias, dtype, rngs)
        self.down_proj = _linear(f, d, ("mlp", None), bias, dtype, rngs)

    def __call__(self, x_td: jax.Array) -> jax.Array:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x_td)) * self.up_proj(x_td))


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, dtype, rngs)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = _norm(config, dtype, rngs)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x_td: jax.Array, cos: jax.Array, sin: jax.Array, layer: int, attend: Attend) -> jax.Array:
        x_td = x_td + self.self_attn(self.input_layernorm(x_td), cos, sin, layer, attend)
        return x_td + self.mlp(self.post_attention_layernorm(x_td))


class Llama(nnx.Module):
    """The Llama family: 1, 2, 3, 3.1, 3.2, TinyLlama and whatever else its config describes.

    `dtype` ("float32", "bfloat16" or "float16") is that of parameters and activations; norms, angles and logits are
    float32 inside. Attributes are named as in Hugging Face checkpoints; a linear kernel is [in, out].
    """

    def __init__(self, config: ModelConfig, *, dtype: str = "float32", rngs: nnx.Rngs):
        self.config = config
        d, v = config.hidden_size, config.vocab_size
        self.embed_tokens = nnx.Embed(
            v, d, dtype=dtype, param_dtype=dtype, rngs=rngs, embedding_metadata=_axes("vocab", None),
            embedding_init=nnx.initializers.normal(0.02),
        )  # fmt: skip
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = _norm(config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(d, v, (None, "vocab"), False, dtype, rngs)

    def __call__(self, tokens_t: jax.Array, positions_t: jax.Array, attend: Attend) -> jax.Array:
        """Final hidden states [T, D] of tokens [T] int32 at positions [T] int32."""
        cos, sin = angles(positions_t, *inverse_frequencies(self.config.rope, self.config.head_dim))
        x_td = self.embed_tokens(tokens_t)
        for index, layer in enumerate(self.layers):
            x_td = layer(x_td, cos, sin, index, attend)
        return self.norm(x_td)

    def logits(self, x_sd: jax.Array) -> jax.Array:
        """Logits [S, V] float32 of hidden states [S, D]."""
        if self.config.tie_word_embeddings:
            return jnp.einsum("sd,vd->sv", x_sd, self.embed_tokens.embedding[...], preferred_element_type=jnp.float32)
        return jnp.einsum("sd,dv->sv", x_sd, self.lm_head.kernel[...], preferred_element_type=jnp.float32)
