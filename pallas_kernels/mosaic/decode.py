"""Paged decode attention: one query token per sequence (Mosaic GPU, Hopper).

Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so the few query heads that share a KV head are wgmma's N (8 or
16) instead of a fraction of its M = 64. A context is cut into splits of a fixed size; each split leaves an fp32 partial
output and a log-sum-exp, and a second kernel merges them in order. Neither the splits nor the order of any sum depends
on what else is in the batch, so a sequence's output is the same to the bit whoever its neighbours are.

Axis letters besides the package's: U splits, M query heads of one KV head padded to wgmma's N.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.kv_write import check_array, check_pools, check_supported

LOG2E = 1.4426950408889634
NEG = -1e30  # a finite minus infinity: NEG - NEG is 0, not NaN
MAX_CONTEXT = 131_072
WGMMA_ROWS = 64


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """How decode cuts a context: into splits, and those into tiles that go through a ring of `stages` of them."""

    stages: int
    split: int = 512  # tokens; a constant, or a sequence's output would depend on its batch
    tile: int = 64  # tokens


TILES = {64: DecodeTiles(stages=4), 128: DecodeTiles(stages=3), 256: DecodeTiles(stages=3)}  # by head dim


@dataclasses.dataclass(frozen=True)
class KVRing:
    """A ring of KV tiles in shared memory: one warpgroup fills it, others compute on its tiles and set them free."""

    k: Any  # [stages, tile, H]
    v: Any  # [stages, tile, X]: all of the head dim, or a part
    k_full: Any  # barriers [stages]
    v_full: Any
    k_free: Any
    v_free: Any
    v_landed: Any  # barrier: a V tile that has to be cleared first

    @staticmethod
    def scratch(
        stages: int, tile: int, block_size: int, head_dim: int, v_columns: int, dtype: Any, consumers: int
    ) -> list[Any]:
        copies = max(1, tile // block_size)
        k, v = (plgpu.SMEM((stages, tile, columns), dtype) for columns in (head_dim, v_columns))
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
        return [k, v, full, full, free, free, plgpu.Barrier(num_arrivals=copies)]

    def fill(self, k_pool_ref, v_pool_ref, table_ref, *, seq, head, start, end, v_column=0) -> None:
        """Copies tokens [start, end) of one sequence and KV head through the ring; `start` is a multiple of the tile.

        The last tile is filled up with rows of the last block: the table is never read past the context. What these
        rows hold is unknown. Who computes masks their scores; in V they are zeroed here, because 0 * NaN is NaN.
        """
        stages, tile, _ = self.k.shape
        block_size = k_pool_ref.shape[2]
        rows = min(tile, block_size)
        tiles = pl.cdiv(end - start, tile)
        last_block = lax.div(end - 1, block_size)

        def copy(pool_ref, ring, column, i, stage, barrier):
            for row in range(0, tile, rows):
                token = start + i * tile + row
                block = table_ref[seq, jnp.minimum(lax.div(token, block_size), last_block)]
                offset = pl.multiple_of(lax.rem(token, block_size), rows) if rows < block_size else 0
                source = pool_ref.at[block, head, pl.ds(offset, rows), pl.ds(column, ring.shape[2])]
                plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(row, rows)], barrier)

        @pl.loop(0, tiles)
        def fill_stage(i):
            stage = lax.rem(i, stages)
            left = end - start - i * tile
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(self.k_free.at[stage]))
            copy(k_pool_ref, self.k, 0, i, stage, self.k_full.at[stage])
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(self.v_free.at[stage]))
            pl.when(left >= tile)(lambda: copy(v_pool_ref, self.v, v_column, i, stage, self.v_full.at[stage]))

            @pl.when(left < tile)
            def fill_last_stage():
                copy(v_pool_ref, self.v, v_column, i, stage, self.v_landed)
                plgpu.barrier_wait(self.v_landed)
                self._clear_tail(stage, left)
                plgpu.commit_smem()
                for _ in range(0, tile, rows):  # as often as copies would have arrived
                    plgpu.barrier_arrive(self.v_full.at[stage])

        @pl.loop(jnp.maximum(tiles - stages, 0), tiles)
        def drain_stage(i):  # a barrier may not complete twice unobserved
            stage = lax.rem(i, stages)
            plgpu.barrier_wait(self.k_free.at[stage])
            plgpu.barrier_wait(self.v_free.at[stage])

    def _clear_tail(self, stage, left) -> None:
        _, tile, head_dim = self.v.shape
        box = (WGMMA_ROWS, 64)
        row = plgpu.broadcasted_iota(jnp.int32, box[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
        row = lax.broadcast_in_dim(row, box, [0])
        for at, column in itertools.product(range(0, tile, box[0]), range(0, head_dim, box[1])):
            piece = self.v.at[stage, pl.ds(at, box[0]), pl.ds(column, box[1])]
            v = plgpu.load(piece, layout=plgpu.Layout.WGMMA)
            piece[...] = jnp.where(row + at < left, v, jnp.zeros_like(v))


def softmax_state(rows: int, columns: int, softmax_axis: int) -> tuple[Any, Any, Any]:
    """An empty online softmax: output [rows, columns], and maximum and sum along `softmax_axis`."""
    layout, kept = plgpu.Layout.WGMMA, (rows, columns)[1 - softmax_axis]
    cast = plgpu.layout_cast
    return (
        cast(jnp.zeros((rows, columns), jnp.float32), layout),
        cast(jnp.full((kept,), NEG, jnp.float32), layout.reduce(softmax_axis)),
        cast(jnp.zeros((kept,), jnp.float32), layout.reduce(softmax_axis)),
    )


def _partial_kernel(
    q_skmh_ref,  # [S, K, M, H]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    table_sw_ref,  # [S, W]
    context_s_ref,  # [S]
    o_uskhm_ref,  # [U, S, K, H, M] fp32
    lse_uskm_ref,  # [U, S, K, M] fp32, base 2
    q_smem,  # [M, H]
    p_smem,  # [M, tile]
    o_smem,  # [H, M] fp32
    lse_smem,  # [M] fp32
    q_full,  # barrier
    *ring_refs,
    split: int,
    scale: float,
):
    u, seq, head = lax.axis_index("u"), lax.axis_index("s"), lax.axis_index("k")
    warpgroup = lax.axis_index("wg")
    ring = KVRing(*ring_refs)
    stages, tile, h = ring.k.shape
    m = q_smem.shape[0]
    start = u * split
    end = jnp.minimum(start + split, context_s_ref[seq])
    layout = plgpu.Layout.WGMMA

    @pl.when((start < end) & (warpgroup == 0))
    def _compute():
        plgpu.copy_gmem_to_smem(q_skmh_ref.at[seq, head], q_smem, q_full)
        plgpu.barrier_wait(q_full)

        def step(i, carry):
            acc_hm, max_m, sum_m = carry
            stage = lax.rem(i, stages)
            left = end - start - i * tile

            def scores(acc_ref):
                plgpu.wgmma(acc_ref, ring.k.at[stage], q_smem.T)
                return acc_ref[...]

            plgpu.barrier_wait(ring.k_full.at[stage])
            x_tm = pl.run_scoped(scores, plgpu.ACC((tile, m), jnp.float32))
            plgpu.barrier_arrive(ring.k_free.at[stage])
            key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(1))
            exists = lax.broadcast_in_dim(key_t < left, (tile, m), [0])
            x_tm = jnp.where(exists, x_tm * (scale * LOG2E), NEG)
            new_max_m = jnp.maximum(max_m, x_tm.max(axis=0))
            alpha_m = jnp.exp2(max_m - new_max_m)
            p_tm = jnp.exp2(x_tm - lax.broadcast_in_dim(new_max_m, (tile, m), [1]))
            sum_m = sum_m * alpha_m + p_tm.sum(axis=0)
            p_smem.T[...] = p_tm.astype(p_smem.dtype)

            def weighted(acc_ref):
                plgpu.wgmma(acc_ref, ring.v.at[stage].T, p_smem.T)
                return acc_ref[...]

            plgpu.barrier_wait(ring.v_full.at[stage])
            plgpu.commit_smem()
            o_hm = pl.run_scoped(weighted, plgpu.ACC((h, m), jnp.float32))
            plgpu.barrier_arrive(ring.v_free.at[stage])
            return acc_hm * lax.broadcast_in_dim(alpha_m, (h, m), [1]) + o_hm, new_max_m, sum_m

        tiles = pl.cdiv(end - start, tile)
        acc_hm, max_m, sum_m = lax.fori_loop(0, tiles, step, softmax_state(h, m, softmax_axis=0))
        o_smem[...] = acc_hm / lax.broadcast_in_dim(sum_m, (h, m), [1])
        lse_smem[...] = max_m + jnp.log2(sum_m)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_uskhm_ref.at[u, seq, head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_uskm_ref.at[u, seq, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when((start < end) & (warpgroup == 1))
    def _copy():
        ring.fill(k_pool_ref, v_pool_ref, table_sw_ref, seq=seq, head=head, start=start, end=end)


def _combine_kernel(
    o_uskhm_ref,  # [U, S, K, H, M] fp32; splits past a context were never written
    lse_uskm_ref,  # [U, S, K, M] fp32, base 2
    context_s_ref,  # [S]
    o_skmh_ref,  # [S, K, M, H]
    o_smem,  # [M, H]
    *,
    split: int,
):
    seq, head = lax.axis_index("s"), lax.axis_index("k")
    m, h = o_smem.shape
    layout = plgpu.Layout.WGMMA

    def wide(x_m):
        return lax.broadcast_in_dim(x_m, (h, m), [1])

    def step(u, carry):
        acc_hm, max_m, sum_m = carry
        o_hm = plgpu.load(o_uskhm_ref.at[u, seq, head], layout=layout, optimized=False)
        lse_m = plgpu.load(lse_uskm_ref.at[u, seq, head], layout=layout.reduce(0), optimized=False)
        new_max_m = jnp.maximum(max_m, lse_m)
        alpha_m, weight_m = jnp.exp2(max_m - new_max_m), jnp.exp2(lse_m - new_max_m)
        return acc_hm * wide(alpha_m) + o_hm * wide(weight_m), new_max_m, sum_m * alpha_m + weight_m

    splits = pl.cdiv(context_s_ref[seq], split)
    acc_hm, _, sum_m = lax.fori_loop(0, splits, step, softmax_state(h, m, softmax_axis=0))
    o_hm = acc_hm / wide(jnp.where(sum_m == 0.0, 1.0, sum_m))  # no context: exactly 0
    o_smem.T[...] = o_hm.astype(o_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_skmh_ref.at[seq, head])
    plgpu.wait_smem_to_gmem(0)


def _launch_partials(q_skmh, k_pool, v_pool, block_tables_sw, context_lens_s, *, tiles: DecodeTiles, scale: float):
    s, k, m, h = q_skmh.shape
    block_size, dtype = k_pool.shape[2], q_skmh.dtype
    u = pl.cdiv(block_tables_sw.shape[1] * block_size, tiles.split)
    return plgpu.kernel(
        functools.partial(_partial_kernel, split=tiles.split, scale=scale),
        out_type=[
            jax.ShapeDtypeStruct((u, s, k, h, m), jnp.float32),
            jax.ShapeDtypeStruct((u, s, k, m), jnp.float32),
        ],
        grid=(u, s, k),
        grid_names=("u", "s", "k"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((m, h), dtype),
            plgpu.SMEM((m, tiles.tile), dtype),
            plgpu.SMEM((h, m), jnp.float32),
            plgpu.SMEM((m,), jnp.float32),
            plgpu.Barrier(),
            *KVRing.scratch(tiles.stages, tiles.tile, block_size, h, h, dtype, consumers=1),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode",
    )(q_skmh, k_pool, v_pool, block_tables_sw, context_lens_s)


def _launch_combine(o_uskhm, lse_uskm, context_lens_s, *, dtype: Any, split: int):
    _, s, k, h, m = o_uskhm.shape
    return plgpu.kernel(
        functools.partial(_combine_kernel, split=split),
        out_type=jax.ShapeDtypeStruct((s, k, m, h), dtype),
        grid=(s, k),
        grid_names=("s", "k"),
        scratch_types=[plgpu.SMEM((m, h), dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_combine",
    )(o_uskhm, lse_uskm, context_lens_s)


def paged_decode_attention(
    q_snh: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_sw: jax.Array,
    context_lens_s: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention of one query token per sequence over that sequence's blocks.

    The softmax and all sums are fp32; the weights meet V in the inputs' dtype. An output depends on nothing but its own
    sequence, bit for bit. Temporary memory: about 4 S N H bytes (doubled or more when G < 8) per 512 tokens of W B.

    Args:
      q_snh: [S, N, H], bfloat16 or float16.
      k_pool, v_pool: [P, K, B, H], q's dtype; the query tokens' own keys and values are already there.
      block_tables_sw: [S, W] int32. Entries past a context may hold anything: they are not read.
      context_lens_s: [S] int32, the query token included. 0 marks padding: its output is exactly 0.
      scale: what multiplies q k^T.

    Returns:
      [S, N, H] in q's dtype.

    Raises:
      ValueError: shapes or dtypes don't fit together.
      NotImplementedError: see `unsupported`; or W B exceeds 131072 tokens.
    """
    s, n, h, k = check_attention(q_snh, k_pool, v_pool, block_tables_sw, context_lens_s)
    if q_snh.shape[0] != s:
        raise ValueError(f"q_snh has {q_snh.shape[0]} rows, expected one for each of the {s} rows of block_tables_sw")
    group = n // k
    m = pl.cdiv(group, 8) * 8
    q_skmh = jnp.pad(q_snh.reshape(s, k, group, h), ((0, 0), (0, 0), (0, m - group), (0, 0)))
    o_uskhm, lse_uskm = _launch_partials(
        q_skmh, k_pool, v_pool, block_tables_sw, context_lens_s, tiles=TILES[h], scale=scale
    )
    o_skmh = _launch_combine(o_uskhm, lse_uskm, context_lens_s, dtype=q_snh.dtype, split=TILES[h].split)
    return o_skmh[:, :, :group].reshape(s, n, h)


