"""Write of one step's keys and values into the paged pool, in place, with rotation of the keys (Mosaic GPU).

A thread block takes one token and some of its KV heads. Registers take the heads in pieces of one element per thread,
so that the same registers hold cos and sin for all of them.

Axis letters besides the package's: Z KV heads of one thread block, padded to a multiple of Y, the heads of one piece.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import FP8, FP8_MAX
from pallas_kernels.mosaic.support import check_grid, check_supported
from pallas_kernels.options import Pools, Ref, WriteOptions
from pallas_kernels.reference import pad_head_dim, rotate

WARPGROUP = 128  # threads
MAX_HEADS = 16  # of one thread block: they fit shared memory at any head dim


def _kernel(
    k_tkh_ref: Ref,  # [T, K, H]
    v_tkh_ref: Ref,  # [T, K, H]
    cos_t_ref: Ref,  # [T, H/2] fp32; unused without rotation
    sin_t_ref: Ref,  # [T, H/2] fp32
    per_scale_kh_ref: Ref,  # [2, K, H] fp32: one over the scales of k and v, in every column; unused without fp8
    slot_t_ref: Ref,  # [T]
    k_pool_ref: Ref,  # [P, K, B, H]
    v_pool_ref: Ref,  # [P, K, B, H]
    *,
    low_smem: Ref,  # [Z, H/2]: the lower half of every key
    high_smem: Ref,  # [Z, H/2]
    v_smem: Ref,  # [Z, H]
    angles_smem: Ref,  # cos and sin [Y, H/2] fp32, every row the same; None without rotation
    per_scale_smem: Ref,  # [Z, H/2] for k and [Z, H] for v, fp32; None without fp8
    fp8_smem: Ref,  # results [Z, H/2], [Z, H/2], [Z, H] in fp8; None without fp8
    loaded: Ref,  # barrier
    heads: int,
    piece: int,
) -> None:
    token = lax.axis_index("t")
    slot = slot_t_ref[token]
    block_size, half = k_pool_ref.shape[2], low_smem.shape[1]
    mine, low, high = pl.ds(lax.axis_index("k") * heads, heads), pl.ds(0, half), pl.ds(half, half)

    def load() -> None:
        copies = [
            (k_tkh_ref.at[token, mine, low], low_smem.at[pl.ds(0, heads)]),
            (k_tkh_ref.at[token, mine, high], high_smem.at[pl.ds(0, heads)]),
            (v_tkh_ref.at[token, mine], v_smem.at[pl.ds(0, heads)]),
        ]
        if per_scale_smem is not None:
            copies.append((per_scale_kh_ref.at[0, mine, low], per_scale_smem[0].at[pl.ds(0, heads)]))
            copies.append((per_scale_kh_ref.at[1, mine], per_scale_smem[1].at[pl.ds(0, heads)]))
        if angles_smem is not None:
            for ref, smem in zip((cos_t_ref, sin_t_ref), angles_smem, strict=True):
                copies += [(ref.at[token], smem.at[y]) for y in range(piece)]
        for source, destination in copies:
            plgpu.copy_gmem_to_smem(source, destination, loaded)

    def transform(z: jax.Array) -> None:
        """Rotate and narrow one piece of the heads, in place or into the fp8 results."""
        some = pl.ds(z * piece, piece)
        layout = plgpu.Layout.WG_STRIDED((piece, half), vec_size=1)
        a, b = (plgpu.load(ref.at[some], layout=layout).astype(jnp.float32) for ref in (low_smem, high_smem))
        if angles_smem is not None:
            cos, sin = (plgpu.load(smem, layout=layout) for smem in angles_smem)
            a, b = (x.astype(low_smem.dtype).astype(jnp.float32) for x in (a * cos - b * sin, b * cos + a * sin))
        if fp8_smem is None:
            low_smem[some], high_smem[some] = a.astype(low_smem.dtype), b.astype(high_smem.dtype)
            return
        per_scale = plgpu.load(per_scale_smem[0].at[some], layout=layout)
        fp8_smem[0][some], fp8_smem[1][some] = _narrow(a * per_scale), _narrow(b * per_scale)
        layout = plgpu.Layout.WG_STRIDED((piece, 2 * half), vec_size=2)
        v = plgpu.load(v_smem.at[some], layout=layout).astype(jnp.float32)
        fp8_smem[2][some] = _narrow(v * plgpu.load(per_scale_smem[1].at[some], layout=layout))

    @pl.when(slot >= 0)
    def write() -> None:
        load()
        plgpu.barrier_wait(loaded)
        if angles_smem is not None or fp8_smem is not None:
            pl.loop(0, low_smem.shape[0] // piece)(transform)
            plgpu.commit_smem()
        block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
        out_low, out_high, out_v = (ref.at[pl.ds(0, heads)] for ref in fp8_smem or (low_smem, high_smem, v_smem))
        plgpu.copy_smem_to_gmem(out_low, k_pool_ref.at[block, mine, offset, low])
        plgpu.copy_smem_to_gmem(out_high, k_pool_ref.at[block, mine, offset, high])
        plgpu.copy_smem_to_gmem(out_v, v_pool_ref.at[block, mine, offset])
        plgpu.wait_smem_to_gmem(0)


def _narrow(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)


def _launch(
    k_pool_ref: Ref, v_pool_ref: Ref, k_tkh: jax.Array, v_tkh: jax.Array, slot_t: jax.Array, options: WriteOptions
) -> None:
    t, k, h = k_tkh.shape
    half, dtype, fp8, rotated = h // 2, k_tkh.dtype, k_pool_ref.dtype == FP8, options.angles is not None
    heads = next(n for n in range(min(k, MAX_HEADS), 0, -1) if k % n == 0)
    piece = pl.cdiv(WARPGROUP, half)
    padded = pl.cdiv(heads, piece) * piece
    cos_t, sin_t = options.angles or [jnp.zeros((1, half), jnp.float32)] * 2
    per_scale_kh = jnp.ones((2, k, h), jnp.float32)
    if options.k_scale_k is not None and options.v_scale_k is not None:
        per_scale_kh /= jnp.stack([options.k_scale_k, options.v_scale_k])[:, :, None]

    def smem(columns: int, dtype: Any) -> Any:
        return plgpu.SMEM((padded, columns), dtype)

    angles: Any = plgpu.SMEM((piece, half), jnp.float32)
    grid = (k // heads, t)
    check_grid("kv_write", grid)
    plgpu.kernel(
        functools.partial(_kernel, heads=heads, piece=piece),
        out_type=(),
        grid=grid,
        grid_names=("k", "t"),
        scratch_types=dict[str, Any](
            low_smem=smem(half, dtype),
            high_smem=smem(half, dtype),
            v_smem=smem(h, dtype),
            angles_smem=(angles, angles) if rotated else None,
            per_scale_smem=(smem(half, jnp.float32), smem(h, jnp.float32)) if fp8 else None,
            fp8_smem=(smem(half, FP8), smem(half, FP8), smem(h, FP8)) if fp8 else None,
            loaded=plgpu.Barrier(num_arrivals=3 + 2 * piece * rotated + 2 * fp8),
        ),
        kernel_name="kv_write",
    )(k_tkh, v_tkh, cos_t, sin_t, per_scale_kh, slot_t, k_pool_ref, v_pool_ref)


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array,
    options: WriteOptions,
) -> Pools:  # fmt: skip
    """Compute `Ops.write_kv` in bfloat16 or float16.

    If the head dim of keys and values is smaller than the pools', XLA rotates and pads them first.
    """
    h = k_pool.shape[3]
    check_supported(k_pool, dtype=k_tkh.dtype, num_heads=k_tkh.shape[1])
    if k_tkh.shape[2] < h:
        if options.angles:
            k_tkh = rotate(k_tkh, *options.angles)
            options = replace(options, cos_t=None, sin_t=None)
        k_tkh, v_tkh = pad_head_dim(k_tkh, h), pad_head_dim(v_tkh, h)
    k_pool_ref, v_pool_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    if slot_mapping_t.shape[0]:
        _launch(k_pool_ref, v_pool_ref, k_tkh, v_tkh, slot_mapping_t, options)
    return jax.freeze(k_pool_ref), jax.freeze(v_pool_ref)
