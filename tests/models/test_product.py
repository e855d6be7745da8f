"""The product of every linear layer, in both of its forms on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.layers import MANY_ROWS, Epilogue, Linear, product

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def arrays(rows: int, dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rows)
    shapes = ((rows, 24), (40, 24), (40,))
    return tuple(np.asarray(jnp.asarray(rng.standard_normal(s), dtype)) for s in shapes)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, MANY_ROWS - 1, MANY_ROWS])
def test_bias_and_activation(rows, dtype):
    x_ti, weight_oi, bias_o = arrays(rows, dtype)
    got = jax.jit(lambda x, w, b: product(x, w, epilogue=Epilogue(bias_o=b, activation=nnx.silu)))(
        x_ti, weight_oi, bias_o
    )
    exact = x_ti.astype(float) @ weight_oi.astype(float).T + bias_o.astype(float)
    expected = exact / (1 + np.exp(-exact))
    assert (got.shape, str(got.dtype)) == ((rows, 40), dtype)
    np.testing.assert_allclose(got.astype(float), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 3, MANY_ROWS])
def test_another_dtype_of_the_result(rows):
    x_ti, weight_oi, _ = arrays(rows, "bfloat16")
    got = jax.jit(lambda x, w: product(x, w, jnp.float32))(x_ti, weight_oi)
    assert (got.shape, got.dtype) == ((rows, 40), np.float32)
    exact = x_ti.astype(float) @ weight_oi.astype(float).T
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)  # bfloat16 operands, no rounding after them


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    layer = Linear(24, 40, (None, None), bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x_ti, _, bias_o = arrays(5, "float32")
    if bias:
        layer.bias[...] = bias_o
    plain = x_ti @ np.asarray(layer.weight[...]).T + (bias_o if bias else 0)
    np.testing.assert_allclose(layer(x_ti), plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer(x_ti, nnx.relu), np.maximum(plain, 0), rtol=1e-5, atol=1e-5)


def test_a_single_row_of_bfloat16_is_never_multiplied_alone():
    """XLA's product of one such row takes ten times as long as that of two on a CPU."""
    x_ti, weight_oi, _ = arrays(1, "bfloat16")
    compiled = jax.jit(product).lower(x_ti, weight_oi).compile().as_text()
    assert "[40,2]" in compiled
