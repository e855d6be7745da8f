"""Ragged paged attention: chunks of prompts and single decode tokens in one launch (Mosaic GPU, Hopper).

The packed query rows are cut into tiles that each belong to one sequence. A thread block takes one tile and one KV
head: one warpgroup copies KV blocks into a ring, each of the others computes 64 wgmma rows, which are tokens x query
heads of that KV head. While the tensor cores multiply one tile's weights with V and the next tile's K with Q, the
softmax of that next tile waits for the second product alone (FlashAttention-3, arXiv 2407.08608, section 3.2); weights
never leave the registers. Rows that no sequence owns are tiles of a sequence without keys, and so come out as 0. KV
tiles start at multiples of the tile in a sequence, so a row's output depends neither on its neighbours nor on how its
prompt was cut into chunks, bit for bit.

Axis letters besides the package's: I query tiles, J compute warpgroups, R = 64 rows of one warpgroup, X output columns
of one thread block (H, or a part of it).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.checks import FP8, check_attention
from pallas_kernels.mosaic.ring import WGMMA_ROWS, KVRing
from pallas_kernels.mosaic.softmax import NEG, natural_lse, scores, softmax_state
from pallas_kernels.mosaic.support import check_supported
from pallas_kernels.query_tiles import query_tiles
from pallas_kernels.reference import pad_head_dim

MAX_COLUMNS = 128  # of the output, for one thread block: accumulators of 256 don't fit the registers


def _kernel(
    q_ikjrh_ref,  # [I, K, J, R, H]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    k_scale_k_ref,  # [K] fp32: on q·k
    v_scale_k_ref,  # [K] fp32: on the output
    table_sw_ref,  # [S, W]
    context_s1_ref,  # [S + 1]: the last sequence owns the padding rows and has no context
    row_end_s1_ref,  # [S + 1]: past the last query row of each sequence
    tile_seq_i_ref,  # [I]: the sequence of a tile, -1 = none
    tile_row_i_ref,  # [I]: its first query row
    o_tnh_ref,  # [T, N, H]
    lse_ikjr_ref,  # [I, K, J, R] fp32, natural
    q_smem,  # [J, R, H]
    o_smem,  # [J, R, X]
    lse_smem,  # [J, R] fp32
    q_full,  # barrier
    *ring_refs,
    group: int,
    soft_cap: float | None,
    window: int | None,
    registers: tuple[int, int] | None,
    contiguous: bool,
):
    # The last tiles of a sequence have the most keys, so they start first.
    i, head = tile_seq_i_ref.shape[0] - 1 - lax.axis_index("i"), lax.axis_index("k")
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
        """First row of this tile, its position in the sequence, rows it owns, keys from the first seen to the last."""
        row, row_end = tile_row_i_ref[i], row_end_s1_ref[seq]
        count = jnp.minimum(row_end - row, warpgroups * tokens)
        position = context_s1_ref[seq] - row_end + row
        end = jnp.maximum(position + count, 0)
        start = jnp.int32(0) if window is None else jnp.clip(position - window + 1, 0, end) // tile * tile
        return row, position, count, start, end

    def by_row(x_r, width):
        return lax.broadcast_in_dim(x_r, (rows, width), [0])

    def attend(start, end, position, count):
        """Leaves this warpgroup's output and log-sum-exp in shared memory; there is at least one tile of keys."""
        tiles = pl.cdiv(end - start, tile)
        scale = k_scale_k_ref[head]
        # Tiles that every row of the thread block sees whole need no mask: those from `whole` to `part`.
        part = jnp.clip(lax.div(position + 1 - start, tile), 1, tiles)
        whole = jnp.int32(1)
        if window is not None:
            whole = jnp.clip(pl.cdiv(position + count - window - start, tile), 1, part)
        position = position + warpgroup * tokens

        def masked(x_rt, t):
            token_r = lax.rem(plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1)), tokens)
            last_r = token_r + (position - start - t * tile)
            key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(0))
            key_rt = lax.broadcast_in_dim(key_t, (rows, tile), [1])
            seen_rt = key_rt <= by_row(last_r, tile)
            if window is not None:
                seen_rt &= key_rt > by_row(last_r - window, tile)
            return jnp.where(seen_rt, x_rt, NEG)

        def softmax(x_rt, t, max_r, sum_r, mask):
            """Weights of a tile, by how much older ones shrink, and the new maximum and sum."""
            x_rt = scores(x_rt, scale, soft_cap)
            if mask:
                x_rt = masked(x_rt, t)
            new_max_r = jnp.maximum(max_r, x_rt.max(axis=1))
            alpha_r = jnp.exp2(max_r - new_max_r)
            p_rt = jnp.exp2(x_rt - by_row(new_max_r, tile))
            return p_rt, alpha_r, new_max_r, sum_r * alpha_r + p_rt.sum(axis=1)

        def product(x_acc, t):
            """Starts Q K^T of a tile."""
            stage = lax.rem(t, stages)
            plgpu.barrier_wait(ring.k_full.at[stage])
            plgpu.wgmma(x_acc, q_smem.at[warpgroup], ring.k.at[stage].T)

        def weighted(o_acc, p_rt, t):
            """Starts P V of a tile."""
            stage = lax.rem(t, stages)
            plgpu.barrier_wait(ring.v_full.at[stage])
            plgpu.wgmma(o_acc, p_rt, ring.v.at[stage])

        def step(mask, t, carry):
            acc_rx, max_r, sum_r, p_rt = carry

            def overlapped(o_acc, x_acc):
                product(x_acc, t)
                weighted(o_acc, p_rt, t - 1)
                x_rt = plgpu.wgmma_accumulator_load(x_acc, wait_n=1)
                plgpu.barrier_arrive(ring.k_free.at[lax.rem(t, stages)])
                return softmax(x_rt, t, max_r, sum_r, mask), o_acc[...]

            def started(o_acc):
                return pl.run_scoped(functools.partial(overlapped, o_acc), plgpu.ACC((rows, tile), jnp.float32))

            (new_p_rt, alpha_r, new_max_r, new_sum_r), acc_rx = _accumulate(started, acc_rx)
            plgpu.barrier_arrive(ring.v_free.at[lax.rem(t - 1, stages)])
            # The old weights are an operand until here: to narrow the new ones any sooner would stall the tensor cores.
            new_p_rt, acc_rx = lax.optimization_barrier((new_p_rt, acc_rx))
            return acc_rx * by_row(alpha_r, columns), new_max_r, new_sum_r, new_p_rt.astype(q_smem.dtype)

        def first(x_acc):
            product(x_acc, jnp.int32(0))
            return x_acc[...]

        acc_rx, max_r, sum_r = softmax_state(rows, columns, softmax_axis=1)
        x_rt = pl.run_scoped(first, plgpu.ACC((rows, tile), jnp.float32))
        plgpu.barrier_arrive(ring.k_free.at[0])
        p_rt, _, max_r, sum_r = softmax(x_rt, jnp.int32(0), max_r, sum_r, True)
        carry = (acc_rx, max_r, sum_r, p_rt.astype(q_smem.dtype))
        if window is not None:
            carry = lax.fori_loop(1, whole, functools.partial(step, True), carry)
        carry = lax.fori_loop(whole, part, functools.partial(step, False), carry)
        acc_rx, max_r, sum_r, p_rt = lax.fori_loop(part, tiles, functools.partial(step, True), carry)

        def last(o_acc):
            weighted(o_acc, p_rt, tiles - 1)
            return None, o_acc[...]

        _, acc_rx = _accumulate(last, acc_rx)
        plgpu.barrier_arrive(ring.v_free.at[lax.rem(tiles - 1, stages)])
        # A row past those owned, or past all keys, may have seen nothing but masks: it is not stored.
        o_smem[warpgroup] = (acc_rx * by_row(v_scale_k_ref[head] / sum_r, columns)).astype(o_smem.dtype)
        lse_smem[warpgroup] = natural_lse(max_r, sum_r)

    @pl.when((seq >= 0) & (warpgroup < warpgroups))
    def compute():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        _, position, count, start, end = extent()
        plgpu.barrier_wait(q_full)
        pl.when(end > 0)(lambda: attend(start, end, position, count))

        @pl.when(end == 0)
        def nothing():
            o_rx, _, total_r = softmax_state(rows, columns, softmax_axis=1)
            o_smem[warpgroup] = o_rx.astype(o_smem.dtype)
            lse_smem[warpgroup] = total_r - jnp.inf

        plgpu.commit_smem()

        @pl.when(lax.axis_index("x") == 0)
        def store_lse():
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ikjr_ref.at[i, head, warpgroup])

        row, _, count, _, _ = extent()  # read again: registers are short in the loops
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
    def copy():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        _, _, _, start, end = extent()
        for j in range(warpgroups):  # one box each: TMA takes five dimensions, shared memory's tiling included
            plgpu.copy_gmem_to_smem(q_ikjrh_ref.at[i, head, j], q_smem.at[j], q_full)
        table = None if contiguous else table_sw_ref
        where = dict(seq=seq, head=head, start=start, end=end, filled=jnp.int32(0), v_column=column)
        ring.drain(ring.fill(k_pool_ref, v_pool_ref, table, **where))


