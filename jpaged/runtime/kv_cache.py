"""The KV pool on the device: how large a block is, how many fit, and the zeroed arrays."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jpaged.config import ModelConfig

# On a CPU the pool shares the memory with everything else, so it stays modest unless it is given a size.
MAX_CPU_POOL_BYTES = 4 * 2**30
MAX_CPU_MEMORY_SHARE = 0.25


def block_bytes(model: ModelConfig, block_size: int, head_dim: int, dtype: str) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    itemsize = jnp.dtype(dtype).itemsize
    return 2 * model.num_hidden_layers * model.num_key_value_heads * block_size * head_dim * itemsize


def fitting_blocks(*, limit: int, in_use: int, temporaries: int, utilization: float, bytes_per_block: int) -> int:
    """Blocks that fit into `utilization` of a memory of `limit` bytes, beside what is in use and a step's temporaries.

    Raises ValueError, with the numbers, if not one fits.
    """
    available = math.floor(limit * utilization) - in_use - temporaries
    if available < bytes_per_block:
        raise ValueError(
            f"gpu_memory_utilization: {utilization} of {limit / 2**30:.2f} GiB leaves no room for the KV pool beside "
            f"{in_use / 2**30:.2f} GiB in use and {temporaries / 2**30:.2f} GiB of temporaries; a block takes "
            f"{bytes_per_block / 2**20:.2f} MiB"
        )
    return available // bytes_per_block


def modest_blocks(wanted: int, bytes_per_block: int) -> int:
    """Blocks of a pool on a CPU: what is wanted, within a modest share of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = min(MAX_CPU_POOL_BYTES, math.floor(memory * MAX_CPU_MEMORY_SHARE))
    return max(1, min(wanted, room // bytes_per_block))


def check_override(num_blocks: int, bytes_per_block: int, available: int) -> None:
    """Raise ValueError if a pool of `num_blocks` takes more than the `available` bytes."""
    wanted = num_blocks * bytes_per_block
    if wanted > available:
        raise ValueError(
            f"num_gpu_blocks_override: {num_blocks} blocks take {wanted / 2**30:.2f} GiB, more than the "
            f"{available / 2**30:.2f} GiB of memory that are free (at most {available // bytes_per_block} blocks)"
        )


def available_memory(device: jax.Device) -> int:
    """Return the bytes of a device's memory that are free; of the host's for a CPU."""
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else available_host_memory()


def available_host_memory() -> int:
    """Return the bytes of the host's memory that programs can have without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def exhaustion_named(field: str, pool: str) -> Iterator[None]:
    """Raise ValueError, with the field to change and the pool in words, where the device's memory is exhausted."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{field}: no memory is left with a KV pool of {pool}; use less ({reason})") from error


def allocate_pool(
    model: ModelConfig, num_blocks: int, block_size: int, head_dim: int, dtype: str, device: jax.Device
) -> list[jax.Array]:
    """[k of layer 0, v of layer 0, k of layer 1, ...], each [P, K, B, H], all zero.

    Zero, not empty: an attention kernel may load a block's unwritten rows, and 0 * NaN is NaN.
    """
    shape = (num_blocks, model.num_key_value_heads, block_size, head_dim)
    with jax.default_device(device):
        return [jnp.zeros(shape, dtype, device=device) for _ in range(2 * model.num_hidden_layers)]
