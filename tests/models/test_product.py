"""Layers with products."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.models.layers import Embedding, Linear, set_ops


def linear(bias: bool, seed: int = 0) -> Linear:
    layer = Linear(24, 40, (None, None), bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    if bias:
        layer.bias[...] = jnp.linspace(-1, 1, 40)
    return layer


def exact(layer: Linear, x_ti: np.ndarray) -> np.ndarray:
    y_to = x_ti @ np.asarray(layer.weight[...], float).T
    return y_to + np.asarray(layer.bias[...]) if hasattr(layer, "bias") else y_to


X = np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    layer, other = linear(bias), linear(bias, 1)
    plain = exact(layer, X)
    np.testing.assert_allclose(layer(X), plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer(X, "relu"), np.maximum(plain, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer(X, "relu", up=other), np.maximum(plain, 0) * exact(other, X), rtol=1e-4, atol=1e-4)
    for found, each in zip(layer.together(X, other), (layer, other), strict=True):
        np.testing.assert_allclose(found, exact(each, X), rtol=1e-5, atol=1e-5)


def test_another_dtype_of_the_result():
    layer = Linear(24, 40, (None, None), bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x_ti = jnp.asarray(X, jnp.bfloat16)
    assert layer(x_ti).dtype == jnp.bfloat16
    found = layer(x_ti, dtype=jnp.float32)
    np.testing.assert_allclose(found, exact(layer, np.asarray(x_ti, float)), rtol=1e-5, atol=1e-5)


def test_an_embedding():
    embedding = Embedding(11, 24, "vocab", dtype=jnp.float32, rngs=nnx.Rngs(0))
    table = np.asarray(embedding.embedding[...])
    np.testing.assert_array_equal(embedding(jnp.array([3, 10])), table[[3, 10]])
    np.testing.assert_allclose(embedding.logits(jnp.asarray(X)), X @ table.T, rtol=1e-5, atol=1e-6)


def test_modules_use_the_products_that_they_are_given():
    module = nnx.List([linear(True), Embedding(11, 24, "vocab", dtype=jnp.float32, rngs=nnx.Rngs(0))])
    set_ops(
        module,
        product=lambda x_ti, weight, **options: ("product", options),
        products=lambda x_ti, *weights: len(weights),
    )
    assert module[0](X, "relu")[1]["activation"] == "relu"
    assert module[0].together(X, module[0], module[0]) == 3
    assert module[1].logits(X)[0] == "product"
    assert linear(True)(X).shape == (5, 40), "other modules are not changed"


def test_an_attribute_of_the_same_name_is_not_replaced():
    class Other(nnx.Module):
        product = 3

    other = Other()
    set_ops(other, product=lambda *_: 0, products=lambda *_: 0)
    assert other.product == 3