def _accumulate(body, start_rx):
    """Runs `body(accumulator)` on an accumulator that holds `start_rx`."""

    def scoped(acc_ref):
        acc_ref[...] = start_rx
        return body(acc_ref)

    return pl.run_scoped(scoped, plgpu.ACC(start_rx.shape, jnp.float32))


def _registers(warpgroups: int, fp8: bool) -> tuple[int, int] | None:
    """Registers per thread of a computing and of the copying warpgroup, of 512 that the warpgroups share; None: as
    the compiler deals them out, which is enough for one computing warpgroup."""
    if warpgroups == 1:
        return None
    copying = 72 if fp8 else 40
    return (504 - copying) // warpgroups // 8 * 8, copying


def _launch(
    q_ikjrh, k_pool, v_pool, k_scale_k, v_scale_k, block_tables_sw, context_s1, row_end_s1, tile_seq_i, tile_row_i, *,
    o_tnh: jax.ShapeDtypeStruct, tiles: tuning.MosaicRagged, soft_cap: float | None, window: int | None,
    contiguous: bool,
):  # fmt: skip
    num_tiles, k, warpgroups, rows, h = q_ikjrh.shape
    dtype, columns = q_ikjrh.dtype, min(h, MAX_COLUMNS)
    return plgpu.kernel(
        functools.partial(
            _kernel, group=o_tnh.shape[1] // k, soft_cap=soft_cap, window=window, contiguous=contiguous,
            registers=_registers(warpgroups, k_pool.dtype == FP8),
        ),
        out_type=[o_tnh, jax.ShapeDtypeStruct((num_tiles, k, warpgroups, rows), jnp.float32)],
        grid=(num_tiles, k, h // columns),
        grid_names=("i", "k", "x"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((warpgroups, rows, h), dtype),
            plgpu.SMEM((warpgroups, rows, columns), o_tnh.dtype),
            plgpu.SMEM((warpgroups, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
            *KVRing.scratch(
                stages=tiles.stages, tile=tiles.tile, block_size=k_pool.shape[2], head_dim=h, v_columns=columns,
                dtype=dtype, pool_dtype=k_pool.dtype, consumers=warpgroups,
            ),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged",
    )(
        q_ikjrh, k_pool, v_pool, k_scale_k, v_scale_k, block_tables_sw, context_s1, row_end_s1, tile_seq_i, tile_row_i
    )  # fmt: skip


def ragged_paged_attention(
    q_tnh: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables_sw: jax.Array,
    context_lens_s: jax.Array,
    cu_q_lens_s1: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale_k: jax.Array | None = None,
    v_scale_k: jax.Array | None = None,
    return_lse: bool = False,
    tiles: tuning.MosaicRagged | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`reference.ragged_paged_attention` in bfloat16 or float16.

    The softmax and all sums are float32; the weights meet V in q's dtype, or in float16 where the pool is fp8. A row's
    output depends neither on its neighbours nor on the chunk it came in, bit for bit.

    Raises ValueError and NotImplementedError as the reference does, and NotImplementedError for what
    `mosaic.unsupported` names.
    """
    options = dict(soft_cap=soft_cap, window=window, k_scale_k=k_scale_k, v_scale_k=v_scale_k)
    check_attention(q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1, **options)
    check_supported(k_pool, dtype=q_tnh.dtype, num_heads=q_tnh.shape[1])
    return _attention(
        q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1,
        scale=scale, tiles=tiles, contiguous=False, return_lse=return_lse, **options,
    )  # fmt: skip


def contiguous_ragged_attention(
    q_tnh: jax.Array,
    k_sklh: jax.Array,
    v_sklh: jax.Array,
    context_lens_s: jax.Array,
    cu_q_lens_s1: jax.Array,
    *,
    scale: float,
    tiles: tuning.MosaicRagged | None = None,
) -> jax.Array:
    """The same kernel on keys and values that lie in one piece, [S, K, L, H]: what paging is measured against.

    L is a multiple of the tile. Arguments aren't checked further.
    """
    table = jnp.zeros((context_lens_s.shape[0], 1), jnp.int32)
    return _attention(
        q_tnh, k_sklh, v_sklh, table, context_lens_s, cu_q_lens_s1,
        scale=scale, tiles=tiles, contiguous=True, return_lse=False,
    )  # fmt: skip


def _attention(
    q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1, *,
    scale, tiles, contiguous, return_lse, soft_cap=None, window=None, k_scale_k=None, v_scale_k=None,
):  # fmt: skip
    t, n, head_dim = q_tnh.shape
    k, h = k_pool.shape[1], k_pool.shape[3]
    group, dtype = n // k, q_tnh.dtype
    tiles = tiles or tuning.find("mosaic.ragged", "", h, k_pool.dtype)
    assert isinstance(tiles, tuning.MosaicRagged), tiles
    tokens = WGMMA_ROWS // group
    row_end_s1, tile_seq_i, tile_row_i = query_tiles(cu_q_lens_s1, t, tiles.warpgroups * tokens)

    # XLA gathers q into the kernel's order: swizzled shared memory is tiled by 8 rows, and TMA can't bring a box that
    # starts at any row into it. Rows past a sequence's own are gathered too and never stored.
    r = jnp.arange(WGMMA_ROWS)
    token_ijr = tile_row_i[:, None, None] + jnp.arange(tiles.warpgroups)[:, None] * tokens + r % tokens
    head_kr = jnp.arange(k)[:, None] * group + jnp.minimum(r // tokens, group - 1)
    if k_pool.dtype == FP8:
        q_tnh = q_tnh.astype(jnp.float16)  # holds every fp8 number exactly
    q_tnh = pad_head_dim(q_tnh, h)
    q_ikjrh = q_tnh.at[jnp.minimum(token_ijr, t - 1)[:, None], head_kr[:, None]].get(mode="promise_in_bounds")
    ones = jnp.ones(k, jnp.float32)
    o_tnh, lse_ikjr = _launch(
        q_ikjrh, k_pool, v_pool, scale * (ones if k_scale_k is None else k_scale_k),
        ones if v_scale_k is None else v_scale_k, block_tables_sw, jnp.append(context_lens_s, jnp.int32(0)),
        row_end_s1, tile_seq_i, tile_row_i,
        o_tnh=jax.ShapeDtypeStruct((t, n, h), dtype), tiles=tiles, soft_cap=soft_cap, window=window,
        contiguous=contiguous,
    )  # fmt: skip
    o_tnh = o_tnh[:, :, :head_dim]
    if not return_lse:
        return o_tnh
    owned_ijr = (tile_seq_i[:, None, None] >= 0) & (token_ijr < row_end_s1[tile_seq_i][:, None, None])
    owned_ijr &= r < group * tokens
    token_ijr = jnp.where(owned_ijr, token_ijr, t)  # past the end: dropped
    lse_tn = jnp.full((t, n), -jnp.inf, jnp.float32)
    return o_tnh, lse_tn.at[token_ijr[:, None], head_kr[:, None]].set(lse_ikjr, mode="drop")
