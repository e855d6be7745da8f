"""The engine's own step on two layers of real models, compared with the same step on the reference implementation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.engine.steps import random_model
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.expected import TOLERANCES, WrongOutput
from benchmarks.kernels.implementations import Unsuitable, choose
from benchmarks.kernels.workloads import Shape
from benchmarks.shared.models import MODELS, cut
from benchmarks.shared.runners import runner_of
from jpaged.config import EngineConfig, Limits
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Chosen, Sample, Scheduled, StepPlan
from jpaged.models.checkpoint import on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.runtime.runner import ModelRunner

# Prompts on both sides of blocks, splits and the window of Gemma 3, tokens of a step, and full and padded batches.
PROMPTS = (1024, 2500, 1300, 700, *(1, 16, 17, 40, 63, 64, 65, 100, 127, 200, 3, 513) * 5), 1024, (64, 64, 40, 1)
TINY = (64, 150, 90, 33, 1, 16, 17, 5), 64, (8, 5, 1)
MAX_MODEL_LEN = 4096
TOP = 20  # tokens whose logprobs are compared
# Of two layers and their products, in units of the tolerance of one attention op. Those of a CPU reach 1.2 and 5.
HIDDEN_TOLERANCE, LOGPROB_TOLERANCE = 2, 10
MAX_DRAWN_DIFFERENTLY = 0.2  # of sampled tokens: rounding turns a few draws around
GREEDY = SamplingParams(temperature=0)
PARAMS = (
    GREEDY, SamplingParams(temperature=0.8, top_p=0.9, top_k=TOP),
    SamplingParams(temperature=0, repetition_penalty=1.2), SamplingParams(temperature=1.0),
)  # fmt: skip


def check(
    bench: Bench, *, name: str, config: str, num_kv_heads: int | None = None, num_experts: int | None = None,
    block_size: int = 16, kv_cache_dtype: str = "auto",
) -> None:  # fmt: skip
    """Compare the only implementation of a run with the reference.

    Args:
        name: the model's name in results.
        config: a key of `models.MODELS`.
        num_kv_heads: where it is not the model's.
        num_experts: all experts of a token, in place of the model's. Rounding would choose others of them.
    """
    row: dict[str, Any] = dict(experiment="model", model=name, kernels=bench.implementations[0])
    cut_config, dtype = cut(MODELS[config], 2), bench.sized("bfloat16", "float32")
    cut_config = dataclasses.replace(cut_config, num_key_value_heads=num_kv_heads or cut_config.num_key_value_heads)
    cut_config = cut_config if num_experts is None else _with_experts(cut_config, num_experts)
    cut_config = bench.sized(cut_config, _shrunk(cut_config))
    prompts, chunk, batches = bench.sized(PROMPTS, TINY)
    most = len(prompts) + len(batches) + sum(prompts) // chunk  # steps, each of which may add a token
    widths = [-(-(length + most) // block_size) for length in prompts]
    order = np.random.default_rng(1).permutation(sum(widths)).tolist()
    tables = [tuple(order.pop() for _ in range(width)) for width in widths]
    settings = EngineConfig(num_gpu_blocks_override=sum(widths), kv_cache_dtype=kv_cache_dtype, swap_space=0)
    limits, pool_dtype = Limits(MAX_MODEL_LEN, len(prompts), chunk, block_size), settings.pool_dtype(dtype)
    heads = cut_config.num_attention_heads, cut_config.num_key_value_heads
    shape = Shape(cut_config.head_dim, block_size, *heads, dtype)
    try:
        kernels = [choose(each, bench.device, shape, pool_dtype) for each in (bench.implementations[0], "reference")]
    except Unsuitable as error:
        bench.report.add(**row, status="skipped", reason=str(error))
        return
    model = random_model(cut_config, dtype)
    fuse(model, on_one_device, gates=not kernels[0].multiplies)  # as on a GPU
    runners = [Observer(runner_of(model, settings, limits, each)) for each in kernels]
    comparison, chosen = Comparison(*runners, TOLERANCES[pool_dtype]), ()
    end = dict(status="ok")
    try:
        for plan in plans(prompts, chunk, batches, tables, cut_config.vocab_size):
            chosen = comparison.step(dataclasses.replace(plan, chosen=chosen))
        comparison.end()
    except WrongOutput as error:
        end = dict(status="wrong", reason=str(error))
    bench.report.add(**row, **end, **comparison.figures)


class Observer:
    """A runner whose hidden states are kept."""

    def __init__(self, runner: ModelRunner):
        self._runner, self._forward = runner, runner._forward
        buckets = runner.shapes.buckets  # few, because each is compiled
        buckets.mixed, buckets.decode = buckets.mixed[-1:], (buckets.decode[0], buckets.decode[-1])
        runner._forward = self._observe  # type: ignore[method-assign]

    def _observe(self, *args: Any) -> Any:
        self._computed = self._forward(*args)
        return self._computed

    def run(self, plan: StepPlan) -> tuple[Sequence[Sample], np.ndarray]:
        """Return a plan's samples, and the hidden states [num_samples, D] that they are drawn from."""
        samples = self._runner.dispatch(plan).result().samples
        return samples, np.asarray(self._computed.x_sd.astype(jnp.float32))[: len(samples)]


