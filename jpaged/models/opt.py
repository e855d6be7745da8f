"""OPT in Flax NNX: LayerNorm, learned positions, an MLP without a gate, biases."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jpaged.models.base import Attend, AttentionSpec, LeafPath, LeafSource, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Embedding, Linear, axes
from jpaged.models.variation import Hf

POSITION_OFFSET = 2  # rows before that of position 0


@dataclass(frozen=True)
class OPTConfig(ModelConfig):
    """Config of an OPT.

    Attributes:
        norm_before: norms come before attention and MLP, else after the residual sum.
        final_norm: whether the last hidden states are normed.
        embedding_size: size of token embeddings, which are projected to the hidden size if it differs.
    """

    architecture: ClassVar[str] = "OPTForCausalLM"
    model_type: ClassVar[str] = "opt"
    mlp_matrices: ClassVar[int] = 2
    defaults: ClassVar[Hf] = {
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "tie_word_embeddings": True, "activation_function": "relu", "enable_bias": True, "do_layer_norm_before": True,
        "eos_token_id": 2,
    }  # fmt: skip

    norm_before: bool = True
    final_norm: bool = True
    embedding_size: int = 0

    @classmethod
    def fields_of(cls, hf: Hf, generation: Hf) -> Hf:
        """Return the values of the fields."""
        hf = cls.defaults | hf
        if not hf.get("layer_norm_elementwise_affine", True):
            raise ValueError("layer_norm_elementwise_affine: only true is supported")
        same = {
            "intermediate_size": hf["ffn_dim"], "hidden_act": hf["activation_function"],
            "attention_bias": hf["enable_bias"], "mlp_bias": hf["enable_bias"],
        }  # fmt: skip
        before, size = hf["do_layer_norm_before"], hf.get("word_embed_proj_dim") or hf["hidden_size"]
        final = before and not hf.get("_remove_final_layer_norm")
        own = {"norm_before": before, "final_norm": final, "embedding_size": size}
        return super().fields_of(hf | same, generation) | own


class Attention(nnx.Module):
    """Self-attention; `attend` does the attention itself."""

    def __init__(self, config: OPTConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d = config.hidden_size
        linear = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.q_proj = linear(d, d, ("heads", None))
        self.k_proj = linear(d, d, ("kv_heads", None))
        self.v_proj = linear(d, d, ("kv_heads", None))
        self.out_proj = linear(d, d, (None, "heads"))

    def __call__(self, x_td: jax.Array, layer: int, attend: Attend) -> jax.Array:
        """Return the output [T, D] of hidden states [T, D]."""
        projected = self.q_proj.together(x_td, self.k_proj, self.v_proj)
        q_tnh, k_tnh, v_tnh = (y_to.reshape(len(x_td), -1, self.head_dim) for y_to in projected)
        return self.out_proj(attend(layer, q_tnh, k_tnh, v_tnh, None, None).reshape(len(x_td), -1))


class Layer(nnx.Module):
    """Decoder layer: attention and MLP, each with a norm and a residual connection."""

    def __init__(self, config: OPTConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        linear = partial(Linear, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.norm_before, self.activation = config.norm_before, config.hidden_act
        self.self_attn = Attention(config, dtype, rngs)
        self.self_attn_layer_norm = layer_norm(d, dtype, rngs)
        self.fc1 = linear(d, f, ("mlp", None))
        self.fc2 = linear(f, d, (None, "mlp"))
        self.final_layer_norm = layer_norm(d, dtype, rngs)

    def __call__(self, x_td: jax.Array, layer: int, attend: Attend) -> jax.Array:
        """Return the hidden states [T, D] after the layer."""
        if self.norm_before:
            x_td = x_td + self.self_attn(self.self_attn_layer_norm(x_td), layer, attend)
            return x_td + self.fc2(self.fc1(self.final_layer_norm(x_td), self.activation))
        x_td = self.self_attn_layer_norm(x_td + self.self_attn(x_td, layer, attend))
        normed_td: jax.Array = self.final_layer_norm(x_td + self.fc2(self.fc1(x_td, self.activation)))
        return normed_td


class OPT(nnx.Module):
    """OPT (arXiv 2205.01068), the model of the PagedAttention paper.

    `dtype` is the dtype of parameters, and thereby of activations. Attributes are named as in Hugging Face checkpoints.
    """

    def __init__(self, config: OPTConfig, *, dtype: str = "float32", rngs: nnx.Rngs):
        self.config: ModelConfig = config
        self.has_final_norm, self.projects = config.final_norm, config.embedding_size != config.hidden_size
        d, e = config.hidden_size, config.embedding_size
        self.embed_tokens = Embedding(config.vocab_size, e, "vocab", dtype=dtype, rngs=rngs)
        rows = config.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = Embedding(rows, d, None, dtype=dtype, rngs=rngs)
        if self.projects:
            self.project_in = Linear(e, d, (None, None), bias=False, dtype=dtype, rngs=rngs)
            self.project_out = Linear(d, e, (None, None), bias=False, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        if self.has_final_norm:
            self.final_layer_norm = layer_norm(d, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(e, config.vocab_size, ("vocab", None), bias=False, dtype=dtype, rngs=rngs)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Causal attention over the whole context, in every layer."""
        return (AttentionSpec(self.config.head_dim**-0.5),) * self.config.num_hidden_layers

    def __call__(self, tokens_t: jax.Array, positions_t: jax.Array, attend: Attend) -> jax.Array:
        """Return the final hidden states [T, E] of tokens [T] int32 at positions [T] int32."""
        x_td: jax.Array = self.embed_tokens(tokens_t)
        if self.projects:
            x_td = self.project_in(x_td)
        x_td = x_td + self.embed_positions(positions_t + POSITION_OFFSET)
        for index, layer in enumerate(self.layers):
            x_td = layer(x_td, index, attend)
        if self.has_final_norm:
            x_td = self.final_layer_norm(x_td)
        return self.project_out(x_td) if self.projects else x_td

    def logits(self, x_se: jax.Array) -> jax.Array:
        """Return the logits [S, V] float32 of final hidden states [S, E]."""
        tied = self.config.tie_word_embeddings
        return self.embed_tokens.logits(x_se) if tied else self.lm_head(x_se, dtype=jnp.float32)


def layer_norm(size: int, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return a norm of the last axis with weight and bias."""
    return nnx.LayerNorm(
        size, epsilon=1e-5, param_dtype=dtype, rngs=rngs, scale_metadata=axes(None), bias_metadata=axes(None)
    )


def source(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the place of a leaf, below `model.decoder.` except for the head."""
    (part,) = same_name(path, config).parts
    return LeafSource((part._replace(name=part.name.replace("model.", "model.decoder.", 1)),))


def full_name(name: str) -> str:
    """Return the present name of a tensor; early checkpoints leave `model.` out."""
    return f"model.{name}" if name.startswith("decoder.") else name
