"""Time of all products of a step on a CPU, by the number of rows, for kinds of weights and ways to multiply them.

    python benchmarks/engine/cpu_products.py --out results      two minutes
    python benchmarks/engine/cpu_products.py --rows 1 8 --only "bfloat16 in tiles"

The products of SmolLM2-135M run in their order in one compiled program, with random weights: 30 layers and the logits.
Ways that the processor does not have are left out. All ways take turns in each round; figures are medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from pallas_kernels import Ops, Weight, cpu, load
from pallas_kernels.cpu.code import Machine
from pallas_kernels.weights import Format, quantize

LAYERS, HIDDEN, INNER, KEYS, VOCABULARY = 30, 576, 1536, 192, 49152
OPS = Ops(load(cpu.__name__))


class Way(NamedTuple):
    """A kind of weights, and the instructions that multiply them.

    Attributes:
        form: of the weights.
        dtype: of the rows.
        instructions: fields of `Machine` that choose the instructions.
        int8_rows: whether rows are rounded to int8.
    """

    form: Format
    dtype: str
    instructions: dict[str, bool]
    int8_rows: bool = False


WAYS = {
    "float32": Way(Format("float32"), "float32", {}),
    "bfloat16 in float32": Way(
        Format("bfloat16"), "bfloat16", {"has_bf16_dot": False, "has_bf16_tiles": False}
    ),
    "bfloat16 in pairs": Way(Format("bfloat16"), "bfloat16", {"has_bf16_dot": True, "has_bf16_tiles": False}),
    "bfloat16 in tiles": Way(Format("bfloat16"), "bfloat16", {"has_bf16_dot": True, "has_bf16_tiles": True}),
    "int8": Way(Format("int8", "float32"), "bfloat16", {"has_int8_tiles": False}),
    "int8 in tiles": Way(Format("int8", "float32"), "bfloat16", {"has_int8_tiles": True}),
    "8 bits in groups of 32": Way(Format("int8", "float16", group=32), "bfloat16", {}),
    "8 bits in groups of 32, rows of int8": Way(
        Format("int8", "float16", group=32), "bfloat16", {"has_byte_dot": True}, int8_rows=True
    ),
    "4 bits in groups of 32": Way(Format("uint8", "float16", "float16", 32), "bfloat16", {}),
    "4 bits in groups of 32, rows of int8": Way(
        Format("uint8", "float16", "float16", 32), "bfloat16", {"has_byte_dot": True}, int8_rows=True
    ),
}  # fmt: skip


def random_weights(form: Format, num_layers: int) -> Any:
    """Return the weights of all layers, and those of the logits."""
    keys = iter(jax.random.split(jax.random.key(0), 7 * num_layers + 1))

    def weight(outputs: int, inputs: int) -> Weight:
        exact = jax.random.normal(next(keys), (outputs, inputs)) / inputs**0.5
        return quantize(exact, form) if form.scales else Weight(exact.astype(form.dtype))

    shapes = ((HIDDEN, KEYS, KEYS), (HIDDEN,), (INNER, INNER))
    layers = [
        (*([weight(outputs, HIDDEN) for outputs in shape] for shape in shapes), weight(HIDDEN, INNER))
        for _ in range(num_layers)
    ]
    return layers, weight(VOCABULARY, HIDDEN)


def step(ops: Ops, x_td: jax.Array, weights: Any) -> jax.Array:
    """Return the logits [T, V] of rows [T, D] after all products of a step."""
    layers, logits = weights
    for qkv, (output,), (gate, up), down in layers:
        q_td, *_ = ops.products(x_td, *qkv)
        x_td = ops.product(q_td, output)
        x_td = ops.product(ops.product(x_td, gate, up=up, activation="silu"), down)
    return ops.product(x_td, logits, dtype=jnp.float32)


@contextmanager
def processor(instructions: dict[str, bool]) -> Iterator[None]:
    """Compile for a machine with some instructions, and without others."""
    machine = Machine.host()._replace(**instructions)
    with mock.patch.object(Machine, "host", lambda: machine):
        yield


def timed(rows: int, names: Sequence[str], num_layers: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Return the seconds of a step in each way, and the bytes of its weights."""
    calls: dict[str, tuple[Callable[[], jax.Array], int]] = {}
    for name in tqdm(names, f"{rows} rows: compiled", leave=False):
        way = WAYS[name]
        x_td = jax.random.normal(jax.random.key(1), (rows, HIDDEN), way.dtype)
        weights = random_weights(way.form, num_layers)
        ops = replace(OPS, int8_rows=way.int8_rows)
        with processor(way.instructions):
            run = jax.jit(lambda x_td, weights, ops=ops: step(ops, x_td, weights)).lower(x_td, weights).compile()
        size = sum(array.nbytes for array in jax.tree.leaves(weights))
        calls[name] = (lambda run=run, x_td=x_td, weights=weights: run(x_td, weights)), size
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # one is not counted
        for name, (call, _) in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(seconds[name][1:]), calls[name][1]) for name in calls}


def available() -> list[str]:
    """Return the ways that this processor has."""
    host = Machine.host()
    return [name for name, way in WAYS.items() if all(getattr(host, k) or not v for k, v in way.instructions.items())]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "cpu_products")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="how often each step is measured")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 16, 40, 128, 512], metavar="N")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), metavar="WAY", help="ways to measure")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    names = [name for name in available() if not args.only or name in args.only]
    for rows in args.rows:
        for name, (seconds, size) in timed(rows, names, args.layers, args.rounds).items():
            multiplied = 2 * rows * (args.layers * HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER) + VOCABULARY * HIDDEN)
            report.add(way=name, rows=rows, ms=1e3 * seconds, gb_s=size / seconds / 1e9,
                       gflop_s=multiplied / seconds / 1e9)  # fmt: skip
    report.publish(
        "Products of a step on a CPU",
        f"{Machine.host().cpu}. The products of SmolLM2-135M, {args.layers} layers and the logits, with random "
        f"weights. Medians of {args.rounds} rounds.",
        table(report.rows, ("rows", "way", "ms", "gb_s", "gflop_s")),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
