"""How the rows of a ragged batch are cut into tiles, for kernels whose grid is fixed before the batch is known."""

import jax
import jax.numpy as jnp


def query_tiles(cu_q_lens_s1: jax.Array, num_rows: int, tile_q: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts rows into tiles of at most `tile_q` rows of one sequence; the rows after the last sequence are sequence S.

    Returns the row ends [S + 1], and for every tile its sequence (-1 = no tile) and first row. There are as many tiles
    as the worst batch needs: that with all its rows but one per sequence in a single sequence. Nothing here depends on
    the layer: XLA computes it once for all of a step.
    """
    row_end_s1 = jnp.append(cu_q_lens_s1[1:], jnp.int32(num_rows))
    tiles_s1 = (row_end_s1 - cu_q_lens_s1 + tile_q - 1) // tile_q
    tile_end_s1 = jnp.cumsum(tiles_s1, dtype=jnp.int32)
    sequences = min(cu_q_lens_s1.shape[0], num_rows)
    i = jnp.arange((num_rows - sequences) // tile_q + sequences, dtype=jnp.int32)
    seq_i = jnp.sum(i[:, None] >= tile_end_s1, axis=1, dtype=jnp.int32)
    live_i = i < tile_end_s1[-1]
    seq_i = jnp.where(live_i, seq_i, 0)
    row_i = cu_q_lens_s1[seq_i] + (i - (tile_end_s1 - tiles_s1)[seq_i]) * tile_q
    return row_end_s1, jnp.where(live_i, seq_i, -1), row_i
