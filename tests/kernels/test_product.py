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
# One jitted function of each, so that cases of the same shapes share an executable.
PRODUCT = {name: jax.jit(ops.product, static_argnames=("activation", "dtype")) for name, ops in OPS.items()}
PRODUCTS = {name: jax.jit(ops.products, static_argnames="dtype") for name, ops in OPS.items()}
DEPTHS = (128, WHOLE + 128, 3 * SEGMENT)
MANY = UNIT_T + BLOCK + 5
# A sum of random numbers in float32, relative to the root of their number.
TOLERANCE = {"float32": 4e-6, "bfloat16": 2**-8, "float16": 2**-10}

USUAL_FORMS = ("float32", "int8", "int4 in groups of 32")
OPTIMIZED = ("float32", "int4 in groups of 32")

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
    if name in OPTIMIZED:
        request.getfixturevalue("optimized_code")
    x_ti, weight = x_of(rows, depth), weight_in(FORMS[name], outputs, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(PRODUCT[implementation](x_ti, weight), exact, depth)


@pytest.mark.parametrize("rows", [1, 7, MANY])
@pytest.mark.parametrize("depth", [64, 72, WHOLE + 128])
def test_products_of_bfloat16(rows, depth):
    """By instructions for pairs of them where the machine has some."""
    x_ti, weight = x_of(rows, depth, "bfloat16"), weight_in(FORMS["bfloat16"], 50, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(PRODUCT["cpu"](x_ti, weight, dtype="float32"), exact, depth)


# Each dtype of x, each set of options.
ROUNDED = [("float32", "wanted rows", 20), ("int8", "experts", 20), ("bfloat16", "a gate", 20)]


@pytest.mark.parametrize(
    "form, case, rows",
    [
        pytest.param(*case, marks=[] if case in ROUNDED else [pytest.mark.deep])
        for case in itertools.product(("float32", "int8", "bfloat16"), ("wanted rows", "a gate", "experts"), (1, 20))
    ],
)
def test_results_of_16_bits_are_rounded_once(form, case, rows):
    """With outputs that are no whole vector, rows that are not wanted, experts, and numbers past those of float16."""
    x_ti = x_of(rows, 128, "bfloat16" if form == "bfloat16" else "float32").copy()
    x_ti[0, 0] = 1e6
    weight = weight_in(FORMS[form], *([3] if case == "experts" else []), 50, 128, bias="float32")
    options = {
        "wanted rows": dict(wanted_t=np.arange(rows) != 3),
        "a gate": dict(up=weight, activation="silu"),
        "experts": dict(sizes_e=np.array([rows // 2, 0, rows - rows // 2 - 1])),  # a row belongs to none
    }[case]
    whole, *rounded = (
        np.asarray(PRODUCT["cpu"](x_ti, weight, dtype=dtype, **options)) for dtype in ("float32", "bfloat16", "float16")
    )
    for found, dtype in zip(rounded, ("bfloat16", "float16"), strict=True):
        assert found.dtype == dtype
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found.astype(np.float32), whole.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("depth", [20, 50, WHOLE + 7])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8"])
def test_the_end_of_a_row_that_is_no_whole_vector(name, depth):
    x_ti, weight = x_of(7, depth), weight_in(FORMS[name], 50, depth)
    exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
    assert_product(PRODUCT["cpu"](x_ti, weight), exact, depth)


@pytest.mark.parametrize("depth", [128, pytest.param(3 * SEGMENT, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name, dtype", [*((name, "float32") for name in FORMS), ("bfloat16", "bfloat16")])
def test_a_row_has_the_same_bits_next_to_any_others(name, depth, dtype):
    x_ti, weight = x_of(1000, depth, dtype), weight_in(FORMS[name], 50, depth)
    multiply = lambda x_ti: np.asarray(PRODUCT["cpu"](x_ti, weight, dtype="float32"))
    together = multiply(x_ti)
    for first, stop in ((0, 1), (5, 7), (BLOCK - 2, BLOCK + 14), (UNIT_T - 1, 2 * UNIT_T - 1), (999, 1000)):
        np.testing.assert_array_equal(multiply(x_ti[first:stop]), together[first:stop])


@pytest.mark.parametrize("name", ["float32", "int8", "int4 in groups of 32"])
def test_few_rows_of_more_outputs_than_are_finished_at_once(name):
    """The outputs of a thread are no multiple of any number."""
    x_ti, weight = x_of(40, 64), weight_in(FORMS[name], 2 * FEW_O * num_threads() + 7, 64)
    multiply = lambda x_ti: np.asarray(PRODUCT["cpu"](x_ti, weight))
    together = multiply(x_ti)
    assert_product(together, np.asarray(x_ti, np.float64) @ exact_matrix(weight).T, 64)
    for rows in (1, 2, 4, 7):
        np.testing.assert_array_equal(multiply(x_ti[:rows]), together[:rows])


# Each activation on a CPU once, each dtype.
ACTIVATED = [
    *(("cpu", activation, "float32") for activation in ("silu", "gelu")),
    *(("cpu", activation, "bfloat16") for activation in (None, *ACTIVATIONS) if activation not in ("silu", "gelu")),
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
    gate, up = (weight_in(FORMS["float32" if dtype == "float32" else "int8"], 50, 64, bias=dtype) for _ in range(2))
    gates, ups = (
        np.asarray(x_ti, np.float64) @ exact_matrix(each).T + np.asarray(each.bias, np.float64) for each in (gate, up)
    )
    with jax.enable_x64():
        exact_gate = np.asarray(jax.jit(ACTIVATIONS[activation])(gates)) if activation else gates
    multiply = PRODUCT[implementation]
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
        found = PRODUCTS[implementation](x_ti, *several)
        assert len(found) == len(several)
        for y_to, weight in zip(found, several):
            np.testing.assert_array_equal(y_to, PRODUCT[implementation](x_ti, weight))


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
    added = tuple(x_of(rows, 100)[:, at : at + 50].copy() for at in (0, 50))
    for array in added:
        array[1::2] = -0.0
    x = np.asarray(x_ti, np.float64)
    gates, ups = (
        x @ exact_matrix(each).T + (0 if each.bias is None else np.asarray(each.bias, np.float64)) + more
        for each, more in zip((gate, up), added)
    )
    multiply = PRODUCT[implementation]
    found = multiply(x_ti, gate, added=added[:1])
    assert_product(found, gates, 64)
    np.testing.assert_array_equal(np.asarray(found)[1::2], np.asarray(multiply(x_ti, gate))[1::2])
    found = multiply(x_ti, gate, up=up, activation="silu", added=added)
    assert_product(found, gates / (1 + np.exp(-gates)) * ups, 64 * 100)
    for y_to, exact in zip(PRODUCTS[implementation](x_ti, gate, up, added=added), (gates, ups), strict=True):
        assert_product(y_to, exact, 64)
    with pytest.raises(ValueError, match=r"^added: 1 arrays for 2 weights$"):
        ops.product(x_ti, gate, up=up, added=added[:1])


@pytest.mark.parametrize("implementation", OPS)
def test_derivatives_by_the_numbers_added(implementation):
    x_ti, weight, added = x_of(5, 64), weight_in(FORMS["float32"], 30, 64, bias="float32"), x_of(5, 30)
    loss = lambda added: (PRODUCT[implementation](x_ti, weight, activation="silu", added=(added,)) ** 2).sum()
    define = lambda added: (jax.nn.silu(x_ti @ weight.values.T + weight.bias + added) ** 2).sum()
    expected = jax.jit(jax.grad(define))(added)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(added), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", OPS)
def test_a_residual_is_added_to_the_rounded_result(implementation, dtype):
    """With outputs that are no whole vector, bias, added numbers, unwanted rows, derivatives, and once with a gate."""
    x_ti, residual_to, factor_to = x_of(21, 64, dtype), x_of(21, 50, dtype), x_of(21, 50)
    weight = Weight(x_of(50, 64, dtype), bias=x_of(1, 50, dtype)[0])
    wanted = np.arange(21) != 7
    gate = dict(up=weight) if dtype == "bfloat16" else {}
    options = dict(gate, activation="silu", added=(factor_to,) * (1 + len(gate)), wanted_t=wanted)
    multiply = lambda **more: PRODUCT[implementation](x_ti, weight, **options, **more)
    plain, found = np.asarray(multiply()), np.asarray(multiply(residual_to=residual_to))
    np.testing.assert_array_equal(found[wanted], (residual_to + plain)[wanted])
    assert found.dtype == dtype
    loss = lambda residual_to: (multiply(residual_to=residual_to).astype(jnp.float32) * factor_to)[wanted].sum()
    derivatives = np.asarray(jax.jit(jax.grad(loss))(residual_to))
    np.testing.assert_allclose(*(np.float32(each[wanted]) for each in (derivatives, factor_to.astype(dtype))))
    with pytest.raises(ValueError, match=r"^residual_to is float32\[21, 49\], expected " + dtype):
        OPS[implementation].product(x_ti, weight, residual_to=np.ones((21, 49), np.float32))


@pytest.mark.parametrize("depth", [64, 3 * SEGMENT])
@pytest.mark.parametrize(
    "wanted", [[], [0], [5, 6, 70], range(UNIT_T + 3), range(UNIT_T - 1, UNIT_T + 9), range(0, UNIT_T + 9, 2)]
)
def test_rows_that_nobody_wants_are_zero(wanted, depth):
    rows = UNIT_T + 9
    x_ti, weight = x_of(rows, depth), weight_in(FORMS["bfloat16"], 50, depth)
    wanted_t = np.isin(np.arange(rows), wanted)
    whole = np.where(wanted_t[:, None], PRODUCT["cpu"](x_ti, weight), np.float32(0))
    with_nan = np.where(wanted_t[:, None], x_ti, np.float32(np.nan))
    np.testing.assert_array_equal(PRODUCT["cpu"](with_nan, weight, wanted_t=wanted_t), whole)


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
    found = np.asarray(PRODUCT[implementation](x_ti, weight, sizes_e=sizes_e))
    for expert, first in enumerate(np.cumsum(sizes_e) - sizes_e):
        of_expert = slice(first, first + sizes_e[expert])
        exact = np.asarray(x_ti[of_expert], np.float64) @ exact_matrix(weight)[expert].T
        exact += weight.bias[expert] if bias else 0
        assert_product(found[of_expert], exact, 128)
    assert np.isfinite(found).all()


def test_experts_compute_wanted_tokens_only():
    sizes_e, tokens_m = np.array([2, 0, 3, 1]), np.array([1, 2, 0, 1, 2, 0])
    x_md, weight = x_of(6, 128), weight_in(FORMS["int8"], 4, 50, 128, bias="float32")
    whole = PRODUCT["cpu"](x_md, weight, sizes_e=sizes_e)
    wanted_m = tokens_m != 1
    found = PRODUCT["cpu"](
        np.where(wanted_m[:, None], x_md, np.float32(np.nan)), weight, sizes_e=sizes_e, tokens_m=tokens_m,
        wanted_t=np.array([True, False, True]),
    )  # fmt: skip
    np.testing.assert_array_equal(found, np.where(wanted_m[:, None], whole, 0))


def changed(weight: Weight, **rows: np.ndarray) -> Weight:
    """Return a weight with another row 7 of some arrays."""
    numbers = np.arange(weight.shape[0])[:, None]
    return weight._replace(**{n: np.where(numbers == 7, row, getattr(weight, n)) for n, row in rows.items()})


but_last = lambda row: np.append(row[:-1], row[-1:] * 0)
FAULTS = {
    "the scale of another group": lambda w: changed(w, scales=np.roll(w.scales[7], 1)),
    "no minimum": lambda w: changed(w, minima=w.minima[7] * 0),
    "another zero point": lambda w: changed(w, minima=w.minima[7] + w.scales[7]),
    "halves exchanged": lambda w: changed(w, values=w.values[7] >> 4 | w.values[7] << 4),
    "the last group left out": lambda w: changed(w, scales=but_last(w.scales[7]), minima=but_last(w.minima[7])),
    "the last number left out": lambda w: changed(w, values=np.append(w.values[7, :-1], w.values[7, -1:] & 15)),
}


class TestPlantedFaults:
    """Each fault must be found by the comparison with float64 that the other tests make."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_of_a_weight(self, fault):
        x_ti, weight = x_of(3, 256), weight_in(FORMS["int4 in groups of 32"], 50, 256)
        exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight).T
        assert_product(PRODUCT["cpu"](x_ti, weight), exact, 256)
        wrong = FAULTS[fault](weight)
        assert wrong.format == weight.format
        with pytest.raises(AssertionError):
            assert_product(PRODUCT["cpu"](x_ti, wrong), exact, 256)

    def test_of_another_expert(self):
        x_ti, weight = x_of(6, 128), weight_in(FORMS["int8"], 4, 50, 128, bias="float32")
        exact = np.asarray(x_ti, np.float64) @ exact_matrix(weight)[2].T + weight.bias[2]
        assert_product(PRODUCT["cpu"](x_ti, weight, sizes_e=np.array([0, 0, 6, 0])), exact, 128)
        with pytest.raises(AssertionError):
            assert_product(PRODUCT["cpu"](x_ti, weight, sizes_e=np.array([0, 1, 5, 0])), exact, 128)


@pytest.mark.parametrize("implementation", OPS)
def test_derivatives_are_those_of_the_definition(implementation):
    x_ti = x_of(5, 64)
    gate, up = weight_in(FORMS["float32"], 30, 64, bias="float32"), weight_in(FORMS["float32"], 30, 64, bias="float32")
    loss = lambda x_ti, gate, up: (PRODUCT[implementation](x_ti, gate, up=up, activation="silu") ** 2).sum()
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(x_ti, gate, up)

    def define(x_ti, gate, up):
        gate_to, up_to = (x_ti @ each.values.T + each.bias for each in (gate, up))
        return ((jax.nn.silu(gate_to) * up_to) ** 2).sum()

    expected = jax.jit(jax.grad(define, (0, 1, 2)))(x_ti, gate, up)
    for one, other in zip(*(map(np.asarray, jax.tree.leaves(each)) for each in (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("implementation", OPS)
def test_all_numbers_of_mxfp4(implementation):
    """Each code with scales of all sizes, as rows of units show them; an exponent of 0 is a scale of 0."""
    codes, exponents = np.arange(16 * 32) % 16, np.linspace(0, 250, 16).astype(np.uint8)
    values, scales = pack(codes.reshape(16, 32).astype(np.uint8), np), exponents[:, None]
    weight = Weight(np.tile(values, (1, 4)), np.tile(scales, (1, 4)))
    expected = exact_matrix(weight)
    expected[0] = 0
    dense = weight.dense(np) if implementation == "cpu" else jax.jit(Weight.dense)(weight)
    np.testing.assert_array_equal(np.asarray(dense, np.float64), expected)
    found = PRODUCT[implementation](np.eye(128, dtype=np.float32), weight)
    np.testing.assert_array_equal(np.asarray(found, np.float64).T, expected)


QUANTIZE = jax.jit(quantize, static_argnums=1)


@pytest.mark.parametrize("number, rounded", [(0.25, 0), (0.26, 0.5), (0.75, 1), (1.25, 1), (2.5, 2), (3.5, 4), (5, 4),
                                             (5.1, 6), (7.9, 6)])  # fmt: skip
def test_numbers_of_mxfp4_are_rounded_to_even_codes(number, rounded):
    weight = QUANTIZE(np.float32([[number, -4.0] + [0] * 30]), FORMS["mxfp4"])
    assert jax.tree.map(np.asarray, weight).dense(np)[0, :2].tolist() == [rounded, -4]
    assert weight.scales.tolist() == [[127]]


def test_packed_numbers():
    numbers = np.arange(3 * 64).reshape(3, 64) * 7 % 16
    packed = jax.jit(pack)(numbers)
    assert packed.shape == (3, 32) and packed.dtype == jnp.uint8
    assert np.asarray(packed)[0, [0, 16]].tolist() == (numbers[0, [0, 32]] + 16 * numbers[0, [16, 48]]).tolist()
    np.testing.assert_array_equal(jax.jit(unpack)(packed), numbers)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.scales])
def test_quantized_numbers_are_the_nearest(name):
    form = FORMS[name]
    exact = x_of(20, 256).astype(np.float64)
    exact[3] = 0
    weight = QUANTIZE(np.float32(exact), form)
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