class Comparison:
    """Two runners of the same plans, and their largest differences so far in `figures`. Raises WrongOutput."""

    def __init__(self, ours: Observer, theirs: Observer, tolerance: float):
        self._ours, self._theirs, self._tolerance = ours, theirs, tolerance
        self._drawn = 0  # samples that are not greedy
        self.figures: dict[str, Any] = dict.fromkeys(
            ("steps", "samples", "error", "logprob_error", "near_ties", "drawn_differently"), 0
        )

    def step(self, plan: StepPlan) -> tuple[Chosen, ...]:
        """Compare a step. Return the reference's tokens where ours differ: the next plan imposes them on both."""
        self.figures["steps"] += 1
        name = f"step {self.figures['steps']} ({len(plan.rows)} sequences, {plan.num_tokens} tokens)"
        print(name, flush=True)  # the log of a process that hangs or dies ends with its step
        (ours, x), (theirs, y) = self._ours.run(plan), self._theirs.run(plan)
        errors, chosen = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1), []
        sampled = [each for each in plan.rows if each.num_samples]
        for (row, start, count, _), a, b, error in zip(sampled, ours, theirs, errors.tolist(), strict=True):
            where = f"{name}, sequence {row} of {start + count} tokens"
            self.figures["samples"] += 1
            self._limit("error", error, HIDDEN_TOLERANCE, f"{where}: hidden state")
            listed, expected = (dict(zip(each.top_tokens, each.top_logprobs)) for each in (a, b))
            for token in listed.keys() & expected.keys():
                error = abs(listed[token] - expected[token])
                self._limit("logprob_error", error, LOGPROB_TOLERANCE, f"{where}: logprob of token {token}")
            self._compare_tokens(a, b, expected, _params(row), where)
            if a.token != b.token:
                chosen.append(Chosen(row, b.token, row))
        return tuple(chosen)

    def _compare_tokens(
        self, a: Sample, b: Sample, expected: dict[int, float], params: SamplingParams, where: str
    ) -> None:
        if params.top_k and a.token not in a.top_tokens:
            raise WrongOutput(f"{where}: token {a.token} is not among the {params.top_k} most likely ones")
        if params != GREEDY:
            self._drawn += 1
            self.figures["drawn_differently"] += a.token != b.token
        elif a.token != b.token:
            gap = expected[b.token] - expected.get(a.token, -np.inf)
            if gap > 2 * LOGPROB_TOLERANCE * self._tolerance:
                raise WrongOutput(f"{where}: token {a.token}, where token {b.token} is likelier by {gap:.3g} nats")
            self.figures["near_ties"] += 1

    def end(self) -> None:
        """Compare the tokens of all steps together."""
        count = self.figures["drawn_differently"]
        if count > 1 + MAX_DRAWN_DIFFERENTLY * self._drawn:
            raise WrongOutput(f"{count} of {self._drawn} tokens were drawn differently")

    def _limit(self, column: str, error: float, tolerance: float, what: str) -> None:
        self.figures[column] = max(self.figures[column], error) if np.isfinite(error) else None
        if not error <= tolerance * self._tolerance:  # NaN is not
            raise WrongOutput(f"{what} is off by {error:.3g}, allowed are {tolerance * self._tolerance:.3g}")


def plans(
    prompts: Sequence[int], chunk: int, batches: Sequence[int], tables: Sequence[tuple[int, ...]], vocab_size: int
) -> Iterator[StepPlan]:
    """Yield steps with chunks of prompts and a token of each sequence whose prompt is complete, then decode steps."""
    rng, computed, row = np.random.default_rng(0), [0] * len(prompts), 0

    def scheduled(row: int, count: int) -> Scheduled:
        computed[row] += count
        return Scheduled(row, computed[row] - count, count, int(computed[row] >= prompts[row]))

    while row < len(prompts):
        rows, admitted = [scheduled(each, 1) for each in range(row)], []
        while row < len(prompts) and (left := chunk - sum(each.num_tokens for each in rows)):
            length, top = prompts[row], TOP if _params(row) != PARAMS[-1] else None
            if not computed[row]:
                tokens = tuple(rng.integers(0, vocab_size, length).tolist())
                admitted.append(Admitted(row, tokens, length, _params(row), row, (tables[row],), top))
            rows.append(scheduled(row, min(left, length - computed[row])))
            row += computed[row] == length
        yield StepPlan(tuple(rows), admitted=tuple(admitted))
    for batch in batches:
        yield StepPlan(tuple(scheduled(each, 1) for each in range(batch)))


def _params(row: int) -> SamplingParams:
    return PARAMS[row % len(PARAMS)]


def _with_experts(config: ModelConfig, count: int) -> ModelConfig:
    """Return a config with a number of experts that compute every token."""
    experts = config.variation.experts
    assert experts is not None, config
    experts = dataclasses.replace(experts, num_experts=count, num_experts_per_tok=count)
    return dataclasses.replace(config, variation=dataclasses.replace(config.variation, experts=experts))


def _shrunk(config: ModelConfig) -> ModelConfig:
    """Return a config with the heads and the layers' kinds of a model, and small matrices."""
    windows = tuple(window and 40 for window in config.variation.windows or ())
    variation = dataclasses.replace(config.variation, windows=windows)
    return dataclasses.replace(config, vocab_size=512, hidden_size=64, intermediate_size=128, variation=variation)
