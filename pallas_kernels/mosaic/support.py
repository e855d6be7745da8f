"""What the Mosaic GPU kernels can serve."""

import functools
from typing import Any

import jax

from pallas_kernels import checks

MAX_KV_HEADS = 128  # one token's keys are one TMA box, at most 256 rows, and fit shared memory with its values

unsupported = functools.partial(checks.unsupported, dtypes=("bfloat16", "float16"), max_kv_heads=MAX_KV_HEADS)


def check_supported(pool: jax.Array, *, dtype: Any, num_heads: int) -> None:
    """Raises NotImplementedError unless these kernels serve `num_heads` query heads of a dtype over such a pool."""
    checks.check_supported("Mosaic GPU", unsupported, pool, dtype=dtype, num_heads=num_heads)
