"""Measurement of a model on its devices: it compiles and runs steps. The times give shapes and sizes of chunks."""

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpaged.config import Limits, Speculation, platform_defaults
from jpaged.core.draft_costs import UNKNOWN, DecodeCosts
from jpaged.core.groups import Windows
from jpaged.runtime.batch import Bucket
from jpaged.runtime.compilation_cache import cache_folder, private_folder
from jpaged.runtime.placement import Placement
from jpaged.runtime.runner import ModelRunner
from jpaged.runtime.step_watch import StepWatch
from jpaged.runtime.swap import TRANSFERS
from jpaged.start.pool import allocate
from jpaged.start.resolve import Resolved

logger = logging.getLogger(__name__)

StepCosts = Mapping[Bucket, float]  # seconds, on empty contexts

# A shape between two others is worth its compilation if the larger one takes more than STEEP times the time of the
# smaller one, and more than LONG_S seconds.
STEEP, LONG_S = 1.5, 0.02
# Seconds in which a CPU schedules, decodes and sends one token of a stream, about as measured by
# `benchmarks/engine/isolation.py`.
CPU_TOKEN_S = 150e-6
LONG_CONTEXT = 2048  # tokens, at which the cost of reading a context is measured
VERSION = 6  # of the way in which costs are measured, and of kernels whose speed changed


class Measured(NamedTuple):
    """Measured numbers of an engine.

    Attributes:
        num_blocks: KV blocks on the devices.
        num_host_blocks: KV blocks on the host, for those of preempted requests and evicted ones of the prefix cache.
        num_pages, num_host_pages: pages of the states of recurrent layers, likewise.
        page_swap_cost: cost of moving a page, as `block_swap_cost`.
        windows: windows of the groups of layers.
        tokens_beside_decodes: maximum tokens of a step with decodes; None: the limit of all steps.
        step_overhead: cost of a step without its tokens, in tokens; inf if it is unknown.
        block_swap_cost: cost of moving one block to the host and back, in tokens; 0 if it is not needed or unknown.
        decode_costs: costs of decode steps.
        token_s: seconds of a token in the largest step; 0 if they are unknown.
    """

    num_blocks: int
    num_host_blocks: int
    windows: Windows
    tokens_beside_decodes: int | None
    step_overhead: float
    block_swap_cost: float
    decode_costs: DecodeCosts
    num_pages: int = 0
    num_host_pages: int = 0
    page_swap_cost: float = 0.0
    token_s: float = 0.0


def measure(runner: ModelRunner, resolved: Resolved, *, beside: int = 0, progress: bool = True) -> Measured:
    """Allocate a runner's KV pool, compile its steps, and measure them.

    All processes that share the devices call it, and run the same programs in the same order.

    Args:
        beside: bytes of a block of another pool that will be allocated later.
        progress: show a progress bar on stderr instead of lines in the log.

    Raises:
        ValueError: there is no memory for the pool, or for a step beside it.
    """
    allocate(runner, resolved, beside)
    config, limits, platform = resolved.config, resolved.limits, resolved.device.platform
    ladders = runner.shapes.buckets.all
    costs: StepCosts = {}
    if config.warm_up is False:
        runner.late = set(ladders)
    else:
        # Processes that share the devices must have the same shapes in every step.
        later = config.warm_up is None and not runner.pads and runner.placement.num_processes == 1
        costs = warm_up(runner, limits, later=later, progress=progress)
    swaps = config.enable_prefix_caching or config.preemption_mode != "recompute"
    num_host_blocks = runner.blocks.num_host_blocks if swaps else 0
    chunk, swap_cost = None, 0.0
    if costs and not config.max_num_batched_tokens:
        chunk = tokens_beside_decodes(costs, platform_defaults(platform).max_chunk_cost, padded=runner.pads)
    if costs and num_host_blocks and (config.enable_prefix_caching or config.preemption_mode == "auto"):
        swap_cost = block_swap_cost(runner, limits, costs)
    if costs and (further := [bucket for bucket in ladders if bucket not in runner.shapes.buckets.all]):
        runner.compile_later(further)
    overhead, decodes = step_overhead(costs, platform), decode_costs(runner, limits, costs)
    blocks, windows = runner.blocks, runner.blocks.cache.groups.windows
    pages = blocks.num_pages, blocks.num_host_pages, swap_cost * blocks.cache.states.page_bytes / blocks.block_bytes
    largest = max((bucket for bucket in costs if not bucket.decode), default=None)
    token_s = costs[largest] / largest.num_tokens if largest else 0.0
    return Measured(blocks.num_blocks, num_host_blocks, windows, chunk, overhead, swap_cost, decodes, *pages, token_s)


