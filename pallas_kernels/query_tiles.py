"""Query tiles of a ragged batch, for kernels whose grid is fixed before the batch is known."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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
