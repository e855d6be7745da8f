"""Another architecture than Llama: LayerNorm, one matrix for queries, keys and values, a window in every second layer,
capped scores, and weights that a checkpoint holds in fused, in separate and in stacked tensors."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.models.base import Architecture, AttentionSpec, LeafSource, Part, same_name
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Linear
from jpaged.models.rope import angles, inverse_frequencies
from pallas_kernels import Weight, product

SOFT_CAP = 20.0


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    """The sliding window is the only setting that a Llama does not have."""

    architecture: ClassVar[str] = "ToyForCausalLM"
    model_type: ClassVar[str] = "toy"
    reads: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    sliding_window: int = 8

    @classmethod
    def fields_of(cls, hf, generation):
        return super().fields_of(hf, generation) | {"sliding_window": hf["sliding_window"]}


class ToyLayer(nnx.Module):
    def __init__(self, config, dtype, rngs):
        d, h, f = config.hidden_size, config.head_dim, config.intermediate_size
        self.heads = n, k = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = h
        self.norm = nnx.LayerNorm(d, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.qkv = Linear(d, (n + 2 * k) * h, ("heads", None), bias=False, dtype=dtype, rngs=rngs)
        self.out = Linear(n * h, d, (None, "heads"), bias=False, dtype=dtype, rngs=rngs)
        self.gate = Linear(d, f, ("mlp", None), bias=False, dtype=dtype, rngs=rngs)
        self.up = Linear(d, f, ("mlp", None), bias=False, dtype=dtype, rngs=rngs)
        self.experts = nnx.Param(jnp.zeros((2, d, f), dtype))  # both are always used

    def __call__(self, x_td, cos, sin, layer, attend):
        t, (n, k), h = len(x_td), self.heads, self.head_dim
        qkv = self.qkv(self.norm(x_td)).reshape(t, n + 2 * k, h)
        q, k, v = jnp.split(qkv, [n, n + k], axis=1)
        x_td = x_td + self.out(attend(layer, q, k, v, cos, sin).reshape(t, -1))
        inner = jax.nn.silu(self.gate(x_td)) * self.up(x_td)
        return x_td + sum(product(inner, Weight(expert)) for expert in self.experts[...])


class Toy(nnx.Module):
    def __init__(self, config, *, dtype="float32", rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([ToyLayer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])

    @property
    def attention_specs(self):
        scale, window = self.config.head_dim**-0.5, self.config.sliding_window
        return tuple(AttentionSpec(scale, window if i % 2 else None, SOFT_CAP) for i in range(len(self.layers)))

    def __call__(self, tokens_t, positions_t, attend):
        cos, sin = angles(positions_t, *inverse_frequencies(self.config.rope, self.config.head_dim))
        x_td = self.embed(tokens_t)
        for index, layer in enumerate(self.layers):
            x_td = layer(x_td, cos, sin, index, attend)
        return x_td

    def logits(self, x_sd):
        return product(x_sd, Weight(self.embed.embedding[...]), dtype=jnp.float32)


def source(path, config) -> LeafSource:
    """Queries, keys and values come from three tensors, gate and up from one, and the experts are stacked."""
    *_, last = path
    prefix = f"model.layers.{path[1]}."
    if "qkv" in path:
        rows = [config.head_dim * heads for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        return LeafSource(tuple(Part(f"{prefix}{name}.weight", 0, count) for name, count in zip("qkv", rows)))
    if "gate" in path or "up" in path:
        size = config.intermediate_size
        return LeafSource((Part(f"{prefix}gate_up.weight", size * ("up" in path), size),))
    if last == "experts":
        return LeafSource(tuple(Part(f"{prefix}experts.{i}.down.weight") for i in range(2)), stacked=True)
    return same_name(path, config)


ARCHITECTURE = Architecture(ToyConfig, Toy, source)

HF = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "vocab_size": 97, "hidden_size": 32,
    "num_hidden_layers": 4, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    """A checkpoint's tensors, of random numbers."""
    rng, d, f = np.random.default_rng(0), 32, 48
    shapes = {"model.embed.weight": (97, d)}
    for i in range(4):
        layer = f"model.layers.{i}."
        shapes |= {layer + "norm.weight": (d,), layer + "gate_up.weight": (2 * f, d), layer + "out.weight": (d, d)}
        shapes |= {layer + name + ".weight": (rows, d) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {layer + f"experts.{expert}.down.weight": (d, f) for expert in range(2)}
    return {name: rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def logits(tokens: list[int]) -> np.ndarray:
    """Compute the logits [T, V] of a text from the checkpoint's tensors, in float64 and without a cache."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors().items()}
    t, (n, k, h) = len(tokens), (4, 2, 8)
    frequencies = 10000.0 ** -(np.arange(0, h, 2) / h)
    turn = np.arange(t)[:, None] * frequencies
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]

    def turned(x):
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["model.embed.weight"][tokens]
    for i in range(4):
        of = lambda name, i=i: weights[f"model.layers.{i}.{name}.weight"]
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * of("norm")
        q, keys, values = turned((y @ of("q").T).reshape(t, n, h)), (y @ of("k").T), (y @ of("v").T).reshape(t, k, h)
        keys = turned(keys.reshape(t, k, h))
        scores = np.einsum("tnh,snh->nts", q, np.repeat(keys, n // k, 1)) * h**-0.5
        scores = SOFT_CAP * np.tanh(scores / SOFT_CAP)
        behind = np.arange(t)[:, None] - np.arange(t)
        seen = (behind >= 0) & (behind < (8 if i % 2 else t))
        p = np.exp(np.where(seen, scores, -np.inf))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", p, np.repeat(values, n // k, 1)).reshape(t, -1) @ of("out").T
        gate, up = np.split(x @ of("gate_up").T, 2, axis=-1)
        inner = gate * (1 + np.tanh(gate / 2)) / 2 * up
        x = x + inner @ (of("experts.0.down") + of("experts.1.down")).T
    return x @ weights["model.embed.weight"].T