def warm_up(runner: ModelRunner, limits: Limits, *, later: bool = False, progress: bool = True) -> StepCosts:
    """Compile every executable, or load it from jax's cache on disk, by running it on padding.

    Then the costs of steps are measured, unless they are stored, and worthwhile shapes are added.

    Args:
        later: compile the shape that serves any step, and the others in the background, beside traffic.

    Returns:
        The costs of steps of the shapes that doubling gives, and of one sequence where padding costs nothing.

    Raises:
        ValueError: a step needs more memory than the pool leaves.
    """
    start, buckets, rows, blocks = time.monotonic(), runner.shapes.buckets, runner.rows, runner.blocks
    ladders = buckets.all
    if later:
        buckets.keep(buckets.mixed[-1:])
    with blocks.exhaustion():
        runner.compile(buckets.all, progress=progress)
        blocks.warm_up(swaps=not later)
        rows.warm_up()
        runner.adapters.warm_up()
        jax.block_until_ready((blocks.pool, rows.state, rows.last_tokens))
        run: Callable[[Bucket], Any] = lambda bucket: runner.run_padding(buckets.fit(*bucket), bucket.num_tokens)
        measured = ladders if runner.pads else (*ladders, Bucket(1, 1, True))  # a single stream
        costs = _stored(runner, limits, "steps", {bucket: partial(run, bucket) for bucket in dict.fromkeys(measured)})
        if runner.pads and (further := further_shapes(costs)):
            runner.shapes.add(further)
            runner.compile(list(further), progress=progress)
    keys = [_costs_key(runner, limits, name) for name in ("steps", "drafts")]  # measured at the same time
    runner.watch = StepWatch(costs, partial(forget_costs, _costs_folder(), keys), padded=runner.pads)
    logger.info("compiled in %.1f seconds", time.monotonic() - start)
    return costs


def _stored(runner: ModelRunner, limits: Limits, name: str, runs: Mapping[Bucket, Callable[[], Any]]) -> StepCosts:
    """Return the costs of some runs, which are measured once."""
    return stored_costs(
        _costs_folder(), _costs_key(runner, limits, name), tuple(runs), lambda: fastest([*runs.values()]),
        lambda seconds: _leaders(seconds, runner.placement),
    )  # fmt: skip


def _costs_folder() -> Path:
    return cache_folder() / "step_costs"


def _costs_key(runner: ModelRunner, limits: Limits, name: str) -> str:
    """Return a text of everything that the costs of steps depend on."""
    placement = runner.placement
    processes = (placement.num_processes,) if placement.num_processes > 1 else ()
    device = placement.platform, placement.device.device_kind, placement.size, os.cpu_count(), *processes
    stored = sorted({str(leaf.dtype) for leaf in runner.tree.expected.values()})
    dtype = runner.outputs.attention_dtype
    described = runner.kind, runner.config, dtype, stored, limits, runner.kernels.name, runner.blocks.cache.dtype
    return repr((name, VERSION, jax.__version__, device, *described))


