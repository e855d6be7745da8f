"""Products of the Mosaic GPU kernel in the interpreter, and the discovery of planted errors."""

import importlib
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from benchmarks.shared.deviceless import abstract
from benchmarks.shared.gpus import H200
from pallas_kernels import Weight, mosaic, reference, takes_weight
from pallas_kernels.mosaic import matmul, numbers
from pallas_kernels.reference import ACTIVATIONS
from pallas_kernels.weights import Format, pack, unpack
from tests.kernels.implementations import ops_of
from tests.kernels.mosaic_interpreter import interpreting
from tests.kernels.products import FORMS, described_weight, exact_matrix, exact_up, weight_in, x_of

product_module = importlib.import_module("pallas_kernels.mosaic.product")  # the package has a function of this name
product = ops_of(mosaic).product
# Of a sum of random numbers in float32, relative to the root of their number; and of the dtypes of rows.
TOLERANCE = {"float32": 4e-6, "bfloat16": 2**-8, "float16": 2**-10}
ROUNDING = 0.42  # root mean square of relative errors of rounding, of the largest
ROWS = {"bfloat16": "bfloat16", "float16": "float16", "int8": "bfloat16", "fp8": "bfloat16"}  # form of the weight
GROUPED = (
    "int4 in groups of 32", "int4 without minima", "int4 in groups of 128", "int8 in groups of 16",
    "int8 in groups of 32", "int8 in groups of 128", "fp8 in groups of 128", "mxfp4",
)  # fmt: skip
SMALLEST_NORMAL = float(jnp.finfo(jnp.float8_e4m3fn).smallest_normal)
OTHERS = {  # forms that the kernel does not take
    "int8 in groups of 24": Format("int8", "float16", None, 24),
    "int4 in groups of 96": Format("uint8", "float16", "float16", 96),
}
SIZES = ((3, 0, 12, 5, 0), (0, 0, 20, 0, 0), (1, 1, 1, 8, 9))  # of experts


def run(op, *arguments: tuple, num_sms: int = 3) -> list[jax.Array]:
    """Compile an op once for several arguments of the same shapes, and return its results."""
    with interpreting(num_sms=num_sms):
        compiled = jax.jit(lambda *args: op(*args))
        return [jax.block_until_ready(compiled(*args)) for args in arguments]


def weight_of(form: str, *shape: int, bias: str | None = None) -> Weight:
    """Return a random weight without fp8's subnormal numbers.

    XLA's code for CPUs, which computes the conversion here, takes them for zero; a GPU does not.
    """
    weight = weight_in(FORMS[form], *shape, bias=bias)
    if form != "fp8":
        return weight
    numbers = weight.values.astype(np.float32)
    is_normal = np.abs(numbers) >= SMALLEST_NORMAL
    return weight._replace(values=np.where(is_normal, numbers, 0).astype(weight.values.dtype))


def assert_near(found: jax.Array, exact: np.ndarray, inputs: int) -> None:
    bound = TOLERANCE["float32"] * inputs**0.5 * (1 + np.abs(exact)) + TOLERANCE[str(found.dtype)] * np.abs(exact)
    difference = np.abs(np.asarray(found, np.float64) - exact)
    assert found.shape == exact.shape and (difference <= bound).all(), difference.max()


