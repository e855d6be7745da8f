"""The jnp definition of every op: the specification that kernels are tested against, and the path on a CPU.

Every op is a pure function. Scores, softmax and sums are float32 (float64 under x64 inputs); results have q's dtype.
Each sequence is computed alone, tile by tile, in an order that depends only on its own length, so that its result has
the same bits next to any other sequences. No slot that a sequence has not written is ever let into a result.

Common to all ops:

- A pool's head dim may be larger than that of q, k and v: the columns past it hold zeros. This is how a head dim that
  a kernel does not have is padded to one that it has.
- A pool may be float8_e4m3fn. Then `k_scale_k` and `v_scale_k` [K] float32 are the factors of its numbers.
- `soft_cap` c turns a score x = scale * q·k into c * tanh(x / c) (Gemma 2, arXiv 2408.00118).
- `window` w lets a query see only the last w tokens up to its own.
- `return_lse` adds the log of the sum of exp(score), natural, float32, -inf where a row sees no key.
  `merge_attention` needs it to combine partial results.

All raise ValueError where shapes or dtypes don't fit together, NotImplementedError where they fit but can't be served.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checks import FP8, FP8_MAX, check_attention, check_copy, check_write
from pallas_kernels.query_tiles import decode_rows

TILE_Q = 64  # query rows attended at once
TILE_KV = 128  # keys gathered at once: small enough to stay in a core's cache
TILE_DECODE = 64  # the same for each of the sequences that are decoded together


def write_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_tkh: jax.Array,
    v_tkh: jax.Array,
    slot_mapping_t: jax.Array,
    *,
    cos_t: jax.Array | None = None,
    sin_t: jax.Array | None = None,
    k_scale_k: jax.Array | None = None,
    v_scale_k: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes token t's key and value into flat slot `slot_mapping[t]` of pools [P, K, B, H]; -1 writes nothing.

    In place where the pools are donated. Of an fp8 pool, numbers past ±448 scales are cut off.

    Args:
        k_tkh, v_tkh: [T, K, H], the pools' dtype; any float dtype for fp8 pools.
        slot_mapping_t: [T] int32, `block_id * B + offset`; no two tokens may name the same one.
        cos_t, sin_t: [T, H/2] float32; keys are rotated by them on their way (half against half, RoFormer, arXiv
            2104.09864). Without them keys are written as they come.
        k_scale_k, v_scale_k: [K] float32, for fp8 pools.
    """
    check_write(k_pool, v_pool, k_tkh, v_tkh, slot_mapping_t, cos_t, sin_t, k_scale_k, v_scale_k)
    if cos_t is not None and sin_t is not None:
        k_tkh = rotate(k_tkh, cos_t, sin_t)
    num_blocks, _, block_size, _ = k_pool.shape
    block = jnp.where(slot_mapping_t < 0, num_blocks, slot_mapping_t // block_size)  # past the end: dropped
    offset = slot_mapping_t % block_size

    def written(pool, x_tkh, scale_k):
        x_tkh = pad_head_dim(quantize(x_tkh, pool.dtype, scale_k), pool.shape[3])
        return pool.at[block, :, offset].set(x_tkh, mode="drop")

    return written(k_pool, k_tkh, k_scale_k), written(v_pool, v_tkh, v_scale_k)


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Copies whole blocks of a pool [P, ...]; all are read before any is written; destination -1 copies nothing.

    Args:
        sources_c, destinations_c: [C] int32; no two copies may have the same destination.
    """
    check_copy(pool, sources_c, destinations_c)
    destinations_c = jnp.where(destinations_c < 0, pool.shape[0], destinations_c)
    return pool.at[destinations_c].set(pool[sources_c], mode="drop")


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
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one query token per sequence over its paged context.

    Args:
        q_snh: [S, N, H].
        k_pool, v_pool: [P, K, B, H] with N a multiple of K, q's dtype or fp8; the query tokens' own keys and values
            are already there.
        block_tables_sw: [S, W] int32; entries past a context are never read. W B is at most 131,072.
        context_lens_s: [S] int32, the query token included; 0 marks a padding row, whose result is 0.
        scale: factor on q·k, above 0.

    Returns [S, N, H], with `return_lse` also [S, N] float32.
    """
    check_attention(
        q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, scale=scale,
        soft_cap=soft_cap, window=window, k_scale_k=k_scale_k, v_scale_k=v_scale_k,
    )  # fmt: skip
    out = _decode(
        q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, scale, soft_cap, window, k_scale_k, v_scale_k
    )  # fmt: skip
    return out if return_lse else out[0]


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
    decode_s: jax.Array | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute causal attention of a mixed batch: chunks of prompts and single decode tokens, one after another in q.

    Args:
        q_tnh: [T, N, H]; sequence s owns rows `cu_q_lens[s]:cu_q_lens[s + 1]`, the last of its context. Row i of r has
            position `context_lens[s] - r + i` and sees the keys up to its own.
        k_pool, v_pool, block_tables_sw, context_lens_s, scale: as in `paged_decode_attention`.
        cu_q_lens_s1: [S + 1] int32, from 0 to at most T, non-decreasing. A padding sequence has no rows.
        decode_s: [S] bool: the sequences of one row whose result is that of `paged_decode_attention`, to the bit; None:
            all sequences of one row. The row of any other sequence has the bits that it would have in a longer chunk.

    Returns [T, N, H], with `return_lse` also [T, N] float32; rows that no sequence owns are 0.
    """
    check_attention(
        q_tnh, k_pool, v_pool, block_tables_sw, context_lens_s, cu_q_lens_s1, scale=scale,
        soft_cap=soft_cap, window=window, k_scale_k=k_scale_k, v_scale_k=v_scale_k, decode_s=decode_s,
    )  # fmt: skip
    attend = partial(
        _attend, k_pool=k_pool, v_pool=v_pool, scale=scale, soft_cap=soft_cap, window=window,
        k_scale_k=k_scale_k, v_scale_k=v_scale_k,
    )  # fmt: skip
    decode_s, _ = decode_rows(cu_q_lens_s1, decode_s)

    def sequence(s, out):
        first, last, length = cu_q_lens_s1[s], cu_q_lens_s1[s + 1], context_lens_s[s]

        def tile(i, out):
            row = first + i * TILE_Q
            rows = row + jnp.arange(TILE_Q)
            positions = jnp.where(rows < last, length - last + rows, -1)
            q = lax.dynamic_slice_in_dim(q_padded, row, TILE_Q)
            seen = jnp.max(positions) + 1
            some = attend(q, positions, block_table_w=block_tables_sw[s], num_keys=seen)
            # Rows past the sequence get zeros here and their own result from the next sequence's tiles.
            return _update(out, some, row)

        tiles = jnp.where(decode_s[s], 0, (last - first + TILE_Q - 1) // TILE_Q)
        return lax.fori_loop(0, tiles, tile, out)

    q_padded = jnp.pad(q_tnh, ((0, TILE_Q), (0, 0), (0, 0)))  # a last tile may hang over
    out = lax.fori_loop(0, context_lens_s.shape[0], sequence, _empty(q_padded))
    out = jax.tree.map(lambda x: x[: q_tnh.shape[0]], out)
    at_s = jnp.where(decode_s, cu_q_lens_s1[:-1], q_tnh.shape[0])  # past the end: dropped
    decoded = _decode(
        q_tnh[at_s], k_pool, v_pool, block_tables_sw, jnp.where(decode_s, context_lens_s, 0), scale, soft_cap, window,
        k_scale_k, v_scale_k,
    )  # fmt: skip
    o_tnh, lse_tn = jax.tree.map(lambda x, y: x.at[at_s].set(y, mode="drop"), out, decoded)
    return (o_tnh, lse_tn) if return_lse else o_tnh


def merge_attention(o_a: jax.Array, lse_a: jax.Array, o_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over two disjoint sets of keys from that over each: a shared prefix, a sequence split over devices.

    Args:
        o_a, o_b: [..., N, H].
        lse_a, lse_b: [..., N], as `return_lse` gives them.

    Returns the merged output, in o_a's dtype, and its log-sum-exp. (Section 2.2 of arXiv 2501.01005.)
    """
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(lse == -jnp.inf, 0, lse)
    a, b = (jnp.exp(x - safe)[..., None] for x in (lse_a, lse_b))
    return (a * o_a + b * o_b).astype(o_a.dtype), lse


def rotate(x_tnh: jax.Array, cos_t: jax.Array, sin_t: jax.Array) -> jax.Array:
    """Rotates each head's two halves against each other by cos and sin [T, H/2], in float32; the dtype stays."""
    a, b = jnp.split(x_tnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_t[:, None], sin_t[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_tnh.dtype)


def quantize(x_tkh: jax.Array, dtype, scale_k: jax.Array | None) -> jax.Array:
    """[T, K, H] in the dtype of a pool: as it is, or as fp8 in units of its head's scale."""
    if dtype != FP8:
        return x_tkh
    assert scale_k is not None
    scaled = x_tkh.astype(jnp.float32) * (1 / scale_k)[:, None]
    return jnp.clip(scaled, -FP8_MAX, FP8_MAX).astype(FP8)


def pad_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    """Adds zero columns up to `head_dim`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def _sum(x):
    """Sum the last axis in an order that follows from its size alone; that of XLA's sum follows from the others too."""
    while x.shape[-1] > 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        a, b = jnp.split(x, 2, axis=-1)
        x = a + b
    return x[..., 0]


def _empty(q_qnh):
    return jnp.zeros_like(q_qnh), jnp.full(q_qnh.shape[:2], -jnp.inf, jnp.promote_types(q_qnh.dtype, jnp.float32))


def _update(out, part, row):
    return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, row, 0), out, part)


