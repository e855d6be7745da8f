"""Paged decode attention: one query token per sequence (Mosaic GPU, Hopper).

Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so the few query heads that share a KV head are wgmma's N (8 or
16) instead of a fraction of its M = 64. A context is cut into splits; each leaves an fp32 partial output and a
log-sum-exp, and a second kernel merges them in order. Neither the splits nor the order of any sum depends on the rest
of the batch, so a sequence's output is the same to the bit in every batch, in decode steps and in mixed ones.

A fixed number of thread blocks walk the splits of the batch: one warpgroup copies, running ahead over the ends of
splits, the other computes. The place of a split changes nothing about its result.

Axis letters besides the package's: R rows of q and of the output, I splits of the batch, M query heads of one KV head
padded to wgmma's N.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.checks import FP8
from pallas_kernels.mosaic.combine import LANES, QueryRows, combine
from pallas_kernels.mosaic.ring import TMA_ROWS, KVRing
from pallas_kernels.mosaic.softmax import NEG, capped, exponent_factor, product, scales, softmax_state
from pallas_kernels.mosaic.support import check_grid, check_supported, compiler_params, num_sms
from pallas_kernels.mosaic.work import DecodeWork, WorkSizes, decode_work
from pallas_kernels.options import AttentionOptions, Contexts, OutputAndLse, Ref
from pallas_kernels.reference import pad_head_dim
from pallas_kernels.transforms import no_vmap

Carry = tuple[jax.Array, jax.Array, jax.Array]  # output, maxima and sums of the softmax so far


def _kernel(
    q_nh_ref: Ref,  # [R K stride, H]
    k_pool_ref: Ref,  # [P, K, B, H]
    v_pool_ref: Ref,  # [P, K, B, H]
    k_scale_k_ref: Ref,  # [K] fp32: on q·k
    v_scale_k_ref: Ref,  # [K] fp32: on the output
    work_i4_ref: Ref,  # [I, 4]: sequence, first token, end, first token that its query sees
    count_ref: Ref,  # [1]: number of rows of work in use
    row_s_ref: Ref,  # [S]: the row of each sequence
    table_sw_ref: Ref,  # [S, W]
    o_ikhm_ref: Ref,  # [I, K, H, M] fp32
    lse_ikl_ref: Ref,  # [I, K, LANES] fp32, base 2
    *,
    q_smem: Ref,  # [stages of q, M, H]
    p_smem: Ref,  # [M, tile]
    o_smem: Ref,  # [H, M] fp32
    lse_smem: Ref,  # [LANES] fp32
    q_full: Ref,  # barriers [stages of q]
    q_free: Ref,  # barriers [stages of q]
    ring: KVRing,
    rows: QueryRows,
    thread_blocks: int,
    soft_cap: float | None,
    windowed: bool,
) -> None:
    stages, tile, h = ring.k.shape
    q_stages, m, _ = q_smem.shape
    num_kv_heads = k_pool_ref.shape[1]
    layout = plgpu.Layout.WGMMA
    steps = pl.cdiv(count_ref[0] * num_kv_heads - lax.axis_index("c"), thread_blocks)

    def work(step: jax.Array) -> tuple[jax.Array, ...]:
        """Return split, KV head, sequence, tokens [start, end) and first token seen of a step of this thread block."""
        at = lax.axis_index("c") + step * thread_blocks
        i, head = lax.div(at, num_kv_heads), lax.rem(at, num_kv_heads)
        return i, head, *(work_i4_ref[i, column] for column in range(4))

    def columns(x_m: jax.Array, rows: int) -> jax.Array:
        return lax.broadcast_in_dim(x_m, (rows, m), [1])

    @pl.when(lax.axis_index("wg") == 0)
    def compute() -> None:
        def split(step: jax.Array, filled: jax.Array) -> jax.Array:
            i, head, _, start, end, first_seen = work(step)
            factor = exponent_factor(k_scale_k_ref[head], soft_cap)
            q_stage = lax.rem(step, q_stages)
            plgpu.barrier_wait(q_full.at[q_stage])

            def attend(t: jax.Array, carry: Carry) -> Carry:
                # Cycles a tile, at head dim 128 and 64 tokens: its 32 KB take a multiprocessor's share of 4.8 TB/s
                # about 1,600; this body is about 160 instructions a warp and waits for two products and two barriers.
                # Two thread blocks share the multiprocessor, so that one waits while the other computes.
                acc_hm, max_m, sum_tm = carry
                stage, token = lax.rem(filled + t, stages), start + t * tile
                plgpu.barrier_wait(ring.k_full.at[stage])
                x_tm = product(ring.k.at[stage], q_smem.at[q_stage].T, tile, m)
                plgpu.barrier_arrive(ring.k_free.at[stage])

                key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(1)) + token
                seen_t = key_t < end
                if windowed:
                    seen_t &= key_t >= first_seen
                seen_tm = lax.broadcast_in_dim(seen_t, (tile, m), [0])
                x_tm = jnp.where(seen_tm, capped(x_tm, k_scale_k_ref[head], soft_cap), NEG)
                new_max_m = jnp.maximum(max_m, x_tm.max(axis=0))
                alpha_m = jnp.exp2((max_m - new_max_m) * factor)
                p_tm = jnp.exp2(x_tm * factor - columns(new_max_m * factor, tile))
                sum_tm = sum_tm * columns(alpha_m, tile) + p_tm

                # All warps have read the last weights: the maximum above is taken across them.
                p_smem.T[...] = p_tm.astype(p_smem.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(ring.v_full.at[stage])
                o_hm = product(ring.v.at[stage].T, p_smem.T, h, m)
                plgpu.barrier_arrive(ring.v_free.at[stage])
                return acc_hm * columns(alpha_m, h) + o_hm, new_max_m, sum_tm

            tiles = pl.cdiv(end - start, tile)
            nothing = plgpu.layout_cast(jnp.zeros((tile, m), jnp.float32), layout)
            carry = (*softmax_state(h, m, softmax_axis=0)[:2], nothing)
            acc_hm, max_m, sum_tm = lax.fori_loop(0, tiles, attend, carry)
            plgpu.barrier_arrive(q_free.at[q_stage])
            sum_m = sum_tm.sum(axis=0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last split
            o_smem[...] = acc_hm * columns(v_scale_k_ref[head] / sum_m, h)
            lse_smem.at[pl.ds(0, m)][...] = max_m * factor + jnp.log2(sum_m)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_ikhm_ref.at[i, head])
            plgpu.copy_smem_to_gmem(lse_smem, lse_ikl_ref.at[i, head])
            return filled + tiles

        lax.fori_loop(0, steps, split, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("wg") == 1)
    def copy() -> None:
        def split(step: jax.Array, filled: jax.Array) -> jax.Array:
            _, head, seq, start, end, first_seen = work(step)
            q_stage = lax.rem(step, q_stages)
            pl.when(step >= q_stages)(lambda: plgpu.barrier_wait(q_free.at[q_stage]))
            row = row_s_ref[seq] if rows.direct else seq
            heads = pl.ds(pl.multiple_of(rows.first(row, head, num_kv_heads) // TMA_ROWS * TMA_ROWS, TMA_ROWS), m)
            plgpu.copy_gmem_to_smem(q_nh_ref.at[heads], q_smem.at[q_stage], q_full.at[q_stage])
            where = dict(seq=seq, head=head, start=start, end=end, filled=filled)
            seen = first_seen if windowed else None
            return ring.fill(k_pool_ref, v_pool_ref, table_sw_ref, seen=seen, **where)

        ring.drain(lax.fori_loop(0, steps, split, jnp.int32(0)))

        @pl.loop(jnp.maximum(steps - q_stages, 0), steps)
        def drain_q(step: jax.Array) -> None:
            plgpu.barrier_wait(q_free.at[lax.rem(step, q_stages)])


def _launch(
    q_rnh: jax.Array, contexts: Contexts, work: DecodeWork, rows: QueryRows, options: AttentionOptions,
    tiles: tuning.MosaicDecode,
) -> list[jax.Array]:  # fmt: skip
    """Compute partial outputs [I, K, H, M] of the splits, and their log-sum-exps [I, K, LANES] of base 2."""
    (_, n, h), k = q_rnh.shape, contexts.k_pool.shape[1]
    m = pl.cdiv(n // k, TMA_ROWS) * TMA_ROWS
    splits, row_s = work
    num_splits, dtype = splits.work_i4.shape[0], q_rnh.dtype
    if not rows.direct:  # XLA fuses the padding with the choice of the rows
        q_skgh = q_rnh.at[jnp.maximum(row_s, 0)].get(mode="promise_in_bounds").reshape(-1, k, n // k, h)
        q_rnh = jnp.pad(q_skgh, ((0, 0), (0, 0), (0, rows.stride - n // k), (0, 0)))
    q_stages = 2 if m * h <= 1024 else 1  # where shared memory is not short
    thread_blocks = min(num_splits * k, tiles.blocks_per_sm * num_sms())
    check_grid("paged_decode", (thread_blocks,))
    soft_cap, windowed = options.soft_cap, options.window is not None
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    partials: list[jax.Array] = plgpu.kernel(
        functools.partial(_kernel, rows=rows, thread_blocks=thread_blocks, soft_cap=soft_cap, windowed=windowed),
        out_type=[float32((num_splits, k, h, m)), float32((num_splits, k, LANES))],
        grid=(thread_blocks,),
        grid_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            q_smem=plgpu.SMEM((q_stages, m, h), dtype),
            p_smem=plgpu.SMEM((m, tiles.tile), dtype),
            o_smem=plgpu.SMEM((h, m), jnp.float32),
            lse_smem=plgpu.SMEM((LANES,), jnp.float32),
            q_full=plgpu.Barrier(num_barriers=q_stages),
            q_free=plgpu.Barrier(num_barriers=q_stages),
            ring=KVRing.scratch(tiles.stages, (tiles.tile, h, h), dtype, contexts.k_pool, consumers=1),
        ),
        # The least bytes of scratch: more would leave no room for two thread blocks with 16 query heads.
        compiler_params=compiler_params(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=1024),
        kernel_name="paged_decode",
    )(q_rnh.reshape(-1, h), *contexts[:2], *scales(options, k), *splits[:2], row_s, contexts.block_tables_sw)
    return partials


def decode_cut(pool: jax.Array, tiles: tuning.Tiles | None) -> tuning.MosaicDecode:
    """Return the given configuration of the decode kernel, or the one for a pool."""
    cut = tiles or tuning.find("mosaic.decode", "", pool.shape[3], pool.dtype)
    assert isinstance(cut, tuning.MosaicDecode) and cut.split % cut.tile == 0, cut
    return cut


def attend_rows(
    q_rnh: jax.Array, contexts: Contexts, work: DecodeWork, o_rnh_ref: Ref, options: AttentionOptions,
    cut: tuning.MosaicDecode,
) -> jax.Array:  # fmt: skip
    """Attend row `work.row_s[s]` of q over the context of sequence s, and write that row of the output ref.

    Args:
        q_rnh: [R, N, H] of the pools' head dim.
        o_rnh_ref: ref [R, N, H].

    Returns:
        The natural log-sum-exps [S, N] float32 of the sequences that have a row.
    """
    n, k, (s,) = q_rnh.shape[1], contexts.k_pool.shape[1], work.row_s.shape
    if contexts.k_pool.dtype == FP8:
        q_rnh = q_rnh.astype(jnp.float16)  # holds every fp8 number exactly
    rows = QueryRows.of(len(q_rnh), n, k)
    o_ikhm, lse_ikl = _launch(q_rnh, contexts, work, rows, options, cut)
    most = work.splits.work_i4.shape[0] // s
    lse_skl = combine(
        o_ikhm, lse_ikl, work.splits.first_s1, work.row_s, o_rnh_ref, rows=rows, max_splits=most,
        sinks_n=options.sinks_n,
    )  # fmt: skip
    lead_sk = rows.lead(work.row_s[:, None], jnp.arange(k), k)
    lse_skg = jnp.take_along_axis(lse_skl, lead_sk[:, :, None] + jnp.arange(n // k), axis=2, mode="clip")
    return lse_skg.reshape(s, n)


def paged_decode_attention(
    q_snh: jax.Array, contexts: Contexts, options: AttentionOptions, *, tiles: tuning.MosaicDecode | None = None
) -> OutputAndLse:
    """Compute `Ops.paged_decode_attention` in bfloat16 or float16.

    The softmax and all sums are float32. The weights are multiplied by V in q's dtype, or in float16 for an fp8 pool.
    Temporary memory: at most 128 S M H float32 partials, M = 8 or 16 the padded query heads of a KV head.
    """
    q_snh, contexts = no_vmap("paged_decode_attention in Mosaic", (q_snh, contexts))
    (s, n, head_dim), (_, k, _, h) = q_snh.shape, contexts.k_pool.shape
    check_supported(contexts.k_pool, dtype=q_snh.dtype, num_heads=n)
    cut = decode_cut(contexts.k_pool, tiles)
    work = options.work
    if work is None:
        # It depends on the batch so that XLA computes it once for all layers: it launches a bare iota for each.
        row_s = jnp.where(contexts.context_lens_s < 0, -1, jnp.arange(s, dtype=jnp.int32))
        work = decode_work(contexts.context_lens_s, row_s, WorkSizes(n, k, contexts.table_tokens, options.window), cut)
    o_ref = jax.empty_ref(jax.ShapeDtypeStruct((s, n, h), q_snh.dtype))
    lse_sn = attend_rows(pad_head_dim(q_snh, h), contexts, work, o_ref, options, cut)
    o_snh = jax.freeze(o_ref)[:, :, :head_dim]
    return o_snh, lse_sn
