"""Writing one step's keys and values into the paged pool, in place (Mosaic GPU).

Also here, because every kernel reads or writes the pool: what a pool may be, and the checks that say so.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_GROUP = 16  # query heads per KV head
MAX_KV_HEADS = 128  # one token's keys are one TMA box, at most 256 rows, and fit shared memory with its values


def _write_kernel(
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


def _launch(k_pool_ref: Any, v_pool_ref: Any, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array) -> None:
    t, k, h = k_tkh.shape
    plgpu.kernel(
        _write_kernel,
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


def write_kv(
    k_pool: jax.Array, v_pool: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, slot_mapping_t: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes token t's key and value to slot `slot_mapping_t[t]` = block_id * B + offset of the pools.

    Args:
      k_pool, v_pool: [P, K, B, H], bfloat16 or float16. Written in place when the enclosing jit donates them and
        returns them in the order of its arguments; otherwise XLA copies them first.
      k_tkh, v_tkh: [T, K, H], the pools' dtype.
      slot_mapping_t: [T] int32, no slot twice; -1 is padding and writes nothing.

    Returns:
      The two pools.

    Raises:
      ValueError: shapes or dtypes don't fit together.
      NotImplementedError: see `unsupported`.
    """
    _, k, b, h = check_pools(k_pool, v_pool)
    t = k_tkh.shape[0]
    check_array("k_tkh", k_tkh, (t, k, h), k_pool.dtype)
    check_array("v_tkh", v_tkh, (t, k, h), k_pool.dtype)
    check_array("slot_mapping_t", slot_mapping_t, (t,), jnp.int32)
    check_supported(dtype=k_pool.dtype, head_dim=h, block_size=b, num_heads=k, num_kv_heads=k)
    k_pool_ref, v_pool_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    _launch(k_pool_ref, v_pool_ref, k_tkh, v_tkh, slot_mapping_t)
    return jax.freeze(k_pool_ref), jax.freeze(v_pool_ref)


def unsupported(*, dtype: Any, head_dim: int, block_size: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why these kernels can't serve a model with such a pool, in words; None when they can."""
    dtype = jnp.dtype(dtype).name
    if dtype not in DTYPES:
        return f"dtype {dtype} is not supported, only {_either(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim} is not supported, only {_either(HEAD_DIMS)}"
    if block_size not in BLOCK_SIZES:
        return f"block size {block_size} is not supported, only {_either(BLOCK_SIZES)}"
    if not 1 <= num_kv_heads <= MAX_KV_HEADS:
        return f"{num_kv_heads} KV heads are not supported, only 1 to {MAX_KV_HEADS}"
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        return (
            f"{num_heads} query heads over {num_kv_heads} KV heads are not supported, "
            f"only a whole number of query heads per KV head from 1 to {MAX_GROUP}"
        )
    return None


def check_supported(**model: Any) -> None:
    """Raises NotImplementedError with the reason that `unsupported` gives, if any."""
    if reason := unsupported(**model):
        raise NotImplementedError(f"Mosaic GPU kernels: {reason}")


def check_array(name: str, array: jax.Array, shape: Sequence[int], dtype: Any) -> None:
    """Raises ValueError unless `array` has this shape and dtype."""
    given, expected = (array.shape, jnp.dtype(array.dtype)), (tuple(shape), jnp.dtype(dtype))
    if given != expected:
        raise ValueError(f"{name} is {given[1]}{list(given[0])}, expected {expected[1]}{list(expected[0])}")


def check_pools(k_pool: jax.Array, v_pool: jax.Array) -> tuple[int, int, int, int]:
    """Raises ValueError unless the pools are two alike [P, K, B, H]; returns their shape."""
    if k_pool.ndim != 4 or math.prod(k_pool.shape) == 0:
        raise ValueError(f"k_pool has shape {list(k_pool.shape)}, expected [P, K, B, H] with none of them 0")
    check_array("v_pool", v_pool, k_pool.shape, k_pool.dtype)
    p, k, b, h = k_pool.shape
    return p, k, b, h


def _either(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
