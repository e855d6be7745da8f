"""Paged attention, of decode and of ragged batches (Pallas-Triton).

A program takes one KV head, a tile of the query rows of one sequence, and one split of the keys that these see. A
decode token is one tile, and its context is cut into splits; a second kernel merges them in order. Prompts are cut into
tiles, and their context is one split. Splits and KV tiles start at multiples of their size, which depends only on the
length of the context. A row's output therefore does not depend on its neighbours, on the table's width or on the chunks
of its prompt, bit for bit, and a decode token's output is the same in a decode step and in a mixed one.

Axis letters besides the package's: I query tiles, R rows (tokens x query heads of one KV head), U splits, C keys.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import checks, tuning
from pallas_kernels.cuts import decode_rows, max_splits, query_tiles, split_size
from pallas_kernels.options import AttentionOptions, Contexts, OutputAndLse, Ref
from pallas_kernels.triton.launch import as_stored, check_supported, iota, launch

Carry = tuple[jax.Array, jax.Array, jax.Array]  # output, maximum and sum of the softmax so far

LOG2E = 1.4426950408889634
NEG = -1e30  # a finite minus infinity to start a maximum from: masked scores are -inf, and -inf - NEG is no NaN
ROWS = 16  # of a tile at least: the least of a dot
COMBINED = 16  # splits merged at once
FP8_UNIT = 256.0  # of the numbers in an fp8 pool as `_widened` gives them: float16's exponent has a bias of 15, fp8's 7
F32_PRODUCT = lax.DotAlgorithmPreset.TF32_TF32_F32_X3  # nearly float32's own, on tensor cores


def _attention_kernel(
    q_tnh_ref: Ref,  # [T, N, h], h at most H
    k_pool_ref: Ref,  # [P, K, B, H]
    v_pool_ref: Ref,  # [P, K, B, H]
    table_sw_ref: Ref,  # [S, W]
    context_s_ref: Ref,  # [S]
    split_s_ref: Ref,  # [S]: tokens of a split
    row_end_s_ref: Ref,  # [S]: past the last query row of each sequence
    tile_seq_i_ref: Ref,  # [I]: the sequence of a query tile, -1 = none
    tile_row_i_ref: Ref,  # [I]: its first query row
    score_scale_k_ref: Ref,  # [K]: makes q·k an exponent of 2, or twice what tanh takes
    value_scale_k_ref: Ref,  # [K]
    o_tunh_ref: Ref,  # [T, U, N, h]
    lse_tun_ref: Ref,  # [T, U, N] float32
    *,
    rows: int,
    tile: int,
    soft_cap: float | None,
    window: int | None,
    sinks_n_ref: Ref | None = None,  # [N] float32; not where splits are combined
) -> None:
    i, head, u = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group = q_tnh_ref.shape[1] // k_pool_ref.shape[1]
    block_size, h = k_pool_ref.shape[2:]
    tokens = rows // group
    seq = tile_seq_i_ref[i]

    @pl.when(seq >= 0)
    def attend_tile() -> None:
        row, row_end = tile_row_i_ref[i], row_end_s_ref[seq]
        position = context_s_ref[seq] - row_end + row  # of the first row
        oldest, split = _oldest_key(position, window), split_s_ref[seq]
        start = (lax.div(oldest, split) + u) * split
        first = jnp.maximum(start, oldest)
        last = jnp.minimum(start + split, position + jnp.minimum(row_end - row, tokens))  # past the last key

        token_r, n_r = lax.div(iota(rows), group), head * group + lax.rem(iota(rows), group)
        mine_r = (token_r < tokens) & (row + token_r < row_end)
        position_r = jnp.where(mine_r, position + token_r, -1)
        column_h = iota(h)
        mine_rh = mine_r[:, None] & (column_h < q_tnh_ref.shape[2])[None, :]

        @pl.when((first < last) | (u == 0))  # rows without a key get their 0 from the first split
        def attend_split() -> None:
            at_rh = (row + token_r)[:, None], n_r[:, None], column_h[None, :]
            q_rh = plt.load(q_tnh_ref.at[at_rh], mask=mine_rh, other=0)
            score_scale = score_scale_k_ref[head]

            def step(j: jax.Array, carry: Carry) -> Carry:
                o_rh, max_r, sum_r = carry
                key_c = j * tile + iota(tile)
                exists_c = (key_c >= first) & (key_c < last)
                block_c = plt.load(table_sw_ref.at[seq, lax.div(key_c, block_size)], mask=exists_c, other=0)
                at_ch = block_c[:, None], head, lax.rem(key_c, block_size)[:, None], column_h[None, :]
                exists_ch = jnp.broadcast_to(exists_c[:, None], (tile, h))  # unwritten slots may be NaN
                k_ch = _widened(plt.load(k_pool_ref.at[at_ch], mask=exists_ch, other=0), q_rh.dtype)
                v_ch = _widened(plt.load(v_pool_ref.at[at_ch], mask=exists_ch, other=0), q_rh.dtype)
                x_rc = _dot(q_rh, k_ch.T) * score_scale
                if soft_cap is not None:  # tanh(y) = 1 - 2 / (1 + exp(2 y))
                    x_rc = (soft_cap * LOG2E) * (1 - 2 / (1 + jnp.exp2(x_rc)))
                seen_rc = key_c[None, :] <= position_r[:, None]
                if window is not None:
                    seen_rc &= key_c[None, :] > position_r[:, None] - window
                x_rc = jnp.where(seen_rc, x_rc, -jnp.inf)
                new_max_r = jnp.maximum(max_r, x_rc.max(axis=1))
                p_rc = jnp.exp2(x_rc - new_max_r[:, None])
                shrink_r = jnp.exp2(max_r - new_max_r)
                o_rh = o_rh * shrink_r[:, None] + _dot(p_rc.astype(v_ch.dtype), v_ch)
                return o_rh, new_max_r, sum_r * shrink_r + p_rc.sum(axis=1)

            zero_r = jnp.zeros((rows,), jnp.float32)
            carry = jnp.zeros((rows, h), jnp.float32), zero_r + NEG, zero_r
            o_rh, max_r, sum_r = lax.fori_loop(lax.div(first, tile), pl.cdiv(last, tile), step, carry)
            if sinks_n_ref is not None:
                sink_r = plt.load(sinks_n_ref.at[n_r], mask=mine_r, other=0) * LOG2E
                shrink_r, max_r, sum_r = _with_sinks(sink_r, max_r, sum_r)
                o_rh = o_rh * shrink_r[:, None]
            o_rh = o_rh * (value_scale_k_ref[head] / jnp.where(sum_r == 0, 1, sum_r))[:, None]
            out_at_rh = (row + token_r)[:, None], u, n_r[:, None], column_h[None, :]
            plt.store(o_tunh_ref.at[out_at_rh], o_rh.astype(o_tunh_ref.dtype), mask=mine_rh)
            plt.store(lse_tun_ref.at[row + token_r, u, n_r], (max_r + jnp.log2(sum_r)) / LOG2E, mask=mine_r)


def _combine_kernel(
    o_sunh_ref: Ref,  # [S, U, N, h] float32; splits past a context were never written
    lse_sun_ref: Ref,  # [S, U, N] float32
    context_s_ref: Ref,  # [S]
    split_s_ref: Ref,  # [S]
    o_snh_ref: Ref,  # [S, N, h]
    lse_sn_ref: Ref,  # [S, N] float32
    *,
    columns: int,
    window: int | None,
    sinks_n_ref: Ref | None = None,  # [N] float32
) -> None:
    seq, n = pl.program_id(0), pl.program_id(1)
    column_h = iota(columns)
    real_h = column_h < o_snh_ref.shape[2]
    context, split = context_s_ref[seq], split_s_ref[seq]
    splits = pl.cdiv(context, split) - lax.div(_oldest_key(context - 1, window), split)

    def step(i: jax.Array, carry: Carry) -> Carry:
        o_h, top, total = carry
        u_u = i * COMBINED + iota(COMBINED)
        live_u = u_u < splits
        lse_u = plt.load(lse_sun_ref.at[seq, u_u, n], mask=live_u, other=-jnp.inf)
        at_uh = seq, u_u[:, None], n, column_h[None, :]
        o_uh = plt.load(o_sunh_ref.at[at_uh], mask=live_u[:, None] & real_h[None, :], other=0)
        new_top = jnp.maximum(top, lse_u.max())
        shrink, weight_u = jnp.exp2((top - new_top) * LOG2E), jnp.exp2((lse_u - new_top) * LOG2E)
        return o_h * shrink + (o_uh * weight_u[:, None]).sum(axis=0), new_top, total * shrink + weight_u.sum()

    carry = jnp.zeros((columns,), jnp.float32), jnp.float32(NEG), jnp.float32(0)
    o_h, top, total = lax.fori_loop(0, pl.cdiv(splits, COMBINED), step, carry)
    if sinks_n_ref is not None:
        shrink, top, total = _with_sinks(sinks_n_ref[n], top, total, LOG2E)
        o_h = o_h * shrink
    o_h = o_h / jnp.where(total == 0, 1, total)  # no context: exactly 0
    plt.store(o_snh_ref.at[seq, n, column_h], o_h.astype(o_snh_ref.dtype), mask=real_h)
    plt.store(lse_sn_ref.at[seq, n], top + jnp.log2(total) / LOG2E)


def _with_sinks(
    sink: jax.Array, top: jax.Array, total: jax.Array, log2_of_unit: float = 1.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the factor of a softmax's result after its sink is added, and the new maximum and sum.

    A softmax without a key keeps its sum of 0.
    """
    new_top = jnp.maximum(top, sink)
    shrink = jnp.exp2((top - new_top) * log2_of_unit)
    added = jnp.exp2((sink - new_top) * log2_of_unit)
    return shrink, new_top, jnp.where(total == 0, 0, total * shrink + added)


