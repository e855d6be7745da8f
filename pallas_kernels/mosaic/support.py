"""Limits of the Mosaic GPU kernels."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import checks

MAX_KV_HEADS = 128  # one token's keys are one TMA box, at most 256 rows, and fit shared memory with its values
HOPPER_SMS = 132
MAX_GRID = (65_535, 65_535, 2**31 - 1)  # thread blocks along CUDA's z, y and x: the last axis of a Pallas grid is x

unsupported = functools.partial(checks.unsupported, dtypes=("bfloat16", "float16"), max_kv_heads=MAX_KV_HEADS)


def check_supported(pool: jax.Array, *, dtype: Any, num_heads: int) -> None:
    """Raise NotImplementedError unless these kernels serve `num_heads` query heads of a dtype over such a pool."""
    checks.check_supported("Mosaic GPU", unsupported, pool, dtype=dtype, num_heads=num_heads)


def check_grid(kernel: str, grid: Sequence[int]) -> None:
    """Raise NotImplementedError if CUDA can't launch this many thread blocks along an axis."""
    for axis, size, limit in zip("zyx"[-len(grid) :], grid, MAX_GRID[-len(grid) :], strict=True):
        if size > limit:
            raise NotImplementedError(f"{kernel}: {size} thread blocks along {axis} are not supported, at most {limit}")


def compiler_params(**options: Any) -> Any:
    """Return compiler parameters with the lowering that the kernels are written for.

    jax's default changed in 0.11. Under "warpgroup" it infers the layouts of values and proves the alignment of slices
    of swizzled memory; under "lane" it compiles slices silently that TMA can't write.
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **options)


def num_sms() -> int:
    """Return the number of multiprocessors of the device that is compiled for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    known = abstract.num_cores if abstract is not None else getattr(jax.devices()[0], "core_count", None)
    return known or HOPPER_SMS  # a CPU that interprets kernels has none


def store_transposed(ref: Any, x: Any) -> None:
    """Store x [a, b] of a WGMMA layout into shared memory [b, a] whose rows are then copied one by one."""
    if x.dtype.itemsize == 4:
        ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
    elif hasattr(plgpu, "store"):  # from jax 0.12 on, which infers no layout for this store unless told to
        plgpu.store(ref.T, x, optimized=False)
    else:
        ref.T[...] = x
