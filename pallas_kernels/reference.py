"""Definition of every op in jnp: the specification that kernels are tested against, and the implementation for CPUs.

Scores, softmax and sums are float32 (float64 under x64 inputs). Each sequence is computed separately, tile by tile, in
an order that depends only on its own length, so its result has the same bits next to any other sequences.

The functions of `Implementation` expect arguments that `Ops` has checked.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import FP8, FP8_MAX
from pallas_kernels.options import AttentionOptions, OutputAndLse, WriteOptions, Written
from pallas_kernels.query_tiles import decode_rows
from pallas_kernels.transforms import varying_like

Carry = tuple[jax.Array, jax.Array, jax.Array]  # unscaled outputs, maxima and sums of the softmax so far

TILE_Q = 64  # query rows attended at once
TILE_KV = 128  # keys gathered at once: small enough to stay in a core's cache
TILE_DECODE = 64  # the same for each of the sequences that are decoded together


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array,
    options: WriteOptions,
) -> Written:  # fmt: skip
    """Define `Ops.write_kv`."""
    if options.angles:
        k_tkh = rotate(k_tkh, *options.angles)
    num_blocks, _, block_size, _ = k_pool.shape
    block = jnp.where(slot_mapping_t < 0, num_blocks, slot_mapping_t // block_size)  # past the end: dropped
    offset = slot_mapping_t % block_size

    def written(pool: jax.Array, x_tkh: jax.Array, scale_k: jax.Array | None) -> jax.Array:
        x_tkh = pad_head_dim(quantize(x_tkh, pool.dtype, scale_k), pool.shape[3])
        return pool.at[block, :, offset].set(x_tkh, mode="drop")

    k_pool, v_pool = written(k_pool, k_tkh, options.k_scale_k), written(v_pool, v_tkh, options.v_scale_k)
    return k_pool, v_pool, rotated_queries(options)


def rotated_queries(options: WriteOptions) -> jax.Array | None:
    """Return the queries of a write's options, rotated; None if there are none."""
    return None if options.q_tnh is None or options.angles is None else rotate(options.q_tnh, *options.angles)


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Define `Ops.copy_blocks`."""
    destinations_c = jnp.where(destinations_c < 0, pool.shape[0], destinations_c)
    return pool.at[destinations_c].set(_blocks(pool, sources_c), mode="drop")


def paged_decode_attention(
    q_snh: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables_sw: jax.Array, context_lens_s: jax.Array,
    options: AttentionOptions,
) -> OutputAndLse:  # fmt: skip
    """Define `Ops.paged_decode_attention`: the query of each sequence, all sequences at once and tile by tile.

    The sequences are sorted by descending length. Tiles that only the longer half of them has are computed for that
    half, and so on, so that at most twice as many keys are read as there are.
    """
    num_seqs, num_heads, head_dim = q_snh.shape
    num_kv_heads, block_size, pool_head_dim = k_pool.shape[1:]
    if num_seqs == 1:  # XLA computes products otherwise where they are not batched
        q_snh, block_tables_sw, context_lens_s = (
            jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)) for x in (q_snh, block_tables_sw, context_lens_s)
        )
    order_s = jnp.argsort(-context_lens_s)
    lens_s = context_lens_s[order_s]
    blocks_per_tile = max(1, TILE_DECODE // block_size)
    tile_kv = blocks_per_tile * block_size
    tables_sw = jnp.pad(block_tables_sw[order_s], ((0, 0), (0, -block_tables_sw.shape[1] % blocks_per_tile)))
    dtype = jnp.promote_types(q_snh.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    group = num_heads // num_kv_heads
    q_skgh = pad_head_dim(q_snh[order_s], pool_head_dim).reshape(-1, num_kv_heads, group, pool_head_dim)
    if group == 1:  # and where they have a vector in the place of a matrix
        q_skgh = jnp.pad(q_skgh, ((0, 0), (0, 0), (0, 1), (0, 0)))
    scale, soft_cap, window = options.scale, options.soft_cap, options.window
    score_scale = scale if options.k_scale_k is None else scale * options.k_scale_k[:, None, None]

    def tile(i: jax.Array, carry: Carry) -> Carry:
        o_skgh, top_skg, total_skg = carry
        size = o_skgh.shape[0]
        positions_c = i * tile_kv + jnp.arange(tile_kv)
        written_sc = positions_c < lens_s[:size, None]
        blocks_sj = lax.dynamic_slice_in_dim(tables_sw[:size], i * blocks_per_tile, blocks_per_tile, axis=1)
        blocks_sj = jnp.where(written_sc[:, ::block_size], blocks_sj, 0)  # past the context: may be anything
        k_skch, v_skch = (
            _blocks(x, blocks_sj).swapaxes(1, 2).reshape(size, num_kv_heads, tile_kv, pool_head_dim).astype(q_snh.dtype)
            for x in (k_pool, v_pool)
        )
        v_skch = jnp.where(written_sc[:, None, :, None], v_skch, 0)  # 0 * NaN is NaN
        scores = dot("skgh,skch->skgc", q_skgh[:size], k_skch) * score_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen_sc = written_sc
        if window is not None:
            seen_sc &= positions_c >= lens_s[:size, None] - window
        scores = jnp.where(seen_sc[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top_skg, scores.max(-1))
        safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
        p = jnp.exp(scores - safe_top[..., None])
        shrink = jnp.exp(top_skg - safe_top)
        o_skgh = o_skgh * shrink[..., None] + dot("skgc,skch->skgh", p.astype(v_skch.dtype), v_skch)
        return o_skgh, new_top, total_skg * shrink + _sum(p)

    rows = q_skgh.shape[:3]
    carry = jnp.zeros(q_skgh.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
    scales = options.k_scale_k, options.v_scale_k
    carry = varying_like(carry, (q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, scales))
    seen_from_s = jnp.maximum(lens_s - (window or 0), 0) if window is not None else jnp.zeros_like(lens_s)
    start = jnp.min(jnp.where(lens_s > 0, seen_from_s, jnp.max(lens_s))) // tile_kv
    size = q_skgh.shape[0]
    while size:
        half = size // 2 if size > 2 else 0
        stop = (lens_s[half] + tile_kv - 1) // tile_kv
        part = lax.fori_loop(start, stop, tile, jax.tree.map(lambda x, size=size: x[:size], carry))
        carry = _update(carry, part, 0)
        start, size = jnp.maximum(start, stop), half
    o_skgh, top_skg, total_skg = carry
    o_skgh = o_skgh / jnp.where(total_skg == 0, 1, total_skg)[..., None]
    if options.v_scale_k is not None:
        o_skgh = o_skgh * options.v_scale_k[:, None, None]
    back_s = jnp.argsort(order_s)[:num_seqs]
    o_snh = o_skgh[back_s, :, :group, :head_dim].reshape(num_seqs, num_heads, head_dim).astype(q_snh.dtype)
    return o_snh, (top_skg + jnp.log(total_skg))[back_s, :, :group].reshape(num_seqs, num_heads)


def ragged_paged_attention(
    q_tnh: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables_sw: jax.Array, context_lens_s: jax.Array,
    cu_q_lens_s1: jax.Array, decode_s: jax.Array | None, options: AttentionOptions,
) -> OutputAndLse:  # fmt: skip
    """Define `Ops.ragged_paged_attention`."""
    decode_s, _ = decode_rows(cu_q_lens_s1, decode_s)

    def sequence(s: jax.Array, out: OutputAndLse) -> OutputAndLse:
        first, last, length = cu_q_lens_s1[s], cu_q_lens_s1[s + 1], context_lens_s[s]

        def tile(i: jax.Array, out: OutputAndLse) -> OutputAndLse:
            row = first + i * TILE_Q
            rows = row + jnp.arange(TILE_Q)
            positions = jnp.where(rows < last, length - last + rows, -1)
            q = lax.dynamic_slice_in_dim(q_padded, row, TILE_Q)
            some = _attend(q, positions, k_pool, v_pool, block_tables_sw[s], jnp.max(positions) + 1, options)
            # Rows past the sequence get zeros here and their own result from the next sequence's tiles.
            return _update(out, some, row)

        tiles = jnp.where(decode_s[s], 0, (last - first + TILE_Q - 1) // TILE_Q)
        attended: OutputAndLse = lax.fori_loop(0, tiles, tile, out)
        return attended

    q_padded = jnp.pad(q_tnh, ((0, TILE_Q), (0, 0), (0, 0)))  # a last tile may hang over
    arrays = q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1, decode_s
    out = varying_like(_empty(q_padded), (arrays, options.k_scale_k, options.v_scale_k))
    out = lax.fori_loop(0, context_lens_s.shape[0], sequence, out)
    out = jax.tree.map(lambda x: x[: q_tnh.shape[0]], out)
    at_s = jnp.where(decode_s, cu_q_lens_s1[:-1], q_tnh.shape[0])  # past the end: dropped
    lens_s = jnp.where(decode_s, context_lens_s, 0)
    decoded = paged_decode_attention(q_tnh[at_s], k_pool, v_pool, block_tables_sw, lens_s, options)
    o_tnh, lse_tn = jax.tree.map(lambda x, y: x.at[at_s].set(y, mode="drop"), out, decoded)
    return o_tnh, lse_tn


def merge_attention(o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention over two disjoint sets of keys: a shared prefix and the rest, or parts on several devices.

    The formula is that of section 2.2 of arXiv 2501.01005.

    Args:
        o_a, o_b: [..., N, H].
        lse_a, lse_b: [..., N], as `return_lse` gives them.

    Returns:
        The merged output, in o_a's dtype, and its log-sum-exp.
    """
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(lse == -jnp.inf, 0, lse)
    a, b = (jnp.exp(x - safe)[..., None] for x in (lse_a, lse_b))
    return (a * o_a + b * o_b).astype(o_a.dtype), lse


