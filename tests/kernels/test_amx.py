"""Products of bfloat16 in tile registers, and planted faults. They need a processor with AMX."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import amx
from pallas_kernels.cpu.code import Machine
from pallas_kernels.cpu.product import UNIT_T
from tests.kernels.products import FORMS, exact_matrix, weight_in, x_of
from tests.kernels.test_product import OPS, assert_product

pytestmark = pytest.mark.skipif(not Machine.host().has_bf16_tiles, reason="this processor has no tiles of bfloat16")

MANY = 2 * UNIT_T + 45
ROWS = (1, 2, 16, 17, 33, 49, 65, UNIT_T, MANY)
VERSIONS = itertools.count(10**6)  # of targets


@pytest.fixture
def multiply(monkeypatch):
    """The op `product` with a float32 result, without any code that another test has compiled."""
    monkeypatch.setattr(sys.modules["pallas_kernels.cpu.product"], "VERSION", next(VERSIONS))
    return jax.jit(lambda x_ti, weight, **options: OPS["cpu"].product(x_ti, weight, dtype=jnp.float32, **options))


def exact_product(x_ti: jax.Array, matrix_oi: np.ndarray) -> np.ndarray:
    return np.asarray(x_ti, np.float64) @ matrix_oi.T


@pytest.mark.parametrize("outputs", [3, 16, 50, amx.WIDTHS + 33])
@pytest.mark.parametrize("depth", [64, 96, 1152])
def test_each_number_of_rows_has_the_same_bits(outputs, depth, multiply):
    x_ti, weight = x_of(MANY, depth, "bfloat16"), weight_in(FORMS["bfloat16"], outputs, depth)
    together = multiply(x_ti, weight)
    assert_product(together, exact_product(x_ti, exact_matrix(weight)), depth)
    for rows in ROWS:
        np.testing.assert_array_equal(multiply(x_ti[-rows:], weight), together[-rows:])


@pytest.mark.parametrize("sizes", [[0, 9, 0, 0], [3, 2, 1, 3], [0, 150, 1, 40], [20, 0, 30, 17]])
def test_experts_whose_rows_begin_inside_a_tile(sizes, multiply):
    weight, rows = weight_in(FORMS["bfloat16"], 4, 50, 128, bias="float32"), sum(sizes)
    x_ti, first = x_of(rows + 3, 128, "bfloat16"), 0
    found = multiply(x_ti, weight, sizes_e=jnp.array(sizes))
    for expert, size in enumerate(sizes):
        matrix, stop = exact_matrix(weight)[expert], first + size
        exact = exact_product(x_ti[first:stop], matrix) + np.asarray(weight.bias[expert])
        assert_product(found[first:stop], exact, 128)
        first = stop
    assert not found[rows:].any()


@pytest.mark.parametrize("wanted", [[], [0], [5, 6, 70], range(UNIT_T - 1, UNIT_T + 9), range(0, UNIT_T + 9, 2)])
def test_rows_that_nobody_wants_are_zero(wanted, multiply):
    x_ti, weight = x_of(UNIT_T + 9, 128, "bfloat16"), weight_in(FORMS["bfloat16"], 50, 128)
    wanted_t = jnp.zeros(len(x_ti), bool).at[jnp.array(wanted, int)].set(True)
    whole = jnp.where(wanted_t[:, None], multiply(x_ti, weight), 0.0)
    with_nan = jnp.where(wanted_t[:, None], x_ti, jnp.nan).astype(jnp.bfloat16)
    np.testing.assert_array_equal(multiply(with_nan, weight, wanted_t=wanted_t), whole)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_gate_and_several_weights_in_one_pass(rows, multiply):
    x_ti, weights = x_of(rows, 128, "bfloat16"), [weight_in(FORMS["bfloat16"], size, 128) for size in (70, 50, 1)]
    for found, weight in zip(OPS["cpu"].products(x_ti, *weights, dtype=jnp.float32), weights, strict=True):
        np.testing.assert_array_equal(found, multiply(x_ti, weight))
    gate, up = (exact_product(x_ti, exact_matrix(weights[0])) for _ in range(2))
    assert_product(multiply(x_ti, weights[0], up=weights[0]), gate * up, 128 * 100)


def _pack_another(self, tile):
    PACK(self, self.code.maximum(tile - 1, tile * 0))


def _configure_one(self, outputs):
    CONFIGURE(self, outputs * 0 + 1)


PACK, CONFIGURE = amx.Input._pack, amx.Tiles._configure
FAULTS = {
    "a tile of rows is not packed": (amx.Input, "_pack", lambda self, tile: None),
    "another tile of rows is packed": (amx.Input, "_pack", _pack_another),
    "a tile of weights of one output": (amx.Tiles, "_configure", _configure_one),
    "sums that are not turned": (amx.Tiles, "_transpose", lambda self, sums, to: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, multiply, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    x_ti, weight = x_of(40, 64, "bfloat16"), weight_in(FORMS["bfloat16"], 50, 64)
    with pytest.raises(AssertionError):
        assert_product(multiply(x_ti, weight), exact_product(x_ti, exact_matrix(weight)), 64)