def _given_sinks(kernel: Callable[..., None], sinks_n: jax.Array | None) -> tuple[Callable[..., None], list[jax.Array]]:
    """Return a kernel that takes the sinks first, and its first arguments: none without sinks."""
    if sinks_n is None:
        return kernel, []
    return lambda sinks_n_ref, *refs: kernel(*refs, sinks_n_ref=sinks_n_ref), [sinks_n]


def _oldest_key(position: jax.Array, window: int | None) -> jax.Array:
    """Return the first key that a query sees."""
    return jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)


def _widened(x_ch: jax.Array, dtype: Any) -> jax.Array:
    """Convert pool entries to q's dtype. Bytes are fp8: their bit fields move to float16's (and NaN becomes 480)."""
    if x_ch.dtype != jnp.uint8:
        return x_ch
    bits_ch = x_ch.astype(jnp.uint16)
    bits_ch = ((bits_ch & 0x80) << 8) | ((bits_ch & 0x7F) << 7)
    return lax.bitcast_convert_type(bits_ch, jnp.float16).astype(dtype)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    out: jax.Array = plt.dot(a, b, precision=F32_PRODUCT if a.dtype == jnp.float32 else None)
    return out


def _launch(
    name: str, q_tnh: jax.Array, contexts: Contexts, *batch: jax.Array, dtype: Any, rows: int, splits: int,
    tiles: tuning.TritonDecode | tuning.TritonRagged, options: AttentionOptions,
) -> list[jax.Array]:  # fmt: skip
    """Run the attention kernel on `batch`, its arguments from `split_s` to `tile_row_i`.

    Returns:
        o [T, U, N, h] and lse [T, U, N].
    """
    k_pool, v_pool, block_tables_sw, context_lens_s = contexts
    (t, n, h), k, scale, soft_cap = q_tnh.shape, k_pool.shape[1], options.scale, options.soft_cap
    score_scale_k = jnp.full((k,), scale * LOG2E if soft_cap is None else scale * 2 * LOG2E / soft_cap, jnp.float32)
    value_scale_k = jnp.ones((k,), jnp.float32)
    if options.k_scale_k is not None and options.v_scale_k is not None:
        score_scale_k *= options.k_scale_k * FP8_UNIT
        value_scale_k = options.v_scale_k * FP8_UNIT
    attend = partial(_attention_kernel, rows=rows, tile=tiles.tile, soft_cap=soft_cap, window=options.window)
    kernel, sinks = _given_sinks(attend, options.sinks_n)
    return launch(
        name, kernel, *sinks,
        q_tnh, as_stored(k_pool), as_stored(v_pool), block_tables_sw, context_lens_s, *batch, score_scale_k,
        value_scale_k,
        grid=(batch[-1].shape[0], k, splits),
        out_types=[jax.ShapeDtypeStruct((t, splits, n, h), dtype), jax.ShapeDtypeStruct((t, splits, n), jnp.float32)],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip


def _fitted(kernel: str, tiles: Any, q: jax.Array, pool: jax.Array) -> Any:
    """Return the given tiles or the default ones, in a size for q's dtype."""
    tiles = tiles or tuning.find(kernel, "", pool.shape[3], pool.dtype)
    if q.dtype != jnp.float32:
        return tiles
    # float32 takes twice the room, and in products twice that again, as two TF32 numbers.
    rows = {"rows": max(ROWS, tiles.rows // 4)} if isinstance(tiles, tuning.TritonRagged) else {}
    return dataclasses.replace(tiles, tile=max(ROWS, tiles.tile // 2), **rows)


def paged_decode_attention(
    q_snh: jax.Array, contexts: Contexts, options: AttentionOptions, *, tiles: tuning.TritonDecode | None = None
) -> OutputAndLse:
    """Compute `Ops.paged_decode_attention`. Temporary memory: 4 S N H bytes per split, at most 32 of them.

    Args:
        q_snh: bfloat16, float16 or float32.
        tiles: how the work is cut; None: the default; float32 takes smaller ones.
    """
    check_supported(q_snh, contexts.k_pool)
    (s, n, _), (_, k, _, h) = q_snh.shape, contexts.k_pool.shape
    cut: tuning.TritonDecode = _fitted("triton.decode", tiles, q_snh, contexts.k_pool)
    most = max_splits(k, contexts.table_tokens, cut.split)
    split_s = split_size(contexts.context_lens_s, cut.split, most)
    o_sunh, lse_sun = _launch(
        "paged_decode", q_snh, contexts, split_s, iota(s) + 1, iota(s), iota(s),
        dtype=jnp.float32, rows=ROWS, splits=most, tiles=cut, options=dataclasses.replace(options, sinks_n=None),
    )  # fmt: skip
    combine, sinks = _given_sinks(partial(_combine_kernel, columns=h, window=options.window), options.sinks_n)
    o_snh, lse_sn = launch(
        "paged_decode_combine", combine, *sinks,
        o_sunh, lse_sun, contexts.context_lens_s, split_s,
        grid=(s, n),
        out_types=[jax.ShapeDtypeStruct(q_snh.shape, q_snh.dtype), jax.ShapeDtypeStruct((s, n), jnp.float32)],
        num_warps=2,
    )  # fmt: skip
    return o_snh, lse_sn


def ragged_paged_attention(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array | None,
    options: AttentionOptions, *, tiles: tuning.TritonRagged | None = None,
    decode_tiles: tuning.TritonDecode | None = None,
) -> OutputAndLse:  # fmt: skip
    """Compute `Ops.ragged_paged_attention`.

    Args:
        q_tnh: bfloat16, float16 or float32.
        tiles, decode_tiles: as in `paged_decode_attention`, of prompts and of decode tokens.
    """
    check_supported(q_tnh, contexts.k_pool)
    context_lens_s, k = contexts.context_lens_s, contexts.k_pool.shape[1]
    (num_rows, n, _), (s,) = q_tnh.shape, context_lens_s.shape
    cut: tuning.TritonRagged = _fitted("triton.ragged", tiles, q_tnh, contexts.k_pool)
    decode_s, row_s = decode_rows(cu_q_lens_s1, decode_s)
    query = query_tiles(cu_q_lens_s1, decode_s, num_rows=num_rows, tile_q=cut.rows // (n // k))
    # Sequence S owns the rows that nobody owns, and has no keys.
    with_padding = contexts._replace(context_lens_s=jnp.append(context_lens_s, jnp.int32(0)))
    o_tunh, lse_tun = _launch(
        "ragged_paged", q_tnh, with_padding,
        jnp.full((s + 1,), checks.MAX_CONTEXT, jnp.int32), query.row_end_s1, query.seq_i, query.row_i,
        dtype=q_tnh.dtype, rows=cut.rows, splits=1, tiles=cut, options=options,
    )  # fmt: skip
    q_snh = q_tnh.at[jnp.maximum(row_s, 0)].get(mode="promise_in_bounds")
    decoding = contexts._replace(context_lens_s=jnp.where(decode_s, context_lens_s, 0))
    decoded = paged_decode_attention(q_snh, decoding, options, tiles=decode_tiles)
    row_s = jnp.where(row_s < 0, num_rows, row_s)  # past the end: dropped
    o_tnh, lse_tn = (
        x_tu[:, 0].at[row_s].set(x_s, mode="drop") for x_tu, x_s in zip((o_tunh, lse_tun), decoded, strict=True)
    )
    return o_tnh, lse_tn
