"""Definition of every op in jnp: the specification that kernels are tested against, and the implementation for CPUs.

Scores, softmax and sums are float32 (float64 under x64 inputs). Each sequence is computed separately, tile by tile, in
an order that depends only on its own length, so its result has the same bits next to any other sequences.

The functions of `Implementation` expect arguments that `Ops` has checked.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.checks import FP8, FP8_MAX
from pallas_kernels.cuts import decode_rows
from pallas_kernels.options import (
    AttentionOptions,
    Contexts,
    OutputAndLse,
    Pools,
    ProductOptions,
    WriteOptions,
    Written,
)
from pallas_kernels.transforms import varying_like
from pallas_kernels.weights import Weight, rounded_rows

Carry = tuple[jax.Array, jax.Array, jax.Array]  # unscaled outputs, maxima and sums of the softmax so far

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "swiglu_oai": lambda x: (x := jnp.minimum(x, SWIGLU_LIMIT)) * jax.nn.sigmoid(SWIGLU_ALPHA * x),
}

# Options for compiling programs for CPUs in which the sum of a row has one order for any number of rows. By default XLA
# leaves sums of large arrays to YNNPACK, which adds in another order than XLA itself does in small arrays.
ROW_ORDER = {"xla_cpu_experimental_ynn_fusion_type": ""}

TILE_Q = 64  # query rows attended at once
TILE_KV = 128  # keys gathered at once: small enough to stay in a core's cache
TILE_DECODE = 64  # the same for each of the sequences that are decoded together


def write_kv(
    pools: Pools, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array, options: WriteOptions
) -> Written:
    """Define `Ops.write_kv`."""
    if options.angles:
        k_tkh = rotate(k_tkh, *options.angles)
    (k_pool, v_pool), (num_blocks, _, block_size, _) = pools, pools[0].shape
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


def product(x_ti: jax.Array, weights: tuple[Weight, ...], options: ProductOptions) -> tuple[jax.Array, ...]:
    """Define `Ops.product` and `Ops.products`: the result of each weight, or one result if they are gated."""
    rows = [rows_for(weight, x_ti, options) for weight in weights]
    found = [sums(x, weight, options.sizes_e) for x, weight in zip(rows, weights)]
    return finished(found, weights, options, x_ti.dtype)


def rows_for(weight: Weight, x_ti: jax.Array, options: ProductOptions) -> jax.Array:
    """Return the rows that are multiplied by a weight."""
    return rounded_rows(x_ti) if options.int8_rows and weight.format.takes_int8_rows else x_ti


def sums(x_ti: jax.Array, weight: Weight, sizes_e: jax.Array | None) -> jax.Array:
    """Return x W^T [T, O], in float32 (float64 of float64), without bias."""
    row_scales = None if weight.has_groups else weight.scales  # factors of the sums
    matrix = weight.dense() if row_scales is None else weight.values.astype(x_ti.dtype)
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(x_ti, matrix))
    if sizes_e is None:
        y_to = jnp.einsum("ti,oi->to", x_ti, matrix, preferred_element_type=dtype)
        return y_to if row_scales is None else y_to * row_scales
    # Row t is multiplied by the matrix of its group.
    by_group = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    y_to = lax.ragged_dot_general(x_ti, matrix, sizes_e, by_group, preferred_element_type=dtype)
    if row_scales is not None:
        of_rows = jnp.repeat(jnp.arange(len(sizes_e)), sizes_e, total_repeat_length=len(x_ti))
        y_to = y_to * row_scales[of_rows]
    return y_to


def finished(
    sums: Sequence[jax.Array], weights: Sequence[Weight], options: ProductOptions, x_dtype: DTypeLike
) -> tuple[jax.Array, ...]:
    """Return the results of a product from the sums of its weights."""
    ys = [
        y if weight.bias is None else y + _bias(weight.bias, len(y), options).astype(y.dtype)
        for y, weight in zip(sums, weights)
    ]
    if options.added is not None:
        ys = [y + more for y, more in zip(ys, options.added, strict=True)]
    if options.gated:
        ys = [gated(options.activation, *ys)]
    elif options.activation:
        ys = [ACTIVATIONS[options.activation](y) for y in ys]
    ys = [y.astype(options.dtype or x_dtype) for y in ys]
    return tuple(ys) if options.residual_to is None else (options.residual_to + ys[0],)


def _bias(bias: jax.Array, rows: int, options: ProductOptions) -> jax.Array:
    """Return the bias of all rows [O], or that of each row's expert [T, O]."""
    if options.sizes_e is None:
        return bias
    return bias[jnp.repeat(jnp.arange(len(bias)), options.sizes_e, total_repeat_length=rows)]


