"""Hidden states of sequences that run alone, in halves and together, compared to the bit."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.engine.steps import random_model
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.implementations import Unsuitable, choose
from benchmarks.kernels.workloads import Shape
from benchmarks.shared.models import MODELS, cut
from benchmarks.shared.runners import runner_of
from jpaged.config import EngineConfig, Limits
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Scheduled, StepPlan
from jpaged.models.checkpoint import on_one_device
from jpaged.models.config import ModelConfig
from jpaged.models.fused import fuse
from jpaged.runtime.runner import ModelRunner
from pallas_kernels import Kernels, reference

# On both sides of blocks, of tiles of rows and of tiles of keys.
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 70, 90, 100, 7, 11, 19, 23, 29)
DECODES, BLOCK_SIZE, WIDTH = 3, 16, 16  # steps, tokens of a block, blocks of a sequence
Groups = Sequence[Sequence[int]]  # of sequences that run in one step


def exactness(bench: Bench, *, config: str) -> None:
    """Count the hidden states of two layers that depend on other sequences, with XLA's products and with kernels."""
    model = bench.sized(cut(MODELS[config], 2), MODELS["tiny"])
    shape = Shape(model.head_dim, BLOCK_SIZE, model.num_attention_heads, model.num_key_value_heads)
    case: dict[str, Any] = dict(experiment="exactness", model=config, kernels=bench.implementations[0])
    try:
        kernels = choose(bench.implementations[0], bench.device, shape)
    except Unsuitable as error:
        bench.report.add(**case, status="skipped", reason=str(error))
        return
    by_xla = kernels.implementation._replace(product=reference.product, skips_rows=False)
    for products in bench.sized(("kernels", "xla"), ("kernels",)):
        row = case | dict(products=products)
        if bench.leaves_out(**row):
            continue
        used = kernels if products == "kernels" else dataclasses.replace(kernels, implementation=by_xla)
        figures = _figures(_runner(model, used, bench.tiny), bench.sized(len(LENGTHS), 8))
        # XLA's products are there to compare: their states differ.
        differ = figures["differ_alone"] + figures["differ_in_halves"]
        bench.report.add(**row, **figures, status="wrong" if differ and used.multiplies else "ok")


def _figures(runner: ModelRunner, count: int) -> dict[str, int]:
    """Return the number of states of some sequences, and the numbers that differ in other groups."""
    every, half = list(range(count)), count // 2
    together = _states(runner, [every], [every])
    alone = _states(runner, [[each] for each in reversed(every)], [every[:1], every[1:half], every[half:]])
    halves = _states(runner, [every[:half], every[half:]], [every[::-1]])
    differ = [sum(together[key] != state for key, state in other.items()) for other in (alone, halves)]
    return dict(states=len(together), differ_alone=differ[0], differ_in_halves=differ[1])


def _runner(config: ModelConfig, kernels: Kernels, tiny: bool) -> ModelRunner:
    model = random_model(config, "bfloat16")
    fuse(model, on_one_device, gates=not kernels.multiplies)
    settings = EngineConfig(num_gpu_blocks_override=len(LENGTHS) * WIDTH, swap_space=0)
    runner = runner_of(model, settings, Limits(WIDTH * BLOCK_SIZE, 32, 1024, BLOCK_SIZE), kernels)
    buckets = runner.shapes.buckets  # few, because each is compiled
    few = lambda all, *more: tuple(dict.fromkeys(all[each] for each in (*(() if tiny else more), -1)))
    buckets.mixed = few(buckets.mixed, len(buckets.mixed) // 2)
    buckets.decode = few(buckets.decode, 0, len(buckets.decode) // 2)
    return runner


def _states(runner: ModelRunner, prompts: Groups, decodes: Groups) -> dict[tuple[int, int], bytes]:
    """Return the last hidden state of each sequence and step, whose prompts and decode steps run in these groups."""
    states: dict[tuple[int, int], bytes] = {}
    forward, computed = runner._forward, list[Any]()
    runner._forward = lambda *args: computed.append(forward(*args)) or computed[-1]  # type: ignore[method-assign]
    for plan in _plans(runner.vocab_size, prompts, decodes):
        runner.dispatch(plan).result()
        x_sd = np.asarray(computed.pop().x_sd.astype(jnp.float32))
        states |= {(row.row, row.start + row.num_tokens): x.tobytes() for row, x in zip(plan.rows, x_sd)}
    runner._forward = forward  # type: ignore[method-assign]
    return states


def _plans(vocab_size: int, prompts: Groups, decodes: Groups) -> Iterator[StepPlan]:
    rng, params = np.random.default_rng(0), SamplingParams(temperature=0)
    tokens = [tuple(rng.integers(0, vocab_size, length).tolist()) for length in LENGTHS]
    tables = [tuple(range(row * WIDTH, row * WIDTH + WIDTH)) for row in range(len(LENGTHS))]
    for rows in prompts:
        admitted = tuple(Admitted(row, tokens[row], LENGTHS[row], params, row, (tables[row],)) for row in rows)
        yield StepPlan(tuple(Scheduled(row, 0, LENGTHS[row], 1) for row in rows), admitted=admitted)
    for step in range(DECODES):
        for rows in decodes:
            yield StepPlan(tuple(Scheduled(row, LENGTHS[row] + step, 1, 1) for row in rows))
