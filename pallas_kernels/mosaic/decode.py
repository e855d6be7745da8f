"""Paged decode attention: one query token per sequence (Mosaic GPU, Hopper).

Operands are swapped: S^T = K Q^T and O^T = V^T P^T, so the few query heads that share a KV head are wgmma's N (8 or
16) instead of a fraction of its M = 64. A context is cut into splits of a fixed size, at multiples of it; each leaves
an fp32 partial output and a log-sum-exp, and a second kernel merges them in order. Neither the splits nor the order of
any sum depends on what else is in the batch, so a sequence's output is the same to the bit whoever its neighbours are.

A fixed number of thread blocks walk the splits of the batch: one warpgroup copies, running ahead over the ends of
splits, the other computes. Where a split is computed changes nothing about its result.

Axis letters besides the package's: U splits of one sequence, I splits of the batch, M query heads of one KV head padded
to wgmma's N.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.checks import FP8, check_attention
from pallas_kernels.mosaic.ring import KVRing
from pallas_kernels.mosaic.softmax import NEG, natural_lse, scores, softmax_state
from pallas_kernels.mosaic.support import check_supported
from pallas_kernels.reference import pad_head_dim

COMBINE_STAGES = 4


def _partial_kernel(
    q_skmh_ref,  # [S, K, M, H]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    k_scale_k_ref,  # [K] fp32: on q·k
    v_scale_k_ref,  # [K] fp32: on the output
    work_i4_ref,  # [I, 4]: sequence, first token, end, first token that its query sees
    count_ref,  # [1]: of the rows of work, those in use
    table_sw_ref,  # [S, W]
    o_ikhm_ref,  # [I, K, H, M] fp32
    lse_ikm_ref,  # [I, K, M] fp32, base 2
    q_smem,  # [stages of q, M, H]
    p_smem,  # [M, tile]
    o_smem,  # [H, M] fp32
    lse_smem,  # [M] fp32
    q_full,  # barriers [stages of q]
    q_free,  # barriers [stages of q]
    *ring_refs,
    thread_blocks: int,
    soft_cap: float | None,
    windowed: bool,
    contiguous: bool,
):
    ring = KVRing(*ring_refs)
    stages, tile, h = ring.k.shape
    q_stages, m, _ = q_smem.shape
    num_kv_heads = k_pool_ref.shape[1]
    layout = plgpu.Layout.WGMMA
    steps = pl.cdiv(count_ref[0] * num_kv_heads - lax.axis_index("c"), thread_blocks)

    def work(step):
        """Of this thread block's step: split, KV head, sequence, tokens [start, end), first token seen."""
        at = lax.axis_index("c") + step * thread_blocks
        i, head = lax.div(at, num_kv_heads), lax.rem(at, num_kv_heads)
        return i, head, *(work_i4_ref[i, column] for column in range(4))

    @pl.when(lax.axis_index("wg") == 0)
    def compute():
        def split(step, filled):
            i, head, _, start, end, first_seen = work(step)
            scale = k_scale_k_ref[head]
            q_stage = lax.rem(step, q_stages)
            plgpu.barrier_wait(q_full.at[q_stage])

            def attend(t, carry):
                acc_hm, max_m, sum_tm = carry
                stage, token = lax.rem(filled + t, stages), start + t * tile

                def product(acc_ref):
                    plgpu.wgmma(acc_ref, ring.k.at[stage], q_smem.at[q_stage].T)
                    return acc_ref[...]

                plgpu.barrier_wait(ring.k_full.at[stage])
                x_tm = pl.run_scoped(product, plgpu.ACC((tile, m), jnp.float32))
                plgpu.barrier_arrive(ring.k_free.at[stage])
                key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(1)) + token
                seen_t = key_t < end
                if windowed:
                    seen_t &= key_t >= first_seen
                seen_tm = lax.broadcast_in_dim(seen_t, (tile, m), [0])
                x_tm = jnp.where(seen_tm, scores(x_tm, scale, soft_cap), NEG)
                new_max_m = jnp.maximum(max_m, x_tm.max(axis=0))
                alpha_m = jnp.exp2(max_m - new_max_m)
                p_tm = jnp.exp2(x_tm - lax.broadcast_in_dim(new_max_m, (tile, m), [1]))
                sum_tm = sum_tm * lax.broadcast_in_dim(alpha_m, (tile, m), [1]) + p_tm
                p_smem.T[...] = p_tm.astype(p_smem.dtype)

                def weighted(acc_ref):
                    plgpu.wgmma(acc_ref, ring.v.at[stage].T, p_smem.T)
                    return acc_ref[...]

                plgpu.barrier_wait(ring.v_full.at[stage])
                plgpu.commit_smem()
                o_hm = pl.run_scoped(weighted, plgpu.ACC((h, m), jnp.float32))
                plgpu.barrier_arrive(ring.v_free.at[stage])
                return acc_hm * lax.broadcast_in_dim(alpha_m, (h, m), [1]) + o_hm, new_max_m, sum_tm

            tiles = pl.cdiv(end - start, tile)
            nothing = plgpu.layout_cast(jnp.zeros((tile, m), jnp.float32), layout)
            carry = (*softmax_state(h, m, softmax_axis=0)[:2], nothing)
            acc_hm, max_m, sum_tm = lax.fori_loop(0, tiles, attend, carry)
            plgpu.barrier_arrive(q_free.at[q_stage])
            sum_m = sum_tm.sum(axis=0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last split
            o_smem[...] = acc_hm * lax.broadcast_in_dim(v_scale_k_ref[head] / sum_m, (h, m), [1])
            lse_smem[...] = max_m + jnp.log2(sum_m)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_ikhm_ref.at[i, head])
            plgpu.copy_smem_to_gmem(lse_smem, lse_ikm_ref.at[i, head])
            return filled + tiles

        lax.fori_loop(0, steps, split, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("wg") == 1)
    def copy():
        def split(step, filled):
            _, head, seq, start, end, _ = work(step)
            q_stage = lax.rem(step, q_stages)
            pl.when(step >= q_stages)(lambda: plgpu.barrier_wait(q_free.at[q_stage]))
            plgpu.copy_gmem_to_smem(q_skmh_ref.at[seq, head], q_smem.at[q_stage], q_full.at[q_stage])
            where = dict(seq=seq, head=head, start=start, end=end, filled=filled)
            return ring.fill(k_pool_ref, v_pool_ref, None if contiguous else table_sw_ref, **where)

        ring.drain(lax.fori_loop(0, steps, split, jnp.int32(0)))

        @pl.loop(jnp.maximum(steps - q_stages, 0), steps)
        def drain_q(step):
            plgpu.barrier_wait(q_free.at[lax.rem(step, q_stages)])


