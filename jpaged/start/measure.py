"""Measurement of a model on its devices: it compiles and runs steps."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax

from jpaged.config import Limits, platform_defaults
from jpaged.runtime.compilation_cache import cache_folder
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.swap import TRANSFERS
from jpaged.start.agreement import leaders_values
from jpaged.start.pool import allocate
from jpaged.start.resolve import Resolved
from jpaged.start.step_costs import StepCosts, further_shapes, step_overhead, stored_costs, tokens_beside_decodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    """Measured numbers of an engine.

    Attributes:
        num_blocks: KV blocks on the devices.
        num_host_blocks: KV blocks on the host that preempted requests may be swapped to; 0: they are not swapped.
        costs: seconds of steps of the shapes that doubling gives; empty without a warm-up.
        tokens_beside_decodes: maximum tokens of a step with decodes; None: the limit of all steps.
        step_overhead: cost of a step without its tokens, in tokens; inf if it is unknown.
        block_swap_cost: cost of moving one block to the host and back, in tokens; 0 if it is not needed or unknown.
    """

    num_blocks: int
    num_host_blocks: int
    costs: StepCosts
    tokens_beside_decodes: int | None
    step_overhead: float
    block_swap_cost: float

    @classmethod
    def of(cls, runner: ModelRunner, resolved: Resolved, costs: StepCosts) -> Self:
        """Return the numbers that follow from a runner and its costs, and measure the cost of swapping if needed."""
        config, platform = resolved.config, resolved.device.platform
        num_host_blocks = 0 if config.preemption_mode == "recompute" else runner.blocks.num_host_blocks
        chunk, swap_cost = None, 0.0
        if costs and not config.max_num_batched_tokens:
            max_cost = platform_defaults(platform).max_chunk_cost
            chunk = tokens_beside_decodes(costs, max_cost, padded=runner.pads)
        if costs and num_host_blocks and config.preemption_mode == "auto":
            swap_cost = block_swap_cost(runner, costs)
        overhead = step_overhead(costs, platform)
        return cls(runner.blocks.num_blocks, num_host_blocks, costs, chunk, overhead, swap_cost)


def measure(runner: ModelRunner, resolved: Resolved, *, progress: bool = True) -> Measured:
    """Allocate a runner's KV pool, compile its steps, and measure them.

    All processes that share the devices call it, and run the same programs in the same order.

    Args:
        progress: show a progress bar on stderr instead of lines in the log.

    Raises:
        ValueError: there is no memory for the pool, or for a step beside it.
    """
    allocate(runner, resolved)
    if resolved.config.warm_up:
        return Measured.of(runner, resolved, warm_up(runner, resolved.limits, progress=progress))
    runner.late = set(runner.shapes.buckets.all)
    return Measured.of(runner, resolved, {})


def warm_up(runner: ModelRunner, limits: Limits, *, progress: bool = True) -> StepCosts:
    """Compile every executable, or load it from jax's cache on disk, by running it on padding.

    Then the costs of steps are measured, unless they are stored, and worthwhile shapes are added.

    Returns:
        The costs of steps of the shapes that doubling gives.

    Raises:
        ValueError: a step needs more memory than the pool leaves.
    """
    start, ladders, rows, blocks = time.monotonic(), runner.shapes.buckets.all, runner.rows, runner.blocks
    with blocks.exhaustion():
        runner.compile(ladders, progress=progress)
        blocks.warm_up()
        rows.warm_up()
        jax.block_until_ready((blocks.pool, rows.state, rows.last_tokens))
        costs = stored_costs(
            cache_folder() / "step_costs", costs_key(runner, limits), ladders,
            lambda bucket: _seconds(lambda: runner.run_padding(bucket)),
            lambda seconds: leaders_values(seconds, runner.placement),
        )  # fmt: skip
        if runner.pads and (further := further_shapes(costs)):
            runner.shapes.add(further)
            runner.compile(list(further), progress=progress)
    logger.info("compiled in %.1f seconds", time.monotonic() - start)
    return costs


def costs_key(runner: ModelRunner, limits: Limits) -> str:
    """Return a text of everything that the costs of steps depend on."""
    placement = runner.placement
    processes = (placement.num_processes,) if placement.num_processes > 1 else ()
    device = placement.platform, placement.device.device_kind, placement.size, os.cpu_count(), *processes
    stored = sorted({str(leaf.dtype) for leaf in runner.tree.expected.values()})
    dtype = runner.outputs.attention_dtype
    described = runner.kind, runner.config, dtype, stored, limits, runner.kernels.name, runner.blocks.cache.dtype
    return repr((jax.__version__, device, *described))


def block_swap_cost(runner: ModelRunner, costs: StepCosts) -> float:
    """Return the number of tokens that could be computed while one block moves to the host and back."""
    bucket, size = runner.shapes.buckets.mixed[-1], TRANSFERS[-1]
    block = _seconds(lambda: runner.blocks.swap_round_trip(size))
    return (block / size) / (costs[bucket] / bucket.num_tokens)


def _seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    """Return the time of the shortest of a few runs."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))
