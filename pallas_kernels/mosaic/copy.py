"""Copy of whole blocks of a pool, in place (Mosaic GPU)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import FP8
from pallas_kernels.mosaic.support import check_grid, check_supported, compiler_params
from pallas_kernels.options import Ref


def _kernel(
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


def _launch(source: jax.Array, from_c: jax.Array, to_c: jax.Array, *, into: Ref = None) -> Any:
    """Copy blocks of `source` into the ref `into`, or, without one, into a new array [C, K, B, H]."""
    _, k, b, h = source.shape
    (c,) = to_c.shape
    check_grid("copy_blocks", (k, c))
    kernel = plgpu.kernel(
        _kernel,
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
    blocks = _launch(pool, sources_c, jnp.where(destinations_c < 0, -1, into_c))
    pool_ref = jax.new_ref(pool)
    _launch(blocks, into_c, destinations_c, into=pool_ref)
    return jax.freeze(pool_ref)