def _combine_kernel(
    o_ikhm_ref,  # [I, K, H, M] fp32
    lse_ikm_ref,  # [I, K, M] fp32, base 2
    split_s1_ref,  # [S + 1]: first split of each sequence
    o_skmh_ref,  # [S, K, M, H]
    lse_skm_ref,  # [S, K, M] fp32, natural
    parts_smem,  # [COMBINE_STAGES, H, M] fp32
    lses_smem,  # [COMBINE_STAGES, M] fp32
    o_smem,  # [M, H]
    lse_smem,  # [M] fp32
    full,  # barriers [COMBINE_STAGES]
):
    seq, head = lax.axis_index("s"), lax.axis_index("k")
    m, h = o_smem.shape
    first, splits = split_s1_ref[seq], split_s1_ref[seq + 1] - split_s1_ref[seq]

    def fetch(u):
        stage = lax.rem(u, COMBINE_STAGES)
        plgpu.copy_gmem_to_smem(o_ikhm_ref.at[first + u, head], parts_smem.at[stage], full.at[stage])
        plgpu.copy_gmem_to_smem(lse_ikm_ref.at[first + u, head], lses_smem.at[stage], full.at[stage])

    def wide(x_m):
        return lax.broadcast_in_dim(x_m, (h, m), [1])

    def merge(u, carry):
        acc_hm, max_m, sum_m = carry
        stage = lax.rem(u, COMBINE_STAGES)
        plgpu.barrier_wait(full.at[stage])
        o_hm = plgpu.load(parts_smem.at[stage], layout=plgpu.Layout.WGMMA)
        lse_m = plgpu.load(lses_smem.at[stage], layout=plgpu.Layout.WGMMA.reduce(0))
        plgpu.commit_smem()  # all have read before the next one lands
        pl.when(u + COMBINE_STAGES < splits)(lambda: fetch(u + COMBINE_STAGES))
        new_max_m = jnp.maximum(max_m, lse_m)
        alpha_m, weight_m = jnp.exp2(max_m - new_max_m), jnp.exp2(lse_m - new_max_m)
        return acc_hm * wide(alpha_m) + o_hm * wide(weight_m), new_max_m, sum_m * alpha_m + weight_m

    for u in range(COMBINE_STAGES):
        pl.when(u < splits)(functools.partial(fetch, jnp.int32(u)))
    acc_hm, max_m, sum_m = lax.fori_loop(0, splits, merge, softmax_state(h, m, softmax_axis=0))
    o_hm = acc_hm / wide(jnp.where(sum_m == 0.0, 1.0, sum_m))  # no context: exactly 0
    o_smem.T[...] = o_hm.astype(o_smem.dtype)
    lse_smem[...] = natural_lse(max_m, sum_m)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_skmh_ref.at[seq, head])
    plgpu.copy_smem_to_gmem(lse_smem, lse_skm_ref.at[seq, head])
    plgpu.wait_smem_to_gmem(0)


