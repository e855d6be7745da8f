"""The op of products: every form of a weight in every implementation, and planted faults."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Weight, cpu, reference
from pallas_kernels.cpu.product import FEW_O, UNIT_T
from pallas_kernels.cpu.team import num_threads
from pallas_kernels.cpu.tiles import BLOCK, SEGMENT, WHOLE
from pallas_kernels.reference import ACTIVATIONS
from pallas_kernels.weights import pack, quantize, unpack
from tests.kernels.implementations import ops_of
from tests.kernels.products import FORMS, exact_matrix, exact_up, weight_in, x_of

OPS = {"reference": ops_of(reference), "cpu": ops_of(cpu)}
DEPTHS = (128, WHOLE + 128, 3 * SEGMENT)
MANY = UNIT_T + BLOCK + 5
# A sum of random numbers in float32, relative to the root of their number.
TOLERANCE = {"float32": 4e-6, "bfloat16": 2**-8, "float16": 2**-10}

USUAL_FORMS = ("float32", "int8", "int4 in groups of 32")

every_form = pytest.mark.parametrize("name", FORMS)


def error_bound(exact: np.ndarray, depth: int, dtype: str = "float32") -> np.ndarray:
    """Return the bound of the error of sums of this number of products, rounded to a dtype."""
    return TOLERANCE["float32"] * depth**0.5 + TOLERANCE[dtype] * np.abs(exact)


def assert_product(found: jax.Array, exact: np.ndarray, depth: int, dtype: str = "float32") -> None:
    difference = np.abs(np.asarray(found, np.float64) - exact)
    assert (difference <= error_bound(exact, depth, dtype)).all(), difference.max()


USUAL_SHAPES = {"cpu": [(1, 50, 128), (15, 103, WHOLE + 128)], "reference": [(15, 103, WHOLE + 128)]}


@every_form
@pytest.mark.parametrize(
    "implementation, rows, outputs, depth",
    [
        pytest.param(
            name, *shape, depth, marks=[] if (*shape, depth) in USUAL_SHAPES[name] else [pytest.mark.deep]
        )
        for name in OPS for shape in ((1, 50), (3, 6), (4, 48), (15, 103), (MANY, 97)) for depth in DEPTHS
    ],
)  # fmt: skip
def test_it_is_that_of_float64(name, implementation, rows, outputs, depth, request):
    """Some of the forms in optimized code, all of them in the deep tier."""
    if name in USUAL_FORMS:
        request.getfixturevalue("optimized_code")
    x_ti, weight = x_of(rows, depth), weight_in(FORMS[name], outputs, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(jax.jit(OPS[implementation].product)(x_ti, weight), exact, depth)


@pytest.mark.parametrize("rows", [1, 7, MANY])
@pytest.mark.parametrize("depth", [64, 72, WHOLE + 128])
def test_products_of_bfloat16(rows, depth):
    """By instructions for pairs of them where the machine has some."""
    x_ti, weight = x_of(rows, depth, "bfloat16"), weight_in(FORMS["bfloat16"], 50, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(OPS["cpu"].product(x_ti, weight, dtype=jnp.float32), exact, depth)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.deep), 20])
def test_results_of_16_bits_are_rounded_once(dtype, rows):
    """With outputs that are no whole vector, rows that are not wanted, experts, and numbers past those of float16."""
    for form, x_dtype in (("float32", "float32"), ("int8", "float32"), ("bfloat16", "bfloat16")):
        x_ti = x_of(rows, 128, x_dtype).at[0, 0].set(1e6)
        wanted = dict(wanted_t=jnp.arange(rows) != 3)
        of_experts = dict(sizes_e=jnp.array([rows // 2, 0, rows - rows // 2 - 1]))  # a row belongs to none
        for shape, options in (((), wanted), ((), {"activation": "silu"}), ((3,), of_experts)):
            weight = weight_in(FORMS[form], *shape, 50, 128, bias="float32")
            found, whole = (
                OPS["cpu"].product(x_ti, weight, up=weight, dtype=each, **options) for each in (dtype, "float32")
            )
            assert found.dtype == dtype
            expected = whole.astype(dtype).astype(jnp.float32)
            np.testing.assert_array_equal(found.astype(jnp.float32), expected, err_msg=form)


@pytest.mark.parametrize("depth", [20, 50, WHOLE + 7])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8"])
def test_the_end_of_a_row_that_is_no_whole_vector(name, depth):
    x_ti, weight = x_of(7, depth), weight_in(FORMS[name], 50, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(OPS["cpu"].product(x_ti, weight), exact, depth)


@pytest.mark.parametrize("depth", [128, pytest.param(3 * SEGMENT, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name, dtype", [*((name, "float32") for name in FORMS), ("bfloat16", "bfloat16")])
def test_a_row_has_the_same_bits_next_to_any_others(name, depth, dtype):
    x_ti, weight = x_of(1000, depth, dtype), weight_in(FORMS[name], 50, depth)
    multiply = jax.jit(lambda x_ti: OPS["cpu"].product(x_ti, weight, dtype=jnp.float32))
    together = multiply(x_ti)
    for first, stop in ((0, 1), (5, 7), (BLOCK - 2, BLOCK + 14), (UNIT_T - 1, 2 * UNIT_T - 1), (999, 1000)):
        np.testing.assert_array_equal(multiply(x_ti[first:stop]), together[first:stop])


@pytest.mark.parametrize("name", ["float32", "int8", "int4 in groups of 32"])
def test_few_rows_of_more_outputs_than_are_finished_at_once(name):
    """The outputs of a thread are no multiple of any number."""
    x_ti, weight = x_of(40, 64), weight_in(FORMS[name], 2 * FEW_O * num_threads() + 7, 64)
    multiply = jax.jit(lambda x_ti: OPS["cpu"].product(x_ti, weight))
    together = multiply(x_ti)
    assert_product(together, np.asarray(x_ti, np.float64) @ exact_matrix(weight).T, 64)
    for rows in (1, 2, 4, 7):
        np.testing.assert_array_equal(multiply(x_ti[:rows]), together[:rows])


# Each activation on a CPU once, with dtypes in turn.
ACTIVATED = [
    *(("cpu", activation, ("float32", "bfloat16")[i % 2]) for i, activation in enumerate([None, *ACTIVATIONS])),
    ("reference", "silu", "bfloat16"),
]


@pytest.mark.parametrize(
    "implementation, activation, dtype",
    [
        pytest.param(*case, marks=[] if case in ACTIVATED else [pytest.mark.deep])
        for case in itertools.product(OPS, [None, *ACTIVATIONS], ("float32", "bfloat16"))
    ],
)
def test_bias_activation_and_gate(implementation, activation, dtype):
    x_ti = x_of(9, 64, dtype)
    gate, up = (weight_in(FORMS[name], 50, 64, bias=dtype) for name in ("int8", "int8"))
    gates, ups = (
        np.asarray(x_ti, np.float64) @ exact_matrix(each).T + np.asarray(each.bias, np.float64) for each in (gate, up)
    )
    with jax.enable_x64():
        exact_gate = np.asarray(ACTIVATIONS[activation](jnp.asarray(gates))) if activation else gates
    multiply = jax.jit(OPS[implementation].product, static_argnames="activation")
    found = multiply(x_ti, gate, activation=activation)
    assert found.dtype == dtype
    assert_product(found, exact_gate, 64, dtype)
    assert_product(
        multiply(x_ti, gate, up=up, activation=activation), exact_gate * exact_up(activation, ups), 64 * 100, dtype
    )


@pytest.mark.parametrize("implementation", ["cpu", pytest.param("reference", marks=pytest.mark.deep)])
def test_several_weights_in_one_pass(implementation):
    x_ti = x_of(5, 128)
    weights = [weight_in(FORMS[name], outputs, 128) for name, outputs in (("int8", 70), ("int8", 50), ("int8", 1))]
    other = weight_in(FORMS["int4 in groups of 32"], 60, 128)  # of another form
    for several in (weights, [*weights, other]):
        found = jax.jit(OPS[implementation].products)(x_ti, *several)
        assert len(found) == len(several)
        for y_to, weight in zip(found, several):
            np.testing.assert_array_equal(y_to, jax.jit(OPS[implementation].product)(x_ti, weight))


ADDED = [
    ("float32", "cpu", 1),
    ("float32", "cpu", MANY),
    ("int4 in groups of 32", "cpu", 9),
    ("float32", "reference", 9),
]


@pytest.mark.parametrize(
    "name, implementation, rows",
    [
        pytest.param(*case, marks=[] if case in ADDED else [pytest.mark.deep])
        for case in itertools.product(USUAL_FORMS, OPS, (1, 9, MANY))
    ],
)
def test_numbers_added_to_the_sums(name, implementation, rows):
    """They are added before the activation, and -0 changes no bit: rows without an adapter have the base's results."""
    ops, x_ti = OPS[implementation], x_of(rows, 64)
    gate, up = weight_in(FORMS[name], 50, 64), weight_in(FORMS[name], 50, 64, bias="float32")
    if name != "float32":
        up = weight_in(FORMS[name], 50, 64)
    added = tuple(np.array(x_of(rows, 100)[:, at : at + 50]) for at in (0, 50))
    for array in added:
        array[::2] = -0.0
    x = np.asarray(x_ti, np.float64)
    gates, ups = (
        x @ exact_matrix(each).T + (0 if each.bias is None else np.asarray(each.bias, np.float64)) + more
        for each, more in zip((gate, up), added)
    )
    multiply = jax.jit(ops.product, static_argnames="activation")
    assert_product(multiply(x_ti, gate, added=added[:1]), gates, 64)
    found = multiply(x_ti, gate, up=up, activation="silu", added=added)
    assert_product(found, gates / (1 + np.exp(-gates)) * ups, 64 * 100)
    for y_to, exact in zip(jax.jit(ops.products)(x_ti, gate, up, added=added), (gates, ups), strict=True):
        assert_product(y_to, exact, 64)
    plain = multiply(x_ti, gate, up=up, activation="silu")
    np.testing.assert_array_equal(found[::2], plain[::2])
    with pytest.raises(ValueError, match=r"^added: 1 arrays for 2 weights$"):
        ops.product(x_ti, gate, up=up, added=added[:1])


