"""The optional arguments of the ops, as values that a wrapper checks once and every implementation takes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

# A reference to an array in a GPU's memory inside a kernel, or to shared memory, a barrier, an accumulator. jax has no
# public type with the members that kernels use (`at`, `T`).
Ref = Any

Pools = tuple[jax.Array, jax.Array]  # of keys and of values
Written = tuple[jax.Array, jax.Array, jax.Array | None]  # pools, and rotated queries if they were given
OutputAndLse = tuple[jax.Array, jax.Array]  # and the log-sum-exp


NO_STATE, CONTINUES = -1, -2  # of `Chains.reads_s`


class Masks(NamedTuple):
    """The tokens that rows of logits allow.

    Attributes:
        allowed_bits_sw: [S, ceil(V / 32)] uint32; bit t % 32 of word t // 32: token t is allowed.
        masked_s: [S] bool; the other rows allow all tokens.
    """

    allowed_bits_sw: jax.Array
    masked_s: jax.Array


class Chains(NamedTuple):
    """Sequences of tokens and the pages of their states, for recurrent layers.

    A chain is a sequence with the sequences after it that continue it. No page that a chain writes is read by another
    chain of the same call.

    Attributes:
        cu_q_lens_s1: [S + 1] int32, from 0 to at most T, non-decreasing: sequence s owns tokens `cu_q_lens[s]` to below
            `cu_q_lens[s + 1]`. A sequence without tokens reads and writes nothing.
        reads_s: [S] int32, the page with the state before the first token of a sequence; NO_STATE: the state is zeros;
            CONTINUES: it is the state after the last token of sequence s - 1, which has tokens.
        writes_s: [S] int32, the page that the state after the last token is written to; -1: none. A sequence may write
            the page that its chain reads.
    """

    cu_q_lens_s1: jax.Array
    reads_s: jax.Array
    writes_s: jax.Array


class Contexts(NamedTuple):
    """Keys and values of sequences in the blocks of pools.

    Attributes:
        k_pool, v_pool: [P, K, B, H].
        block_tables_sw: [S, W] int32: the blocks of each sequence.
        context_lens_s: [S] int32: tokens of each sequence; 0: padding.
    """

    k_pool: jax.Array
    v_pool: jax.Array
    block_tables_sw: jax.Array
    context_lens_s: jax.Array

    @property
    def table_tokens(self) -> int:
        """W B: the tokens that a row of a block table can hold."""
        return self.block_tables_sw.shape[1] * self.k_pool.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WriteOptions:
    """Options of `Ops.write_kv`.

    Attributes:
        cos_t, sin_t: [T, H/2] float32, both or neither: the rotation of the keys (half against half, RoFormer, arXiv
            2104.09864).
        k_scale_k, v_scale_k: [K] float32, for fp8 pools only: the factors of the stored numbers.
        q_tnh: [T, N, H], queries that are rotated, too.
    """

    cos_t: jax.Array | None = None
    sin_t: jax.Array | None = None
    k_scale_k: jax.Array | None = None
    v_scale_k: jax.Array | None = None
    q_tnh: jax.Array | None = None

    @property
    def angles(self) -> tuple[jax.Array, jax.Array] | None:
        """The rotation's cos and sin, None without rotation."""
        return None if self.cos_t is None or self.sin_t is None else (self.cos_t, self.sin_t)


class LowRank(NamedTuple):
    """Matrices of low rank that are added to a weight [O, I], one pair for each of N slots.

    Attributes:
        a: [N, R, I], float32, bfloat16 or float16.
        b: [N, R, O], of the same dtype.
    """

    a: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionOptions:
    """Options of the attention ops. As a pytree it has the arrays as leaves.

    Attributes:
        scale: the factor of q·k, above 0.
        soft_cap: c turns a score x = scale * q·k into c * tanh(x / c) (Gemma 2, arXiv 2408.00118).
        window: a query sees only the last `window` tokens, itself included.
        k_scale_k, v_scale_k: [K] float32, for fp8 pools only: the factors of the stored numbers.
        sinks_n: [N] float32, a score of each head that joins the sum of every softmax with a key and has no value
            (attention sinks of gpt-oss); scale and soft cap do not apply to it. None: there are none.
        work: the implementation's lists of work for the batch and the window, from `Kernels.make_work`; None: the
            device makes them.
    """

    scale: float = field(metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    k_scale_k: jax.Array | None = None
    v_scale_k: jax.Array | None = None
    work: Any = None
    sinks_n: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProductOptions:
    """Options of `Ops.product`. As a pytree it has the arrays as leaves.

    Attributes:
        activation: one of `reference.ACTIVATIONS`, applied to the sums with their bias; None: none.
        gated: there are two weights, and one result: that of the first one times that of the second one, which has no
            activation.
        dtype: dtype of the result; None: that of x.
        wanted_t: [T] bool, the rows that are needed; the others may be 0. None: all rows.
        sizes_e: [E] int32, number of rows of each expert; rows are sorted by expert, and rows past the last expert's
            may be 0. None: the weights are no experts'.
        tokens_m: [M] int32, the element of `wanted_t` that a row of x belongs to; None: that of its own number.
        added: for each weight [T, O] float32, added to its sums and their bias before the activation; None: nothing.
        residual_to: [T, O] in the dtype of the result, to which the only result is added once it is rounded; None:
            nothing.
        int8_rows: whether x is rounded by `weights.rounded_rows` next to weights that take rows of int8.
    """

    activation: str | None = field(default=None, metadata={"static": True})
    gated: bool = field(default=False, metadata={"static": True})
    dtype: DTypeLike | None = field(default=None, metadata={"static": True})
    wanted_t: jax.Array | None = None
    sizes_e: jax.Array | None = None
    tokens_m: jax.Array | None = None
    added: tuple[jax.Array, ...] | None = None
    residual_to: jax.Array | None = None
    int8_rows: bool = field(default=False, metadata={"static": True})