def _leaders(seconds: Sequence[float], placement: Placement) -> Sequence[float]:
    """Return the seconds of process 0, as float32, in all processes that share a mesh. All of them must call it."""
    if placement.num_processes == 1:
        return seconds
    return [float(each) for each in multihost_utils.broadcast_one_to_all(np.array(seconds, np.float32))]


def block_swap_cost(runner: ModelRunner, limits: Limits, costs: StepCosts) -> float:
    """Return the number of tokens that could be computed while one block moves to the host and back."""
    largest, size = max(bucket for bucket in costs if not bucket.decode), TRANSFERS[-1]
    swap = Bucket(size, 0, False)  # stands for the transfer in the file
    seconds = _stored(runner, limits, "swap", {swap: lambda: runner.blocks.swap_round_trip(size)})[swap]
    return (seconds / size) / (costs[largest] / largest.num_tokens)


def fastest(runs: Sequence[Callable[[], Any]], repeats: int = 5) -> list[float]:
    """Return the time of the shortest of a few calls of each run.

    They take turns: a machine that is busy for a moment would delay all calls of one run.
    """
    times = [[_seconds(run) for run in runs] for _ in range(repeats)]
    return [min(each) for each in zip(*times, strict=True)]


def _seconds(run: Callable[[], Any]) -> float:
    """Return the time of a call until its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def further_shapes(costs: StepCosts) -> StepCosts:
    """Return the shapes halfway between two neighbours of the ladders if the larger one is much more expensive.

    Their costs are assumed to be halfway, too.
    """
    ladders: dict[int | None, list[Bucket]] = {}
    for bucket in sorted(costs):
        ladders.setdefault(None if bucket.decode else bucket.num_seqs, []).append(bucket)
    further = {}
    for rungs in ladders.values():
        for low, high in itertools.pairwise(rungs):
            middle = (low.num_tokens + high.num_tokens) // 2
            if costs[high] > max(LONG_S, STEEP * costs[low]) and low.num_tokens < middle:
                rung = Bucket(middle, middle if high.decode else high.num_seqs, high.decode)
                further[rung] = (costs[low] + costs[high]) / 2
    return further


def tokens_beside_decodes(costs: StepCosts, max_cost: float, *, padded: bool = True) -> int:
    """Return the maximum number of tokens for steps in which sequences decode.

    The number is at least twice the number of sequences, if a step has that room. The tokens of decodes then leave room
    for prompts.

    Args:
        max_cost: maximum cost of such a step, in decode steps.
        padded: whether a step costs as much as its whole shape, so that the number is that of a shape. Otherwise costs
            between two shapes are interpolated.
    """
    costs = {**costs, **further_shapes(costs)} if padded else costs
    decode = max(bucket for bucket in costs if bucket.decode)
    mixed = sorted(bucket for bucket in costs if not bucket.decode and bucket.num_seqs == decode.num_seqs)
    shapes, seconds = [bucket.num_tokens for bucket in mixed], [costs[bucket] for bucket in mixed]
    sizes = shapes if padded else range(shapes[0], shapes[-1] + 1)
    roomy = [size for size in sizes if size >= 2 * decode.num_seqs] or sizes[-1:]
    cheap = [size for size in roomy if np.interp(size, shapes, seconds) <= max_cost * costs[decode]]
    return cheap[-1] if cheap else roomy[0]


def step_overhead(costs: StepCosts, platform: str) -> float:
    """Return the cost of a step without its tokens, in tokens that cost as much; inf if unknown or tokens cost nothing.

    The costs are fitted by a line, with equal relative errors for short and long steps. On a CPU the
    time that the host spends on a token is added. Beside a GPU this work overlaps with that of the device.
    """
    tokens, seconds = [bucket.num_tokens for bucket in costs], np.array([*costs.values()])
    if len(set(tokens)) <= 1:
        return math.inf
    slope, start = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    slope = max(slope, 0.0) + (CPU_TOKEN_S if platform == "cpu" else 0.0)
    return max(0.0, float(start / slope)) if slope > 0 else math.inf


def decode_costs(runner: ModelRunner, limits: Limits, costs: StepCosts) -> DecodeCosts:
    """Return the costs of decode steps.

    With drafts, the steps of one sequence are measured where padding costs nothing, and everywhere one with as many
    drafts as possible on a long context, which they read together. Costs between measured numbers of tokens are
    interpolated where padding costs nothing. Otherwise a step costs what its shape does. No step costs more than one
    of more tokens: a busy machine delays some of the measured ones.
    """
    drafts = Speculation.of(limits.speculative_config)
    known = {bucket.num_tokens: seconds for bucket, seconds in costs.items() if bucket.decode}
    if not known:
        return UNKNOWN
    context = 0.0
    if drafts is not None:
        fit, most = runner.shapes.buckets.fit, max(1, min(drafts.num_tokens + 1, limits.max_model_len - 1))
        counts = [most] if runner.pads else range(1, most + 1)
        length = max(1, min(LONG_CONTEXT, limits.max_model_len - most))
        long = Bucket(length, most, False)  # stands for the step with a context in the file
        runs = {Bucket(n, n, True): partial(runner.run_padding, fit(n, n, True), n) for n in counts}
        runs[long] = partial(runner.run_padding, fit(most, most, True), most, context=length)
        seconds = _stored(runner, limits, "drafts", runs)
        context = max(0.0, seconds[long] - seconds[Bucket(most, most, True)]) / (most * length)
        if not runner.pads:
            known |= {count: seconds[Bucket(count, count, True)] for count in counts}
    counts, times = np.array(sorted(known.items())).T
    times = np.minimum.accumulate(times[::-1])[::-1]
    sizes = np.arange(limits.max_num_decodes + 1)
    every = times[np.searchsorted(counts, sizes)] if runner.pads else np.interp(sizes, counts, times)
    return DecodeCosts(tuple(every.tolist()), context)


def costs_file(folder: Path, key: str) -> Path | None:
    """Return the file of the costs of a key; None if the folder is not a `private_folder`."""
    usable = private_folder(folder)
    return usable and usable / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def forget_costs(folder: Path, keys: Iterable[str]) -> None:
    """Let the next start measure the costs of some keys again."""
    for key in keys:
        if path := costs_file(folder, key):
            path.unlink(missing_ok=True)


def stored_costs(
    folder: Path, key: str, buckets: Sequence[Bucket], measure: Callable[[], Sequence[float]],
    agree: Callable[[Sequence[float]], Sequence[float]] = lambda seconds: seconds,
) -> StepCosts:  # fmt: skip
    """Return the costs of all shapes from a file, or else measure them and write it.

    Args:
        folder: it is used if it is a `private_folder`.
        key: identifies everything that the costs depend on.
        measure: return the seconds of all shapes.
        agree: return the seconds of the process whose costs hold for all processes that share the device mesh. They
            measure together, if that process has no file.
    """
    path = costs_file(folder, key)
    stored = _read(path, key) if path else {}
    known = stored.keys() == set(buckets)
    seconds = agree([stored[bucket] if known else 0.0 for bucket in buckets])
    if all(seconds):
        return dict(zip(buckets, seconds, strict=True))
    costs = dict(zip(buckets, agree(measure()), strict=True))
    if path:
        _write(path, key, costs)
    return costs


def _write(path: Path, key: str, costs: StepCosts) -> None:
    content = {"key": key, "seconds": [[*bucket, seconds] for bucket, seconds in costs.items()]}
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the costs of steps are not stored: %s", error)


def _read(path: Path, key: str) -> dict[Bucket, float]:
    """Return the costs in a file; none if the file is missing, broken, or has another key."""
    try:
        content = json.loads(path.read_text())
        costs = {Bucket(int(t), int(s), bool(d)): float(seconds) for t, s, d, seconds in content["seconds"]}
        return costs if content["key"] == key and all(seconds > 0 for seconds in costs.values()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
