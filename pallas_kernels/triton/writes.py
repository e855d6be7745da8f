"""Writes into the pool, in place (Pallas-Triton): keys and values of tokens, and copies of blocks."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import checks, reference
from pallas_kernels.options import Pools, Ref, WriteOptions, Written
from pallas_kernels.triton.launch import as_stored, check_supported, iota, launch

PIECE = 2048  # elements that one program copies


def _write_kernel(
    k_tkh_ref: Ref,  # [T, K, h], h at most H
    v_tkh_ref: Ref,  # [T, K, h]
    slot_t_ref: Ref,  # [T]
    *refs: Ref,  # if keys are rotated cos and sin [T, h / 2]; both pools; and in their place
    # k_pool_ref  [P, K, B, H]
    # v_pool_ref  [P, K, B, H]
) -> None:
    *angle_refs, k_pool_ref, v_pool_ref = *refs[:-4], *refs[-2:]
    t, head = pl.program_id(0), pl.program_id(1)
    slot, h = slot_t_ref[t], k_tkh_ref.shape[2]
    _, _, block_size, pool_h = k_pool_ref.shape
    column_h = iota(pool_h)
    real_h = column_h < h

    @pl.when(slot >= 0)
    def write() -> None:
        k_h, v_h = (plt.load(ref.at[t, head, column_h], mask=real_h, other=0) for ref in (k_tkh_ref, v_tkh_ref))
        if angle_refs:
            left_h = column_h < h // 2
            other_h = jnp.where(left_h, column_h + h // 2, column_h - h // 2)  # its partner in the other half
            partner_h = plt.load(k_tkh_ref.at[t, head, other_h], mask=real_h, other=0).astype(jnp.float32)
            angle_h = jnp.where(left_h, column_h, column_h - h // 2)
            cos_h, sin_h = (plt.load(ref.at[t, angle_h], mask=real_h, other=0) for ref in angle_refs)
            rotated_h = k_h.astype(jnp.float32) * cos_h + jnp.where(left_h, -partner_h, partner_h) * sin_h
            k_h = rotated_h.astype(k_h.dtype)
        at = lax.div(slot, block_size), head, lax.rem(slot, block_size), column_h
        plt.store(k_pool_ref.at[at], k_h)
        plt.store(v_pool_ref.at[at], v_h)


def write_kv(
    pools: Pools, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array, options: WriteOptions
) -> Written:
    """Compute `Ops.write_kv`. XLA rotates the queries, and rotates and rounds the keys for fp8 pools."""
    k_pool, v_pool = pools
    check_supported(k_tkh, k_pool)
    q_tnh = reference.rotated_queries(options)
    if k_tkh.shape[0] == 0:
        return k_pool, v_pool, q_tnh
    angles = options.angles or ()
    if angles and k_pool.dtype == checks.FP8:
        k_tkh, angles = reference.rotate(k_tkh, *angles), ()
    k_tkh = reference.quantize(k_tkh, k_pool.dtype, options.k_scale_k)
    v_tkh = reference.quantize(v_tkh, v_pool.dtype, options.v_scale_k)
    arrays = as_stored(k_tkh), as_stored(v_tkh), slot_mapping_t, *angles
    pool_type = jax.ShapeDtypeStruct(k_pool.shape, as_stored(k_pool).dtype)
    stored = launch(
        "kv_write", _write_kernel, *arrays, as_stored(k_pool), as_stored(v_pool),
        grid=k_tkh.shape[:2], out_types=[pool_type] * 2, aliases={len(arrays): 0, len(arrays) + 1: 1}, num_warps=1,
    )  # fmt: skip
    written_k, written_v = (lax.bitcast_convert_type(pool, k_pool.dtype) for pool in stored)
    return written_k, written_v, q_tnh


def _copy_kernel(
    blocks_ce_ref: Ref,  # [C, E]
    destination_c_ref: Ref,  # [C]
    _pool_pe_ref: Ref,  # [P, E]
    pool_pe_ref: Ref,  # [P, E], in its place
) -> None:
    c, piece = pl.program_id(0), pl.program_id(1)
    destination = destination_c_ref[c]
    e = piece * PIECE + iota(PIECE)
    mask = (e < pool_pe_ref.shape[1]) & (destination >= 0)
    plt.store(pool_pe_ref.at[destination, e], plt.load(blocks_ce_ref.at[c, e], mask=mask, other=0), mask=mask)


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Compute `Ops.copy_blocks`. Temporary memory: the C blocks, which are all read before any is overwritten."""
    if sources_c.shape[0] == 0:
        return pool
    pool_pe = as_stored(pool).reshape(pool.shape[0], -1)
    blocks_ce = pool_pe.at[sources_c].get(mode="clip")  # a source of no destination may be anything
    [pool_pe] = launch(
        "copy_blocks", _copy_kernel, blocks_ce, destinations_c, pool_pe,
        grid=(blocks_ce.shape[0], pl.cdiv(blocks_ce.shape[1], PIECE)),
        out_types=[jax.ShapeDtypeStruct(pool_pe.shape, pool_pe.dtype)], aliases={2: 0}, num_warps=4,
    )  # fmt: skip
    return lax.bitcast_convert_type(pool_pe, pool.dtype).reshape(pool.shape)
