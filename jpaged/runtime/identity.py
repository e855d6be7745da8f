"""Identity of a runner's computations: the settings that bits depend on, and a hash of the parameters."""

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jpaged.models.layers import SCALE
from jpaged.progress import track
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement
from pallas_kernels import Kernels

logger = logging.getLogger(__name__)


def versions() -> dict[str, str]:
    """Return the versions that must be the same wherever the same bits are computed."""
    installed = {}
    for name in ("jpaged", "jax", "jaxlib"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def numerics_of(
    kind: str, leaves: Mapping[str, Any], kernels: Kernels, cache: KVCache, placement: Placement
) -> dict[str, str | int]:
    """Return the settings that the bits of an output depend on, by name.

    Args:
        kind: name of the module's class.
        leaves: shapes and dtypes of the parameters by name.
    """
    multiplies = placement.size == 1 and kernels.multiplies
    weights = (leaves.get(name.removesuffix(SCALE)) for name in leaves if name.endswith(SCALE))
    quantized = {str(weight.dtype) for weight in weights if weight is not None}
    return {
        **versions(), "model": kind, "device": _device(placement, kernels.name), "dtype": str(cache.attention_dtype),
        "activation_dtype": "int8" if kernels.int8_rows else str(cache.attention_dtype),
        "quantization": ", ".join(sorted(quantized)) or "none", "kv_cache_dtype": cache.dtype, "kernels": kernels.name,
        "products": "kernels" if multiplies else "XLA", "block_size": cache.block_size,
        "tensor_parallel_size": placement.size,
    }  # fmt: skip


def hash_arrays(described: str, arrays: Mapping[str, jax.Array]) -> str:
    """Return a hash of the names, shapes, dtypes and bits of arrays, 16 bytes in hexadecimal digits.

    The arrays are copied to the host one after the other. A processor core hashes about 1 GB/s.

    Args:
        described: a text on which the computation depends, too.
    """
    start, total = time.monotonic(), hashlib.blake2b(described.encode(), digest_size=16)
    for name, array in track(arrays.items(), len(arrays), "hashed", "array", bar=False):
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        total.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        host = np.ascontiguousarray(jax.device_get(array))
        total.update(host.reshape(-1).view(np.uint8).data)
    logger.info("hashed the parameters in %.1f seconds", time.monotonic() - start)
    return total.hexdigest()


def _device(placement: Placement, kernels: str) -> str:
    """Return the kind of the devices; for compiled CPU kernels, the processor and its instructions that they use."""
    if kernels != "cpu":
        return str(placement.device.device_kind)
    from pallas_kernels.cpu.code import Machine

    machine = Machine.host()
    bfloat16 = "tiles" if machine.has_bf16_tiles else "pairs" if machine.has_bf16_dot else "float32"
    int8 = "tiles" if machine.has_int8_tiles else "float32"
    return f"{machine.cpu}, vectors of {machine.lanes}, bfloat16 in {bfloat16}, int8 in {int8}"