def _launch_partials(
    q_skmh, k_pool, v_pool, k_scale_k, v_scale_k, work_i4, count, block_tables_sw, *,
    tiles: tuning.MosaicDecode, soft_cap: float | None, windowed: bool, contiguous: bool,
):  # fmt: skip
    _, k, m, h = q_skmh.shape
    num_splits, dtype = work_i4.shape[0], q_skmh.dtype
    q_stages = 2 if m * h <= 1024 else 1  # where shared memory is not short
    thread_blocks = min(num_splits * k, tiles.blocks_per_sm * _num_sms())
    return plgpu.kernel(
        functools.partial(
            _partial_kernel, thread_blocks=thread_blocks, soft_cap=soft_cap, windowed=windowed, contiguous=contiguous
        ),
        out_type=[
            jax.ShapeDtypeStruct((num_splits, k, h, m), jnp.float32),
            jax.ShapeDtypeStruct((num_splits, k, m), jnp.float32),
        ],
        grid=(thread_blocks,),
        grid_names=("c",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((q_stages, m, h), dtype),
            plgpu.SMEM((m, tiles.tile), dtype),
            plgpu.SMEM((h, m), jnp.float32),
            plgpu.SMEM((m,), jnp.float32),
            plgpu.Barrier(num_barriers=q_stages),
            plgpu.Barrier(num_barriers=q_stages),
            *KVRing.scratch(
                stages=tiles.stages, tile=tiles.tile, block_size=k_pool.shape[2], head_dim=h, v_columns=h,
                dtype=dtype, pool_dtype=k_pool.dtype, consumers=1,
            ),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode",
    )(q_skmh, k_pool, v_pool, k_scale_k, v_scale_k, work_i4, count, block_tables_sw)  # fmt: skip


def _launch_combine(o_ikhm, lse_ikm, split_s1, *, dtype: Any):
    _, k, h, m = o_ikhm.shape
    s = split_s1.shape[0] - 1
    return plgpu.kernel(
        _combine_kernel,
        out_type=[jax.ShapeDtypeStruct((s, k, m, h), dtype), jax.ShapeDtypeStruct((s, k, m), jnp.float32)],
        grid=(s, k),
        grid_names=("s", "k"),
        scratch_types=[
            plgpu.SMEM((COMBINE_STAGES, h, m), jnp.float32),
            plgpu.SMEM((COMBINE_STAGES, m), jnp.float32),
            plgpu.SMEM((m, h), dtype),
            plgpu.SMEM((m,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=COMBINE_STAGES),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode_combine",
    )(o_ikhm, lse_ikm, split_s1)


def _splits(context_lens_s, max_splits: int, split: int, tile: int, window: int | None):
    """The splits of a batch, sequence after sequence: work [I, 4], how many there are [1], first ones [S + 1].

    Nothing here depends on the layer: XLA computes it once for all of a step.
    """
    s = context_lens_s.shape[0]
    first_seen_s = jnp.maximum(context_lens_s - window, 0) if window else jnp.zeros_like(context_lens_s)
    first_split_s = first_seen_s // split
    counts_s = pl.cdiv(context_lens_s, split) - first_split_s
    split_s1 = jnp.pad(jnp.cumsum(counts_s), (1, 0))
    seq_i = jnp.repeat(jnp.arange(s, dtype=jnp.int32), counts_s, total_repeat_length=s * max_splits)
    u_i = first_split_s[seq_i] + jnp.arange(s * max_splits, dtype=jnp.int32) - split_s1[seq_i]
    start_i = jnp.maximum(u_i * split, first_seen_s[seq_i] // tile * tile)
    end_i = jnp.minimum((u_i + 1) * split, context_lens_s[seq_i])
    return jnp.stack([seq_i, start_i, end_i, first_seen_s[seq_i]], axis=1), split_s1[-1:], split_s1


def paged_decode_attention(
    q_snh: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_sw: jax.Array,
    context_lens_s: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale_k: jax.Array | None = None,
    v_scale_k: jax.Array | None = None,
    return_lse: bool = False,
    tiles: tuning.MosaicDecode | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`reference.paged_decode_attention` in bfloat16 or float16.

    The softmax and all sums are float32; the weights meet V in q's dtype, or in float16 where the pool is fp8. An
    output depends on nothing but its own sequence, bit for bit. Temporary memory: 4 S N H bytes (more where G is no
    multiple of 8: it is padded to one) for each `tiles.split` of the table's W B tokens.

    Raises ValueError and NotImplementedError as the reference does, and NotImplementedError for what
    `mosaic.unsupported` names.
    """
    options = dict(soft_cap=soft_cap, window=window, k_scale_k=k_scale_k, v_scale_k=v_scale_k)
    check_attention(q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, **options)
    check_supported(k_pool, dtype=q_snh.dtype, num_heads=q_snh.shape[1])
    out = _attention(
        q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, scale=scale, tiles=tiles, contiguous=False, **options
    )
    return out if return_lse else out[0]


def contiguous_decode_attention(
    q_snh: jax.Array,
    k_sklh: jax.Array,
    v_sklh: jax.Array,
    context_lens_s: jax.Array,
    *,
    scale: float,
    tiles: tuning.MosaicDecode | None = None,
) -> jax.Array:
    """The same kernel on keys and values that lie in one piece, [S, K, L, H]: what paging is measured against.

    L is a multiple of the tile. Arguments aren't checked further.
    """
    table = jnp.zeros((q_snh.shape[0], 1), jnp.int32)
    return _attention(q_snh, k_sklh, v_sklh, table, context_lens_s, scale=scale, tiles=tiles, contiguous=True)[0]


def _attention(
    q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, *,
    scale, tiles, contiguous, soft_cap=None, window=None, k_scale_k=None, v_scale_k=None,
):  # fmt: skip
    s, n, head_dim = q_snh.shape
    _, k, block_size, h = k_pool.shape
    group, dtype = n // k, q_snh.dtype
    tiles = tiles or tuning.find("mosaic.decode", "", h, k_pool.dtype)
    assert isinstance(tiles, tuning.MosaicDecode) and tiles.split % tiles.tile == 0, tiles
    if k_pool.dtype == FP8:
        q_snh = q_snh.astype(jnp.float16)  # holds every fp8 number exactly
    m = pl.cdiv(group, 8) * 8
    q_skmh = pad_head_dim(q_snh, h).reshape(s, k, group, h)
    q_skmh = jnp.pad(q_skmh, ((0, 0), (0, 0), (0, m - group), (0, 0)))
    ones = jnp.ones(k, jnp.float32)
    max_splits = pl.cdiv(block_tables_sw.shape[1] * block_size, tiles.split)
    work_i4, count, split_s1 = _splits(context_lens_s, max_splits, tiles.split, tiles.tile, window)
    o_ikhm, lse_ikm = _launch_partials(
        q_skmh, k_pool, v_pool, scale * (ones if k_scale_k is None else k_scale_k),
        ones if v_scale_k is None else v_scale_k, work_i4, count, block_tables_sw,
        tiles=tiles, soft_cap=soft_cap, windowed=window is not None, contiguous=contiguous,
    )  # fmt: skip
    o_skmh, lse_skm = _launch_combine(o_ikhm, lse_ikm, split_s1, dtype=dtype)
    return o_skmh[:, :, :group, :head_dim].reshape(s, n, head_dim), lse_skm[:, :, :group].reshape(s, n)


def _num_sms() -> int:
    """Of the device that is compiled for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.num_cores if abstract is not None else jax.devices()[0].core_count