def rotate(x_tnh: jax.Array, cos_t: jax.Array, sin_t: jax.Array) -> jax.Array:
    """Rotate each head's two halves against each other by cos and sin [T, H/2], in float32; the dtype is kept."""
    a, b = jnp.split(x_tnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_t[:, None], sin_t[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_tnh.dtype)


def quantize(x_tkh: jax.Array, dtype: Any, scale_k: jax.Array | None) -> jax.Array:
    """Convert [T, K, H] to a pool's dtype: unchanged, or fp8 in units of its head's scale."""
    if dtype != FP8:
        return x_tkh
    assert scale_k is not None
    scaled = x_tkh.astype(jnp.float32) * (1 / scale_k)[:, None]
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8)


def pad_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    """Add zero columns up to `head_dim`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def _blocks(pool: jax.Array, ids: jax.Array) -> jax.Array:
    """Return blocks of a pool; an id outside the pool names its nearest block."""
    return pool.at[ids].get(mode="clip", wrap_negative_indices=False)


def _sum(x: jax.Array) -> jax.Array:
    """Sum the last axis in an order that depends only on its size; that of XLA's sum depends on the others too."""
    while x.shape[-1] > 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        a, b = jnp.split(x, 2, axis=-1)
        x = a + b
    return x[..., 0]


