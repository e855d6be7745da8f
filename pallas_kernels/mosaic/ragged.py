"""Ragged paged attention: chunks of prompts and decode tokens in one batch (Mosaic GPU, Hopper).

The kernels of `decode.py` compute decode tokens, with the same bits as in a decode step. All other rows are cut into
tiles of one sequence each. A thread block takes one tile and one KV head: one warpgroup copies KV
blocks into a ring, each of the others computes 64 wgmma rows, which are tokens x query heads of that KV head. While
the tensor cores multiply the weights of one tile with V and Q with the K of the next, the softmax of the next tile
waits only for the second product (FlashAttention-3, arXiv 2407.08608, section 3.2); weights never leave the registers.
Rows that no sequence owns are tiles of a sequence without keys, so they become 0. KV tiles start at multiples of the
tile in a sequence, so a row's output depends neither on its neighbours nor on the chunks of its prompt, bit for bit.

Axis letters besides the package's: I query tiles, J compute warpgroups, R = 64 rows of one warpgroup, Y tokens x G rows
of one KV head, X output columns of one thread block (H, or a part of it).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.checks import FP8
from pallas_kernels.cuts import QueryTiles
from pallas_kernels.mosaic.decode import attend_rows, decode_cut
from pallas_kernels.mosaic.ring import TMA_ROWS, WGMMA_ROWS, KVRing
from pallas_kernels.mosaic.softmax import (
    LOG2E,
    NEG,
    capped,
    exponent_factor,
    natural_lse,
    product,
    scales,
    sinks_first,
    softmax_state,
    with_sinks,
)
from pallas_kernels.mosaic.support import check_grid, check_supported, compiler_params
from pallas_kernels.mosaic.work import RaggedWork, WorkSizes, ragged_work, tokens_per_warpgroup
from pallas_kernels.options import AttentionOptions, Contexts, OutputAndLse, Ref
from pallas_kernels.reference import pad_head_dim
from pallas_kernels.transforms import no_vmap

MAX_COLUMNS = 128  # of the output, for one thread block: accumulators of 256 don't fit the registers

Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # output, maxima, sums, and the weights of the last tile
Weights = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # of a tile, their factor for older ones, maxima, sums


def _kernel(
    q_kyh_ref: Ref,  # [K, Y, H]
    k_pool_ref: Ref,  # [P, K, B, H]
    v_pool_ref: Ref,  # [P, K, B, H]
    k_scale_k_ref: Ref,  # [K] fp32: on q·k
    v_scale_k_ref: Ref,  # [K] fp32: on the output
    table_sw_ref: Ref,  # [S, W]
    context_s1_ref: Ref,  # [S + 1]: the last sequence owns the padding rows and has no context
    first_row_s1_ref: Ref,  # [S + 1]
    row_end_s1_ref: Ref,  # [S + 1]
    tile_seq_i_ref: Ref,  # [I]: the sequence of a tile, -1 = none
    tile_row_i_ref: Ref,  # [I]: its first row
    o_tnh_ref: Ref,  # [T, N, H]
    lse_ikjr_ref: Ref,  # [I, K, J, R] fp32, natural
    *,
    q_smem: Ref,  # [J, R, H]
    o_smem: Ref,  # [J, R, X]
    lse_smem: Ref,  # [J, R] fp32
    q_full: Ref,  # barrier
    ring: KVRing,
    soft_cap: float | None,
    window: int | None,
    registers: tuple[int, int] | None,
    sinks_ref: Any = None,  # ref or None: [K, period of heads + R] fp32, base 2
    sinks_smem: Any = None,  # [J, R] fp32
) -> None:
    num_tiles, num_kv_heads, columns = tile_seq_i_ref.shape[0], k_pool_ref.shape[1], o_smem.shape[2]
    chunks = o_tnh_ref.shape[2] // columns
    warpgroup = lax.axis_index("wg")
    stages, tile, _ = ring.k.shape
    warpgroups, rows, _ = q_smem.shape
    group = o_tnh_ref.shape[1] // num_kv_heads
    tokens = tokens_per_warpgroup(group)
    layout = plgpu.Layout.WGMMA

    def place() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the tile, the KV head and the first output column of this thread block.

        They are computed again for each use, which the barrier makes the compiler do: registers are short in the loops.
        With several chunks of columns, it would take more of them.
        """
        at = lax.axis_index("c")
        at = lax.optimization_barrier(at) if chunks == 1 else at
        # The last tiles of a sequence have the most keys, so they start first.
        i, head = num_tiles - 1 - lax.div(at, num_kv_heads * chunks), lax.rem(lax.div(at, chunks), num_kv_heads)
        return i, head, pl.multiple_of(lax.rem(at, chunks) * columns, columns)

    def extent(i: jax.Array) -> tuple[jax.Array, ...]:
        """Return the owned rows [first, end), the position of the first one, and the keys from first to last seen."""
        seq = tile_seq_i_ref[i]
        first = jnp.maximum(tile_row_i_ref[i], first_row_s1_ref[seq])
        row_end = row_end_s1_ref[seq]
        end = jnp.minimum(row_end, tile_row_i_ref[i] + warpgroups * tokens)
        position = context_s1_ref[seq] - row_end + first
        key_end = jnp.maximum(position + end - first, 0)
        key_start = jnp.int32(0) if window is None else jnp.clip(position - window + 1, 0, key_end) // tile * tile
        return first, end, position, key_start, key_end

    def own_rows(i: jax.Array, wg: jax.Array | int) -> tuple[jax.Array, ...]:
        """Return the rows [first, end) of a warpgroup, its first row of `q_smem` with a token, and the token's row."""
        first, end, *_ = extent(i)
        start = tile_row_i_ref[i] + wg * tokens
        first, end = jnp.maximum(first, start), jnp.minimum(end, start + tokens)
        return first, end, lax.rem(start * group, TMA_ROWS), start

    def by_row(x_r: jax.Array, width: int) -> jax.Array:
        return lax.broadcast_in_dim(x_r, (rows, width), [0])

    def softmax(x_rt: jax.Array, last_key_r: jax.Array | None, max_r: jax.Array, sum_r: jax.Array) -> Weights:
        """Return the weights of a tile, the factor by which older ones shrink, and the new maximum and sum.

        `last_key_r`: the last key of the tile that each row sees; None: all rows see all keys.
        """
        _, head, _ = place()
        scale = k_scale_k_ref[head]
        factor = exponent_factor(scale, soft_cap)
        x_rt = capped(x_rt, scale, soft_cap)
        if last_key_r is not None:
            key_t = plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout.reduce(0))
            key_rt = lax.broadcast_in_dim(key_t, (rows, tile), [1])
            seen_rt = key_rt <= by_row(last_key_r, tile)
            if window is not None:
                seen_rt &= key_rt > by_row(last_key_r - window, tile)
            x_rt = jnp.where(seen_rt, x_rt, NEG)
        new_max_r = jnp.maximum(max_r, x_rt.max(axis=1))
        alpha_r = jnp.exp2((max_r - new_max_r) * factor)
        # A row that has seen no key yet has weights of 0, not exp2 of a rounding error of NEG.
        shift_r = jnp.where(new_max_r == NEG, 0.0, new_max_r * factor)
        p_rt = jnp.exp2(x_rt * factor - by_row(shift_r, tile))
        return p_rt, alpha_r, new_max_r, sum_r * alpha_r + p_rt.sum(axis=1)

    def attend(start: jax.Array, end: jax.Array, position: jax.Array, count: jax.Array) -> None:
        """Leave this warpgroup's output and log-sum-exp in shared memory; there is at least one tile of keys."""
        tiles = pl.cdiv(end - start, tile)
        # Tiles that every row of the thread block sees whole need no mask: those from `whole` to `part`.
        part = jnp.clip(lax.div(position + 1 - start, tile), 1, tiles)
        whole = jnp.int32(1)
        if window is not None:
            whole = jnp.clip(pl.cdiv(position + count - window - start, tile), 1, part)

        def last_key(t: jax.Array) -> jax.Array:
            """Return the last key of tile t, counted within it, that each row sees."""
            i, _, _ = place()
            _, _, lead, row = own_rows(i, warpgroup)
            seq = tile_seq_i_ref[i]
            first_token = context_s1_ref[seq] - row_end_s1_ref[seq] + row - start - t * tile
            r = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=layout.reduce(1))
            last_r: jax.Array = lax.div(r - lead + TMA_ROWS * group, group) + (first_token - TMA_ROWS)
            return last_r

        def step(masked: bool, t: jax.Array, carry: Carry) -> Carry:
            # The order of waits: S of tile t; then the softmax, beside O += P V of tile t - 1; then K of tile t + 1;
            # then P V. The wait for K is the edge of a basic block, over which ptxas moves no wait: without it the wait
            # for P V comes before the softmax and nothing overlaps.
            # Cycles a tile, at head dim 128 and 128 keys: the products of a warpgroup take 2 x 512, those of both
            # warpgroups 2,048; the rest of this body is about 520 instructions a warp, and each of the four schedulers
            # has one warp of either warpgroup.
            acc_rx, max_r, sum_r, p_rt = carry
            stage, older = lax.rem(t, stages), lax.rem(t - 1, stages)

            def overlapped(o_acc: Ref, x_acc: Ref) -> tuple[Weights, jax.Array]:
                o_acc[...] = acc_rx
                plgpu.wgmma(x_acc, q_smem.at[warpgroup], ring.k.at[stage].T)
                plgpu.barrier_wait(ring.v_full.at[older])
                plgpu.wgmma(o_acc, p_rt, ring.v.at[older])
                x_rt = plgpu.wgmma_accumulator_load(x_acc, wait_n=1)
                plgpu.barrier_arrive(ring.k_free.at[stage])
                state = softmax(x_rt, last_key(t) if masked else None, max_r, sum_r)
                wait_for_keys(ring, t + 1, tiles)
                return state, o_acc[...]

            accumulators = plgpu.ACC((rows, columns), jnp.float32), plgpu.ACC((rows, tile), jnp.float32)
            (new_p_rt, alpha_r, new_max_r, new_sum_r), o_rx = pl.run_scoped(overlapped, *accumulators)
            plgpu.barrier_arrive(ring.v_free.at[older])
            # The old weights are an operand until here: to narrow the new ones any sooner would stall the tensor cores.
            new_p_rt, o_rx = lax.optimization_barrier((new_p_rt, o_rx))
            return o_rx * by_row(alpha_r, columns), new_max_r, new_sum_r, new_p_rt.astype(q_smem.dtype)

        def last(o_acc: Ref) -> jax.Array:
            o_acc[...] = acc_rx
            plgpu.wgmma(o_acc, p_rt, ring.v.at[lax.rem(tiles - 1, stages)])
            o_rx: jax.Array = o_acc[...]
            return o_rx

        acc_rx, max_r, sum_r = softmax_state(rows, columns, softmax_axis=1)
        wait_for_keys(ring, jnp.int32(0), tiles)
        x_rt = product(q_smem.at[warpgroup], ring.k.at[0].T, rows, tile)
        plgpu.barrier_arrive(ring.k_free.at[0])
        p_rt, _, max_r, sum_r = softmax(x_rt, last_key(jnp.int32(0)), max_r, sum_r)
        wait_for_keys(ring, jnp.int32(1), tiles)
        carry = (acc_rx, max_r, sum_r, p_rt.astype(q_smem.dtype))
        if window is not None:
            carry = lax.fori_loop(1, whole, functools.partial(step, True), carry)
        carry = lax.fori_loop(whole, part, functools.partial(step, False), carry)
        acc_rx, max_r, sum_r, p_rt = lax.fori_loop(part, tiles, functools.partial(step, True), carry)
        plgpu.barrier_wait(ring.v_full.at[lax.rem(tiles - 1, stages)])
        acc_rx = pl.run_scoped(last, plgpu.ACC((rows, columns), jnp.float32))
        plgpu.barrier_arrive(ring.v_free.at[lax.rem(tiles - 1, stages)])
        _, head, _ = place()
        # Rows that this warpgroup doesn't own may have seen nothing but masks: they are not stored.
        if sinks_smem is None:
            o_smem[warpgroup] = (acc_rx * by_row(v_scale_k_ref[head] / sum_r, columns)).astype(o_smem.dtype)
            lse_smem[warpgroup] = natural_lse(max_r * exponent_factor(k_scale_k_ref[head], soft_cap), sum_r)
            return
        sink_r = plgpu.load(sinks_smem.at[warpgroup], layout=layout.reduce(1))
        max_r = max_r * exponent_factor(k_scale_k_ref[head], soft_cap)
        shrink_r, max_r, sum_r = with_sinks(sink_r, max_r, sum_r)
        o_smem[warpgroup] = (acc_rx * by_row(shrink_r * (v_scale_k_ref[head] / sum_r), columns)).astype(o_smem.dtype)
        lse_smem[warpgroup] = natural_lse(max_r, sum_r)

    def pass_by(start: jax.Array, end: jax.Array) -> None:
        """Free every tile: this warpgroup owns no row."""

        @pl.loop(0, pl.cdiv(end - start, tile))
        def free(t: jax.Array) -> None:
            stage = lax.rem(t, stages)
            plgpu.barrier_wait(ring.k_full.at[stage])
            plgpu.barrier_arrive(ring.k_free.at[stage])
            plgpu.barrier_wait(ring.v_full.at[stage])
            plgpu.barrier_arrive(ring.v_free.at[stage])

    tile_exists = tile_seq_i_ref[place()[0]] >= 0

    @pl.when(tile_exists & (warpgroup < warpgroups))
    def compute() -> None:
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")
        i, _, _ = place()
        first, end, position, key_start, key_end = extent(i)
        own_first, own_end, _, _ = own_rows(i, warpgroup)
        owns = own_first < own_end
        plgpu.barrier_wait(q_full)
        pl.when(owns & (key_end > 0))(lambda: attend(key_start, key_end, position, end - first))
        pl.when(jnp.logical_not(owns))(lambda: pass_by(key_start, key_end))

        i, head, column = place()
        *_, key_end = extent(i)  # read again, as the rows below

        @pl.when(key_end == 0)
        def nothing() -> None:
            o_rx, _, total_r = softmax_state(rows, columns, softmax_axis=1)
            o_smem[warpgroup] = o_rx.astype(o_smem.dtype)
            lse_smem[warpgroup] = total_r - jnp.inf

        plgpu.commit_smem()
        own_first, own_end, lead, start = own_rows(i, warpgroup)

        @pl.loop(own_first, own_end)
        def store_token(row: jax.Array) -> None:
            source = o_smem.at[warpgroup, pl.ds(lead + (row - start) * group, group)]
            plgpu.copy_smem_to_gmem(source, o_tnh_ref.at[row, pl.ds(head * group, group), pl.ds(column, columns)])

        @pl.when(column == 0)
        def store_lse() -> None:  # unowned rows included; no reader takes them
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ikjr_ref.at[i, head, warpgroup])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(tile_exists & (warpgroup == warpgroups))
    def copy() -> None:
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        i, head, column = place()
        _, _, position, key_start, key_end = extent(i)
        seen = None if window is None else jnp.clip(position - window + 1, 0, key_end)
        for j in range(warpgroups):
            _, _, lead, start = own_rows(i, j)
            box = pl.ds(pl.multiple_of(start * group - lead, TMA_ROWS), rows)
            plgpu.copy_gmem_to_smem(q_kyh_ref.at[head, box], q_smem.at[j], q_full)
            if sinks_ref is not None:
                first = lax.rem(start * group - lead, math.lcm(group, TMA_ROWS))
                sinks = sinks_ref.at[head, pl.ds(pl.multiple_of(first, TMA_ROWS), rows)]
                plgpu.copy_gmem_to_smem(sinks, sinks_smem.at[j], q_full)
        where = dict(seq=tile_seq_i_ref[i], head=head, start=key_start, end=key_end, seen=seen, v_column=column)
        ring.drain(ring.fill(k_pool_ref, v_pool_ref, table_sw_ref, filled=jnp.int32(0), **where))