def check_attention(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables_sw: jax.Array, context_lens_s: jax.Array
) -> tuple[int, int, int, int]:
    """Checks what both attention ops take; returns S, N, H, K."""
    _, k, b, h = check_pools(k_pool, v_pool)
    if q.ndim != 3:
        raise ValueError(f"q has shape {list(q.shape)}, expected [rows, N, H]")
    n = q.shape[1]
    check_array("q", q, (q.shape[0], n, h), k_pool.dtype)
    if n % k:
        raise ValueError(f"q has {n} heads, expected a multiple of the pools' {k} KV heads")
    if block_tables_sw.ndim != 2:
        raise ValueError(f"block_tables_sw has shape {list(block_tables_sw.shape)}, expected [S, W]")
    s, w = block_tables_sw.shape
    check_array("block_tables_sw", block_tables_sw, (s, w), jnp.int32)
    check_array("context_lens_s", context_lens_s, (s,), jnp.int32)
    check_supported(dtype=k_pool.dtype, head_dim=h, block_size=b, num_heads=n, num_kv_heads=k)
    if w * b > MAX_CONTEXT:
        raise NotImplementedError(
            f"Mosaic GPU kernels: block tables of {w} x {b} = {w * b} tokens are not supported, at most {MAX_CONTEXT}"
        )
    return s, n, h, k
