"""A mixture of experts on a CPU: grouped products beside those of XLA, which multiplies all rows by all experts.

    python benchmarks/engine/experts.py --out results      ten minutes, 12 GB of memory

One layer of Qwen3-30B-A3B's experts (128, of which a token takes 8) with random parameters computes random rows. The
kernels read and multiply the experts that the router chose; XLA's `ragged_dot` on a CPU, the reference, multiplies each
row by the matrices of every expert. The reference runs once, and only for one token, because it takes up to a minute.
Multiplications and bytes follow from the routes of the rows, and for the reference from XLA's analysis of the compiled
program.
"""

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine.cpu_step import timed
from benchmarks.engine.steps import random_model
from benchmarks.kernels.workloads import random_array
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.models import MODELS
from benchmarks.shared.results import Report, script_parser, table
from jpaged.models.layers import set_ops
from jpaged.models.moe import MixtureOfExperts
from pallas_kernels import Ops, cpu, load, reference

# Name -> dtype of activations and of unquantized parameters, and quantization.
KINDS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int4": ("bfloat16", "int4")}
TOKENS = (1, 64)
SMALL = dict(experts=dict(num_experts=4, num_experts_per_tok=2, intermediate_size=64), hidden_size=64)


def calls_of(mixture: MixtureOfExperts, x_td: jax.Array) -> dict[str, Any]:
    """Return the layer with grouped products and with those of the reference, and its products alone, compiled."""
    graphdef, state = nnx.split(mixture)
    tokens, top_k = len(x_td), mixture.top_k

    def with_products(module: str, state: Any) -> MixtureOfExperts:
        ops, merged = Ops(load(module)), nnx.merge(graphdef, state)
        set_ops(merged, product=ops.product, products=ops.products)
        return merged

    def products(state: Any, x_md: jax.Array, sizes_e: jax.Array, tokens_m: jax.Array) -> jax.Array:
        return with_products(cpu.__name__, state).experts(x_md, sizes_e, tokens_m)

    chosen_m = np.sort(chosen(mixture, x_td).reshape(-1))
    sizes_e = jnp.asarray(np.bincount(chosen_m, minlength=mixture.num_experts), jnp.int32)
    tokens_m = jnp.arange(tokens * top_k, dtype=jnp.int32) // top_k
    whole = lambda module: jax.jit(lambda state, x_td: with_products(module, state)(x_td)).lower(state, x_td).compile()
    grouped, dense = whole(cpu.__name__), whole(reference.__name__)
    alone, x_md = jax.jit(products), x_td[tokens_m]
    return {
        "grouped": lambda: grouped(state, x_td),
        "products": lambda: alone(state, x_md, sizes_e, tokens_m),
        "dense": lambda: dense(state, x_td),
        "flops": dense.cost_analysis()["flops"],
    }


def chosen(mixture: MixtureOfExperts, x_td: jax.Array) -> np.ndarray:
    """Return the experts [T, K] of each row."""
    return np.asarray(jax.lax.top_k(mixture.gate(x_td, dtype=jnp.float32), mixture.top_k)[1])


def row_of(mixture: MixtureOfExperts, x_td: jax.Array, rounds: int) -> dict[str, Any]:
    """Return multiplications, bytes and times of a layer, grouped and dense."""
    calls, routes = calls_of(mixture, x_td), chosen(mixture, x_td)
    flops, dense = calls.pop("flops"), calls.pop("dense")
    seconds, dense_s = timed(calls, rounds), None
    if len(x_td) == 1:
        start = time.perf_counter()
        expected = np.asarray(dense(), np.float32)
        dense_s = time.perf_counter() - start
        np.testing.assert_allclose(np.asarray(calls["grouped"](), np.float32), expected, atol=0.05)
    experts = mixture.experts
    of_experts = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(experts))) / mixture.num_experts
    distinct, (_, size, _) = len(np.unique(routes)), experts.gate_proj.shape
    products = routes.size * 3 * size * x_td.shape[1]
    return {
        "experts_read": distinct, "grouped_mb": distinct * of_experts / 1e6,
        "dense_mb": mixture.num_experts * of_experts / 1e6, "grouped_gflop": 2 * products / 1e9,
        "dense_gflop": flops / 1e9, "grouped_ms": 1e3 * seconds["grouped"],
        "beside_products_ms": 1e3 * (seconds["grouped"] - seconds["products"]), "dense_ms": dense_s and 1e3 * dense_s,
        "ratio": dense_s and dense_s / seconds["grouped"], "gb_s": distinct * of_experts / seconds["grouped"] / 1e9,
    }  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "experts")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each program is measured")
    parser.add_argument("--tiny", action="store_true", help="4 small experts: shows that the program works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), args.tiny))
    config = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_hidden_layers=1, vocab_size=128)
    if args.tiny:
        experts = dataclasses.replace(config.variation.experts, **SMALL["experts"])
        variation = dataclasses.replace(config.variation, experts=experts)
        config = dataclasses.replace(config, hidden_size=SMALL["hidden_size"], variation=variation)
    for kind, (dtype, quantization) in KINDS.items():
        mixture = random_model(config, dtype, quantization).layers[0].mlp
        for tokens in TOKENS:
            x_td = random_array((tokens, config.hidden_size), dtype, tokens)
            report.add(
                experiment="experts", kind=kind, tokens=tokens, **row_of(mixture, x_td, args.rounds), status="ok"
            )
        del mixture
        gc.collect()
    experts = config.variation.experts
    report.publish(
        "A mixture of experts on a CPU",
        f"One layer of {experts.num_experts} experts, {experts.num_experts_per_tok} for each token, hidden size "
        f"{config.hidden_size} and expert size {experts.intermediate_size}. Grouped: the kernels, medians of "
        f"{args.rounds} rounds; dense: XLA's ragged_dot, once.",
        table(report.rows, ("kind", "tokens", "experts_read", "grouped_mb", "dense_mb", "grouped_gflop", "dense_gflop",
                            "grouped_ms", "beside_products_ms", "dense_ms", "ratio", "gb_s")),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