def gated(activation: str | None, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return activation(gate) * up; with swiglu_oai, up is clipped to the limit and 1 is added."""
    if activation == "swiglu_oai":
        up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return (ACTIVATIONS[activation](gate) if activation else gate) * up


def paged_decode_attention(q_snh: jax.Array, contexts: Contexts, options: AttentionOptions) -> OutputAndLse:
    """Define `Ops.paged_decode_attention`: the query of each sequence, all sequences at once and tile by tile."""
    k_pool, v_pool, block_tables_sw, context_lens_s = contexts
    num_seqs, num_heads, head_dim = q_snh.shape
    num_kv_heads, block_size, pool_head_dim = k_pool.shape[1:]
    if num_seqs == 1:  # XLA sums a product in another order if it is not batched
        q_snh, block_tables_sw, context_lens_s = (
            jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1)) for x in (q_snh, block_tables_sw, context_lens_s)
        )
    order_s = jnp.argsort(-context_lens_s)
    lens_s = context_lens_s[order_s]
    tables_sw, blocks_per_tile = _whole_tiles(block_tables_sw[order_s], TILE_DECODE, block_size)
    tile_kv = blocks_per_tile * block_size
    group = num_heads // num_kv_heads
    q_skgh = pad_head_dim(q_snh[order_s], pool_head_dim).reshape(-1, num_kv_heads, group, pool_head_dim)
    if group == 1:  # or if one of its matrices is a vector
        q_skgh = jnp.pad(q_skgh, ((0, 0), (0, 0), (0, 1), (0, 0)))

    def tile(i: jax.Array, carry: Carry) -> Carry:
        size = carry[0].shape[0]
        positions_c = i * tile_kv + jnp.arange(tile_kv)
        written_sc = positions_c < lens_s[:size, None]
        blocks_sj = lax.dynamic_slice_in_dim(tables_sw[:size], i * blocks_per_tile, blocks_per_tile, axis=1)
        held_sc = seen_sc = written_sc
        if options.window is not None:
            oldest_s1 = lens_s[:size, None] - options.window
            held_sc &= positions_c >= oldest_s1 // block_size * block_size
            seen_sc &= positions_c >= oldest_s1
        kv_skch = _gathered((k_pool, v_pool), blocks_sj, held_sc, q_snh.dtype)
        return _add_tile(carry, q_skgh[:size], kv_skch, seen_sc[:, None, None], options, "skgh,skch->skgc", _sum)

    start = _start(q_skgh, (q_snh, k_pool, v_pool, block_tables_sw, context_lens_s), options)
    carry = _fold_halves(tile, start, lens_s, tile_kv, options.window)
    if options.sinks_n is not None:
        carry = _with_sinks(carry, options.sinks_n.reshape(num_kv_heads, group))
    o_skgh, lse_skg = _finished(carry, options)
    back_s = jnp.argsort(order_s)[:num_seqs]
    o_snh = o_skgh[back_s, :, :group, :head_dim].reshape(num_seqs, num_heads, head_dim).astype(q_snh.dtype)
    return o_snh, lse_skg[back_s, :, :group].reshape(num_seqs, num_heads)


def _fold_halves(
    tile: Callable[[jax.Array, Carry], Carry], carry: Carry, lens_s: jax.Array, tile_kv: int, window: int | None
) -> Carry:
    """Fold `tile` over the tiles of sequences in descending order of their lengths.

    Tiles that only the longer half of the sequences has are computed for that half, and so on. At most twice as many
    keys are read as there are.
    """
    seen_from_s = jnp.zeros_like(lens_s) if window is None else jnp.maximum(lens_s - window, 0)
    start = jnp.min(jnp.where(lens_s > 0, seen_from_s, jnp.max(lens_s))) // tile_kv
    size = lens_s.shape[0]
    while size:
        half = size // 2 if size > 2 else 0
        stop = (lens_s[half] + tile_kv - 1) // tile_kv
        part = lax.fori_loop(start, stop, tile, jax.tree.map(lambda x, size=size: x[:size], carry))
        carry = _update(carry, part, 0)
        start, size = jnp.maximum(start, stop), half
    return carry


def ragged_paged_attention(
    q_tnh: jax.Array, contexts: Contexts, cu_q_lens_s1: jax.Array, decode_s: jax.Array | None, options: AttentionOptions
) -> OutputAndLse:
    """Define `Ops.ragged_paged_attention`."""
    pools, block_tables_sw, context_lens_s = contexts[:2], contexts.block_tables_sw, contexts.context_lens_s
    decode_s, _ = decode_rows(cu_q_lens_s1, decode_s)

    def sequence(s: jax.Array, out: OutputAndLse) -> OutputAndLse:
        first, last, length = cu_q_lens_s1[s], cu_q_lens_s1[s + 1], context_lens_s[s]

        def tile(i: jax.Array, out: OutputAndLse) -> OutputAndLse:
            row = first + i * TILE_Q
            rows = row + jnp.arange(TILE_Q)
            positions = jnp.where(rows < last, length - last + rows, -1)
            q = lax.dynamic_slice_in_dim(q_padded, row, TILE_Q)
            some = _attend(q, positions, pools, block_tables_sw[s], jnp.max(positions) + 1, options)
            # Rows past the sequence get zeros here. The tiles of the next sequence overwrite them.
            return _update(out, some, row)

        tiles = jnp.where(decode_s[s], 0, (last - first + TILE_Q - 1) // TILE_Q)
        attended: OutputAndLse = lax.fori_loop(0, tiles, tile, out)
        return attended

    q_padded = jnp.pad(q_tnh, ((0, TILE_Q), (0, 0), (0, 0)))  # a last tile may hang over
    arrays = q_tnh, contexts, cu_q_lens_s1, decode_s, options.k_scale_k, options.v_scale_k, options.sinks_n
    out = jnp.zeros_like(q_padded), jnp.full(q_padded.shape[:2], -jnp.inf, _accumulated(q_tnh.dtype))
    out = varying_like(out, arrays)
    out = lax.fori_loop(0, context_lens_s.shape[0], sequence, out)
    out = jax.tree.map(lambda x: x[: q_tnh.shape[0]], out)
    at_s = jnp.where(decode_s, cu_q_lens_s1[:-1], q_tnh.shape[0])  # past the end: dropped
    contexts = contexts._replace(context_lens_s=jnp.where(decode_s, context_lens_s, 0))
    decoded = paged_decode_attention(q_tnh[at_s], contexts, options)
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
    """Convert [T, K, H] to a pool's dtype: to the nearest finite number, for fp8 in units of the scale of each head.

    Numbers of the pool's own dtype are unchanged.
    """
    if dtype == x_tkh.dtype:
        return x_tkh
    if dtype != FP8:
        largest = float(jnp.finfo(dtype).max)
        return jnp.clip(x_tkh, -largest, largest).astype(dtype)
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
    """Sum the last axis in an order that depends only on its size. XLA's sum depends on the other axes too."""
    while x.shape[-1] > 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        a, b = jnp.split(x, 2, axis=-1)
        x = a + b
    return x[..., 0]


def _update[T](out: T, part: T, row: jax.Array | int) -> T:
    updated: T = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, row, 0), out, part)
    return updated


