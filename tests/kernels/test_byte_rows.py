"""Products of rows that are rounded to int8, in every implementation, and planted faults."""

import itertools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Ops, Weight, cpu, load, reference, rows
from pallas_kernels.cpu import byte_rows
from pallas_kernels.cpu.code import Code, Machine
from pallas_kernels.cpu.product import FEW_O, UNIT_T
from pallas_kernels.cpu.team import num_threads
from pallas_kernels.weights import Format, rounded_rows
from tests.kernels.implementations import ops_of
from tests.kernels.products import FORMS, exact_matrix, weight_in, x_of
from tests.kernels.test_product import FAULTS, error_bound

OPS = {
    "reference": replace(ops_of(reference), int8_rows=True),
    "rows": Ops(load("pallas_kernels.reference")._replace(product=rows.product), int8_rows=True),
    "cpu": replace(ops_of(cpu), int8_rows=True),
}
PRODUCT = {name: jax.jit(ops.product, static_argnames=("activation", "dtype")) for name, ops in OPS.items()}
PLAIN = jax.jit(ops_of(cpu).product, static_argnames=("activation", "dtype"))
MORE = {
    "int8 with minima": Format("int8", "float32", "float16", 32),
    "int4 in groups of 64": Format("uint8", "float32", None, 64),
}
TAKING = {name: form for name, form in (FORMS | MORE).items() if form.takes_int8_rows}
USUAL = ("int8 in groups of 32", "int4 in groups of 32", "mxfp4", "int8 with minima")
VERSIONS = itertools.count(2 * 10**6)  # of targets

has_byte_dot = pytest.mark.skipif(not Machine.host().has_byte_dot, reason="this processor has no dots of bytes")
each_form = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.deep]) for name in TAKING]
)


def rounded(x_ti: np.ndarray) -> np.ndarray:
    """Return rows as multiples of the scale of each 32 inputs, float64."""
    groups = x_ti.astype(np.float32).reshape(len(x_ti), -1, 32)
    scales = np.abs(groups).max(-1, keepdims=True) * np.float32(1 / 127)
    scales[scales == 0] = 1
    return (np.rint(groups * (1 / scales)).astype(np.float64) * scales).reshape(x_ti.shape)


def assert_rounded(found: jax.Array, x_ti: np.ndarray, weight: Weight) -> None:
    """Check a float32 result. The sums of groups are exact, so that few roundings are left."""
    exact = rounded(x_ti) @ exact_matrix(weight).T
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=1e-5 * x_ti.shape[1] ** 0.5, rtol=0)


