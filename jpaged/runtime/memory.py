"""Memory of a device, and the number of KV blocks that fit into it."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax

from jpaged.config import EngineConfig

logger = logging.getLogger(__name__)

# On a CPU the pool shares the memory with everything else, so it stays modest unless it is given a size.
MAX_CPU_POOL_BYTES = 4 * 2**30
MAX_CPU_MEMORY_SHARE = 0.25


def pool_size(
    devices: Sequence[jax.Device],
    *,
    wanted: int,
    utilization: float,
    block_bytes: int,
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
    sampling: Callable[[], int],
    model: Callable[[int], int],
) -> int:
    """Return the number of blocks that fit into every device's memory with the temporaries of the largest steps.

    The steps are compiled as the warm-up will need them. Sampling does not depend on the pool, and usually needs more
    memory than the model's part of a step. If it needs less, that part is compiled again for a smaller pool.

    Args:
        devices: the devices of this process.
        wanted: maximum number of blocks that could ever be used; it limits only the pool on a CPU.
        block_bytes: bytes of a block on each device.
        agree: return the number for all processes that share the pool.
        sampling: return the bytes that sampling and swapping need.
        model: return the bytes that the model's part of a step needs with a pool of a number of blocks.
    """
    stats = [device.memory_stats() for device in devices]
    if not all(each and "bytes_limit" in each for each in stats):
        return agree(cpu_num_blocks(wanted, block_bytes * len(devices)))

    def fitting(temporaries: int) -> int:
        return min(
            fitting_blocks(
                limit=each["bytes_limit"], in_use=each["bytes_in_use"], utilization=utilization,
                bytes_per_block=block_bytes, temporaries=temporaries,
            )
            for each in stats
        )  # fmt: skip

    logger.info("compiling the largest steps, to measure the memory that they leave for the KV pool")
    beside = sampling()
    num_blocks = agree(fitting(beside))  # the processes compile for one number, as XLA's autotuning expects
    inside = model(num_blocks)
    return agree(num_blocks if inside <= beside else fitting(inside))


def temporaries(steps: Iterable[jax.stages.Lowered]) -> int:
    """Return the maximum bytes that one of several steps needs for temporaries, as XLA reports them."""
    analyses = [step.compile().memory_analysis() for step in steps]
    most: int = max(analysis.temp_size_in_bytes for analysis in analyses if analysis)
    return most


def fitting_blocks(*, limit: int, in_use: int, temporaries: int, utilization: float, bytes_per_block: int) -> int:
    """Return the blocks that fit into `utilization` of `limit` bytes with the memory in use and a step's temporaries.

    Raises:
        ValueError: not one block fits; the message has the numbers.
    """
    available = math.floor(limit * utilization) - in_use - temporaries
    if available < bytes_per_block:
        raise ValueError(
            f"gpu_memory_utilization: {utilization} of {limit / 2**30:.2f} GiB leaves no memory for the KV pool after "
            f"{in_use / 2**30:.2f} GiB in use and {temporaries / 2**30:.2f} GiB of temporaries; a block takes "
            f"{bytes_per_block / 2**20:.2f} MiB"
        )
    return available // bytes_per_block


def cpu_num_blocks(wanted: int, bytes_per_block: int) -> int:
    """Return the blocks of a pool on a CPU: the wanted number, within a modest share of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = min(MAX_CPU_POOL_BYTES, math.floor(memory * MAX_CPU_MEMORY_SHARE))
    return max(1, min(wanted, room // bytes_per_block))


def given_num_blocks(config: EngineConfig, bytes_per_block: int, available: int) -> int | None:
    """Return the number of KV blocks that the config sets, as a number or in bytes; None if it sets neither.

    Raises:
        ValueError: not one block fits into the given bytes, or the blocks take more than the `available` bytes.
    """
    num_blocks, given = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
    field = "num_gpu_blocks_override"
    if given is not None:
        field, num_blocks = "kv_cache_memory_bytes", given // bytes_per_block
        if not num_blocks:
            raise ValueError(f"{field}: must be at least {bytes_per_block}, the bytes of one block, not {given}")
    if num_blocks and (wanted := num_blocks * bytes_per_block) > available:
        raise ValueError(
            f"{field}: {num_blocks} blocks take {wanted / 2**30:.2f} GiB, more than the "
            f"{available / 2**30:.2f} GiB of free memory (at most {available // bytes_per_block} blocks)"
        )
    return num_blocks


def available_memory(devices: Sequence[jax.Device]) -> int:
    """Return the free bytes of the device with the fewest; CPUs share those of the host."""
    stats = [device.memory_stats() for device in devices]
    if not all(each and "bytes_limit" in each for each in stats):
        return available_host_memory() // len(devices)
    least: int = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    return least


def available_host_memory() -> int:
    """Return the bytes of the host's memory that programs can allocate without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextlib.contextmanager
def explain_exhaustion(field: str, pool: str) -> Iterator[None]:
    """Convert the exhaustion of the device's memory to a ValueError with the field to change and the pool in words."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{field}: no memory is left with a KV pool of {pool}; use less ({reason})") from error