def _attend(
    q_qnh: jax.Array, positions_q: jax.Array, pools: Pools, block_table_w: jax.Array, num_keys: jax.Array,
    options: AttentionOptions,
) -> OutputAndLse:  # fmt: skip
    """Attend queries at `positions` (-1: no query, result 0) over the first `num_keys` keys of one block table.

    R = Q G rows of a KV head are one matrix, and so are the C tokens of a tile: a CPU multiplies these fastest.
    """
    num_queries, num_heads, head_dim = q_qnh.shape
    num_kv_heads, block_size, pool_head_dim = pools[0].shape[1:]
    block_table_w, blocks_per_tile = _whole_tiles(block_table_w, TILE_KV, block_size)
    tile_kv = blocks_per_tile * block_size
    group, window = num_heads // num_kv_heads, options.window
    q_krh = pad_head_dim(q_qnh, pool_head_dim).reshape(num_queries, num_kv_heads, group, pool_head_dim)
    q_krh = q_krh.swapaxes(0, 1).reshape(num_kv_heads, -1, pool_head_dim)
    positions_r = jnp.repeat(positions_q, group)

    def tile(i: jax.Array, carry: Carry) -> Carry:
        positions_c = i * tile_kv + jnp.arange(tile_kv)
        blocks_j = lax.dynamic_slice_in_dim(block_table_w, i * blocks_per_tile, blocks_per_tile)
        held_c = (positions_c < num_keys) & (positions_c >= oldest // block_size * block_size)
        kv_kch = _gathered(pools, blocks_j, held_c, q_qnh.dtype)
        seen_rc = positions_c <= positions_r[:, None]
        if window is not None:
            seen_rc &= positions_c > positions_r[:, None] - window
        return _add_tile(carry, q_krh, kv_kch, seen_rc, options, "krh,kch->krc", partial(jnp.sum, axis=-1))

    oldest: jax.Array | int = 0  # key that any query sees
    if window is not None:
        oldest = jnp.maximum(jnp.min(jnp.where(positions_q < 0, num_keys, positions_q)) - window + 1, 0)
    start = _start(q_krh, (q_qnh, positions_q, pools, block_table_w, num_keys), options)
    carry = lax.fori_loop(oldest // tile_kv, (num_keys + tile_kv - 1) // tile_kv, tile, start)
    if options.sinks_n is not None:
        carry = _with_sinks(carry, jnp.tile(options.sinks_n.reshape(num_kv_heads, group), num_queries))
    o_krh, lse_kr = _finished(carry, options)

    def by_query(x: jax.Array) -> jax.Array:
        return x.reshape(num_kv_heads, num_queries, group, *x.shape[2:]).swapaxes(0, 1)

    o_qnh = by_query(o_krh)[..., :head_dim].reshape(q_qnh.shape).astype(q_qnh.dtype)
    return o_qnh, by_query(lse_kr).reshape(num_queries, num_heads)


# Softmax over tiles of keys, computed online (Milakov and Gimelshein, arXiv 1805.02867).


def _accumulated(dtype: Any) -> Any:
    """Return the dtype of scores and sums."""
    return jnp.promote_types(dtype, jnp.float32)


def _whole_tiles(tables: jax.Array, tokens: int, block_size: int) -> tuple[jax.Array, int]:
    """Return block tables [..., W] padded to whole tiles of `tokens` or one block, and the blocks of a tile."""
    blocks = max(1, tokens // block_size)
    return jnp.pad(tables, [(0, 0)] * (tables.ndim - 1) + [(0, -tables.shape[-1] % blocks)]), blocks


def _gathered(pools: Pools, blocks: jax.Array, held: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return keys and values of blocks [..., J], each [..., K, C, H].

    Args:
        held: [..., C] bool, the tokens of the context, without blocks that a window has passed. Other values are 0.
    """
    block_size = pools[0].shape[2]
    blocks = jnp.where(held[..., ::block_size], blocks, 0)  # past the context and before the window: may be anything

    def tokens(pool: jax.Array) -> jax.Array:
        shape = *blocks.shape[:-1], pool.shape[1], held.shape[-1], pool.shape[3]
        return _blocks(pool, blocks).swapaxes(-4, -3).reshape(shape).astype(dtype)

    k, v = map(tokens, pools)
    return k, jnp.where(held[..., None, :, None], v, 0)  # 0 * NaN is NaN


def _start(q: jax.Array, like: Any, options: AttentionOptions) -> Carry:
    """Return the state of the softmax before any key."""
    rows, dtype = q.shape[:-1], _accumulated(q.dtype)
    start = jnp.zeros(q.shape, dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)
    return varying_like(start, (like, options.k_scale_k, options.v_scale_k))


def _add_tile(
    carry: Carry, q: jax.Array, kv: tuple[jax.Array, jax.Array], seen: jax.Array, options: AttentionOptions,
    products: str, total: Callable[[jax.Array], jax.Array],
) -> Carry:  # fmt: skip
    """Add the keys and values of a tile to the state of the softmax.

    Args:
        seen: whether a query sees a key.
        products: the einsum of the scores.
        total: a function that sums the last axis.
    """
    (k, v), (o, top, sums) = kv, carry
    dot = partial(jnp.einsum, preferred_element_type=o.dtype)
    scale, soft_cap = options.scale, options.soft_cap
    scores = dot(products, q, k) * (scale if options.k_scale_k is None else scale * options.k_scale_k[:, None, None])
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(-1))
    safe_top = jnp.where(new_top == -jnp.inf, 0, new_top)
    p = jnp.exp(scores - safe_top[..., None])
    shrink = jnp.exp(top - safe_top)
    queries, keys, weights = re.split(",|->", products)
    o = o * shrink[..., None] + dot(f"{weights},{keys}->{queries}", p.astype(v.dtype), v)
    return o, new_top, sums * shrink + total(p)


def _with_sinks(carry: Carry, sinks: jax.Array) -> Carry:
    """Add a score without a value to the state of each softmax that has a key."""
    o, top, sums = carry
    new_top = jnp.where(sums == 0, top, jnp.maximum(top, sinks))
    safe_top = jnp.where(sums == 0, 0, new_top)
    shrink = jnp.exp(top - safe_top)
    sums = jnp.where(sums == 0, 0, sums * shrink + jnp.exp(sinks - safe_top))
    return o * shrink[..., None], new_top, sums


def _finished(carry: Carry, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Return the outputs and the log-sum-exp of a state after all keys; outputs without a key are 0."""
    o, top, sums = carry
    o = o / jnp.where(sums == 0, 1, sums)[..., None]
    if options.v_scale_k is not None:
        o = o * options.v_scale_k[:, None, None]
    return o, top + jnp.log(sums)
