"""Kernels for CPUs, which LLVM compiles on the machine where they run. They need llvmlite.

They are attention over the blocks of the pool, writes into it, products with weights and with matrices of low rank,
norms, and the ops of recurrent layers and of sampling. XLA copies blocks as fast as memory allows.
"""

import importlib.util
from typing import Any

import jax.numpy as jnp

from pallas_kernels.checks import FP8
from pallas_kernels.reference import copy_blocks

DTYPES = ("float32", "bfloat16", "float16")
SKIPS_ROWS = True  # of products, see `ops.Implementation`

if importlib.util.find_spec("llvmlite"):
    from pallas_kernels.cpu.attention import paged_decode_attention, ragged_paged_attention
    from pallas_kernels.cpu.code import Machine
    from pallas_kernels.cpu.conv import causal_conv
    from pallas_kernels.cpu.delta import delta_rule
    from pallas_kernels.cpu.lora import low_rank
    from pallas_kernels.cpu.norm import rms_norm
    from pallas_kernels.cpu.product import product, usual_target
    from pallas_kernels.cpu.sampling import argmax_and_lse, gumbel, gumbel_argmax, ranks, top
    from pallas_kernels.cpu.writes import write_kv
    from pallas_kernels.cpu.zeros import zeros


def unsupported(*, dtype: Any, pool_dtype: Any, **shapes: int) -> str | None:
    """Return the reason why the kernels can't serve a model with such pools; None if they can."""
    dtype, pool_dtype = jnp.dtype(dtype).name, jnp.dtype(pool_dtype)
    if not importlib.util.find_spec("llvmlite"):
        return "llvmlite is not installed (pip install llvmlite)"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not supported, only {', '.join(DTYPES)}"
    pool_dtypes = (*(DTYPES if dtype == "float32" else (dtype,)), FP8.name)
    if pool_dtype.name not in pool_dtypes:
        return f"pools of {pool_dtype.name} are not supported, only {' or '.join(pool_dtypes)}"
    try:
        usual_target(dtype)
    except Exception as error:
        return f"they do not compile on this machine: {error!r}"
    return None


def bfloat16_weights() -> tuple[str, ...]:
    """Return the dtypes of weights whose products with rows of bfloat16 are faster than those with rows of float32."""
    if importlib.util.find_spec("llvmlite") is None or Machine.host().lanes < 8:  # neither AVX2 nor AVX-512
        return ()
    return ("bfloat16", "int8") if Machine.host().has_int8_tiles else ("bfloat16",)


__all__ = [
    "argmax_and_lse", "bfloat16_weights", "causal_conv", "copy_blocks", "delta_rule", "gumbel", "gumbel_argmax",
    "low_rank", "paged_decode_attention", "product", "ragged_paged_attention", "ranks", "rms_norm", "top",
    "unsupported", "write_kv", "zeros",
]  # fmt: skip