@pytest.mark.parametrize("implementation", OPS)
def test_derivatives_by_the_numbers_added(implementation):
    x_ti, weight, added = x_of(5, 64), weight_in(FORMS["float32"], 30, 64), x_of(5, 30)
    loss = lambda added: (OPS[implementation].product(x_ti, weight, activation="silu", added=(added,)) ** 2).sum()
    expected = jax.grad(lambda added: (jax.nn.silu(x_ti @ weight.values.T + added) ** 2).sum())(added)
    np.testing.assert_allclose(jax.grad(loss)(added), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", OPS)
def test_a_residual_is_added_to_the_rounded_result(implementation, dtype):
    """With outputs that are no whole vector, bias, gate, added numbers, rows that are not wanted, and derivatives."""
    ops, x_ti, residual_to = OPS[implementation], x_of(21, 64, dtype), x_of(21, 50, dtype)
    weights = [Weight(jnp.asarray(x_of(50, 64), dtype), bias=jnp.asarray(x_of(1, 50)[0], dtype))] * 2
    options = dict(activation="silu", added=(x_of(21, 50),) * 2, wanted_t=jnp.arange(21) != 7)
    multiply = jax.jit(lambda **more: ops.product(x_ti, weights[0], up=weights[1], **options, **more))
    plain, found = multiply(), multiply(residual_to=residual_to)
    expected = np.asarray(residual_to + plain)
    wanted = np.asarray(options["wanted_t"])
    np.testing.assert_array_equal(np.asarray(found)[wanted], expected[wanted])
    assert found.dtype == dtype
    loss = lambda residual_to: (multiply(residual_to=residual_to).astype(jnp.float32) * x_of(21, 50))[wanted].sum()
    np.testing.assert_allclose(jax.grad(loss)(residual_to)[wanted], jnp.asarray(x_of(21, 50), dtype)[wanted])
    with pytest.raises(ValueError, match=r"^residual_to is float32\[21, 49\], expected " + dtype):
        ops.product(x_ti, weights[0], residual_to=jnp.ones((21, 49)))


@pytest.mark.parametrize("depth", [64, 3 * SEGMENT])
@pytest.mark.parametrize(
    "wanted", [[], [0], [5, 6, 70], range(UNIT_T + 3), range(UNIT_T - 1, UNIT_T + 9), range(0, UNIT_T + 9, 2)]
)
def test_rows_that_nobody_wants_are_zero(wanted, depth):
    rows = UNIT_T + 9
    x_ti, weight = x_of(rows, depth), weight_in(FORMS["bfloat16"], 50, depth)
    wanted_t = jnp.zeros(rows, bool).at[jnp.array(wanted, int)].set(True)
    whole = jnp.where(wanted_t[:, None], OPS["cpu"].product(x_ti, weight), 0.0)
    with_nan = jnp.where(wanted_t[:, None], x_ti, jnp.nan)
    np.testing.assert_array_equal(jax.jit(OPS["cpu"].product)(with_nan, weight, wanted_t=wanted_t), whole)


SIZES = {"one": [0, 9, 0, 0], "all": [3, 2, 1, 3], "many": [0, 150, 1, 40], "some rows of none": [2, 0, 3, 1]}
EXPERTS = [("float32", "all"), ("int8", "some rows of none"), ("int4 in groups of 32", "many"), ("mxfp4", "one")]


@pytest.mark.parametrize("implementation", OPS)
@pytest.mark.parametrize(
    "name, sizes",
    [
        pytest.param(name, sizes, marks=[] if (name, sizes) in EXPERTS else [pytest.mark.deep])
        for name in FORMS for sizes in SIZES
    ],
)  # fmt: skip
def test_experts(name, implementation, sizes):
    sizes_e = np.array(SIZES[sizes], np.int32)
    rows = max(9, sizes_e.sum())
    bias = "float32" if sizes in ("all", "some rows of none") else None
    x_ti, weight = x_of(rows, 128), weight_in(FORMS[name], 4, 50, 128, bias=bias)
    found = jax.jit(OPS[implementation].product)(x_ti, weight, sizes_e=sizes_e)
    for expert, first in enumerate(np.cumsum(sizes_e) - sizes_e):
        of_expert = slice(first, first + sizes_e[expert])
        exact = np.asarray(x_ti[of_expert], np.float64) @ exact_matrix(weight)[expert].T
        exact += np.asarray(weight.bias[expert]) if bias else 0
        assert_product(found[of_expert], exact, 128)
    assert np.isfinite(found).all()


def test_experts_compute_wanted_tokens_only():
    sizes_e, tokens_m = jnp.array([2, 0, 3, 1]), jnp.array([1, 2, 0, 1, 2, 0], jnp.int32)
    x_md, weight = x_of(6, 128), weight_in(FORMS["int8"], 4, 50, 128)
    whole = OPS["cpu"].product(x_md, weight, sizes_e=sizes_e)
    wanted_m = tokens_m != 1
    found = OPS["cpu"].product(
        jnp.where(wanted_m[:, None], x_md, jnp.nan), weight, sizes_e=sizes_e, tokens_m=tokens_m,
        wanted_t=jnp.array([True, False, True]),
    )  # fmt: skip
    np.testing.assert_array_equal(found, jnp.where(wanted_m[:, None], whole, 0.0))


FAULTS = {
    "the scale of another group": lambda w: w._replace(scales=w.scales.at[7].set(jnp.roll(w.scales[7], 1))),
    "no minimum": lambda w: w._replace(minima=w.minima.at[7].set(0)),
    "another zero point": lambda w: w._replace(minima=w.minima.at[7].add(w.scales[7])),
    "halves exchanged": lambda w: w._replace(values=w.values.at[7].set(w.values[7] >> 4 | w.values[7] << 4)),
    "the last group left out": lambda w: w._replace(scales=w.scales.at[7, -1].set(0), minima=w.minima.at[7, -1].set(0)),
    "the last number left out": lambda w: w._replace(values=w.values.at[7, -1].set(w.values[7, -1] & 15)),
}


class TestPlantedFaults:
    """Each fault must be found by the comparison with float64 that the other tests make."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_of_a_weight(self, fault):
        x_ti, weight = x_of(3, 256), weight_in(FORMS["int4 in groups of 32"], 50, 256)
        exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
        assert_product(OPS["cpu"].product(x_ti, weight), exact, 256)
        with pytest.raises(AssertionError):
            assert_product(OPS["cpu"].product(x_ti, FAULTS[fault](weight)), exact, 256)

    def test_of_another_expert(self):
        x_ti, weight = x_of(6, 128), weight_in(FORMS["int8"], 4, 50, 128)
        exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight)[2].T
        assert_product(OPS["cpu"].product(x_ti, weight, sizes_e=jnp.array([0, 0, 6, 0])), exact, 128)
        with pytest.raises(AssertionError):
            assert_product(OPS["cpu"].product(x_ti, weight, sizes_e=jnp.array([0, 1, 5, 0])), exact, 128)


@pytest.mark.parametrize("implementation", OPS)
def test_derivatives_are_those_of_the_definition(implementation):
    x_ti = x_of(5, 64)
    gate, up = weight_in(FORMS["float32"], 30, 64, bias="float32"), weight_in(FORMS["float32"], 30, 64, bias="float32")
    loss = lambda product, *arrays: (product(arrays[0], arrays[1], up=arrays[2], activation="silu") ** 2).sum()
    found = jax.grad(lambda *arrays: loss(OPS[implementation].product, *arrays), (0, 1, 2))(x_ti, gate, up)

    def define(x_ti, gate, up):
        gate_to, up_to = (x_ti @ each.values.T + each.bias for each in (gate, up))
        return ((jax.nn.silu(gate_to) * up_to) ** 2).sum()

    expected = jax.grad(define, (0, 1, 2))(x_ti, gate, up)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("implementation", OPS)
def test_all_numbers_of_mxfp4(implementation):
    """Each code with scales of all sizes, as rows of units show them; an exponent of 0 is a scale of 0."""
    codes, exponents = np.arange(16 * 32) % 16, np.linspace(0, 250, 16).astype(np.uint8)
    weight = Weight(pack(jnp.asarray(codes.reshape(16, 32), jnp.uint8)), jnp.asarray(exponents[:, None]))
    weight = Weight(jnp.tile(weight.values, (1, 4)), jnp.tile(weight.scales, (1, 4)))
    expected = exact_matrix(weight)
    expected[0] = 0
    np.testing.assert_array_equal(
        np.asarray(weight.dense(np if implementation == "cpu" else jnp), np.float64), expected
    )
    found = OPS[implementation].product(jnp.eye(128), weight)
    np.testing.assert_array_equal(np.asarray(found, np.float64).T, expected)


@pytest.mark.parametrize("number, rounded", [(0.25, 0), (0.26, 0.5), (0.75, 1), (1.25, 1), (2.5, 2), (3.5, 4), (5, 4),
                                             (5.1, 6), (7.9, 6)])  # fmt: skip
def test_numbers_of_mxfp4_are_rounded_to_even_codes(number, rounded):
    exact = jnp.zeros((1, 32)).at[0, :2].set(jnp.array([number, -4.0]))
    weight = quantize(exact, FORMS["mxfp4"])
    assert weight.dense()[0, :2].tolist() == [rounded, -4]
    assert weight.scales.tolist() == [[127]]


def test_packed_numbers():
    numbers = jnp.arange(3 * 64).reshape(3, 64) * 7 % 16
    packed = pack(numbers)
    assert packed.shape == (3, 32) and packed.dtype == jnp.uint8
    assert [int(packed[0, 0]), int(packed[0, 16])] == [int(numbers[0, 0] + 16 * numbers[0, 16]),
                                                       int(numbers[0, 32] + 16 * numbers[0, 48])]  # fmt: skip
    np.testing.assert_array_equal(unpack(packed), numbers)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.scales])
def test_quantized_numbers_are_the_nearest(name):
    form = FORMS[name]
    exact = np.asarray(jax.random.normal(jax.random.key(1), (20, 256))).astype(np.float64)
    exact[3] = 0
    weight = quantize(jnp.asarray(exact, jnp.float32), form)
    matrix = exact_matrix(weight)
    grouped = (-1, form.group or 256)
    span = np.abs(exact.reshape(grouped)).max(1, keepdims=True) if form.minima is None else np.ptp(
        exact.reshape(grouped), axis=1, keepdims=True)  # fmt: skip
    steps = {"int8": 127 if form.minima is None else 255, "uint8": 7 if form.minima is None else 15}
    step = 2**-3 if form.dtype == "float8_e4m3fn" else 1 / 2 if form.is_mxfp4 else 1 / steps[form.dtype]
    error = np.abs(matrix - exact).reshape(grouped)
    assert (error <= 0.5 * step * span * 1.05 + 1e-3 * span + 1e-30).all()
    assert not matrix[3].any()


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(x_ti=jnp.ones((2, 3, 4))), "x_ti is float32"),
        (dict(x_ti=jnp.ones((2, 5))), r"weight: its values are \[8, 4\], expected \[O, I\] with 5 inputs"),
        (dict(weight=Weight(jnp.ones((8, 4)), jnp.ones(7))), r"its scales are \[7\], which do not fit \[8, 4\]"),
        (dict(weight=Weight(jnp.ones((8, 4)), jnp.ones((8, 3)))), "its scales"),
        (dict(weight=Weight(jnp.ones((8, 4)), jnp.ones(8, "int8"))), "its scales are int8"),
        (dict(weight=Weight(jnp.ones((8, 4), "int8"), jnp.ones((8, 1), "uint8"))), "its scales are uint8"),
        (dict(weight=Weight(jnp.ones((8, 4)), minima=jnp.ones((8, 1)))), "minima need scales"),
        (dict(weight=Weight(jnp.ones((8, 4)), bias=jnp.ones(4))), r"its bias is \[4\], expected \[8\]"),
        (dict(weight=Weight(jnp.ones((8, 2), "uint8"), jnp.ones((8, 1)))), "of 4 bits needs scales of groups"),
        (dict(up=Weight(jnp.ones((9, 4)))), "expected one shape"),
        (dict(wanted_t=jnp.ones(5, bool)), r"wanted_t is bool\[5\]"),
        (dict(sizes_e=jnp.ones(3, int)), r"expected \[3, O, I\]"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, error):
    with pytest.raises(ValueError, match=error):
        OPS["reference"].product(**{"x_ti": jnp.ones((2, 4)), "weight": Weight(jnp.ones((8, 4)))} | arguments)
