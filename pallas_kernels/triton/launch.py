"""Common parts of the Pallas-Triton kernels: unsupported arguments, the launch, and the view of an fp8 pool."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import pallas_call
from jax.experimental.pallas import triton as plt

from pallas_kernels import checks

# One axis of the grid counts KV heads, and CUDA allows no more.
unsupported = functools.partial(checks.unsupported, dtypes=("bfloat16", "float16", "float32"), max_kv_heads=65_535)


def check_supported(x: jax.Array, pool: jax.Array) -> None:
    """Raise NotImplementedError unless these kernels serve heads `x` [rows, heads, H] over such a pool."""
    checks.check_supported("Pallas-Triton", unsupported, pool, dtype=x.dtype, num_heads=x.shape[1])


def iota(size: int) -> jax.Array:
    """Return 0 to `size` - 1 as int32."""
    return lax.iota(jnp.int32, size)


def launch(
    name: str,
    kernel: Callable[..., None],
    *arrays: jax.Array,
    grid: tuple[int, ...],
    out_types: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int] | None = None,
    num_warps: int,
    num_stages: int = 1,
) -> list[jax.Array]:
    """Run `kernel(*refs)`, one program per point of the grid, on whole arrays.

    Args:
        aliases: {input: output that is written in its place}.
    """
    whole_arrays: list[Any] = [*arrays, *out_types]
    for x in whole_arrays:
        # For arrays of up to 2^32 bytes, Triton counts elements in int32. That is too small if elements have one byte.
        if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
            raise NotImplementedError(
                f"Pallas-Triton kernels: {x.dtype}{list(x.shape)} has {x.size} elements of one byte; "
                f"supported are up to {2**31}, and from {2**32 + 1} on"
            )

    def named(*refs: Any) -> None:
        kernel(*refs)

    named.__name__ = name  # Triton's compiler and profilers take it from here
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out: list[jax.Array] = pallas_call(
        named,
        grid=grid,
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(out_types),
        out_shape=list(out_types),
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )(*arrays)
    return out


def as_stored(pool: jax.Array) -> jax.Array:
    """Return a pool as the kernels see it: an fp8 pool as its bytes.

    Triton can't convert fp8 below compute capability 8.9.
    """
    return lax.bitcast_convert_type(pool, jnp.uint8) if pool.dtype == checks.FP8 else pool