def _decode(
    q_snh, k_pool, v_pool, block_tables_sw, context_lens_s, scale, soft_cap, window, k_scale_k, v_scale_k
):  # fmt: skip
    """One query of each sequence at the end of its context, all sequences at once and tile by tile.

    The sequences go by falling length. Tiles that only the longer half of them has are computed for that half alone,
    and so on, so that at most twice as many keys are read as there are.
    """
    num_seqs, num_heads, head_dim = q_snh.shape
    num_kv_heads, block_size, pool_head_dim = k_pool.shape[1:]
    if num_seqs == 1:  # XLA computes products otherwise where they are not batched
        pad = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
        q_snh, block_tables_sw, context_lens_s = pad(q_snh), pad(block_tables_sw), pad(context_lens_s)
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
    scale = scale if k_scale_k is None else scale * k_scale_k[:, None, None]

    def tile(i, carry):
        o_skgh, top_skg, total_skg = carry
        size = o_skgh.shape[0]
        positions_c = i * tile_kv + jnp.arange(tile_kv)
        written_sc = positions_c < lens_s[:size, None]
        blocks_sj = lax.dynamic_slice_in_dim(tables_sw[:size], i * blocks_per_tile, blocks_per_tile, axis=1)
        blocks_sj = jnp.where(written_sc[:, ::block_size], blocks_sj, 0)  # past the context: may be anything
        k_skch, v_skch = (
            x[blocks_sj].swapaxes(1, 2).reshape(size, num_kv_heads, tile_kv, pool_head_dim).astype(q_snh.dtype)
            for x in (k_pool, v_pool)
        )
        v_skch = jnp.where(written_sc[:, None, :, None], v_skch, 0)  # 0 * NaN is NaN
        scores = dot("skgh,skch->skgc", q_skgh[:size], k_skch) * scale
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
    if v_scale_k is not None:
        o_skgh = o_skgh * v_scale_k[:, None, None]
    back_s = jnp.argsort(order_s)[:num_seqs]
    o_snh = o_skgh[back_s, :, :group, :head_dim].reshape(num_seqs, num_heads, head_dim).astype(q_snh.dtype)
    return o_snh, (top_skg + jnp.log(total_skg))[back_s, :, :group].reshape(num_seqs, num_heads)


