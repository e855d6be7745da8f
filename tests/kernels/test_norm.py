"""The op of root-mean-square norms: compiled for a CPU and as defined, in float64; bits of rows; planted faults."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Ops, load
from pallas_kernels.cpu import code, norm

pytestmark = pytest.mark.usefixtures("optimized_code")

OPS = {name: Ops(load(f"pallas_kernels.{name}")) for name in ("reference", "cpu")}
VERSIONS = itertools.count(10**6)  # of targets
SHAPES = [(1, 64), (5, 130), (300, 63), (3, 7), (2, 2 * norm.UNIT)]  # parts of vectors and of columns, several units
ROUNDED = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-10}


@pytest.fixture
def anew(monkeypatch) -> Ops:
    """The op for a CPU, without any code that another test has compiled."""
    monkeypatch.setattr(norm, "VERSION", next(VERSIONS))
    return OPS["cpu"]


def call_of(rows: int, width: int, dtype: str = "float32", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, rows, width])
    x_td = rng.standard_normal((rows, width)) * np.geomspace(0.01, 100, rows)[:, None]
    return x_td.astype(np.dtype(dtype)), rng.standard_normal(width).astype(np.dtype(dtype))


def assert_normed(ops: Ops, x_td: jax.Array, scale_d: jax.Array, offset: float = 0.0) -> None:
    epsilon = 0.01
    y_td = jax.jit(lambda *args: ops.rms_norm(*args, epsilon=epsilon, offset=offset))(x_td, scale_d)
    assert y_td.dtype == x_td.dtype
    x, scale = np.asarray(x_td, np.float64), np.asarray(scale_d, np.float64) + offset
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale
    np.testing.assert_allclose(np.asarray(y_td, np.float64), expected, rtol=ROUNDED[str(x_td.dtype)], atol=1e-6)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_it_is_that_of_float64(name, shape, dtype):
    assert_normed(OPS[name], *call_of(*shape, dtype), offset=float(dtype == "float32"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bits_of_the_row_alone(shape):
    x_td, scale_d = call_of(*shape)
    compiled = jax.jit(lambda x_td: OPS["cpu"].rms_norm(x_td, scale_d, epsilon=1e-5))
    normed = lambda x_td: np.asarray(compiled(x_td))
    whole = normed(x_td)
    for t in range(0, len(x_td), 7):
        np.testing.assert_array_equal(normed(x_td[t : t + 1])[0], whole[t])


def test_rows_of_zeros_with_infinity_and_with_nan():
    x_td = np.ones((4, 70), np.float32)
    x_td[0], x_td[1, 69], x_td[2, 3] = 0, np.inf, np.nan
    y_td = np.asarray(OPS["cpu"].rms_norm(x_td, np.ones(70, np.float32), epsilon=1e-5))
    assert not y_td[0].any() and np.isnan(y_td[1, 69]) and np.isnan(y_td[2]).all() and np.isfinite(y_td[3]).all()


@pytest.mark.parametrize("name", OPS)
def test_derivatives(name):
    x_td, scale_d = call_of(5, 130)

    def loss(x_td, scale_d, ops) -> jax.Array:
        return (ops.rms_norm(x_td, scale_d, epsilon=0.1, offset=1.0) * x_td[::-1]).sum()

    def by_definition(x_td, scale_d) -> jax.Array:
        factor = 1 / jnp.sqrt((x_td**2).mean(-1, keepdims=True) + 0.1)
        return (x_td * factor * (scale_d + 1) * x_td[::-1]).sum()

    found = jax.jit(jax.grad(lambda *args: loss(*args, OPS[name]), argnums=(0, 1)))(x_td, scale_d)
    for one, other in zip(found, jax.jit(jax.grad(by_definition, argnums=(0, 1)))(x_td, scale_d), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((jnp.ones((2, 3, 4)), jnp.ones(4)), r"^x_td is float32\[2, 3, 4\], expected \[T, D\] of float32"),
        ((jnp.ones((2, 4), int), jnp.ones(4)), r"^x_td is int32"),
        ((jnp.ones((2, 4)), jnp.ones(5)), r"^scale_d is float32\[5\], expected \[4\] of float32"),
    ],
)
def test_errors(arguments, error):
    with pytest.raises(ValueError, match=error):
        OPS["cpu"].rms_norm(*arguments, epsilon=1e-5)


SUM = norm._Writer._sum_of_squares
FAULTS = {
    "the sum of the first row": ("_sum_of_squares", lambda self, start: SUM(self, start * 0)),
    "a sum of whole columns only": (
        "_sum_of_squares", lambda self, start: SUM(_narrow(self, self.width - self.width % norm.COLUMNS), start)
    ),
    "numbers past the end of a row": ("_sum_of_squares", lambda self, start: SUM(_narrow(self, self.width + 1), start)),
}  # fmt: skip


def _narrow(writer: norm._Writer, width: code.Value) -> norm._Writer:
    """A writer of rows of another width."""
    other = object.__new__(norm._Writer)
    other.__dict__ = writer.__dict__ | {"width": width}
    return other


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, anew, monkeypatch):
    monkeypatch.setattr(norm._Writer, *FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_normed(anew, *call_of(5, 130, seed=1))


@pytest.mark.parametrize("lanes", [4, 8])
def test_the_bits_are_those_of_vectors_of_any_width(lanes, anew, monkeypatch):
    x_td, scale_d = call_of(5, 130)
    expected = OPS["cpu"].rms_norm(x_td, scale_d, epsilon=1e-5)
    machine = code.Machine.host()
    monkeypatch.setattr(norm, "VERSION", next(VERSIONS))
    monkeypatch.setattr(code.Machine, "host", classmethod(lambda cls: machine._replace(lanes=lanes)))
    np.testing.assert_array_equal(anew.rms_norm(x_td, scale_d, epsilon=1e-5), expected)
