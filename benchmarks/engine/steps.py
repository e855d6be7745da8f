"""The engine: time of a decode step, and tokens per second over a whole workload. Parameters are random."""

import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine.trace import busiest, idle_between, trace
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.workloads import random_array
from benchmarks.shared.models import MODELS
from benchmarks.shared.results import with_floor
from benchmarks.shared.runners import runner_of
from benchmarks.shared.timing import Timing, summarize
from jpaged.bench.throughput import measure
from jpaged.config import EngineConfig, Limits
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Scheduled, StepPlan
from jpaged.llm import LLM
from jpaged.models.base import Leaf, LeafPath, Model
from jpaged.models.checkpoint import abstract_model, merged, on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.models.layers import MINIMUM, SCALE
from jpaged.models.quantized import formats_of
from jpaged.runtime.runner import ModelRunner
from jpaged.start.load import FUSING
from pallas_kernels import has_products
from pallas_kernels.weights import Format

TEMPERATURE = 0.6  # of nano-vllm's benchmark
SHARPNESS = 3.0  # of random queries, relative to keys


def random_model(config: ModelConfig, dtype: str, quantization: str | None = None) -> Model:
    """Return a model with parameters drawn on the device, and matrices scaled to keep the size of activations.

    Queries are longer: as in a trained model, attention looks at a few tokens, and one wrong key changes its output.
    """
    formats = formats_of(merged(*abstract_model(config, dtype)), quantization)
    graphdef, leaves = abstract_model(config, dtype, formats)
    filled = {}
    for seed, (path, leaf) in enumerate(leaves.items()):
        factor = SHARPNESS if {"q_proj", "q_norm"} & set(path) else 1.0
        of_weight = (*path[:-1], str(path[-1]).removesuffix(SCALE).removesuffix(MINIMUM))
        if path[-1] == "scale":
            array = jnp.full(leaf.shape, factor - config.variation.unit_offset, dtype)
        elif of_weight in formats:
            array = _quantized_leaf(leaf, path, formats[of_weight], factor * config.hidden_size**-0.5, seed)
        else:
            factor *= 0.02 if path[-1] == "embedding" else leaf.shape[-1] ** -0.5
            array = random_array(leaf.shape, dtype, seed) * jnp.asarray(factor, dtype)
        filled[path] = leaf.replace(array)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _quantized_leaf(leaf: Leaf, path: LeafPath, form: Format, size: float, seed: int) -> jax.Array:
    """Return a leaf of a quantized weight whose elements have about this size."""
    if path[-1].endswith(MINIMUM):
        return jnp.full(leaf.shape, -2 * size, leaf.dtype)
    if path[-1].endswith(SCALE):
        return jnp.full(leaf.shape, size * (4 / 15 if form.is_packed else 1 / 40), leaf.dtype)
    if form.is_packed:
        return jax.random.bits(jax.random.key(seed, impl="unsafe_rbg"), leaf.shape, jnp.uint8)
    return (40 * random_array(leaf.shape, "bfloat16", seed)).astype(leaf.dtype)


