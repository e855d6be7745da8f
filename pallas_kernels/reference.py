"""The jnp definition of every op: the specification that kernels are tested against, and the path on a CPU.

Every op is a pure function. Scores, softmax and sums are float32 (float64 under x64 inputs); results have q's dtype.
A sequence is worked on alone, tile by tile, in an order that depends on nothing but its own length: whatever runs
beside it, its result is the same to the bit. No slot that a sequence has not written is ever let into a result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

TILE_Q = 16  # query rows attended at once
TILE_KV = 128  # keys gathered at once: small enough to stay in a core's cache


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes token t's key and value into flat slot `slot_mapping[t]` of pools [P, K, B, H]; -1 writes nothing.

    A slot is `block_id * B + offset`; no two tokens may name the same one. In place where the pools are donated.
    """
    num_blocks, _, block_size, _ = k_pool.shape
    block = jnp.where(slot_mapping_t < 0, num_blocks, slot_mapping_t // block_size)  # past the end: dropped
    offset = slot_mapping_t % block_size
    return (
        k_pool.at[block, :, offset].set(k_tkh, mode="drop"),
        v_pool.at[block, :, offset].set(v_tkh, mode="drop"),
    )


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Copies whole blocks of a pool [P, ...]; all are read before any is written; destination -1 copies nothing."""
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
) -> jax.Array:
    """Attention of one query token per sequence over its paged context.

    Args:
        q_snh: [S, N, H].
        k_pool, v_pool: [P, K, B, H] with N a multiple of K.
        block_tables_sw: [S, W] int32; entries past a context are never read.
        context_lens_s: [S] int32, the query token included; 0 marks a padding row, whose result is 0.
        scale: factor on q·k.

    Returns [S, N, H].
    """

    def sequence(s, out):
        q = lax.dynamic_slice_in_dim(q_snh, s, 1)
        position = context_lens_s[s] - 1
        o = _attend(q, position[None], k_pool, v_pool, block_tables_sw[s], context_lens_s[s], scale)
        return lax.dynamic_update_slice_in_dim(out, o, s, 0)

    return lax.fori_loop(0, q_snh.shape[0], sequence, jnp.zeros_like(q_snh))


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
    """Causal attention of a mixed batch: chunks of prompts and single decode tokens, one after another in q.

    Args:
        q_tnh: [T, N, H]; sequence s owns rows `cu_q_lens[s]:cu_q_lens[s + 1]`, the last of its context.
        k_pool, v_pool, block_tables_sw, context_lens_s: as in `paged_decode_attention`.
        cu_q_lens_s1: [S + 1] int32, non-decreasing from 0.

    Returns [T, N, H]; rows that no sequence owns are 0.
    """

    def sequence(s, out):
        first, last, length = cu_q_lens_s1[s], cu_q_lens_s1[s + 1], context_lens_s[s]

        def tile(i, out):
            row = first + i * TILE_Q
            rows = row + jnp.arange(TILE_Q)
            positions = jnp.where(rows < last, length - last + rows, -1)
            q = lax.dynamic_slice_in_dim(q_padded, row, TILE_Q)
            seen = jnp.max(positions) + 1
            o = _attend(q, positions, k_pool, v_pool, block_tables_sw[s], seen, scale)
            # Rows past the sequence get zeros here and their own result from the next sequence's tiles.
            return lax.dynamic_update_slice_in_dim(out, o, row, 0)

        return lax.fori_loop(0, (last - first + TILE_Q - 1) // TILE_Q, tile, out)

    q_padded = jnp.pad(q_tnh, ((0, TILE_Q), (0, 0), (0, 0)))  # a last tile may hang over
    out = lax.fori_loop(0, context_lens_s.shape[0], sequence, jnp.zeros_like(q_padded))
    return out[: q_tnh.shape[0]]


def _attend(q_qnh, positions_q, k_pool, v_pool, block_table_w, num_keys, scale):
    """Queries at `positions` (-1: no query, result 0) over the first `num_keys` keys of one block table.

    The softmax is taken online over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867). R = Q G rows of a kv
    head are one matrix, and so are the C tokens of a tile: what a CPU multiplies fastest.
    """
    num_queries, num_heads, head_dim = q_qnh.shape
    num_kv_heads, block_size = k_pool.shape[1:3]
    group = num_heads // num_kv_heads
    blocks_per_tile = max(1, TILE_KV // block_size)
    tile_kv = blocks_per_tile * block_size
    block_table_w = jnp.pad(block_table_w, (0, -block_table_w.shape[0] % blocks_per_tile))
    dtype = jnp.promote_types(q_qnh.dtype, jnp.float32)
    dot = partial(jnp.einsum, preferred_element_type=dtype)
    q_krh = q_qnh.reshape(num_queries, num_kv_heads, group, head_dim).swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
    positions_r = jnp.repeat(positions_q, group)

    def tile(i, carry):
        o_krh, top_kr, total_kr = carry
        key_positions_c = i * tile_kv + jnp.arange(tile_kv)
        blocks = lax.dynamic_slice_in_dim(block_table_w, i * blocks_per_tile, blocks_per_tile)
        blocks = jnp.where(key_positions_c[::block_size] < num_keys, blocks, 0)  # past the context: may be anything
        k_kch, v_kch = (x[blocks].swapaxes(0, 1).reshape(num_kv_heads, tile_kv, head_dim) for x in (k_pool, v_pool))
        v_kch = jnp.where((key_positions_c < num_keys)[:, None], v_kch, 0)  # 0 * NaN is NaN
        scores = dot("krh,kch->krc", q_krh, k_kch) * scale
        scores = jnp.where(key_positions_c <= positions_r[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top_kr, scores.max(-1))
        safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
        p = jnp.exp(scores - safe_top[..., None])
        shrink = jnp.exp(top_kr - safe_top)
        o_krh = o_krh * shrink[..., None] + dot("krc,kch->krh", p.astype(v_kch.dtype), v_kch)
        return o_krh, new_top, total_kr * shrink + p.sum(-1)

    rows = q_krh.shape[:2]
    start = jnp.zeros(q_krh.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
    o_krh, _, total_kr = lax.fori_loop(0, (num_keys + tile_kv - 1) // tile_kv, tile, start)
    o_krh = o_krh / jnp.where(total_kr == 0, 1, total_kr)[..., None]
    o_qkgh = o_krh.reshape(num_kv_heads, num_queries, group, head_dim).swapaxes(0, 1)
    return o_qkgh.reshape(q_qnh.shape).astype(q_qnh.dtype)