def test_forms_that_take_such_rows():
    assert {name for name in FORMS if name in TAKING} == {
        "int8 in groups of 32", "int8 in groups of 128", "int4 in groups of 32", "int4 without minima", "mxfp4",
        "int4 in groups of 128",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_rounded_to_the_nearest(dtype):
    x_ti = x_of(50, 96, dtype).copy()
    x_ti[3, 32:64], x_ti[4, 5], x_ti[5] = 0, 1e-38, 1e-33
    found = np.asarray(jax.jit(rounded_rows)(x_ti))
    expected = rounded(x_ti)
    expected[5] = 0  # too small for a scale
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert np.abs(found - x_ti.astype(np.float32)).max() > 0


@each_form
@pytest.mark.parametrize("implementation", OPS)
@pytest.mark.parametrize(
    "num_rows, depth, dtype", [(1, 640, "bfloat16"), (7, 128, "float32"), (UNIT_T + 9, 384, "float16")]
)
def test_it_is_the_product_of_rounded_rows(name, implementation, num_rows, depth, dtype):
    x_ti, weight = x_of(num_rows, depth, dtype), weight_in(TAKING[name], 50, depth)
    assert_rounded(PRODUCT[implementation](x_ti, weight, dtype="float32"), x_ti, weight)


@has_byte_dot
@each_form
@pytest.mark.parametrize("depth", [32, 64, 96, 160, 576])
def test_the_end_of_a_row_that_is_no_whole_chunk(name, depth):
    form = TAKING[name]
    depth = -(-depth // form.group) * form.group
    x_ti, weight = x_of(5, depth), weight_in(form, 21, depth)
    assert byte_rows.has_code(form, depth)
    assert_rounded(PRODUCT["cpu"](x_ti, weight), x_ti, weight)


@each_form
@pytest.mark.parametrize("depth", [192, pytest.param(2304, marks=pytest.mark.deep)])
def test_a_row_has_the_same_bits_next_to_any_others(name, depth):
    depth = -(-depth // TAKING[name].group) * TAKING[name].group
    x_ti, weight = x_of(300, depth, "bfloat16"), weight_in(TAKING[name], 50, depth)
    multiply = lambda x_ti: np.asarray(PRODUCT["cpu"](x_ti, weight, dtype="float32"))
    together = multiply(x_ti)
    for first, stop in ((0, 1), (5, 7), (62, 65), (100, 116), (UNIT_T - 1, 2 * UNIT_T - 1), (299, 300)):
        np.testing.assert_array_equal(multiply(x_ti[first:stop]), together[first:stop])


@has_byte_dot
def test_threads_that_pack_the_same_row_do_not_disturb_each_other():
    x_ti, weight = x_of(1, 2304), weight_in(TAKING["int4 in groups of 32"], 256, 2304)
    multiply = jax.jit(lambda x_nti: jax.lax.map(lambda x_ti: OPS["cpu"].product(x_ti, weight), x_nti))
    found = np.asarray(multiply(np.repeat(x_ti[None], 4000, axis=0)))[:, 0]
    np.testing.assert_array_equal(found, np.broadcast_to(found[0], found.shape))


def test_few_rows_of_more_outputs_than_are_finished_at_once():
    x_ti, weight = x_of(40, 64), weight_in(TAKING["int4 in groups of 32"], 2 * FEW_O * num_threads() + 7, 64)
    together = np.asarray(PRODUCT["cpu"](x_ti, weight))
    assert_rounded(together, x_ti, weight)
    for num_rows in (1, 2, 4, 7):
        np.testing.assert_array_equal(PRODUCT["cpu"](x_ti[:num_rows], weight), together[:num_rows])


@pytest.mark.parametrize("implementation", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_options_are_applied_as_to_other_rows(implementation):
    """Bias, gate, activation, added numbers, a residual, unwanted rows and the dtype of the result."""
    form = TAKING["int4 in groups of 32"]
    x_ti, residual_to = x_of(21, 192, "bfloat16"), x_of(21, 50, "bfloat16")
    gate, up = (weight_in(form, 50, 192, bias=bias) for bias in ("float32", "float32"))
    wanted = np.arange(21) % 5 != 3
    options = dict(up=up, activation="silu", added=(x_of(21, 50),) * 2, residual_to=residual_to, wanted_t=wanted)
    found = np.asarray(PRODUCT[implementation](x_ti, gate, **options))
    expected = np.asarray(PLAIN(rounded(x_ti).astype(np.float32), gate, **options, dtype="bfloat16"))
    assert found.dtype == "bfloat16"
    np.testing.assert_allclose(*(np.float32(each[wanted]) for each in (found, expected)), rtol=2**-7, atol=2**-7)
    with_nan = np.where(wanted[:, None], x_ti, np.array(np.nan, x_ti.dtype))
    np.testing.assert_array_equal(PRODUCT[implementation](with_nan, gate, **options)[wanted], found[wanted])


@pytest.mark.parametrize("implementation", OPS)
def test_experts(implementation):
    sizes_e, form = np.array([1, 150, 2, 38], np.int32), TAKING["int4 without minima"]
    x_ti, weight = x_of(191, 128, "bfloat16"), weight_in(form, 4, 50, 128)
    found = PRODUCT[implementation](x_ti, weight, sizes_e=sizes_e, dtype="float32")
    for expert, first in enumerate(np.cumsum(sizes_e) - sizes_e):
        of_expert = slice(first, first + sizes_e[expert])
        matrix = Weight(weight.values[expert], weight.scales[expert])
        assert_rounded(found[of_expert], x_ti[of_expert], matrix)


@pytest.mark.parametrize("implementation", OPS)
def test_several_weights_of_which_some_take_other_rows(implementation):
    x_ti = x_of(5, 128)
    packed, dense = weight_in(TAKING["int4 in groups of 32"], 50, 128), weight_in(FORMS["float32"], 30, 128)
    first, second = jax.jit(OPS[implementation].products)(x_ti, packed, dense)
    assert_rounded(first, x_ti, packed)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(dense).T
    assert (np.abs(second - exact) <= error_bound(exact, 128)).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", OPS)
def test_a_row_that_is_not_finite_is_nan_alone(implementation, number):
    x_ti, weight = x_of(9, 128).copy(), weight_in(TAKING["int4 in groups of 32"], 50, 128)
    x_ti[4, 70] = number
    found = np.asarray(PRODUCT[implementation](x_ti, weight))
    assert np.isnan(found[4]).all()
    others = np.arange(9) != 4
    assert_rounded(found[others], x_ti[others], weight)


def test_derivatives_are_those_of_the_rows_as_they_are():
    x_ti, weight = x_of(5, 64), weight_in(TAKING["int4 in groups of 32"], 30, 64)
    loss = lambda product: lambda x_ti: jnp.sin(product(x_ti, weight) / 8).sum()
    found, plain = (jax.jit(jax.grad(loss(product)))(x_ti) for product in (PRODUCT["cpu"], PLAIN))
    np.testing.assert_allclose(found, plain, atol=0.1)
    assert np.abs(plain).max() > 1


@has_byte_dot
@pytest.mark.parametrize("name", USUAL)
def test_vectors_of_avx2(name, monkeypatch):
    """Their code runs here too, on this machine's registers."""
    host = Machine.host()._replace(lanes=8, registers=16, has_bf16_dot=False, has_bf16_tiles=False)
    monkeypatch.setattr(Machine, "host", lambda: host)
    monkeypatch.setattr(sys.modules["pallas_kernels.cpu.product"], "VERSION", next(VERSIONS))
    for num_rows in (1, 6, 70):
        x_ti, weight = x_of(num_rows, 288), weight_in(TAKING[name], 50, 288)
        found = jax.jit(lambda *args: OPS["cpu"].product(*args))(x_ti, weight)
        assert_rounded(found, x_ti, weight)


def test_a_machine_without_such_instructions_rounds_the_rows_before(monkeypatch):
    host = Machine.host()._replace(has_byte_dot=False)
    monkeypatch.setattr(Machine, "host", lambda: host)
    x_ti, weight = x_of(6, 128), weight_in(TAKING["int4 in groups of 32"], 50, 128)
    found = jax.jit(lambda *args: OPS["cpu"].product(*args))(x_ti, weight)
    np.testing.assert_array_equal(found, PLAIN(rounded(x_ti).astype(np.float32), weight))


class TestPlantedFaults:
    """Each fault must be found by the comparison that the other tests make."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_of_a_weight(self, fault):
        x_ti, weight = x_of(3, 256), weight_in(TAKING["int4 in groups of 32"], 50, 256)
        with pytest.raises(AssertionError):
            assert_rounded(PRODUCT["cpu"](x_ti, FAULTS[fault](weight)), x_ti, weight)

    @has_byte_dot
    @pytest.mark.parametrize("fault", ["rows as they are", "no offset", "the scale of another group", "no end"])
    def test_of_the_rows(self, fault, monkeypatch):
        x_ti, weight = x_of(3, 160), weight_in(TAKING["int4 without minima"], 50, 160)
        if fault == "rows as they are":
            found = PLAIN(x_ti, weight)
        else:
            monkeypatch.setattr(sys.modules["pallas_kernels.cpu.product"], "VERSION", next(VERSIONS))
            if fault == "no offset":
                monkeypatch.setattr(byte_rows, "MIDDLE", 0)
            elif fault == "no end":
                monkeypatch.setattr(Code, "load_first", lambda code, *args: code.load_vector(*args[:-1]) & 0)
            else:
                of_groups = byte_rows._Tile._of_groups
                wrong = lambda tile, factors, number, i: of_groups(tile, factors, number ^ 1, i)
                monkeypatch.setattr(byte_rows._Tile, "_of_groups", wrong)
            found = jax.jit(lambda *args: OPS["cpu"].product(*args))(x_ti, weight)
        with pytest.raises(AssertionError):
            assert_rounded(found, x_ti, weight)
