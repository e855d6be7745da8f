"""Contract between a model and the engine: the model's call and its attributes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Sharding

from jpaged.models.config import ModelConfig


class Attend(Protocol):
    """Attention as a function that a model's layers call. For models with recurrent layers, it is a `LayerOps`."""

    def __call__(
        self, layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, cos: jax.Array | None,
        sin: jax.Array | None, /, *, sinks_n: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return the attention [T, N, H] of queries [T, N, H] over the keys and values [T, K, H] of their sequences.

        Args:
            cos, sin: [T, H/2], the rotation of queries and keys; None: they are not rotated.
            sinks_n: [N] float32, a score of each head that joins the sum of every softmax and has no value.
        """


class Recur(Protocol):
    """Ops of recurrent layers, each called once by a layer. They read and write the state of each sequence."""

    def causal_conv(self, layer: int, x_tc: jax.Array, weight_cw: jax.Array, activation: str) -> jax.Array:
        """Return the causal convolution of channels [T, C] by weights [C, W]."""

    def delta_rule(
        self, layer: int, q_tkd: jax.Array, k_tkd: jax.Array, v_thv: jax.Array, log_decay_th: jax.Array,
        beta_th: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Return the outputs [T, H, V] of the gated delta rule, as `pallas_kernels.delta_rule`."""


@dataclass(frozen=True)
class LayerOps:
    """Attention and the ops of `Recur`, in one argument of a model."""

    attend: Attend
    causal_conv: Callable[..., jax.Array]
    delta_rule: Callable[..., jax.Array]

    def __call__(self, *arguments: Any, **options: Any) -> jax.Array:
        """Attend."""
        return self.attend(*arguments, **options)


class AttentionSpec(NamedTuple):
    """Attention of one layer.

    Attributes:
        scale: factor on q·k.
        window: number of tokens that a query sees, including the query's token; None: all tokens.
        soft_cap: c where scores x become c * tanh(x / c); None: no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class RecurrentSpec(NamedTuple):
    """State of a layer with the gated delta rule: a matrix for each head, and the last inputs of a convolution.

    Attributes:
        num_heads: H, heads of values.
        key_dim, value_dim: D and V, the shape of a head's matrix.
        channels: C, of the convolution.
        taps: W, inputs that a token's output depends on.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int


LayerSpec = AttentionSpec | RecurrentSpec


@runtime_checkable
class Model(Protocol):
    """Interface of an `nnx.Module` that the engine can serve.

    A model needs no cache, because attention is an argument. A module that wraps the trained module may have the
    attribute `trained_path`, the trained module's path in the wrapper, such as "gpt": `update_params` then also accepts
    the state of `self.gpt`.
    """

    config: ModelConfig

    @property
    def attention_specs(self) -> tuple[LayerSpec, ...]:
        """Attention or recurrence of each layer; a layer's number is its index here."""

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


class LeafSource(NamedTuple):
    """Place of a leaf in a checkpoint.

    Attributes:
        parts: one after another along an axis.
        stacked: whether each part is a whole tensor, which becomes one row of the leaf along a new first axis.
        axis: axis of the tensors and of the leaf, along which parts have rows.
    """

    parts: tuple[Part, ...]
    stacked: bool = False
    axis: int = 0


class Interleaved(NamedTuple):
    """Place of a weight or bias of all experts in a tensor of a checkpoint; see `jpaged.models.interleaved`.

    Attributes:
        name: name of the tensor.
        place: number of the weight or bias in it.
        parts: number of those that it holds.
    """

    name: str
    place: int = 0
    parts: int = 1


Graph = nnx.GraphDef[Any]  # of a module, without its leaves
Leaf = nnx.Variable[Any]
LeafPath = tuple[Any, ...]  # of a leaf in an NNX state, e.g. ("layers", 0, "mlp", "up_proj", "weight")
Leaves = Mapping[LeafPath, Leaf]
Place = Callable[[Leaf], Sharding]  # of a parameter; its metadata names its axes


def same_name(path: LeafPath, config: ModelConfig) -> LeafSource:
    """Return the tensor with the leaf's name, below `model.` except for the head, as Hugging Face names it."""
    *parents, leaf = map(str, path)
    prefix = [] if parents[0] == "lm_head" else ["model"]
    leaf = {"embedding": "weight", "scale": "weight"}.get(leaf, leaf)  # Flax's names, and Hugging Face's
    return LeafSource((Part(".".join([*prefix, *parents, leaf])),))


def is_derived(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor, which some checkpoints hold, follows from the config or from other tensors."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


class Architecture(NamedTuple):
    """Kind of model.

    Attributes:
        config: type that reads config.json.
        module: (config, dtype=..., rngs=...) -> the module.
        source: (path of a leaf, config) -> its place in a Hugging Face checkpoint.
        is_derived: (name of a tensor, config) -> whether a checkpoint may hold it though no leaf uses it.
        rename: (name of a tensor in a file) -> the name that `source` and `is_derived` use, where checkpoints differ.
        interleaved: (name of a tensor of `source`) -> its place in a tensor of experts; None: it is a tensor itself.
        examples: ids of checkpoints on the Hugging Face hub.
        features: differences from Llama, for the documentation.
    """

    config: type[ModelConfig]
    module: Callable[..., Model]
    source: Callable[[LeafPath, ModelConfig], LeafSource] = same_name
    is_derived: Callable[[str, ModelConfig], bool] = is_derived
    rename: Callable[[str], str] = str
    interleaved: Callable[[str], Interleaved | None] = lambda name: None
    examples: tuple[str, ...] = ()
    features: str = ""
