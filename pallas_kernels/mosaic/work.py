"""Lists of the work of the attention kernels for one batch. They depend on its lengths only, and serve all layers.

A host that knows the lengths makes them with numpy and sends them with the batch: on the device they take eight small
launches in each step.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.cuts import QueryTiles, Splits, decode_rows, make_splits, max_splits, query_tiles
from pallas_kernels.mosaic.ring import TMA_ROWS, WGMMA_ROWS


class DecodeWork(NamedTuple):
    """Work of the decode kernels.

    Attributes:
        row_s: [S] int32: row of q and of the output of each sequence, -1 = none.
    """

    splits: Splits
    row_s: jax.Array


class RaggedWork(NamedTuple):
    """Work of all attention kernels in a mixed step.

    Attributes:
        context_s1: [S + 1] int32: contexts, and a 0 for the rows after the last sequence.
    """

    tiles: QueryTiles
    context_s1: jax.Array
    decode: DecodeWork


class WorkSizes(NamedTuple):
    """WorkSizes that the work of a batch follows from, beside its lengths.

    Attributes:
        table_tokens: W B, tokens that a row of a block table holds.
        window: see `AttentionOptions`.
    """

    num_heads: int
    num_kv_heads: int
    table_tokens: int
    window: int | None


def decode_work(
    context_lens_s: Any, row_s: Any, sizes: WorkSizes, cut: tuning.MosaicDecode, xp: Any = jnp
) -> DecodeWork:
    """Return the work of one query of each sequence.

    Args:
        context_lens_s: [S] int32; 0 for a sequence that takes no part.
        xp: numpy or jax.numpy.
    """
    most = max_splits(sizes.num_kv_heads, sizes.table_tokens, cut.split)
    splits = make_splits(context_lens_s, most=most, split=cut.split, tile=cut.tile, window=sizes.window, xp=xp)
    return DecodeWork(splits, row_s)


def ragged_work(
    context_lens_s: Any, cu_q_lens_s1: Any, decode_s: Any, num_rows: int, sizes: WorkSizes,
    cuts: tuple[tuning.MosaicRagged, tuning.MosaicDecode], xp: Any = jnp,
) -> RaggedWork:  # fmt: skip
    """Return the work of a mixed batch of T = `num_rows` rows; other arguments as in `decode_work`."""
    (cut, decode_cut), group = cuts, sizes.num_heads // sizes.num_kv_heads
    tokens = tokens_per_warpgroup(group)
    align = TMA_ROWS // math.gcd(TMA_ROWS, group) if tokens * group == WGMMA_ROWS else 1
    decode_s, row_s = decode_rows(cu_q_lens_s1, decode_s, xp)
    tiles = query_tiles(cu_q_lens_s1, decode_s, num_rows=num_rows, tile_q=cut.warpgroups * tokens, align=align, xp=xp)
    decode = decode_work(xp.where(decode_s, context_lens_s, 0), row_s, sizes, decode_cut, xp)
    return RaggedWork(tiles, xp.append(context_lens_s, xp.int32(0)), decode)


def tokens_per_warpgroup(group: int) -> int:
    """Return the tokens of one warpgroup's 64 rows of the ragged kernel.

    A warpgroup's box of q starts at a multiple of TMA_ROWS rows. If the group divides 64, every tile starts there.
    Otherwise a box may hold up to TMA_ROWS - 1 rows of an earlier token before the first row of the tile.
    """
    lead = 0 if WGMMA_ROWS % group == 0 else TMA_ROWS - math.gcd(TMA_ROWS, group)
    return (WGMMA_ROWS - lead) // group


def make_work(
    context_lens_s: Any, cu_q_lens_s1: Any | None, decode_s: Any | None, *, num_rows: int, num_heads: int,
    num_kv_heads: int, table_tokens: int, head_dim: int, pool_dtype: str, tiles: dict[str, tuning.Tiles],
    window: int | None, xp: Any,
) -> DecodeWork | RaggedWork:  # fmt: skip
    """Return the work of a mixed batch, or of a decode step if `cu_q_lens_s1` is None.

    Args:
        tiles: configurations by "decode" and "ragged"; `tuning.find` gives a missing one.
        head_dim, pool_dtype: of the pools.
        xp: numpy or jax.numpy.
    """

    def cut(op: str) -> Any:
        return tiles.get(op) or tuning.find(f"mosaic.{op}", "", head_dim, pool_dtype)

    sizes = WorkSizes(num_heads, num_kv_heads, table_tokens, window)
    if cu_q_lens_s1 is None:
        row_s = xp.arange(context_lens_s.shape[0], dtype=xp.int32)
        return decode_work(context_lens_s, row_s, sizes, cut("decode"), xp)
    cuts = cut("ragged"), cut("decode")
    return ragged_work(context_lens_s, cu_q_lens_s1, decode_s, num_rows, sizes, cuts, xp)
