"""Writing one step's keys and values into the paged pool, in place; keys rotated on their way (Mosaic GPU).

Axis letters besides the package's: Y tokens and Z KV heads of one thread block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import FP8, FP8_MAX, check_write
from pallas_kernels.mosaic.support import check_supported
from pallas_kernels.reference import pad_head_dim, rotate

WARPGROUP = 128  # threads


def _copy_kernel(
    k_tkh_ref,  # [T, K, H]
    v_tkh_ref,  # [T, K, H]
    slot_t_ref,  # [T]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    k_smem,  # [K, H]
    v_smem,  # [K, H]
    loaded,  # barrier
):
    token = lax.axis_index("t")
    slot = slot_t_ref[token]
    block_size = k_pool_ref.shape[2]

    @pl.when(slot >= 0)
    def _():
        plgpu.copy_gmem_to_smem(k_tkh_ref.at[token], k_smem, loaded)
        plgpu.copy_gmem_to_smem(v_tkh_ref.at[token], v_smem, loaded)
        plgpu.barrier_wait(loaded)
        block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
        plgpu.copy_smem_to_gmem(k_smem, k_pool_ref.at[block, :, offset])
        plgpu.copy_smem_to_gmem(v_smem, v_pool_ref.at[block, :, offset])
        plgpu.wait_smem_to_gmem(0)


def _transform_kernel(
    k_tkh_ref,  # [T, K, H]
    v_tkh_ref,  # [T, K, H]
    cos_t_ref,  # [T, H/2] fp32
    sin_t_ref,  # [T, H/2] fp32
    per_scale_kh_ref,  # [2, K, H] fp32: one over the scales of k and v, in every column
    slot_t_ref,  # [T]
    k_pool_ref,  # [P, K, B, H]
    v_pool_ref,  # [P, K, B, H]
    low_smem,  # [Y, Z, H/2]: the lower half of every key
    high_smem,  # [Y, Z, H/2]
    v_smem,  # [Y, Z, H]
    cos_smem,  # [Y, Z, H/2] fp32
    sin_smem,  # [Y, Z, H/2] fp32
    per_k_smem,  # [Y, Z, H/2] fp32
    per_v_smem,  # [Y, Z, H] fp32
    low_out,  # [Y, Z, H/2] in the pools' dtype
    high_out,  # [Y, Z, H/2]
    v_out,  # [Y, Z, H]
    loaded,  # barrier
    *,
    rotated: bool,
):
    tokens, num_heads, half = low_smem.shape
    heads = pl.ds(lax.axis_index("k") * num_heads, num_heads)
    block_size, fp8 = k_pool_ref.shape[2], low_out.dtype == FP8
    first = lax.axis_index("t") * tokens
    slots = [slot_t_ref[first + y] for y in range(tokens)]
    low, high = pl.ds(0, half), pl.ds(half, half)

    def load(y):
        token = first + y
        sources = [
            (k_tkh_ref.at[token, heads, low], low_smem),
            (k_tkh_ref.at[token, heads, high], high_smem),
            (v_tkh_ref.at[token, heads], v_smem),
        ]
        if fp8:
            sources += [(per_scale_kh_ref.at[0, heads, low], per_k_smem), (per_scale_kh_ref.at[1, heads], per_v_smem)]
        for source, destination in sources:
            plgpu.copy_gmem_to_smem(source, destination.at[y], loaded)
        if rotated:  # a copy for every head, so that all arrays have one shape and registers hold them alike

            @pl.loop(0, num_heads)
            def load_angles(head):
                plgpu.copy_gmem_to_smem(cos_t_ref.at[token], cos_smem.at[y, head], loaded)
                plgpu.copy_gmem_to_smem(sin_t_ref.at[token], sin_smem.at[y, head], loaded)

    def narrowed(x, per_smem):
        return jnp.clip(x * per_smem[...], -FP8_MAX, FP8_MAX) if fp8 else x

    def store(y):
        @pl.when(slots[y] >= 0)
        def _():
            block, offset = lax.div(slots[y], block_size), lax.rem(slots[y], block_size)
            plgpu.copy_smem_to_gmem(low_out.at[y], k_pool_ref.at[block, heads, offset, low])
            plgpu.copy_smem_to_gmem(high_out.at[y], k_pool_ref.at[block, heads, offset, high])
            plgpu.copy_smem_to_gmem(v_out.at[y], v_pool_ref.at[block, heads, offset])

    @pl.when(functools.reduce(jnp.maximum, slots) >= 0)
    def _():
        for y in range(tokens):
            load(y)
        plgpu.barrier_wait(loaded)
        a, b = low_smem[...].astype(jnp.float32), high_smem[...].astype(jnp.float32)
        if rotated:
            cos, sin = cos_smem[...], sin_smem[...]
            a, b = (x.astype(low_smem.dtype).astype(jnp.float32) for x in (a * cos - b * sin, b * cos + a * sin))
        low_out[...] = narrowed(a, per_k_smem).astype(low_out.dtype)
        high_out[...] = narrowed(b, per_k_smem).astype(high_out.dtype)
        v_out[...] = narrowed(v_smem[...].astype(jnp.float32), per_v_smem).astype(v_out.dtype)
        plgpu.commit_smem()
        for y in range(tokens):
            store(y)
        plgpu.wait_smem_to_gmem(0)


def _launch_copy(k_pool_ref: Any, v_pool_ref: Any, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array):
    t, k, h = k_tkh.shape
    plgpu.kernel(
        _copy_kernel,
        out_type=(),
        grid=(t,),
        grid_names=("t",),
        scratch_types=[
            plgpu.SMEM((k, h), k_tkh.dtype),
            plgpu.SMEM((k, h), v_tkh.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="kv_write",
    )(k_tkh, v_tkh, slot_mapping_t, k_pool_ref, v_pool_ref)


def _launch_transform(k_pool_ref: Any, v_pool_ref: Any, k_tkh, v_tkh, cos_t, sin_t, k_scale_k, v_scale_k, slots_t):
    t, k, h = k_tkh.shape
    half, dtype, fp8, rotated = h // 2, k_pool_ref.dtype, k_pool_ref.dtype == FP8, cos_t is not None
    # At a time, so that every thread has as many elements, a power of two.
    heads = next(n for n in (8, 4, 2, 1) if k % n == 0)
    tokens = pl.cdiv(WARPGROUP, heads * half)
    missing = ((0, -t % tokens), (0, 0))
    slots_t = jnp.pad(slots_t, missing[0], constant_values=-1)
    k_tkh, v_tkh = (jnp.pad(x, (*missing, (0, 0))) for x in (k_tkh, v_tkh))
    unused = jnp.zeros((1, half), jnp.float32)
    cos_t, sin_t = (jnp.pad(x, missing) if rotated else unused for x in (cos_t, sin_t))
    per_scale_kh = jnp.ones((2, k, h), jnp.float32)
    if fp8:
        per_scale_kh /= jnp.stack([k_scale_k, v_scale_k])[:, :, None]

    def smem(columns, dtype, used=True):
        return plgpu.SMEM((tokens, heads, columns) if used else (1, 1, 128), dtype)

    copies = tokens * (3 + 2 * fp8 + 2 * heads * rotated)
    plgpu.kernel(
        functools.partial(_transform_kernel, rotated=rotated),
        out_type=(),
        grid=(slots_t.shape[0] // tokens, k // heads),
        grid_names=("t", "k"),
        scratch_types=[
            smem(half, k_tkh.dtype),
            smem(half, k_tkh.dtype),
            smem(h, v_tkh.dtype),
            smem(half, jnp.float32, rotated),
            smem(half, jnp.float32, rotated),
            smem(half, jnp.float32, fp8),
            smem(h, jnp.float32, fp8),
            smem(half, dtype),
            smem(half, dtype),
            smem(h, dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
        kernel_name="kv_write",
    )(k_tkh, v_tkh, cos_t, sin_t, per_scale_kh, slots_t, k_pool_ref, v_pool_ref)


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
    """`reference.write_kv` in bfloat16 or float16.

    In place when the enclosing jit donates the pools and returns them in the order of its arguments; otherwise XLA
    copies them first. Keys and values of a head dim smaller than the pools' are rotated and padded by XLA beforehand.

    Raises ValueError as the reference does, and NotImplementedError for what `mosaic.unsupported` names.
    """
    check_write(k_pool, v_pool, k_tkh, v_tkh, slot_mapping_t, cos_t, sin_t, k_scale_k, v_scale_k)
    h = k_pool.shape[3]
    check_supported(k_pool, dtype=k_tkh.dtype, num_heads=k_tkh.shape[1])
    if k_tkh.shape[2] < h:
        if cos_t is not None and sin_t is not None:
            k_tkh, cos_t, sin_t = rotate(k_tkh, cos_t, sin_t), None, None
        k_tkh, v_tkh = pad_head_dim(k_tkh, h), pad_head_dim(v_tkh, h)
    k_pool_ref, v_pool_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    if cos_t is None and k_pool.dtype != FP8:
        _launch_copy(k_pool_ref, v_pool_ref, k_tkh, v_tkh, slot_mapping_t)
    else:
        _launch_transform(
            k_pool_ref, v_pool_ref, k_tkh, v_tkh, cos_t, sin_t, k_scale_k, v_scale_k, slot_mapping_t
        )  # fmt: skip
    return jax.freeze(k_pool_ref), jax.freeze(v_pool_ref)
