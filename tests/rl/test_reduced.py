"""Reductions that have the bits of `ROW_ORDER` in programs without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.rl.reduced import by_xla
from pallas_kernels import ROW_ORDER
from pallas_kernels.reductions import row_logsumexp, row_sum

X = np.random.default_rng(0).standard_normal((1536, 512)).astype(np.float32)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def norm(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def probabilities(x):
    """Sums in a nested call, after a function with derivatives of its own, and a literal argument."""
    return jax.jit(lambda x: jax.nn.softmax(doubled(x), axis=-1))(x - 1.0)


def num_differing(found, expected) -> int:
    return int((np.asarray(found).view(np.uint32) != np.asarray(expected).view(np.uint32)).sum())


@pytest.mark.parametrize("function", [norm, probabilities])
def test_a_functions_reductions_have_one_order_in_any_program(function):
    expected = jax.jit(function, compiler_options=ROW_ORDER)(X)
    assert num_differing(jax.jit(function)(X), expected) > 0, "XLA has another order by default"
    assert num_differing(jax.jit(lambda x: by_xla(lambda: function(x)))(X), expected) == 0


@pytest.mark.parametrize("function", [row_sum, row_logsumexp])
def test_reductions_of_logits_have_one_order_in_any_program(function):
    x = np.random.default_rng(1).standard_normal((64, 40_000)).astype(np.float32)
    assert num_differing(jax.jit(function)(x), jax.jit(function, compiler_options=ROW_ORDER)(x)) == 0


def test_results_keep_their_structure_and_integers_their_sums():
    found = jax.jit(lambda x: by_xla(lambda: {"sum": (x.sum(), x.astype(jnp.int32).sum()), "max": x.max(), "x": x}))(X)
    assert found["sum"][1] == X.astype(np.int32).sum() and found["max"] == X.max()
    np.testing.assert_allclose(found["sum"][0], X.sum(), atol=1e-1)
    assert np.array_equal(found["x"], X)