def _attend(
    q_qnh, positions_q, *, k_pool, v_pool, block_table_w, num_keys, scale, soft_cap, window, k_scale_k, v_scale_k
):
    """Queries at `positions` (-1: no query, result 0) over the first `num_keys` keys of one block table.

    The softmax is taken online over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867). R = Q G rows of a kv
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
    scale = scale if k_scale_k is None else scale * k_scale_k[:, None, None]

    def tile(i, carry):
        o_krh, top_kr, total_kr = carry
        key_positions_c = i * tile_kv + jnp.arange(tile_kv)
        blocks = lax.dynamic_slice_in_dim(block_table_w, i * blocks_per_tile, blocks_per_tile)
        blocks = jnp.where(key_positions_c[::block_size] < num_keys, blocks, 0)  # past the context: may be anything
        k_kch, v_kch = (
            x[blocks].swapaxes(0, 1).reshape(num_kv_heads, tile_kv, pool_head_dim).astype(q_qnh.dtype)
            for x in (k_pool, v_pool)
        )
        v_kch = jnp.where((key_positions_c < num_keys)[:, None], v_kch, 0)  # 0 * NaN is NaN
        scores = dot("krh,kch->krc", q_krh, k_kch) * scale
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

    first = 0
    if window is not None:
        oldest = jnp.min(jnp.where(positions_q < 0, num_keys, positions_q))
        first = jnp.maximum(oldest - window + 1, 0) // tile_kv
    rows = q_krh.shape[:2]
    start = jnp.zeros(q_krh.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
    o_krh, top_kr, total_kr = lax.fori_loop(first, (num_keys + tile_kv - 1) // tile_kv, tile, start)
    o_krh = o_krh / jnp.where(total_kr == 0, 1, total_kr)[..., None]
    if v_scale_k is not None:
        o_krh = o_krh * v_scale_k[:, None, None]
    lse_kr = top_kr + jnp.log(total_kr)
    by_query = lambda x: x.reshape(num_kv_heads, num_queries, group, *x.shape[2:]).swapaxes(0, 1)
    o_qnh = by_query(o_krh)[..., :head_dim].reshape(q_qnh.shape).astype(q_qnh.dtype)
    return o_qnh, by_query(lse_kr).reshape(num_queries, num_heads)
