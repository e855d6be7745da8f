"""Size of the KV pool: the blocks that fit into the memory of the devices and of the host."""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpaged.config import EngineConfig
from jpaged.core.pages import PAGES_PER_SEQUENCE, divide_memory
from jpaged.models.decoder import layer_specs
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.swap import TRANSFERS
from jpaged.start.resolve import Resolved, check_num_blocks
from pallas_kernels import Kernels

logger = logging.getLogger(__name__)


def allocate(runner: ModelRunner, resolved: Resolved, beside: int = 0) -> None:
    """Allocate a runner's KV pool: of the size that the config sets, else the largest that leaves room for steps.

    All processes that share the devices call it, and get the same number of blocks.

    Args:
        beside: bytes of a block of another pool that will be allocated later: the memory is enough for as many of its
            blocks. This pool then has at most as many blocks as could ever be used.

    Raises:
        ValueError: the pool does not fit, or has fewer blocks than there are sequences.
    """
    config, limits, blocks = resolved.config, resolved.limits, runner.blocks
    host_kib = _least(int(min(config.swap_space * 2**20, available_host_memory() // 2**11)), runner.placement)
    devices = runner.placement.local_devices
    page_bytes, block_bytes = blocks.cache.states.page_bytes, blocks.block_bytes
    pages_wanted = PAGES_PER_SEQUENCE * limits.max_num_seqs if page_bytes else 0
    wanted = limits.max_num_seqs * blocks.cache.most_blocks(limits)
    num_host_blocks = host_kib * 2**10 // (block_bytes * len(devices))
    num_host_blocks, num_host_pages = divide_memory(num_host_blocks, block_bytes, page_bytes, limits.max_num_seqs)
    num_blocks = configured_num_blocks(config, blocks.block_bytes, available_memory(devices))
    reason = sized_by = "kv_cache_memory_bytes" if config.kv_cache_memory_bytes else "num_gpu_blocks_override"
    if num_blocks is None:
        wanted += -(-pages_wanted * page_bytes // block_bytes)
        moved_bytes = 2 * TRANSFERS[-1] * blocks.block_bytes if num_host_blocks else 0
        num_blocks = fill_memory(
            runner, config.gpu_memory_utilization, wanted=wanted, moved_bytes=moved_bytes, beside=beside
        )  # fmt: skip
        num_blocks = min(num_blocks, wanted) if beside else num_blocks
        if resolved.device.platform != "cpu":
            reason = sized_by = "gpu_memory_utilization"
        else:
            reason = "enough for all sequences" if num_blocks == wanted else "a quarter of the memory, at most 4 GiB"
    num_pages = pages_wanted
    if not config.num_gpu_blocks_override:
        num_blocks, num_pages = divide_memory(num_blocks, block_bytes, page_bytes, pages_wanted)
    # Preempted requests need no more than all sequences do. Copies of evicted blocks can be more than the pool has.
    num_host_blocks = min(num_host_blocks, max(wanted, 4 * num_blocks) if config.enable_prefix_caching else wanted)
    check_num_blocks(limits, num_blocks, len(blocks.cache.groups.windows))
    blocks.allocate(num_blocks, num_host_blocks, sized_by, num_pages, num_host_pages)
    if num_pages:
        logger.info("states of recurrent layers: %d pages of %.2f MiB, of the pool", num_pages, page_bytes / 2**20)
    if 0 < num_pages < limits.max_num_seqs:
        logger.warning(
            "max_num_seqs: %d sequences have %d pages of states, so that some wait", limits.max_num_seqs, num_pages
        )
    used = "; a block takes memory once it is used" if blocks.is_lazy else ""
    logger.info(
        "KV pool: %d blocks of %d tokens (%s, %s): %s%s", num_blocks, limits.block_size, blocks.size,
        blocks.cache.dtype, reason, used,
    )  # fmt: skip


def check_pool(resolved: Resolved, placement: Placement, kernels: Kernels, dtype: str) -> None:
    """Check a size of the pool that the config sets, before anything is loaded or compiled.

    Args:
        dtype: dtype of keys.

    Raises:
        ValueError: the pool does not fit, or has fewer blocks than there are sequences.
    """
    config, limits = resolved.config, resolved.limits
    cache = KVCache.of(
        resolved.model, limits.block_size, config.pool_dtype(dtype), kernels, layer_specs(resolved.model),
        max_model_len=limits.max_model_len,
    )  # fmt: skip
    memory = available_memory(placement.local_devices)
    if num_blocks := configured_num_blocks(config, cache.block_bytes // placement.kv_size, memory):
        check_num_blocks(limits, num_blocks)


def fill_memory(
    runner: ModelRunner, utilization: float, *, wanted: int, moved_bytes: int, beside: int = 0
) -> int:  # fmt: skip
    """Return the number of blocks that fit into every device's memory with the temporaries of the largest steps.

    The steps are compiled as the warm-up will need them. Sampling does not depend on the pool, and usually needs more
    memory than the model's part of a step. If it needs less, that part is compiled again for a smaller pool.

    Args:
        wanted: maximum number of blocks that could ever be used; it limits only the pool on a CPU.
        moved_bytes: bytes that swapping needs.
        beside: as in `allocate`.
    """
    placement, block_bytes = runner.placement, runner.blocks.block_bytes + beside
    stats = [device.memory_stats() for device in placement.local_devices]
    if not all(each and "bytes_limit" in each for each in stats):
        return _least(cpu_num_blocks(wanted, block_bytes * len(stats)), placement)

    def fitting(temporaries: int) -> int:
        return min(
            fitting_blocks(
                limit=each["bytes_limit"], in_use=each["bytes_in_use"], utilization=utilization,
                bytes_per_block=block_bytes, temporaries=temporaries,
            )
            for each in stats
        )  # fmt: skip

    logger.info("compiling the largest steps, to measure the memory that they leave for the KV pool")
    outside = max(moved_bytes, sampling_temporaries(runner))
    num_blocks = _least(fitting(outside), placement)  # XLA's autotuning expects the same shapes in all processes
    inside = model_temporaries(runner, num_blocks)
    return _least(num_blocks if inside <= outside else fitting(inside), placement)


def _least(number: int, placement: Placement) -> int:
    """Return the least number of all processes that share a mesh. All of them must call it."""
    if placement.num_processes == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def model_temporaries(runner: ModelRunner, num_blocks: int) -> int:
    """Return the bytes that the model's part of the largest steps needs in addition to parameters and pool."""
    lowering, buckets = runner.lowering(), runner.shapes.buckets
    return temporaries(lowering.forward(bucket, num_blocks) for bucket in (buckets.decode[-1], buckets.mixed[-1]))


def sampling_temporaries(runner: ModelRunner) -> int:
    """Return the bytes that the largest steps need for samples and prompt logprobs."""
    lowering, buckets = runner.lowering(), runner.shapes.buckets
    samplings = [lowering.sampling(bucket, Settings.ANY) for bucket in (buckets.decode[-1], buckets.mixed[-1])]
    return temporaries([*samplings, lowering.scores(buckets.mixed[-1])])


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
    """Return the blocks of a pool on a CPU: the wanted number, in a quarter of the memory and at most 4 GiB.

    The pool shares the memory with everything else, so it stays modest unless it is given a size.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(wanted, min(4 * 2**30, memory // 4) // bytes_per_block))


def configured_num_blocks(config: EngineConfig, bytes_per_block: int, available: int) -> int | None:
    """Return the number of KV blocks that the config sets, as a number or in bytes; None if it sets neither.

    Raises:
        ValueError: not one block fits into the configured bytes, or the blocks take more than the `available` bytes.
    """
    num_blocks, pool_bytes = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
    field = "num_gpu_blocks_override"
    if pool_bytes is not None:
        field, num_blocks = "kv_cache_memory_bytes", pool_bytes // bytes_per_block
        if not num_blocks:
            raise ValueError(f"{field}: must be at least {bytes_per_block}, the bytes of one block, not {pool_bytes}")
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
