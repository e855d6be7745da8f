"""Products with weights of real models: kernels beside XLA, by the number of rows."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.bench import Bench
from benchmarks.kernels.expected import WrongOutput
from benchmarks.kernels.workloads import random_array
from benchmarks.shared.timing import JaxTimed, measure
from pallas_kernels import Weight, reference
from pallas_kernels.dispatch import PROGRAMS
from pallas_kernels.options import ProductOptions
from pallas_kernels.weights import Format, quantize

TOLERANCE = 2**-6  # of the largest number of a result: two roundings to bfloat16, and a gate's
MIN_BYTES = 400e6  # of the weights that are multiplied in turn, many times a cache


class Case(NamedTuple):
    """A weight.

    Attributes:
        dtype: of its numbers; with 8 bits it has a scale for each output; uint8: packed numbers of 4 bits.
        outputs, inputs: its shape.
        gated: there is a second one, for a gated product.
        experts: number of experts; 0: none.
        top: experts of a token.
        group: number of inputs with a scale and a minimum in float16; None: there are none.
    """

    dtype: str
    outputs: int
    inputs: int
    gated: bool = False
    experts: int = 0
    top: int = 1
    group: int | None = None

    @property
    def count(self) -> int:
        """Number of all numbers of the case."""
        return (1 + self.gated) * max(1, self.experts) * self.outputs * self.inputs

    @property
    def number_bytes(self) -> float:
        """Bytes of a number with its share of a group's scale and minimum."""
        size = jnp.dtype(self.dtype).itemsize
        return size if self.group is None else (0.5 if self.dtype == "uint8" else size) + 4 / self.group


# Names of the weights of Llama-3.1-8B, and of the experts of Qwen3-30B-A3B.
CASES = {
    "qkv": Case("bfloat16", 6144, 4096),
    "o": Case("bfloat16", 4096, 4096),
    "gate and up": Case("bfloat16", 14336, 4096, gated=True),
    "down": Case("bfloat16", 4096, 14336),
    "qkv, int8": Case("int8", 6144, 4096),
    "qkv, fp8": Case("float8_e4m3fn", 6144, 4096),
    "gate and up, int8": Case("int8", 14336, 4096, gated=True),
    "qkv, 4 bits": Case("uint8", 6144, 4096, group=32),
    "qkv, 4 bits in groups of 128": Case("uint8", 6144, 4096, group=128),
    "gate and up, 4 bits": Case("uint8", 14336, 4096, gated=True, group=32),
    "down, 4 bits": Case("uint8", 4096, 14336, group=32),
    "qkv, 8 bits in groups of 32": Case("int8", 6144, 4096, group=32),
    "experts' gate and up": Case("bfloat16", 768, 2048, gated=True, experts=128, top=8),
    "experts' down": Case("bfloat16", 2048, 768, experts=128, top=8),
    "experts' gate and up, int8": Case("int8", 768, 2048, gated=True, experts=128, top=8),
    "experts' gate and up, 4 bits": Case("uint8", 768, 2048, gated=True, experts=128, top=8, group=32),
}
TINY = {
    "tiny": Case("bfloat16", 128, 128),
    "tiny experts": Case("int8", 64, 128, gated=True, experts=3, top=2),
    "tiny, 4 bits": Case("uint8", 64, 128, gated=True, group=32),
}

Multiply = Callable[[jax.Array, tuple[Weight, ...], ProductOptions], tuple[jax.Array, ...]]


def products(bench: Bench, names: Sequence[str], rows: Sequence[int]) -> None:
    """Compare the results of XLA and of the kernels of each implementation, then time them.

    Args:
        names: keys of CASES.
        rows: numbers of tokens; with experts, each token has a row for each of its experts.
    """
    multiplies: dict[str, Multiply] = {"xla": reference.product}
    for name in bench.implementations:
        module = importlib.import_module(PROGRAMS[name].module) if name in PROGRAMS else None
        if module and hasattr(module, "product"):
            multiplies[name] = module.product
    for name in bench.sized(names, [*TINY]):
        each = bench.sized(CASES, TINY)[name]
        sets = max(2, round(MIN_BYTES / (each.count * each.number_bytes))) if not bench.tiny else 2
        weights = [_weights(each, 10 * i) for i in range(sets)]
        for tokens in bench.sized(rows, [3]):
            _compare(bench, name, each, tokens, weights, multiplies)


def _weights(case: Case, seed: int) -> tuple[Weight, ...]:
    experts = (case.experts,) if case.experts else ()

    def weight(seed: int) -> Weight:
        values = random_array((*experts, case.outputs, case.inputs), "bfloat16", seed)
        if case.group:
            form = Format(case.dtype, "float16", "float16", case.group)
            quantized: Weight = jax.jit(quantize, static_argnums=1)(values * case.inputs**-0.5, form)
            return quantized
        if jnp.dtype(case.dtype).itemsize > 1:
            return Weight((values * case.inputs**-0.5).astype(case.dtype))
        scale = jnp.full((*experts, case.outputs), case.inputs**-0.5 / 40, jnp.float32)
        return Weight((40 * values).clip(-127, 127).astype(case.dtype), scale)

    return tuple(weight(seed + i) for i in range(1 + case.gated))


def _compare(
    bench: Bench, name: str, case: Case, tokens: int, weights: Sequence[tuple[Weight, ...]],
    multiplies: dict[str, Multiply],
) -> None:  # fmt: skip
    row: dict[str, Any] = dict(experiment="product", weight=name, rows=tokens)
    if bench.leaves_out(**row):
        return
    sizes, touched = None, case.count
    if case.experts:
        rng = np.random.default_rng(0)
        chosen = [rng.choice(case.experts, case.top, replace=False) for _ in range(tokens)]
        sizes = np.bincount(np.concatenate(chosen), minlength=case.experts)
        touched = case.count // case.experts * int((sizes > 0).sum())
    x_ti = random_array((tokens * case.top, case.inputs), "bfloat16", 999)
    options = ProductOptions(
        "silu" if case.gated else None, case.gated, sizes_e=None if sizes is None else jnp.asarray(sizes, jnp.int32)
    )
    timed: dict[str, JaxTimed] = {}
    expected: np.ndarray | None = None
    errors = {}
    for variant, multiply in multiplies.items():

        def call(carry: Any, x_ti: jax.Array, weight: tuple[Weight, ...], multiply: Multiply = multiply) -> Any:
            (y_to,) = jax.lax.optimization_barrier(multiply(x_ti, weight, options))
            return y_to[0, 0].astype(jnp.float32) + 0 * carry

        try:
            found = np.asarray(jax.jit(multiply)(x_ti, weights[0], options)[0], np.float32)
            expected = found if expected is None else expected
            errors[variant] = float(np.abs(found - expected).max() / np.abs(expected).max())
            if not errors[variant] <= TOLERANCE:
                raise WrongOutput(f"off by {errors[variant]:.2g} of the largest number, allowed {TOLERANCE:.2g}")
            timed[variant] = JaxTimed(call, jnp.zeros(()), x_ti, weights)
        except Exception as error:  # of a compiler or a driver: the other variants go on
            bench.fail(error, **row, variant=variant)
    moved = touched * case.number_bytes + 2 * tokens * case.top * (case.inputs + case.outputs)
    operations = 2 * (1 + case.gated) * tokens * case.top * case.outputs * case.inputs
    for variant, timing in measure(timed, bench.effort).items():
        bench.report.add(
            **row, variant=variant, **timing.row(), gb_per_s=moved / timing.median / 1e9,
            tflop_per_s=operations / timing.median / 1e12, error=errors[variant], status="ok",
        )  # fmt: skip