def step(
    bench: Bench, *, model: str, batches: list[int], contexts: list[int], block_size: int, kernels: str = "auto"
) -> None:
    """Time of one decode step over batch and context.

    `step_ms` is one step alone: arrays made on the host, dispatch, the device, sampled tokens back on the host.
    `dispatch_ms` is the host's part of it, before the wait. `device_ms` is the same step dispatched many times before
    anything is waited for. `floor_ms` is the time that reading the parameters and the keys and values takes at this
    run's read ceiling. `compile_s` is the first step, most of which is compilation. Rows of their own, under a
    profiler, have `gap_us`, the idle time of the device between two steps back to back, and the kernels that take most
    of a step.
    """
    config = MODELS[model]
    max_model_len, max_seqs = max(contexts) + block_size, max(batches)
    limits = Limits(max_model_len, max_seqs, max(2048, max_seqs), block_size)
    dtype = bench.sized("bfloat16", "float32")
    module = random_model(config, dtype)
    if bench.device.platform in FUSING:
        multiplies = has_products(kernels, bench.device.platform, bench.device.compute_capability, dtype)
        fuse(module, on_one_device, gates=not multiplies)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(module)))
    itemsize = jnp.dtype(dtype).itemsize
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    room = 0.85 * bench.device.memory_bytes - parameters
    cases = [(batch, context) for context in contexts for batch in batches]
    blocks = {case: case[0] * -(-case[1] // block_size) for case in cases}
    fitting = [count for count in blocks.values() if count * block_size * token_bytes <= room]
    runner = runner_of(module, EngineConfig(num_gpu_blocks_override=max(fitting), kernels=kernels), limits)
    # Zeros could be read faster than numbers.
    for i, zeros in enumerate(runner.blocks.pool):  # one by one: two pools would not fit
        runner.blocks.pool[i] = random_array(zeros.shape, str(zeros.dtype), i)
        del zeros
    for batch, context in cases:
        case = dict(experiment="step", model=model, kernels=runner.kernels.name, batch=batch, context=context)
        if bench.leaves_out(**case):
            continue
        if blocks[batch, context] > runner.blocks.num_blocks:
            bench.report.add(**case, status="skipped", reason="its keys and values do not fit the device")
            continue
        admission, plan = decode_plans(batch, context, runner.blocks.num_blocks, block_size)
        runner.dispatch(admission)
        start = time.monotonic()
        runner.dispatch(plan).result()
        compile_s = time.monotonic() - start
        bench.report.say(f"{model} at batch {batch} compiled in {compile_s:.0f} s")
        timing, dispatch, device = _time_step(bench, runner, plan)
        read = parameters + batch * context * token_bytes
        if not config.tie_word_embeddings:
            read -= config.vocab_size * config.hidden_size * itemsize  # looked up, not read
        row = case | dict(
            step_ms=1e3 * timing.median, step_ms_low=1e3 * timing.low, step_ms_high=1e3 * timing.high,
            dispatch_ms=1e3 * dispatch.median, device_ms=1e3 * device.median, bytes=read,
            tokens_per_s=batch / timing.median, block_size=block_size, compile_s=compile_s, status="ok",
        )  # fmt: skip
        bench.report.add(**with_floor(row, bench.read_gb_per_s))
        for found in _traced(partial(runner.dispatch, plan), bench.sized(20, 3)):
            bench.report.add(**case | found)
    del runner
    gc.collect()


def decode_plans(batch: int, context: int, num_blocks: int, block_size: int) -> tuple[StepPlan, StepPlan]:
    """Return the admission of `batch` sequences on blocks in random order, and a step in which each computes the last
    of `context` tokens."""
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    params, width = SamplingParams(temperature=TEMPERATURE), -(-context // block_size)
    admitted = tuple(
        Admitted(s, (s % 256,) * context, context - 1, params, s, (tuple(order[s * width : (s + 1) * width]),))
        for s in range(batch)
    )
    return StepPlan(admitted=admitted), StepPlan(tuple(Scheduled(s, context - 1, 1, 1) for s in range(batch)))


def _traced(dispatch: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Return the fields of rows with the idle time between steps and their kernels, or the reason why none is known."""
    try:
        events = trace(dispatch, steps)
    except Exception as error:  # a profiler may be missing or not allowed
        return [dict(experiment="gap", status="skipped", reason=f"{type(error).__name__}: {error}"[:300])]
    gap_s, unknown = idle_between(events, steps), "the trace does not show where a step starts"
    gap = dict(status="skipped", reason=unknown) if gap_s is None else dict(gap_us=1e6 * gap_s, status="ok")
    kernels = [dict(experiment="step kernels", **each, status="ok") for each in busiest(events, steps)]
    return [dict(experiment="gap", **gap), *kernels]


def _time_step(bench: Bench, runner: ModelRunner, plan: StepPlan) -> tuple[Timing, Timing, Timing]:
    """Return times of a step with the host in it, of its dispatch, and of steps enqueued back to back."""
    steps = bench.sized(20, 2)

    def alone() -> tuple[float, float]:
        start = time.perf_counter()
        pending = runner.dispatch(plan)
        dispatched = time.perf_counter()
        pending.result()
        return time.perf_counter() - start, dispatched - start

    def enqueued() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            pending = runner.dispatch(plan)
        pending.result()
        return (time.perf_counter() - start) / steps

    for _ in range(3):
        alone()
    whole, dispatches, queued = [], [], []
    for _ in range(bench.effort.rounds):
        times, before = zip(*(alone() for _ in range(steps)))
        whole.append(times)
        dispatches.append(before)
        queued.append([enqueued()])
    return summarize(whole), summarize(dispatches), summarize(queued)


def throughput(bench: Bench, *, model: str, requests: int, low: int, high: int, block_size: int) -> None:
    """nano-vllm's workload through the offline API: prompts and outputs of `low` to `high` tokens, uniformly drawn."""
    case: dict[str, Any] = dict(experiment="throughput", model=model, requests=requests)
    if bench.leaves_out(**case):
        return
    config, rng = MODELS[model], random.Random(0)
    start = time.monotonic()
    llm = LLM(
        random_model(config, bench.sized("bfloat16", "float32")), progress=False, block_size=block_size,
        max_model_len=2 * high, max_num_seqs=bench.sized(min(256, requests), 2),
        max_num_batched_tokens=bench.sized(2048, 16), num_gpu_blocks_override=bench.sized(None, 64),
    )  # fmt: skip
    case |= dict(kernels=llm.engine.runner.kernels.name, block_size=block_size, start_seconds=time.monotonic() - start)
    bench.report.say(f"{model} started in {case['start_seconds']:.0f} s")
    if bench.deadline.passed:
        bench.report.add(**case, status="skipped", reason="time")
        return

    prompts = [[rng.randrange(config.vocab_size) for _ in range(rng.randint(low, high))] for _ in range(requests)]
    lengths = [rng.randint(low, high) for _ in range(requests)]
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lengths]
    found = measure(llm, prompts, params, progress=False)
    assert found.output_tokens == sum(lengths), "a request ended early"
    given, made, seconds = found.prompt_tokens, found.output_tokens, found.duration
    bench.report.add(
        **case, input_tokens=given, output_tokens=made, seconds=seconds, output_tokens_per_s=made / seconds,
        tokens_per_s=(given + made) / seconds, preemptions=llm.engine.stats().num_preemptions, status="ok",
    )  # fmt: skip
