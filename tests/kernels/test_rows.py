"""Products and reductions whose rows do not depend on the number of rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.config import ModelConfig
from jpaged.models.layers import RMSNorm, set_ops
from jpaged.models.moe import MixtureOfExperts
from jpaged.models.variation import Experts
from pallas_kernels import ROW_ORDER, Ops, load, reference, rows
from pallas_kernels.ops import Implementation
from pallas_kernels.reductions import row_argmax, row_logsumexp, row_max, row_sum
from pallas_kernels.weights import Format, Weight, quantize

SIZES = (1, 3, 17)
ALL = 64
OPTIMIZED = ROW_ORDER | {"xla_backend_optimization_level": "3"}  # as users compile
BY_ROWS = Ops(load("pallas_kernels.reference")._replace(product=rows.product))
CONFIG = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.dtype(dtype))


def sizes_that_differ(function, width: int, dtype: str = "float32", options=OPTIMIZED) -> list[int]:
    """Return the numbers of rows with which some row has other bits than among `ALL` rows."""
    x = normal(4 * ALL, width, dtype=dtype)

    compiled = jax.jit(function, compiler_options=options)

    def bits(size: int) -> np.ndarray:
        parts = [np.asarray(compiled(x[i : i + size])) for i in range(0, 2 * ALL, size)]
        return np.concatenate([part.reshape(len(part), -1) for part in parts])[:ALL]

    expected = bits(ALL)
    return [size for size in SIZES if not np.array_equal(bits(size), expected, equal_nan=True)]


def weight(form: Format | None, outputs: int, inputs: int, dtype: str, *, bias: bool = True, seed: int = 1) -> Weight:
    values = normal(outputs, inputs, dtype=dtype, seed=seed)
    made = Weight(values) if form is None else jax.jit(quantize, static_argnums=1)(values, form)
    return made._replace(bias=normal(outputs, dtype=dtype, seed=2) if bias else None)


FORMS = {"dense": None, "int8": Format("int8", "float32"), "int4": Format("uint8", "float16", "float16", 32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "activation", ["silu", *(pytest.param(each, marks=pytest.mark.deep) for each in (None, "gelu_pytorch_tanh"))]
)
@pytest.mark.parametrize("form", ["int8", *(pytest.param(form, marks=pytest.mark.deep) for form in ("dense", "int4"))])
def test_a_gated_product_of_the_kernels_has_one_order(form, activation):
    """Outputs end in a part of a vector, in other parts for few rows than for many."""
    pytest.importorskip("llvmlite")
    ops = Ops(load("pallas_kernels.cpu"))
    gate, up = (weight(FORMS[form], 72, 64, "float32", seed=seed) for seed in (1, 3))
    assert sizes_that_differ(lambda x: ops.product(x, gate, up=up, activation=activation), 64) == []


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.deep)])
def test_a_product_by_rows_has_one_order_and_that_of_xla_does_not(dtype):
    plain = weight(None, 72, 160, dtype)
    for ops, differs in ((BY_ROWS, False), (Ops(load("pallas_kernels.reference")), True)):
        found = sizes_that_differ(lambda x, ops=ops: ops.product(x, plain, dtype=jnp.float32), 160, dtype)
        assert bool(found) == differs


@pytest.mark.parametrize("form", ["dense", pytest.param("int8", marks=pytest.mark.deep), "int4"])
def test_products_by_rows_are_those_of_the_definition(form):
    """Of wanted rows, with and without experts; other rows are 0."""
    x, wanted = normal(9, 64), jnp.arange(9) % 3 > 0
    plain = weight(FORMS[form], 40, 64, "float32")
    expected = np.where(wanted[:, None], reference_ops().product(x, plain, activation="silu"), 0)
    np.testing.assert_allclose(BY_ROWS.product(x, plain, activation="silu", wanted_t=wanted), expected, atol=2e-5)
    assert all(np.array_equal(a, b) for a, b in zip(BY_ROWS.products(x, plain, plain), [BY_ROWS.product(x, plain)] * 2))
    several = [weight(FORMS[form], 40, 64, "float32", bias=False, seed=seed) for seed in range(3)]
    experts = Weight(*(None if part[0] is None else jnp.stack(part) for part in zip(*several)))
    options = {"sizes_e": jnp.asarray([4, 0, 3]), "tokens_m": jnp.arange(9)[::-1]}
    expected = np.asarray(reference_ops().product(x, experts, **options)).copy()
    expected[7:] = 0  # rows of no expert
    found = BY_ROWS.product(x, experts, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-5)
    some = BY_ROWS.product(x, experts, **options, wanted_t=wanted)
    np.testing.assert_array_equal(some, np.where(wanted[::-1, None], found, 0))


def reference_ops() -> Ops:
    return Ops(Implementation(*load("pallas_kernels.reference")._replace(product=reference.product)))


REDUCTIONS = {"max": row_max, "sum": row_sum, "logsumexp": row_logsumexp, "argmax": row_argmax}


@pytest.mark.parametrize(
    "name, width",
    [
        pytest.param(name, width, marks=[] if i % 3 == j else [pytest.mark.deep])
        for i, name in enumerate(REDUCTIONS) for j, width in enumerate((259, 1280, 3))
    ],
)  # fmt: skip
def test_a_reduction_of_logits_has_one_order(name, width):
    assert sizes_that_differ(REDUCTIONS[name], width) == []
    x = normal(5, width)
    x[0, 0], x[1, 1], x[2] = np.inf, np.nan, -np.inf
    expected = {
        "max": lambda x: x.max(-1), "sum": lambda x: x.sum(-1),
        "logsumexp": jax.jit(partial(jax.nn.logsumexp, axis=-1)), "argmax": lambda x: x.argmax(-1),
    }[name](x)  # fmt: skip
    kept = np.arange(5) != (1 if name == "argmax" else -1)  # any place in a row with NaN
    np.testing.assert_allclose(
        np.asarray(jax.jit(REDUCTIONS[name])(x))[kept], np.asarray(expected)[kept], rtol=1e-5, atol=1e-4
    )


def test_a_norm_and_a_router_have_one_order_and_without_the_options_they_do_not():
    norm = RMSNorm(160, 1e-6, dtype="float32")
    assert sizes_that_differ(norm, 160) == []
    assert sizes_that_differ(norm, 160, options=None)
    router = MixtureOfExperts(CONFIG, Experts(5, 2, 24, True), "float32", nnx.Rngs(0))
    set_ops(router, product=BY_ROWS.product, products=BY_ROWS.products)
    assert sizes_that_differ(router, 64) == []
