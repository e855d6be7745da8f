"""Writes into the paged pool, in place: a step's keys and values, and copies of whole blocks (Mosaic GPU, Hopper).

For keys and values, which it rotates together with the queries, a thread block takes one token and some of its KV
heads, with their queries. Registers take the heads in pieces of one element per thread, so that the same registers hold
cos and sin for all of them. Queries, keys and values are one argument: where a model's projection computes them
together, XLA launches nothing to take them apart.

Axis letters besides the package's: C heads of queries, keys and values together, Z heads of one thread block, padded to
a multiple of Y, the heads of one piece.
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
from pallas_kernels.mosaic.support import check_grid, check_supported, compiler_params
from pallas_kernels.options import Pools, Ref, WriteOptions, Written
from pallas_kernels.reference import pad_head_dim, rotate, rotated_queries

WARPGROUP = 128  # threads
MAX_HEADS, MAX_ROWS = 16, 160  # of one thread block, KV heads and all: they fit shared memory at any head dim


def _kernel(
    x_tch_ref: Ref,  # [T, C, H]: queries, if there are any, keys, values
    cos_t_ref: Ref,  # [T, H/2] fp32; unused without rotation
    sin_t_ref: Ref,  # [T, H/2] fp32
    per_scale_kh_ref: Ref,  # [2, K, H] fp32: one over the scales of k and v, in every column; unused without fp8
    slot_t_ref: Ref,  # [T]
    k_pool_ref: Ref,  # [P, K, B, H]
    v_pool_ref: Ref,  # [P, K, B, H]
    q_tnh_ref: Ref = None,  # [T, N, H]; None without queries
    *,
    q_smem: Ref,  # [Z, H/2], twice: the lower and the upper half of every query; None without queries
    k_smem: Ref,  # the same of keys
    v_smem: Ref,  # [Z, H]
    angles_smem: Ref,  # cos and sin [Y, H/2] fp32, every row the same; None without rotation
    per_scale_smem: Ref,  # [Z, H/2] for k and [Z, H] for v, fp32; None without fp8
    fp8_smem: Ref,  # results [Z, H/2], [Z, H/2], [Z, H] in fp8; None without fp8
    loaded: Ref,  # barrier
    heads: int,
    piece: int,
) -> None:
    token, first = lax.axis_index("t"), lax.axis_index("k") * heads
    slot = slot_t_ref[token]
    _, num_kv_heads, block_size, h = k_pool_ref.shape
    num_queries = 0 if q_tnh_ref is None else q_tnh_ref.shape[1]
    group = num_queries // num_kv_heads
    halves = pl.ds(0, h // 2), pl.ds(h // 2, h // 2)
    mine, queries = pl.ds(first, heads), pl.ds(first * group, heads * group)
    layout = plgpu.Layout.WG_STRIDED((piece, h // 2), vec_size=1)

    def used(smem: Ref, count: int = heads) -> Ref:
        """Return the rows without the padding."""
        return smem.at[pl.ds(0, count)]

    def load() -> None:
        k_heads, v_heads = (pl.ds(num_queries + i * num_kv_heads + first, heads) for i in range(2))
        copies = [(x_tch_ref.at[token, v_heads], used(v_smem))]
        for half, smem in zip(halves, k_smem, strict=True):
            copies.append((x_tch_ref.at[token, k_heads, half], used(smem)))
        if q_smem is not None:
            for half, smem in zip(halves, q_smem, strict=True):
                copies.append((x_tch_ref.at[token, queries, half], used(smem, heads * group)))
        if per_scale_smem is not None:
            copies.append((per_scale_kh_ref.at[0, mine, halves[0]], used(per_scale_smem[0])))
            copies.append((per_scale_kh_ref.at[1, mine], used(per_scale_smem[1])))
        if angles_smem is not None:
            for ref, smem in zip((cos_t_ref, sin_t_ref), angles_smem, strict=True):
                copies += [(ref.at[token], smem.at[y]) for y in range(piece)]
        for source, destination in copies:
            plgpu.copy_gmem_to_smem(source, destination, loaded)

    def rotated(smem: Ref, some: Any) -> tuple[jax.Array, jax.Array]:
        """Return both halves of a piece of heads, rotated and rounded to their dtype, in float32."""
        a, b = (plgpu.load(ref.at[some], layout=layout).astype(jnp.float32) for ref in smem)
        if angles_smem is None:
            return a, b
        cos, sin = (plgpu.load(ref, layout=layout) for ref in angles_smem)
        a, b = (x.astype(v_smem.dtype).astype(jnp.float32) for x in (a * cos - b * sin, b * cos + a * sin))
        return a, b

    def rotate_in_place(smem: Ref, z: jax.Array) -> None:
        some = pl.ds(z * piece, piece)
        for ref, x in zip(smem, rotated(smem, some), strict=True):
            ref[some] = x.astype(ref.dtype)

    def narrow(z: jax.Array) -> None:
        """Rotate one piece of the keys, and convert it and the values to fp8."""
        some = pl.ds(z * piece, piece)
        per_scale = plgpu.load(per_scale_smem[0].at[some], layout=layout)
        for ref, x in zip(fp8_smem[:2], rotated(k_smem, some), strict=True):
            ref[some] = _narrow(x * per_scale)
        wide = plgpu.Layout.WG_STRIDED((piece, h), vec_size=2)
        v = plgpu.load(v_smem.at[some], layout=wide).astype(jnp.float32)
        fp8_smem[2][some] = _narrow(v * plgpu.load(per_scale_smem[1].at[some], layout=wide))

    def store() -> None:
        block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
        *keys, values = fp8_smem or (*k_smem, v_smem)
        for half, smem in zip(halves, keys, strict=True):
            plgpu.copy_smem_to_gmem(used(smem), k_pool_ref.at[block, mine, offset, half])
        plgpu.copy_smem_to_gmem(used(values), v_pool_ref.at[block, mine, offset])

    @pl.when((slot >= 0) | (q_smem is not None))
    def write() -> None:
        load()
        plgpu.barrier_wait(loaded)
        if q_smem is not None:
            pl.loop(0, q_smem[0].shape[0] // piece)(functools.partial(rotate_in_place, q_smem))
        if fp8_smem is not None:
            pl.loop(0, v_smem.shape[0] // piece)(narrow)
        elif angles_smem is not None:
            pl.loop(0, v_smem.shape[0] // piece)(functools.partial(rotate_in_place, k_smem))
        plgpu.commit_smem()
        if q_smem is not None:
            for half, smem in zip(halves, q_smem, strict=True):
                plgpu.copy_smem_to_gmem(used(smem, heads * group), q_tnh_ref.at[token, queries, half])
        pl.when(slot >= 0)(store)
        plgpu.wait_smem_to_gmem(0)


def _narrow(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(FP8)


def _launch(
    k_pool_ref: Ref, v_pool_ref: Ref, k_tkh: jax.Array, v_tkh: jax.Array, slot_t: jax.Array, options: WriteOptions
) -> jax.Array | None:
    """Write keys and values through the refs, and return the rotated queries if there are any."""
    (t, k, h), q_tnh = k_tkh.shape, options.q_tnh
    half, dtype, fp8, rotated = h // 2, k_tkh.dtype, k_pool_ref.dtype == FP8, options.angles is not None
    group = 0 if q_tnh is None else q_tnh.shape[1] // k
    heads = next(n for n in range(min(k, MAX_HEADS), 0, -1) if k % n == 0 and n * (group + 2) <= MAX_ROWS)
    piece = pl.cdiv(WARPGROUP, half)
    cos_t, sin_t = options.angles or [jnp.zeros((1, half), jnp.float32)] * 2
    per_scale_kh = jnp.ones((2, k, h), jnp.float32)
    if options.k_scale_k is not None and options.v_scale_k is not None:
        per_scale_kh /= jnp.stack([options.k_scale_k, options.v_scale_k])[:, :, None]
    # XLA finds slices of one array here, and puts them together again without a copy.
    x_tch = jnp.concatenate([k_tkh, v_tkh] if q_tnh is None else [q_tnh, k_tkh, v_tkh], axis=1)

    def smem(columns: int, dtype: Any, rows: int = heads) -> Any:
        return plgpu.SMEM((pl.cdiv(rows, piece) * piece, columns), dtype)

    queries: Any = None if q_tnh is None else (smem(half, dtype, heads * group),) * 2
    grid = (k // heads, t)
    check_grid("kv_write", grid)
    out: list[jax.Array] = plgpu.kernel(
        functools.partial(_kernel, heads=heads, piece=piece),
        out_type=[] if q_tnh is None else [jax.ShapeDtypeStruct(q_tnh.shape, dtype)],
        grid=grid,
        grid_names=("k", "t"),
        scratch_types=dict[str, Any](
            q_smem=queries,
            k_smem=(smem(half, dtype), smem(half, dtype)),
            v_smem=smem(h, dtype),
            angles_smem=(smem(half, jnp.float32, piece),) * 2 if rotated else None,
            per_scale_smem=(smem(half, jnp.float32), smem(h, jnp.float32)) if fp8 else None,
            fp8_smem=(smem(half, FP8), smem(half, FP8), smem(h, FP8)) if fp8 else None,
            loaded=plgpu.Barrier(num_arrivals=3 + 2 * (q_tnh is not None) + 2 * piece * rotated + 2 * fp8),
        ),
        compiler_params=compiler_params(),
        kernel_name="kv_write",
    )(x_tch, cos_t, sin_t, per_scale_kh, slot_t, k_pool_ref, v_pool_ref)
    return out[0] if out else None


def write_kv(
    pools: Pools, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array, options: WriteOptions
) -> Written:
    """Compute `Ops.write_kv` in bfloat16 or float16.

    If the head dim of keys and values is smaller than the pools', XLA rotates and pads them first, and rotates the
    queries.
    """
    h, rotated_tnh = pools[0].shape[3], None
    check_supported(pools[0], dtype=k_tkh.dtype, num_heads=k_tkh.shape[1])
    if k_tkh.shape[2] < h:
        rotated_tnh = rotated_queries(options)
        if options.angles:
            k_tkh = rotate(k_tkh, *options.angles)
            options = replace(options, cos_t=None, sin_t=None, q_tnh=None)
        k_tkh, v_tkh = pad_head_dim(k_tkh, h), pad_head_dim(v_tkh, h)
    k_pool_ref, v_pool_ref = map(jax.new_ref, pools)
    if slot_mapping_t.shape[0]:
        launched_tnh = _launch(k_pool_ref, v_pool_ref, k_tkh, v_tkh, slot_mapping_t, options)
        rotated_tnh = launched_tnh if rotated_tnh is None else rotated_tnh
    else:
        rotated_tnh = options.q_tnh
    return jax.freeze(k_pool_ref), jax.freeze(v_pool_ref), rotated_tnh


def _copy_kernel(
    source_ref: Ref,  # [P, K, B, H]
    from_c_ref: Ref,  # [C]
    to_c_ref: Ref,  # [C], -1 = none
    destination_ref: Ref,  # [P, K, B, H]
    smem: Ref,  # [B, H]
    loaded: Ref,  # barrier
) -> None:
    c, head = lax.axis_index("c"), lax.axis_index("k")
    block = to_c_ref[c]

    @pl.when(block >= 0)
    def copy() -> None:
        plgpu.copy_gmem_to_smem(source_ref.at[from_c_ref[c], head], smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem, destination_ref.at[block, head])
        plgpu.wait_smem_to_gmem(0)


def _copy(source: jax.Array, from_c: jax.Array, to_c: jax.Array, *, into: Ref = None) -> Any:
    """Copy blocks of `source` into the ref `into`, or, without one, into a new array [C, K, B, H]."""
    _, k, b, h = source.shape
    (c,) = to_c.shape
    check_grid("copy_blocks", (k, c))
    kernel = plgpu.kernel(
        _copy_kernel,
        out_type=jax.ShapeDtypeStruct((c, k, b, h), source.dtype) if into is None else (),
        grid=(k, c),
        grid_names=("k", "c"),
        scratch_types=[plgpu.SMEM((b, h), source.dtype), plgpu.Barrier()],
        compiler_params=compiler_params(),
        kernel_name="copy_blocks",
    )
    return kernel(source, from_c, to_c) if into is None else kernel(source, from_c, to_c, into)


def copy_blocks(pool: jax.Array, sources_c: jax.Array, destinations_c: jax.Array) -> jax.Array:
    """Compute `Ops.copy_blocks` of a pool [P, K, B, H], through a copy [C, K, B, H]: a source may be overwritten."""
    if pool.ndim != 4:
        raise ValueError(f"pool has shape {list(pool.shape)}, expected [P, K, B, H]")
    dtype = jnp.bfloat16 if pool.dtype == FP8 else pool.dtype
    check_supported(pool, dtype=dtype, num_heads=pool.shape[1])
    into_c = jnp.arange(sources_c.shape[0], dtype=jnp.int32)
    blocks = _copy(pool, sources_c, jnp.where(destinations_c < 0, -1, into_c))
    pool_ref = jax.new_ref(pool)
    _copy(blocks, into_c, destinations_c, into=pool_ref)
    return jax.freeze(pool_ref)
