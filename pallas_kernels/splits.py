"""Cut of contexts into splits by the decode kernels (split-KV, FlashDecoding, arXiv 2311.01282).

Axis letters besides the package's: I splits of the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

MAX_SPLITS = 32  # of one context: the combine kernel reads all of them at once
THREAD_BLOCKS = 128  # that one long context keeps busy, of a Hopper's 132 multiprocessors


class Splits(NamedTuple):
    """Splits of a batch, sequence after sequence, and each in the order of its tokens.

    Attributes:
        work_i4: [I, 4] int32: sequence, first token, end, first token that its query sees.
        num_splits: [1] int32: number of rows of `work_i4` in use.
        first_s1: [S + 1] int32: first split of each sequence.
    """

    work_i4: jax.Array
    num_splits: jax.Array
    first_s1: jax.Array


def max_splits(num_kv_heads: int, table_tokens: int, split: int) -> int:
    """Return the largest number of splits of one context.

    It bounds the partial results: 134 MB for 256 sequences of 131,072 tokens, 8 KV heads of up to 8 query heads each
    and head dim 128.
    """
    return min(MAX_SPLITS, pl.cdiv(THREAD_BLOCKS, num_kv_heads), pl.cdiv(table_tokens, split))


def split_size(context_lens_s: jax.Array, split: int, most: int) -> jax.Array:
    """Return the tokens of a split for each context: `split`, doubled until `most` of them hold the context.

    The size depends only on the context's own length, so the order of every sum does too.
    """
    excess_s = pl.cdiv(context_lens_s, most * split)  # up to 1: no doubling
    return split << jnp.where(excess_s <= 1, 0, 32 - lax.clz(excess_s - 1))


def make_splits(context_lens_s: jax.Array, *, most: int, split: int, tile: int, window: int | None) -> Splits:
    """Cut contexts [S] into at most `most` splits each; a context of 0 and tokens before the window have none.

    The result does not depend on the layer: XLA computes it once for all of a step.
    """
    s = context_lens_s.shape[0]
    size_s = split_size(context_lens_s, split, most)
    seen_s = jnp.maximum(context_lens_s - window, 0) if window else jnp.zeros_like(context_lens_s)
    counts_s = pl.cdiv(context_lens_s, size_s) - seen_s // size_s
    first_s1 = jnp.pad(jnp.cumsum(counts_s, dtype=jnp.int32), (1, 0))
    num_splits = s * most
    i = jnp.arange(num_splits, dtype=jnp.int32)
    seq_i = jnp.repeat(jnp.arange(s, dtype=jnp.int32), counts_s, total_repeat_length=num_splits)
    size_i, seen_i = size_s[seq_i], seen_s[seq_i]
    start_i = (seen_i // size_i + i - first_s1[seq_i]) * size_i
    end_i = jnp.minimum(start_i + size_i, context_lens_s[seq_i])
    start_i = jnp.maximum(start_i, seen_i // tile * tile)
    return Splits(jnp.stack([seq_i, start_i, end_i, seen_i], axis=1), first_s1[-1:], first_s1)
