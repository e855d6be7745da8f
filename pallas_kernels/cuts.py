"""Cuts of a batch, for kernels whose grid is fixed before the batch is known.

The decode kernels cut contexts into splits (split-KV, FlashDecoding, arXiv 2311.01282), others a ragged batch into
query tiles.

Axis letters besides the package's: I splits of the batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

MAX_DOUBLINGS = 16  # of a split's size, more than any context needs
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


def split_size(context_lens_s: Any, split: int, most: int, xp: Any = jnp) -> Any:
    """Return the tokens of a split for each context: `split`, doubled until `most` of them hold the context.

    The size depends only on the length of the context. Therefore the order of every sum does, too.

    Args:
        xp: numpy or jax.numpy.
    """
    limits = most * split << xp.arange(MAX_DOUBLINGS, dtype=xp.int32)
    return split << (context_lens_s[:, None] > limits).sum(axis=1, dtype=xp.int32)


def make_splits(context_lens_s: Any, *, most: int, split: int, tile: int, window: int | None, xp: Any = jnp) -> Splits:
    """Cut contexts [S] into at most `most` splits each; a context of 0 and tokens before the window have none.

    The result does not depend on the layer: XLA computes it once for all of a step.

    Args:
        xp: numpy or jax.numpy.
    """
    s = context_lens_s.shape[0]
    size_s = split_size(context_lens_s, split, most, xp)
    seen_s = xp.maximum(context_lens_s - window, 0) if window else xp.zeros_like(context_lens_s)
    counts_s = -(-context_lens_s // size_s) - seen_s // size_s  # not pl.cdiv: of arrays of numpy it is an op of jax
    first_s1 = xp.concatenate([xp.zeros(1, xp.int32), xp.cumsum(counts_s, dtype=xp.int32)])
    i = xp.arange(s * most, dtype=xp.int32)
    each_s = xp.arange(s, dtype=xp.int32)
    if xp is jnp:
        seq_i = jnp.repeat(each_s, counts_s, total_repeat_length=len(i))
    else:
        seq_i = xp.zeros_like(i)
        seq_i[: counts_s.sum()] = xp.repeat(each_s, counts_s)
    size_i, seen_i = size_s[seq_i], seen_s[seq_i]
    start_i = (seen_i // size_i + i - first_s1[seq_i]) * size_i
    end_i = xp.minimum(start_i + size_i, context_lens_s[seq_i])
    start_i = xp.maximum(start_i, seen_i // tile * tile)
    return Splits(xp.stack([seq_i, start_i, end_i, seen_i], axis=1), first_s1[-1:], first_s1)


class QueryTiles(NamedTuple):
    """Tiles of rows of one sequence each. Sequence S owns the rows after the last sequence.

    Attributes:
        first_row_s1, row_end_s1: [S + 1] int32: the rows of each sequence.
        seq_i: [I] int32: sequence of a tile, -1 = no tile.
        row_i: [I] int32: first row of a tile, up to `align - 1` rows before the sequence's first row.
    """

    first_row_s1: jax.Array
    row_end_s1: jax.Array
    seq_i: jax.Array
    row_i: jax.Array


def query_tiles(
    cu_q_lens_s1: Any, decode_s: Any, *, num_rows: int, tile_q: int, align: int = 1, xp: Any = jnp
) -> QueryTiles:
    """Cut rows into tiles of at most `tile_q` rows that start at multiples of `align`, which divides `tile_q`.

    Sequences of `decode_s` have no tiles. I is the number of tiles that the worst batch needs. The result does not
    depend on the layer: XLA computes it once for all of a step.

    Args:
        xp: numpy or jax.numpy.
    """
    row_end_s1 = xp.append(cu_q_lens_s1[1:], xp.int32(num_rows))
    start_s1 = cu_q_lens_s1 // align * align
    tiles_s1 = xp.where(row_end_s1 > cu_q_lens_s1, (row_end_s1 - start_s1 + tile_q - 1) // tile_q, 0)
    tiles_s1 = xp.where(xp.append(decode_s, False), 0, tiles_s1)
    tile_end_s1 = xp.cumsum(tiles_s1, dtype=xp.int32)
    sequences = min(cu_q_lens_s1.shape[0], num_rows)
    num_tiles = (num_rows + sequences * (align - 2)) // tile_q + sequences
    i = xp.arange(num_tiles, dtype=xp.int32)
    seq_i = xp.sum(i[:, None] >= tile_end_s1, axis=1, dtype=xp.int32)
    live_i = i < tile_end_s1[-1]
    seq_i = xp.where(live_i, seq_i, 0)
    row_i = start_s1[seq_i] + (i - (tile_end_s1 - tiles_s1)[seq_i]) * tile_q
    return QueryTiles(cu_q_lens_s1, row_end_s1, xp.where(live_i, seq_i, -1), row_i)


def decode_rows(cu_q_lens_s1: Any, decode_s: Any, xp: Any = jnp) -> tuple[Any, Any]:
    """Return the sequences with a decode token, [S] bool, and its row of q, -1 = none, [S] int32.

    Args:
        decode_s: [S] bool; None: all sequences of one query.
        xp: numpy or jax.numpy.
    """
    one_s = cu_q_lens_s1[1:] - cu_q_lens_s1[:-1] == 1
    decode_s = one_s if decode_s is None else one_s & decode_s
    return decode_s, xp.where(decode_s, cu_q_lens_s1[:-1], -1)
