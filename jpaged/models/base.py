"""Contract between a model and the engine: the model's call and its attributes."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jpaged.models.config import ModelConfig

# attend(layer, q [T, N, H], k [T, K, H], v [T, K, H], cos, sin [T, H/2] or None) -> [T, N, H]. It rotates q and k by
# cos and sin, if they are given.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None], jax.Array]


class AttentionSpec(NamedTuple):
    """Attention of one layer.

    Attributes:
        scale: factor on q·k.
        window: number of tokens up to its own that a query sees; None: all.
        soft_cap: c where scores x become c * tanh(x / c); None: no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@runtime_checkable
class Model(Protocol):
    """Interface of an `nnx.Module` that the engine can serve.

    It needs no cache: attention is an argument. A module that wraps the one that is trained may have the attribute
    `trained_path`, the path of that one in it, such as "gpt": `update_params` then accepts the state of `self.gpt` too.
    """

    config: ModelConfig

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """Attention of each layer; a layer's number is its index here."""

    def __call__(self, tokens_t: jax.Array, positions_t: jax.Array, attend: Attend) -> jax.Array:
        """Return the final hidden states [T, D] of tokens [T] int32 at positions [T] int32."""

    def logits(self, x_sd: jax.Array) -> jax.Array:
        """Return the logits [S, V] float32 of hidden states [S, D]."""


class Part(NamedTuple):
    """Rows of a tensor in a checkpoint.

    Attributes:
        name: name of the tensor.
        start: first row of the tensor.
        rows: number of rows; None: as many as the leaf has.
    """

    name: str
    start: int = 0
    rows: int | None = None


class Source(NamedTuple):
    """Place of a leaf in a checkpoint.

    Attributes:
        parts: one after another along the first axis.
        stacked: each part is a whole tensor, and they lie on a new first axis.
    """

    parts: tuple[Part, ...]
    stacked: bool = False


LeafPath = tuple[Any, ...]  # of a leaf in an NNX state, e.g. ("layers", 0, "mlp", "up_proj", "weight")

LEAVES = {"embedding": "weight", "scale": "weight"}  # Flax's names of leaves, and Hugging Face's


def same_name(path: LeafPath, config: ModelConfig) -> Source:
    """Return the tensor with the leaf's own name, below `model.` except for the head, as Hugging Face names it."""
    *parents, leaf = map(str, path)
    prefix = [] if parents[0] == "lm_head" else ["model"]
    return Source((Part(".".join([*prefix, *parents, LEAVES.get(leaf, leaf)])),))


def is_derived(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor follows from the config or from other tensors, as some in checkpoints do."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


class Architecture(NamedTuple):
    """Kind of model.

    Attributes:
        config: type that reads config.json.
        module: (config, dtype=..., rngs=...) -> the module.
        source: (path of a leaf, config) -> its place in a Hugging Face checkpoint.
        is_derived: (name of a tensor, config) -> whether a checkpoint may hold it in addition to the leaves' own.
        rename: (name of a tensor in a file) -> its name for `source` and `is_derived`, where checkpoints differ.
        examples: ids of checkpoints on the Hugging Face hub.
        features: its variations, for the documentation.
    """

    config: type[ModelConfig]
    module: Callable[..., Model]
    source: Callable[[LeafPath, ModelConfig], Source] = same_name
    is_derived: Callable[[str, ModelConfig], bool] = is_derived
    rename: Callable[[str], str] = str
    examples: tuple[str, ...] = ()
    features: str = ""