def wait_for_keys(ring: KVRing, t: jax.Array, tiles: jax.Array) -> None:
    """Wait for K of tile t, if there is one."""
    pl.when(t < tiles)(lambda: plgpu.barrier_wait(ring.k_full.at[lax.rem(t, ring.k.shape[0])]))


def _launch(
    q_kyh: jax.Array, contexts: Contexts, work: RaggedWork, o_tnh_ref: Ref, options: AttentionOptions,
    tiles: tuning.MosaicRagged,
) -> jax.Array:  # fmt: skip
    """Write the tiles' rows of the output ref and return their log-sum-exps [I, K, J, R]."""
    (k, _, h), dtype, warpgroups, k_pool = q_kyh.shape, q_kyh.dtype, tiles.warpgroups, contexts.k_pool
    num_tiles, columns = work.tiles.seq_i.shape[0], min(h, MAX_COLUMNS)
    grid = (num_tiles * k * (h // columns),)
    check_grid("ragged_paged", grid)
    # Per thread of a computing and of the copying warpgroup, of 512 that the warpgroups share. The compiler's own
    # distribution is enough for one computing warpgroup.
    copying = 72 if k_pool.dtype == FP8 else 40
    registers = None if warpgroups == 1 else ((504 - copying) // warpgroups // 8 * 8, copying)
    kernel: Callable[..., None] = functools.partial(
        _kernel, soft_cap=options.soft_cap, window=options.window, registers=registers
    )
    arrays: list[jax.Array] = []
    scratch: dict[str, Any] = {}
    if options.sinks_n is not None:
        arrays.append(_sinks_of_rows(options.sinks_n.reshape(k, -1)))
        scratch["sinks_smem"] = plgpu.SMEM((warpgroups, WGMMA_ROWS), jnp.float32)
        kernel = functools.partial(sinks_first, kernel)
    lse_ikjr: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tiles, k, warpgroups, WGMMA_ROWS), jnp.float32),
        grid=grid,
        grid_names=("c",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types=dict(
            q_smem=plgpu.SMEM((warpgroups, WGMMA_ROWS, h), dtype),
            o_smem=plgpu.SMEM((warpgroups, WGMMA_ROWS, columns), o_tnh_ref.dtype),
            lse_smem=plgpu.SMEM((warpgroups, WGMMA_ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=warpgroups * (1 + len(arrays))),
            ring=KVRing.scratch(tiles.stages, (tiles.tile, h, columns), dtype, k_pool, consumers=warpgroups),
            **scratch,
        ),
        compiler_params=compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="ragged_paged",
    )(
        *arrays, q_kyh, *contexts[:2], *scales(options, k), contexts.block_tables_sw, work.context_s1, *work.tiles,
        o_tnh_ref,
    )  # fmt: skip
    return lse_ikjr


def _sinks_of_rows(sinks_kg: jax.Array) -> jax.Array:
    """Return sinks of base 2 in the order of a KV head's rows, for boxes of WGMMA_ROWS that start at TMA_ROWS."""
    group = sinks_kg.shape[1]
    rows = math.lcm(group, TMA_ROWS) + WGMMA_ROWS
    return jnp.tile(sinks_kg * LOG2E, -(-rows // group))[:, :rows]


def ragged_paged_attention(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array | None,
    options: AttentionOptions, *, tiles: tuning.MosaicRagged | None = None,
    decode_tiles: tuning.MosaicDecode | None = None,
) -> OutputAndLse:  # fmt: skip
    """Compute `Ops.ragged_paged_attention` in bfloat16 or float16.

    The softmax and all sums are float32. The weights are multiplied by V in q's dtype, or in float16 for an fp8 pool.
    Temporary memory: as much as `paged_decode_attention`, and one copy of q.
    """
    q_tnh, contexts, cu_q_lens_s1 = no_vmap("ragged_paged_attention in Mosaic", (q_tnh, contexts, cu_q_lens_s1))
    k_pool, dtype = contexts.k_pool, q_tnh.dtype
    (t, n, head_dim), (_, k, _, h) = q_tnh.shape, k_pool.shape
    check_supported(k_pool, dtype=dtype, num_heads=n)
    group = n // k
    cut = tiles or tuning.find("mosaic.ragged", "", h, k_pool.dtype)
    assert isinstance(cut, tuning.MosaicRagged), cut
    cut_of_decode = decode_cut(k_pool, decode_tiles)
    work = options.work
    if work is None:
        sizes = WorkSizes(n, k, contexts.table_tokens, options.window)
        work = ragged_work(contexts.context_lens_s, cu_q_lens_s1, decode_s, t, sizes, (cut, cut_of_decode))

    q_tnh = pad_head_dim(q_tnh, h)
    o_ref = jax.empty_ref(jax.ShapeDtypeStruct((t, n, h), dtype))
    # The rows of one KV head lie together, so that a box of them is a warpgroup's operand; boxes may end past the last.
    q_kyh = q_tnh.reshape(t, k, group, h).swapaxes(0, 1).reshape(k, t * group, h)
    q_kyh = jnp.pad(q_kyh, ((0, 0), (0, -t * group % TMA_ROWS + cut.warpgroups * WGMMA_ROWS), (0, 0)))
    if k_pool.dtype == FP8:
        q_kyh = q_kyh.astype(jnp.float16)  # holds every fp8 number exactly
    lse_ikjr = _launch(q_kyh, contexts, work, o_ref, options, cut)
    lse_sn = attend_rows(q_tnh, contexts, work.decode, o_ref, options, cut_of_decode)
    o_tnh = jax.freeze(o_ref)[:, :, :head_dim]
    return o_tnh, _lse_of_rows(lse_ikjr, work.tiles, lse_sn, work.decode.row_s, t)


def _lse_of_rows(
    lse_ikjr: jax.Array, query: QueryTiles, lse_sn: jax.Array, decode_row_s: jax.Array, num_rows: int
) -> jax.Array:
    """Return the log-sum-exps [T, N] of tiles and decode tokens; -inf for rows that no sequence owns."""
    (_, k, j, r), (_, n) = lse_ikjr.shape, lse_sn.shape
    group = n // k
    tokens = tokens_per_warpgroup(group)
    start_ij = query.row_i[:, None] + jnp.arange(j) * tokens
    row_ijr = jnp.arange(r) + (start_ij * group // TMA_ROWS * TMA_ROWS)[:, :, None]
    token_ijr, head_ijr = row_ijr // group, row_ijr % group
    first_i, end_i = query.first_row_s1[query.seq_i], query.row_end_s1[query.seq_i]
    owned_ijr = (token_ijr >= jnp.maximum(start_ij, first_i[:, None])[:, :, None]) & (query.seq_i >= 0)[:, None, None]
    owned_ijr &= token_ijr < jnp.minimum(start_ij + tokens, end_i[:, None])[:, :, None]
    token_ijr = jnp.where(owned_ijr, token_ijr, num_rows)  # past the end: dropped
    lse_tn = jnp.full((num_rows, n), -jnp.inf, jnp.float32)
    head_ikjr = jnp.arange(k)[:, None, None] * group + head_ijr[:, None]
    lse_tn = lse_tn.at[token_ijr[:, None], head_ikjr].set(lse_ikjr, mode="drop")
    return lse_tn.at[jnp.where(decode_row_s < 0, num_rows, decode_row_s)].set(lse_sn, mode="drop")
