"""Ragged paged attention: chunks of prompts and single decode tokens in one launch (Mosaic GPU, Hopper).

The packed query rows are cut into tiles that each belong to one sequence. A thread block takes one tile and one KV
head: one warpgroup copies KV blocks into a ring, each of the others computes 64 wgmma rows, which are tokens x query
heads of that KV head. Rows that no sequence owns are tiles of a sequence without keys, and so come out as 0. KV tiles
start at token 0 of the sequence, so a row's output depends neither on its neighbours nor on how its prompt was cut into
chunks, bit for bit.

Axis letters besides the package's: I query tiles, J compute warpgroups, R = 64 rows of one warpgroup, X output columns
of one thread block (H, or a part of it).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.decode import LOG2E, NEG, WGMMA_ROWS, KVRing, check_attention, softmax_state
from pallas_kernels.mosaic.kv_write import check_array

MAX_COLUMNS = 128  # of the output, for one thread block: accumulators of 256 don't fit the registers


@dataclasses.dataclass(frozen=True)
class RaggedTiles:
    """How the work is cut: `warpgroups` of 64 rows share a ring of `stages` KV tiles of `tile` tokens."""

    warpgroups: int = 2
    tile: int = 64
    stages: int = 3

    def tokens(self, group: int) -> int:
        """Tokens of one warpgroup: its 64 rows hold `group` query heads of each."""
        return WGMMA_ROWS // group


TILES = {64: RaggedTiles(), 128: RaggedTiles(), 256: RaggedTiles(warpgroups=1)}  # by head dim


def _kernel(
    q_ikjrh_ref,  # [I, K, J, R, H]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    table_sw_ref,  # [S, W]
    context_s1_ref,  # [S + 1]: the last sequence owns the padding rows and has no context
    row_end_s1_ref,  # [S + 1]: past the last query row of each sequence
    tile_seq_i_ref,  # [I]: the sequence of a tile, -1 = none
    tile_row_i_ref,  # [I]: its first query row
    o_tnh_ref,  # [T, N, H]
    q_smem,  # [J, R, H]
    p_smem,  # [J, R, tile]
    o_smem,  # [J, R, X]
    q_full,  # barrier
    *ring_refs,
    group: int,
    scale: float,
):
    i, head = lax.axis_index("i"), lax.axis_index("k")
    columns = o_smem.shape[2]
    column = pl.multiple_of(lax.axis_index("x") * columns, columns)
    warpgroup = lax.axis_index("wg")
    ring = KVRing(*ring_refs)
    stages, tile, _ = ring.k.shape
    warpgroups, rows, _ = q_smem.shape
    tokens = rows // group
    layout = plgpu.Layout.WGMMA
    seq = tile_seq_i_ref[i]

    def extent():
        """First row of this tile, its position in the sequence, rows it owns, keys that the last of them sees."""
        row, row_end = tile_row_i_ref[i], row_end_s1_ref[seq]
        count = jnp.minimum(row_end - row, warpgroups * tokens)
        position = context_s1_ref[seq] - row_end + row
        return row, position, count, jnp.maximum(position + count, 0)

    def by_row(x_r, width):
        return lax.broadcast_in_dim(x_r, (rows, width), [0])

    @pl.when((seq >= 0) & (warpgroup < warpgroups))
    def _compute():
        _, position, _, keys = extent()
        tiles = pl.cdiv(keys, tile)
        unmasked = jnp.clip(lax.div(position + 1, tile), 0, tiles)  # tiles that every row sees whole
        position = position + warpgroup * tokens
        plgpu.barrier_wait(q_full)

        def step(masked, t, carry):
            acc_rx, max_r, sum_r = carry
            stage = lax.rem(t, stages)

            def scores(acc_ref):
                plgpu.wgmma(acc_ref, q_smem.at[warpgroup], ring.k.at[stage].T)
                return acc_ref[...]

            plgpu.barrier_wait(ring.k_full.at[stage])
            x_rt = pl.run_scoped(scores, plgpu.ACC((rows, tile), jnp.float32)) * (scale * LOG2E)
            plgpu.barrier_arrive(ring.k_free.at[stage])
            if masked:
                token_r = lax.rem(plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1)), tokens)
                limit_r = token_r + (position - t * tile)
                key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(0))
                visible = lax.broadcast_in_dim(key_t, (rows, tile), [1]) <= by_row(limit_r, tile)
                x_rt = jnp.where(visible, x_rt, NEG)
            new_max_r = jnp.maximum(max_r, x_rt.max(axis=1))
            alpha_r = jnp.exp2(max_r - new_max_r)
            p_rt = jnp.exp2(x_rt - by_row(new_max_r, tile))
            sum_r = sum_r * alpha_r + p_rt.sum(axis=1)
            p_smem[warpgroup] = p_rt.astype(p_smem.dtype)
            plgpu.barrier_wait(ring.v_full.at[stage])
            plgpu.commit_smem()

            def weighted(acc_ref):
                plgpu.wgmma(acc_ref, p_smem.at[warpgroup], ring.v.at[stage])
                return acc_ref[...]

            o_rx = pl.run_scoped(weighted, plgpu.ACC((rows, columns), jnp.float32))
            plgpu.barrier_arrive(ring.v_free.at[stage])
            return acc_rx * by_row(alpha_r, columns) + o_rx, new_max_r, sum_r

        carry = softmax_state(rows, columns, softmax_axis=1)
        carry = lax.fori_loop(0, unmasked, functools.partial(step, False), carry)
        acc_rx, _, sum_r = lax.fori_loop(unmasked, tiles, functools.partial(step, True), carry)
        sum_r = jnp.where(sum_r == 0.0, 1.0, sum_r)  # no keys: exactly 0
        o_smem[warpgroup] = (acc_rx / by_row(sum_r, columns)).astype(o_smem.dtype)
        plgpu.commit_smem()
        row, _, count, _ = extent()  # read again: registers are short in the loops
        row, count = row + warpgroup * tokens, jnp.clip(count - warpgroup * tokens, 0, tokens)

        def store(at, size):
            @pl.loop(0, group)
            def store_head(g):
                source = o_smem.at[warpgroup, pl.ds(g * tokens + at, size)]
                target = o_tnh_ref.at[pl.ds(row + at, size), head * group + g, pl.ds(column, columns)]
                plgpu.copy_smem_to_gmem(source, target)

        for bit in reversed(range(tokens.bit_length())):  # owned rows as power-of-two boxes: no other row is written
            at = (count >> (bit + 1)) << (bit + 1)
            pl.when((count >> bit) & 1 == 1)(functools.partial(store, at, 1 << bit))
        plgpu.wait_smem_to_gmem(0)

    @pl.when((seq >= 0) & (warpgroup == warpgroups))
    def _copy():
        _, _, _, keys = extent()
        for j in range(warpgroups):  # one box each: TMA takes five dimensions, shared memory's tiling included
            plgpu.copy_gmem_to_smem(q_ikjrh_ref.at[i, head, j], q_smem.at[j], q_full)
        ring.fill(k_pool_ref, v_pool_ref, table_sw_ref, seq=seq, head=head, start=0, end=keys, v_column=column)


def _launch(
    q_ikjrh,
    k_pool,
    v_pool,
    block_tables_sw,
    context_s1,
    row_end_s1,
    tile_seq_i,
    tile_row_i,
    *,
    shape_tnh: tuple[int, int, int],
    tiles: RaggedTiles,
    scale: float,
):
    num_tiles, k, warpgroups, rows, h = q_ikjrh.shape
    dtype, columns = q_ikjrh.dtype, min(h, MAX_COLUMNS)
    return plgpu.kernel(
        functools.partial(_kernel, group=shape_tnh[1] // k, scale=scale),
        out_type=jax.ShapeDtypeStruct(shape_tnh, dtype),
        grid=(num_tiles, k, h // columns),
        grid_names=("i", "k", "x"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((warpgroups, rows, h), dtype),
            plgpu.SMEM((warpgroups, rows, tiles.tile), dtype),
            plgpu.SMEM((warpgroups, rows, columns), dtype),
            plgpu.Barrier(num_arrivals=warpgroups),
            *KVRing.scratch(tiles.stages, tiles.tile, k_pool.shape[2], h, columns, dtype, consumers=warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged",
    )(q_ikjrh, k_pool, v_pool, block_tables_sw, context_s1, row_end_s1, tile_seq_i, tile_row_i)


def _query_tiles(cu_q_lens_s1: jax.Array, num_rows: int, tile_q: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts rows into tiles of at most `tile_q` rows of one sequence; the rows after the last sequence are sequence S.

    Returns the row ends [S + 1], and for every tile its sequence (-1 = no tile) and first row. There are as many tiles
    as the worst batch needs: that with all its rows but one per sequence in a single sequence.
    """
    row_start_s1, row_end_s1 = cu_q_lens_s1, jnp.append(cu_q_lens_s1[1:], jnp.int32(num_rows))
    tiles_s1 = pl.cdiv(row_end_s1 - row_start_s1, tile_q)
    tile_end_s1 = jnp.cumsum(tiles_s1)
    sequences = min(cu_q_lens_s1.shape[0], num_rows)
    i = jnp.arange((num_rows - sequences) // tile_q + sequences, dtype=jnp.int32)
    seq_i = jnp.sum(i[:, None] >= tile_end_s1, axis=1, dtype=jnp.int32)
    live_i = i < tile_end_s1[-1]
    seq_i = jnp.where(live_i, seq_i, 0)
    row_i = row_start_s1[seq_i] + (i - (tile_end_s1 - tiles_s1)[seq_i]) * tile_q
    return row_end_s1, jnp.where(live_i, seq_i, -1), row_i


def ragged_paged_attention(
    q_tnh: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_sw: jax.Array,
    context_lens_s: jax.Array,
    cu_q_lens_s1: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Causal attention of a mixed batch: sequence s owns the query rows `cu_q_lens[s]:cu_q_lens[s + 1]`.

    They are the last tokens of its context: row i of r has position `context_lens[s] - r + i` and sees the keys up to
    its own. The softmax and all sums are fp32; the weights meet V in the inputs' dtype. A row's output depends neither
    on its neighbours nor on the chunk it came in, bit for bit.

    Args:
      q_tnh: [T, N, H], bfloat16 or float16.
      k_pool, v_pool: [P, K, B, H], q's dtype; the keys and values of q's own tokens are already there.
      block_tables_sw: [S, W] int32. Entries past a context may hold anything: they are not read.
      context_lens_s: [S] int32, the query tokens included.
      cu_q_lens_s1: [S + 1] int32, from 0 to at most T, non-decreasing. A padding sequence has no rows.
      scale: what multiplies q k^T.

    Returns:
      [T, N, H] in q's dtype; rows that no sequence owns are exactly 0.

    Raises:
      ValueError: shapes or dtypes don't fit together.
      NotImplementedError: see `unsupported`; or W B exceeds 131072 tokens.
    """
    s, n, h, k = check_attention(q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s)
    check_array("cu_q_lens_s1", cu_q_lens_s1, (s + 1,), jnp.int32)
    t, group, tiles = q_tnh.shape[0], n // k, TILES[h]
    tokens = tiles.tokens(group)
    row_end_s1, tile_seq_i, tile_row_i = _query_tiles(cu_q_lens_s1, t, tiles.warpgroups * tokens)

    # XLA gathers q into the kernel's order: swizzled shared memory is tiled by 8 rows, and TMA can't bring a box that
    # starts at any row into it. Rows past a sequence's own are gathered too and never stored.
    r = jnp.arange(WGMMA_ROWS)
    token_ijr = tile_row_i[:, None, None] + jnp.arange(tiles.warpgroups)[:, None] * tokens + r % tokens
    head_kr = jnp.arange(k)[:, None] * group + jnp.minimum(r // tokens, group - 1)
    token_ijr = jnp.minimum(token_ijr, t - 1)
    q_ikjrh = q_tnh.at[token_ijr[:, None], head_kr[:, None]].get(mode="promise_in_bounds")

    return _launch(
        q_ikjrh,
        k_pool,
        v_pool,
        block_tables_sw,
        jnp.append(context_lens_s, jnp.int32(0)),
        row_end_s1,
        tile_seq_i,
        tile_row_i,
        shape_tnh=(t, n, h),
        tiles=tiles,
        scale=scale,
    )
