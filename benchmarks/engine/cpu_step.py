"""The parts of a step's time on a CPU, beside the least time for its bytes and its products.

    python benchmarks/engine/cpu_step.py --out results      two minutes

The model is that of `cpu_serving.py`. Parts are measured alone or by leaving them out, all in turn in each round: the
layers without attention, writes and attention, logits, sampling, and the host's part. The floor of a part is the longer
of two times, measured in the same rounds: that of reading its parameters or its keys and values as fast as all threads
read an array, and that of its multiplications at the speed of a product of large matrices.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.engine.cpu_serving import CONCURRENCY, CONFIG
from benchmarks.engine.steps import decode_plans, random_model
from benchmarks.kernels.workloads import random_array
from benchmarks.shared.bandwidth import STREAMS, read
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.runners import runner_of
from jpaged.config import EngineConfig, Limits
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted, Scheduled, StepPlan
from jpaged.models.config import ModelConfig
from jpaged.models.layers import set_ops
from jpaged.models.llama import Llama
from jpaged.runtime.batch import make_batch
from jpaged.runtime.runner import ModelRunner
from pallas_kernels import Weight

BLOCK_SIZE, MAX_TOKENS = 64, 128
READ_BYTES, LARGE = 2**29, 2048


class Case(NamedTuple):
    """A step: decodes, each at the end of a context, and a prompt's first tokens."""

    decodes: int
    context: int
    chunk: int = 0

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.chunk

    def plans(self, num_blocks: int) -> tuple[StepPlan, StepPlan]:
        """Return the plan that admits the sequences, and the step."""
        admission, step = decode_plans(self.decodes, self.context, num_blocks, BLOCK_SIZE)
        if not self.chunk:
            return admission, step
        used = {block for sequence in admission.admitted for block in sequence.block_ids[0]}
        free = tuple(block for block in range(num_blocks) if block not in used)[: -(-self.chunk // BLOCK_SIZE)]
        prompt = Admitted(self.decodes, (7,) * self.chunk, self.chunk, SamplingParams(), 0, (free,))
        rows = (*step.rows, Scheduled(self.decodes, 0, self.chunk, 1))
        return StepPlan(admitted=(*admission.admitted, prompt)), StepPlan(rows)


CASES = (Case(1, 128), Case(16, 128), Case(16, 512), Case(15, 512, 113))


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; all are made in each round, after one that is not counted.

    The calls "read N" have N streams in each thread, and the faster one is "read".
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                samples[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(each) for name, each in samples.items()}
    seconds["read"] = min(seconds.pop(name) for name in list(seconds) if name.startswith("read "))
    return seconds


def calls_of(runner: ModelRunner, model: Llama, case: Case) -> dict[str, Callable[[], Any]]:
    """Return a step, its parts, and the ceilings of the machine, as calls."""
    admission, plan = case.plans(runner.blocks.num_blocks)
    runner.dispatch(admission).result()
    shapes, rows = runner.shapes, case.num_tokens
    made = make_batch(plan, runner.rows.table, shapes.buckets, shapes.layouts)
    buffer, bits = jax.device_put(made.buffer), shapes.no_bits[made.bucket.num_seqs]
    computed = runner._forward(buffer, made.bucket)
    graphdef, state = nnx.split(model)
    positions, kernels = jnp.arange(rows), runner.kernels

    def with_products(state):
        merged = nnx.merge(graphdef, state)
        set_ops(merged, product=kernels.product, products=kernels.products, rms_norm=kernels.rms_norm)
        return merged

    layers = jax.jit(lambda state: with_products(state)(positions, positions, lambda layer, q, *_: q))
    logits = jax.jit(lambda state, x_sd: with_products(state).logits(x_sd))
    large, array = random_array((LARGE, LARGE), "float32", 2), jnp.arange(READ_BYTES // 4, dtype=jnp.int32)
    multiply = jax.jit(lambda x, w: kernels.product(x, Weight(w)))
    reads = {f"read {streams}": partial(jax.jit(partial(read, streams=streams)), array) for streams in STREAMS}
    return {
        "step": lambda: runner.dispatch(plan).result().samples,
        "forward": lambda: runner._forward(buffer, made.bucket),
        "choose": lambda: runner._choose(computed, bits, runner.step.settings_for(made.settings)),
        "layers": lambda: layers(state),
        "logits": lambda: logits(state, computed.x_sd),
        **reads,
        "multiply": lambda: multiply(large, large),
    }


def num_bytes(leaves: Sequence[jax.Array]) -> int:
    """Return the bytes of arrays."""
    return sum(leaf.nbytes for leaf in leaves)


def num_products(config: ModelConfig) -> int:
    """Return the multiplications of a token in the layers of a dense decoder with gated MLPs."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return config.num_hidden_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def rows_of(
    seconds: dict[str, float], model: Llama, case: Case, num_samples: int, pool_itemsize: int = 4
) -> list[dict[str, Any]]:
    """Return the parts of a step with their floors, in milliseconds."""
    config = model.config
    second_of_byte, second_of_flop = seconds["read"] / READ_BYTES, seconds["multiply"] / (2 * LARGE**3)

    def part(name: str, time: float, size: int = 0, flops: int = 0) -> dict[str, Any]:
        floor = max(size * second_of_byte, flops * second_of_flop) or None
        over = time / floor if floor else None
        return {"part": name, "ms": 1e3 * time, "bytes": size, "floor_ms": floor and 1e3 * floor, "over_floor": over}

    leaves = jax.tree.leaves(nnx.state(model.layers))
    head = nnx.state(model.embed_tokens if config.tie_word_embeddings else model.lm_head)
    vocabulary = config.vocab_size * config.hidden_size
    products = num_products(config)
    keys = case.decodes * case.context + case.chunk
    attended = case.decodes * case.context + case.chunk * (case.chunk + 1) // 2
    token_bytes = 2 * pool_itemsize * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    per_key = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    parts = [
        part("layers without attention", seconds["layers"], num_bytes(leaves), 2 * products * case.num_tokens),
        part("writes and attention", seconds["forward"] - seconds["layers"], keys * token_bytes, attended * per_key),
        part("logits", seconds["logits"], num_bytes(jax.tree.leaves(head)), 2 * vocabulary * num_samples),
        part("sampling", seconds["choose"] - seconds["logits"]),
        part("host", seconds["step"] - seconds["forward"] - seconds["choose"]),
    ]
    floor = sum(each["floor_ms"] or 0 for each in parts)
    whole = {
        "part": "step",
        "ms": 1e3 * seconds["step"],
        "bytes": sum(each["bytes"] for each in parts),
        "floor_ms": floor,
        "over_floor": 1e3 * seconds["step"] / floor,
    }
    return [*parts, whole]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "cpu_step")
    parser.add_argument("--rounds", type=int, default=31, metavar="N", help="how often each part is measured")
    parser.add_argument("--kernels", default="auto", metavar="NAME", help="attention kernels, as the engine's option")
    parser.add_argument("--tiny", action="store_true", help="one layer, few tokens: shows that the program works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    cases = (Case(3, 64, 13),) if args.tiny else CASES
    config = ModelConfig.from_hf(CONFIG | ({"num_hidden_layers": 1, "vocab_size": 1024} if args.tiny else {}))
    model = random_model(config, "float32")
    width = max(case.context for case in cases) // BLOCK_SIZE + 1
    limits = Limits(config.max_position_embeddings, 4 if args.tiny else CONCURRENCY, MAX_TOKENS, BLOCK_SIZE)
    for case in cases:
        blocks = EngineConfig(num_gpu_blocks_override=(CONCURRENCY + 1) * width, swap_space=0, kernels=args.kernels)
        calls = calls_of(runner_of(model, blocks, limits), model, case)
        seconds = timed(calls, args.rounds)
        name = f"{case.decodes} decodes behind {case.context} tokens" + f", a chunk of {case.chunk}" * bool(case.chunk)
        rates = {"read_gb_s": READ_BYTES / seconds["read"] / 1e9, "gflop_s": 2 * LARGE**3 / seconds["multiply"] / 1e9}
        for row in rows_of(seconds, model, case, case.decodes + bool(case.chunk)):
            report.add(experiment="cpu step", step=name, **row, **rates)
    report.publish(
        "The parts of a step on a CPU",
        f"A Llama of {config.num_hidden_layers} layers and hidden size {config.hidden_size}, float32, KV blocks of "
        f"{BLOCK_SIZE} tokens in random order. The floor of a part is the time of reading its parameters or keys "
        "and values, or that of its multiplications, whichever is longer, at the rates of the same rounds: all "
        f"threads read an array (GB/s), and a product of {LARGE} x {LARGE} matrices (GFLOP/s). Medians of "
        f"{args.rounds} rounds.",
        table(report.rows, ("step", "part", "ms", "floor_ms", "over_floor", "read_gb_s", "gflop_s")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