def _empty(q_qnh: jax.Array) -> OutputAndLse:
    return jnp.zeros_like(q_qnh), jnp.full(q_qnh.shape[:2], -jnp.inf, jnp.promote_types(q_qnh.dtype, jnp.float32))


def _update[T](out: T, part: T, row: jax.Array | int) -> T:
    updated: T = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, row, 0), out, part)
    return updated


def _attend(
    q_qnh: jax.Array, positions_q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_table_w: jax.Array,
    num_keys: jax.Array, options: AttentionOptions,
) -> OutputAndLse:  # fmt: skip
    """Attend queries at `positions` (-1: no query, result 0) over the first `num_keys` keys of one block table.

    The softmax is computed online over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867). R = Q G rows of a kv
    head are one matrix, and so are the C tokens of a tile: a CPU multiplies these fastest.
    """
    num_queries, num_heads, head_dim = q_qnh.shape
    num_kv_heads, block_size, pool_head_dim = k_pool.shape[1:]
    group = num_heads // num_kv_heads
    blocks_per_tile = max(1, TILE_KV // block_size)
    tile_kv = blocks_per_tile * block_size
    block_table_w = jnp.pad(block_table_w, (0, -block_table_w.shape[0] % blocks_per_tile))
    dtype = jnp.promote_types(q_qnh.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    q_krh = pad_head_dim(q_qnh, pool_head_dim).reshape(num_queries, num_kv_heads, group, pool_head_dim)
    q_krh = q_krh.swapaxes(0, 1).reshape(num_kv_heads, -1, pool_head_dim)
    positions_r = jnp.repeat(positions_q, group)
    scale, soft_cap, window = options.scale, options.soft_cap, options.window
    score_scale = scale if options.k_scale_k is None else scale * options.k_scale_k[:, None, None]

    def tile(i: jax.Array, carry: Carry) -> Carry:
        o_krh, top_kr, total_kr = carry
        key_positions_c = i * tile_kv + jnp.arange(tile_kv)
        blocks = lax.dynamic_slice_in_dim(block_table_w, i * blocks_per_tile, blocks_per_tile)
        blocks = jnp.where(key_positions_c[::block_size] < num_keys, blocks, 0)  # past the context: may be anything
        k_kch, v_kch = (
            _blocks(x, blocks).swapaxes(0, 1).reshape(num_kv_heads, tile_kv, pool_head_dim).astype(q_qnh.dtype)
            for x in (k_pool, v_pool)
        )
        v_kch = jnp.where((key_positions_c < num_keys)[:, None], v_kch, 0)  # 0 * NaN is NaN
        scores = dot("krh,kch->krc", q_krh, k_kch) * score_scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = key_positions_c <= positions_r[:, None]
        if window is not None:
            seen &= key_positions_c > positions_r[:, None] - window
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top_kr, scores.max(-1))
        safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
        p = jnp.exp(scores - safe_top[..., None])
        shrink = jnp.exp(top_kr - safe_top)
        o_krh = o_krh * shrink[..., None] + dot("krc,kch->krh", p.astype(v_kch.dtype), v_kch)
        return o_krh, new_top, total_kr * shrink + p.sum(-1)

    first: jax.Array | int = 0
    if window is not None:
        oldest = jnp.min(jnp.where(positions_q < 0, num_keys, positions_q))
        first = jnp.maximum(oldest - window + 1, 0) // tile_kv
    rows = q_krh.shape[:2]
    start = jnp.zeros(q_krh.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
    scales = options.k_scale_k, options.v_scale_k
    start = varying_like(start, (q_qnh, positions_q, k_pool, v_pool, block_table_w, num_keys, scales))
    o_krh, top_kr, total_kr = lax.fori_loop(first, (num_keys + tile_kv - 1) // tile_kv, tile, start)
    o_krh = o_krh / jnp.where(total_kr == 0, 1, total_kr)[..., None]
    if options.v_scale_k is not None:
        o_krh = o_krh * options.v_scale_k[:, None, None]
    lse_kr = top_kr + jnp.log(total_kr)

    def by_query(x: jax.Array) -> jax.Array:
        return x.reshape(num_kv_heads, num_queries, group, *x.shape[2:]).swapaxes(0, 1)

    o_qnh = by_query(o_krh)[..., :head_dim].reshape(q_qnh.shape).astype(q_qnh.dtype)
    return o_qnh, by_query(lse_kr).reshape(num_queries, num_heads)