def grouped_weight(form: str, *shape: int, seed: int = 0) -> Weight:
    """Return a random weight with groups whose scaled numbers, and sums of few of them, are exact in bfloat16."""
    layout, random = FORMS[form], np.random.default_rng(seed)
    *outer, inputs = shape
    groups = (*outer, inputs // layout.group)
    scales = 2.0 ** random.integers(-2, 2, groups)
    minima = None if layout.minima is None else random.integers(-16, 16, groups) * scales
    if layout.is_mxfp4:
        scales = 127 + np.log2(scales)
        # Without the codes of ±0.5, which are subnormal numbers first: XLA's code for CPUs takes them for zero.
        values = pack(random.choice([code for code in range(16) if code % 8 != 1], shape), np)
    elif layout.is_packed:
        values = random.integers(0, 256, (*outer, inputs // 2), np.uint8)
        minima = None if minima is None else minima - 8 * scales
    else:
        values = random.integers(-64, 64, shape)
    dtypes = zip((values, scales, minima), layout)
    return Weight(*(None if array is None else np.asarray(array).astype(np.dtype(dtype)) for array, dtype in dtypes))


def exact_sums(x_ti: jax.Array, weight: Weight) -> np.ndarray:
    bias = 0 if weight.bias is None else np.asarray(weight.bias, np.float64)
    return np.asarray(x_ti, np.float64) @ exact_matrix(weight).T + bias


def activated(exact: np.ndarray, activation: str | None) -> np.ndarray:
    with jax.enable_x64():
        return np.asarray(jax.jit(ACTIVATIONS[activation])(exact)) if activation else exact


def cases(usual, *axes) -> list:
    """All cases, the deep tier's marked."""
    return [case if case in usual else pytest.param(*case, marks=pytest.mark.deep) for case in itertools.product(*axes)]


@pytest.mark.parametrize(
    ("form", "rows", "dtype"),
    cases(
        [("int8", 65, "float32")],
        ROWS, (1, 3, 64, 65, 2048), ("float32", "bfloat16", "float16"),
    ),
)  # fmt: skip
def test_it_is_that_of_float64(form, rows, dtype):
    x_ti, weight = x_of(rows, 128, ROWS[form]), weight_of(form, 128, 128, bias="float32")
    [found] = run(lambda *args: product(*args, dtype=dtype), (x_ti, weight))
    assert found.dtype == dtype
    assert_near(found, exact_sums(x_ti, weight), 128)


@pytest.mark.parametrize(
    ("form", "rows", "dtype"),
    cases(
        [("int4 in groups of 32", 65, "bfloat16"), ("int8 in groups of 32", 3, "float16")],
        GROUPED, (1, 3, 64, 65, 2048), ("bfloat16", "float16"),
    ),
)  # fmt: skip
def test_it_is_that_of_float64_with_groups(form, rows, dtype):
    """To the bit: all of these numbers are exact in the rows' dtype, and their sums in float32."""
    if "fp8" in form and dtype == "float16":
        pytest.skip("fp8 needs rows of bfloat16")
    inputs = 512 if rows < 100 else 256
    x_ti = np.round(2 * x_of(rows, inputs)).astype(np.dtype(dtype))
    weight = grouped_weight(form, 128 if rows > 64 else 64, inputs)
    [found] = run(lambda *args: product(*args, dtype="float32"), (x_ti, weight))
    np.testing.assert_array_equal(found, exact_sums(x_ti, weight))


@pytest.mark.parametrize(
    ("form", "dtype"),
    cases([("int4 in groups of 32", "bfloat16")], GROUPED[:-1], ("bfloat16", "float16")),  # MXFP4 is exact
)  # fmt: skip
def test_errors_are_those_of_few_roundings(form, dtype):
    """The errors of scales, scaled numbers, addends and weights are independent."""
    if "fp8" in form and dtype == "float16":
        pytest.skip("fp8 needs rows of bfloat16")
    x_ti, weight = x_of(9, 512, dtype), weight_in(FORMS[form], 64, 512)
    [found] = run(lambda *args: product(*args, dtype="float32"), (x_ti, weight))
    scaled = exact_matrix(weight._replace(minima=None))
    matrix = exact_matrix(weight)
    squares = np.asarray(x_ti, np.float64) ** 2 @ (2 * scaled**2 + (matrix - scaled) ** 2 + matrix**2).T
    error = np.abs(np.asarray(found, np.float64) - exact_sums(x_ti, weight)) / np.sqrt(squares)
    assert error.max() < 5 * ROUNDING * TOLERANCE[dtype], error.max()


class TestUnpackedRegisters:
    """The operations on registers, computed with NumPy for the four threads that share rows."""

    @staticmethod
    def value(result, arguments):
        """Return a result's elements."""
        if isinstance(result.owner, ir.Block):
            return arguments[result.arg_number]
        op = result.owner.opview
        operands = [TestUnpackedRegisters.value(operand, arguments) for operand in op.operands]
        match op.operation.name:
            case "vector.shuffle":
                return np.concatenate(operands)[list(op.mask)]
            case "vector.bitcast":
                size = ir.VectorType(op.result.type)
                return operands[0].view({1: "uint32", 2: "uint16", 4: "uint8"}[size.shape[0]])
            case "vector.extract" | "vector.broadcast":
                return operands[0]
            case "arith.constant":
                return np.array([op.value.value], "uint32")
            case "arith.shrui":
                return operands[0] >> operands[1]
            case "arith.andi":
                return operands[0] & operands[1]
            case "arith.ori":
                return operands[0] | operands[1]
        raise AssertionError(op)

    @pytest.mark.parametrize("dtype", numbers.PATTERNS)
    def test_they_are_the_numbers_in_the_order_of_the_inputs(self, dtype):
        random = np.random.default_rng(1)
        packed = random.integers(0, 256, 32, np.uint8)  # of one row
        pattern, offset = numbers.PATTERNS[dtype]
        found = np.zeros(64, np.uint16)
        with mlir.make_ir_context(), ir.Location.unknown():
            module = ir.Module.create()
            pair = ir.VectorType.get((2,), ir.IntegerType.get_signless(8))
            with ir.InsertionPoint(module.body):
                function = func.FuncOp("unpack", ir.FunctionType.get([pair] * 8, []))
            with ir.InsertionPoint(function.add_entry_block()):
                layout = mgpu.WGMMA_LAYOUT
                registers = np.array(function.arguments, object).reshape(layout.registers_shape((64, 32)))
                array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)
                unpacked = numbers.unpack_registers(None, array, pattern=pattern).registers
                func.ReturnOp([])
            for thread in range(4):
                # Registers are those of 8 columns each, of rows that are 8 apart.
                arguments = [packed[8 * tile + 2 * thread :][:2] for tile in range(4) for _ in range(2)]
                for at, register in np.ndenumerate(unpacked):
                    found[8 * at[1] + 2 * thread :][:2] = self.value(register, arguments)
        floats = found.view(np.float16) if dtype == "float16" else (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(floats - offset, unpack(packed, np))


def test_all_numbers_of_mxfp4():
    """To the bit, as those of fp8 below; ±0.5 are subnormal numbers before they are scaled."""
    codes = (np.arange(128) + np.arange(64)[:, None]) % 16
    exponents = np.linspace(60, 190, 64 * 4).astype(np.uint8).reshape(64, 4)
    weight = Weight(pack(codes.astype(np.uint8), np), exponents)
    x_ti = np.eye(16, 128, 56, dtype=jnp.bfloat16)  # inputs of two groups
    [found] = run(lambda *args: product(*args, dtype="float32"), (x_ti, weight))
    exact, is_normal = exact_matrix(weight)[:, 56:72].T, (codes % 8 != 1)[:, 56:72].T
    np.testing.assert_array_equal(np.where(is_normal, found, 0), np.where(is_normal, exact, 0))
    assert ((found == exact) | (found == 0))[~is_normal].all()


def test_all_numbers_of_fp8():
    """To the bit: rows of a single 1 pick each of the 254 finite numbers; for subnormal ones see `weight_of`."""
    bits = (np.arange(256) + 4 * np.arange(64)[:, None]) % 256
    values = np.where(bits % 128 == 127, 0, bits).astype(np.uint8)
    numbers = values.view(jnp.float8_e4m3fn)
    x_ti = np.eye(4, 256, dtype=jnp.bfloat16)
    [found] = run(lambda *args: product(*args, dtype="float32"), (x_ti, Weight(numbers)))
    exact = np.asarray(numbers, np.float32)[:, :4].T
    assert len(np.unique(exact)) == 253, "254 with both zeros"
    is_normal = np.abs(exact) >= SMALLEST_NORMAL
    np.testing.assert_array_equal(np.where(is_normal, found, 0), np.where(is_normal, exact, 0))
    assert ((found == exact) | (found == 0))[~is_normal].all()


@pytest.mark.parametrize(
    ("form", "activation", "gated"),
    cases(
        [("bfloat16", "gelu", True), ("bfloat16", "gelu_pytorch_tanh", False), ("int4 in groups of 32", "silu", True)],
        ("bfloat16", "int8", "fp8", *GROUPED), (None, *ACTIVATIONS), (False, True),
    ),
)  # fmt: skip
def test_bias_activation_and_gate(form, activation, gated):
    x_ti, inputs = x_of(5, 128 if form in GROUPED else 64, "bfloat16"), 128 if form in GROUPED else 64
    gate = (grouped_weight if form in GROUPED else weight_of)(form, 64, inputs)
    gate = gate._replace(bias=np.linspace(-1, 1, 64).astype(jnp.bfloat16))
    up = jax.tree.map(lambda array: array[::-1], gate)
    exact = activated(exact_sums(x_ti, gate), activation)
    exact = exact * (exact_up(activation, exact_sums(x_ti, up)) if gated else 1)

    def op(x_ti, gate, up):
        return product(x_ti, gate, activation=activation, dtype="float32", **dict(up=up) if gated else {})

    assert_near(run(op, (x_ti, gate, up))[0], exact, 64 * 100)


@pytest.mark.parametrize(
    "form",
    ["int4 in groups of 32"]
    + [pytest.param(each, marks=pytest.mark.deep) for each in ("bfloat16", "int8", *GROUPED[1:])],
)
def test_experts(form):
    """Of one tile of outputs for each expert: some, all or none of the rows."""
    inputs = 128 if form in GROUPED else 64
    x_ti = x_of(20, inputs, "bfloat16")
    gate = (grouped_weight if form in GROUPED else weight_of)(form, 5, 64, inputs)
    gate = gate._replace(bias=np.linspace(-9, 9, 5 * 64).astype(jnp.bfloat16).reshape(5, 64))
    up = jax.tree.map(lambda array: array[::-1], gate)

    def op(x_ti, gate, up, sizes_e):
        return product(x_ti, gate, up=up, activation="swiglu_oai", sizes_e=sizes_e, dtype="float32")

    found = run(op, *((x_ti, gate, up, np.array(sizes)) for sizes in SIZES))
    for sizes, y_to in zip(SIZES, found, strict=True):
        assert_near(y_to, exact_experts(x_ti, gate, up, sizes), 64 * 100)


def exact_experts(x_ti: jax.Array, gate: Weight, up: Weight, sizes: tuple[int, ...]) -> np.ndarray:
    exact_x, of_rows = np.asarray(x_ti, np.float64), np.repeat(np.arange(len(sizes)), sizes)
    gates, ups = (
        np.einsum("ti,toi->to", exact_x, exact_matrix(each)[of_rows]) + np.asarray(each.bias, np.float64)[of_rows]
        for each in (gate, up)
    )
    return activated(gates, "swiglu_oai") * exact_up("swiglu_oai", ups)


class TestBits:
    """A row has the same bits however many others there are, and wherever its parts are added."""

    @pytest.mark.parametrize(
        "form", ["bfloat16", *(pytest.param(form, marks=pytest.mark.deep) for form in ("int8", "int4 in groups of 32"))]
    )
    def test_parts_are_added_in_one_order(self, form):
        """By XLA where tiles are few, else inside the kernel."""
        x_ti, weight = x_of(3, 1024, "bfloat16"), weight_of(form, 64, 1024)
        assert product_module.parts_of(weight) == 2
        op = lambda *args: product(*args, dtype="float32")
        [separate], [inside] = (run(op, (x_ti, weight), num_sms=num_sms) for num_sms in (2, 1))
        np.testing.assert_array_equal(separate, inside)
        if form not in GROUPED:
            assert_near(separate, exact_sums(x_ti, weight), 1024)

    @pytest.mark.parametrize(
        ("form", "inputs", "rows"),
        [
            ("bfloat16", 256, (1, 65)),
            *(
                pytest.param(form, inputs, (1, 3, 20, 64, 65, 1025), marks=pytest.mark.deep)
                for form in (*ROWS, *GROUPED) for inputs in (256, 1024)
            ),
        ],
    )  # fmt: skip
    def test_a_row_is_the_same_among_any_number(self, form, inputs, rows):
        x_ti, weight = x_of(max(rows), inputs, ROWS.get(form, "bfloat16")), weight_of(form, 64, inputs)
        op = lambda *args: product(*args, dtype="float32")
        found = [run(op, (x_ti[:size], weight), num_sms=2)[0] for size in rows]
        for one in found:
            np.testing.assert_array_equal(one, found[-1][: len(one)])

    @pytest.mark.parametrize("form", ["bfloat16", "int8", "int4 in groups of 32", "int8 in groups of 32"])
    @pytest.mark.parametrize(
        ("outputs", "inputs"), [(576, 1536), (6144, 4096), (4096, 14336), (128256, 4096), (64, 64)]
    )
    def test_no_cut_of_the_inputs_depends_on_the_rows(self, form, outputs, inputs, monkeypatch):
        """Depths of tiles may differ: each is a whole number of instructions."""
        seen = []

        def launch(inputs_, dtype, *, form, cut, parts=1, separate=False, activation=None):
            seen.append((parts, cut))
            (t, i), (_, o, _) = inputs_.x_ti.shape, inputs_.values[0].shape
            assert t % cut.rows == 0 and o % (matmul.OUTPUTS * cut.warpgroups) == 0 and i % (parts * cut.depth) == 0
            return jnp.zeros((parts if separate else 1, t, o), "float32" if separate else dtype)

        monkeypatch.setattr(product_module, "launch", launch)
        weight = described_weight(FORMS[form], outputs, inputs)
        with abstract(H200):
            for rows in (1, 3, 8, 9, 64, 65, 512, 1023, 1024, 2048, 16384):
                x_ti = jax.ShapeDtypeStruct((rows, inputs), "bfloat16")
                assert jax.eval_shape(product, x_ti, weight).shape == (rows, outputs)
        assert len({parts for parts, _ in seen}) == 1
        assert len({cut for _, cut in seen}) > 1 and all(cut.depth % 32 == 0 for _, cut in seen)


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        pytest.param(sizes, tile, marks=[] if i % 3 == j else [pytest.mark.deep])
        for i, sizes in enumerate([*SIZES, (20,), (0, 0), (8, 8, 0, 4)]) for j, tile in enumerate((8, 128, 1))
    ],
)  # fmt: skip
def test_places_of_experts_rows(sizes, tile):
    num_rows = max(1, sum(sizes))
    places = jax.jit(product_module.expert_rows, static_argnums=(1, 2))(np.array(sizes), num_rows, tile)
    places = jax.tree.map(np.asarray, places)
    tiles = -(-np.array(sizes) // tile)
    assert places.num_tiles.tolist() == [tiles.sum()] and len(places.expert_r) >= tiles.sum()
    np.testing.assert_array_equal(places.expert_r[: tiles.sum()], np.repeat(np.arange(len(sizes)), tiles))
    assert ((places.expert_r >= 0) & (places.expert_r < len(sizes))).all(), "tiles that are not in use read a weight"
    if sum(sizes):
        of_rows = np.repeat(np.arange(len(sizes)), sizes)
        np.testing.assert_array_equal(places.source_p[places.place_m], np.arange(num_rows))
        np.testing.assert_array_equal(places.expert_r[places.place_m // tile], of_rows)
        assert len(np.unique(places.place_m)) == num_rows


@pytest.mark.parametrize(
    ("rows", "form", "shape", "reason"),
    [
        ("bfloat16", "int8 in groups of 24", (64, 192), "groups have 24 inputs, expected a multiple of 16"),
        ("bfloat16", "int4 in groups of 96", (64, 192), "groups have 96 inputs, expected a multiple of 32 and a part"),
        ("float16", "fp8 in groups of 128", (64, 128), "weights are float8_e4m3fn and rows float16"),
        ("float32", "bfloat16", (64, 64), "rows are float32"),
        ("bfloat16", "float32", (64, 64), "weights are float32 and rows bfloat16"),
        ("float16", "fp8", (64, 64), "weights are float8_e4m3fn and rows float16"),
        ("bfloat16", "bfloat16", (65, 64), "65 outputs and 64 inputs, expected multiples of 64 and 64"),
        ("bfloat16", "int8", (64, 96), "64 outputs and 96 inputs"),
    ],
)
def test_other_products_are_the_references(rows, form, shape, reason, monkeypatch):
    monkeypatch.setattr(product_module, "launch", lambda *args, **options: pytest.fail("launched"))
    x_ti, weight = jax.ShapeDtypeStruct((3, shape[1]), rows), described_weight((FORMS | OTHERS)[form], *shape)
    assert reason in product_module.unsupported_product(x_ti, (weight,))
    assert not takes_weight(weight.format, weight.shape, rows)
    assert jax.eval_shape(product, x_ti, weight).shape == (3, shape[0])


def test_a_gate_of_two_forms_is_the_references(monkeypatch):
    monkeypatch.setattr(product_module, "launch", lambda *args, **options: pytest.fail("launched"))
    x_ti, gate = x_of(3, 64, "bfloat16"), weight_in(FORMS["bfloat16"], 64, 64)
    for up in (weight_in(FORMS["int8"], 64, 64), gate._replace(bias=np.ones(64, jnp.bfloat16))):
        found, expected = (jax.jit(ops_of(each).product)(x_ti, gate, up=up) for each in (mosaic, reference))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.deep
def test_derivatives_are_the_references():
    x_ti, weight = x_of(3, 64, "bfloat16"), weight_of("bfloat16", 64, 64)
    slopes = lambda op: jax.grad(lambda x_ti, values: op(x_ti, Weight(values), dtype="float32").sum(), (0, 1))
    [found] = run(slopes(product), (x_ti, weight.values))
    for one, expected in zip(found, slopes(ops_of(reference).product)(x_ti, weight.values), strict=True):
        np.testing.assert_array_equal(one, expected)


def without(name: str) -> types.SimpleNamespace:
    """Return `plgpu` with a function that does nothing."""
    return types.SimpleNamespace(**vars(plgpu) | {name: lambda *args, **options: None})


@pytest.mark.deep
class TestPlantedFaults:
    """Each must be found by the comparisons above, or by the interpreter."""

    @staticmethod
    def launched(monkeypatch, change) -> None:
        """Let the kernel take changed inputs."""
        launch = product_module.launch
        monkeypatch.setattr(
            product_module, "launch", lambda inputs, *rest, **options: launch(change(inputs), *rest, **options)
        )

    @staticmethod
    def filled(monkeypatch, **changes) -> None:
        """Let the ring be filled from other places."""
        fill = matmul.Ring.fill

        def wrong(self, inputs, **where):
            return fill(self, inputs, **where | {name: change(where[name]) for name, change in changes.items()})

        monkeypatch.setattr(matmul.Ring, "fill", wrong)

    @pytest.mark.parametrize(
        "fault",
        [
            lambda patch: TestPlantedFaults.launched(patch, lambda i: i._replace(scales=i.scales[::-1])),
            lambda patch: TestPlantedFaults.launched(patch, lambda i: i._replace(values=i.values[::-1])),
            lambda patch: TestPlantedFaults.launched(patch, lambda i: i._replace(biases=(i.biases[0],) * 2)),
            lambda patch: TestPlantedFaults.launched(patch, lambda i: i._replace(expert_r=jnp.roll(i.expert_r, 1))),
            lambda patch: TestPlantedFaults.launched(patch, lambda i: i._replace(num_tiles=i.num_tiles - 1)),
            lambda patch: TestPlantedFaults.filled(patch, row=lambda row: 0 * row),
            lambda patch: TestPlantedFaults.filled(patch, expert=lambda expert: 0 * expert),
        ],
        ids=["scales exchanged", "weights exchanged", "another weight's biases", "another expert", "last tile left out",
             "another tile's rows", "first expert"],
    )  # fmt: skip
    def test_of_experts(self, fault, monkeypatch):
        fault(monkeypatch)
        with pytest.raises(AssertionError):
            test_experts("int8")

    @pytest.mark.parametrize(
        "change",
        [
            lambda i: i._replace(factors=(jnp.roll(i.factors[0], 1, 0), *i.factors[1:])),
            lambda i: i._replace(factors=(jnp.roll(i.factors[0], 1, 1), *i.factors[1:])),
            lambda i: i._replace(factors=(jnp.roll(i.factors[0], 1, 2), *i.factors[1:])),
            lambda i: i._replace(factors=(i.factors[0], jnp.roll(i.factors[1], 1, 2), *i.factors[2:])),
            lambda i: i._replace(factors=(i.factors[0], i.factors[1] + i.factors[0].astype("float16"), *i.factors[2:])),
            lambda i: i._replace(factors=(*i.factors[2:], *i.factors[:2])),
            lambda i: i._replace(values=tuple(each << 4 | each >> 4 for each in i.values)),
        ],
        ids=["another expert's scales", "another output's", "another group's", "another group's minima",
             "another zero point", "factors exchanged", "halves exchanged"],
    )  # fmt: skip
    def test_of_groups(self, change, monkeypatch):
        self.launched(monkeypatch, change)
        with pytest.raises(AssertionError):
            test_experts("int4 in groups of 32")

    @pytest.mark.parametrize("place", [lambda *args: 0, lambda *args: 1], ids=["the first", "the second"])
    def test_a_place_among_copied_groups(self, place, monkeypatch):
        monkeypatch.setattr(matmul, "first_in", place)
        with pytest.raises(AssertionError):
            test_it_is_that_of_float64_with_groups("int4 in groups of 128", 65, "bfloat16")

    @pytest.mark.parametrize("name", ["MIDDLE", "PACKED"])
    def test_another_middle_or_width(self, name, monkeypatch):
        monkeypatch.setattr(numbers, name, 2 * getattr(numbers, name))
        with pytest.raises(AssertionError):
            test_it_is_that_of_float64_with_groups("int4 without minima", 3, "bfloat16")

    @pytest.mark.parametrize("num_sms", [1, 2], ids=["inside", "separate"])
    def test_parts_of_the_first_inputs_only(self, num_sms, monkeypatch):
        """Parts counted twice, and the tail left out."""
        self.filled(monkeypatch, start=lambda start: 0 * start, depths=lambda depths: depths)
        if num_sms == 1:  # both parts come through one call
            sums = matmul.Ring.sums
            monkeypatch.setattr(matmul.Ring, "sums", lambda *args: [2 * each for each in sums(*args)])
        x_ti, weight = x_of(3, 1024, "bfloat16"), weight_of("bfloat16", 64, 1024)
        [found] = run(product, (x_ti, weight), num_sms=num_sms)
        with pytest.raises(AssertionError):
            assert_near(found, exact_sums(x_ti, weight), 1024)

    def test_parts_in_another_order(self, monkeypatch):
        """Found by bits only."""
        reduced = lambda function, items: function(items[1], items[0] * (1 + 2**-23))
        monkeypatch.setattr(product_module, "functools", types.SimpleNamespace(reduce=reduced))
        with pytest.raises(AssertionError):
            TestBits().test_parts_are_added_in_one_order("bfloat16")

    def test_a_number_of_parts_that_depends_on_the_rows(self, monkeypatch):
        parts_of = product_module.parts_of
        sizes = iter([1, 2])
        monkeypatch.setattr(product_module, "parts_of", lambda *shape: parts_of(*shape) * next(sizes))
        with pytest.raises(AssertionError):
            TestBits().test_a_row_is_the_same_among_any_number("bfloat16", 256, (1, 65))

    def test_a_ring_that_does_not_wait_for_room(self, monkeypatch):
        fill = matmul.Ring.fill

        def hasty(self, *args, **where):
            with monkeypatch.context() as patch:
                patch.setattr(matmul, "plgpu", without("barrier_wait"))
                return fill(self, *args, **where)

        monkeypatch.setattr(matmul.Ring, "fill", hasty)
        x_ti, weight = x_of(3, 1024, "bfloat16"), weight_of("bfloat16", 64, 1024)
        with pytest.raises(Exception, match=r"RACE DETECTED|completed|arrier"):
            run(product, (x_ti, weight), num_sms=1)
