"""The op of matrices of low rank: compiled for a CPU and by products, against float64; bits of rows; planted faults."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LowRank, Ops, load
from pallas_kernels.cpu import code, lora

optimized = pytest.mark.usefixtures("optimized_code")
OPS = {name: Ops(load(f"pallas_kernels.{name}")) for name in ("reference", "cpu")}
LOW_RANK = {name: jax.jit(ops.low_rank) for name, ops in OPS.items()}
VERSIONS = itertools.count(10**6)  # of targets
# Rows, inputs, outputs of each pair, slots and ranks: parts of vectors, blocks and units; one and no row of a slot.
SHAPES = {
    "parts": (37, 50, (130, 3), 3, 5),
    "blocks": (200, 33, (65,), 1, 8),
    "units": (9, 96, (600, 64, 1030), 4, 16),
    "one row": (1, 64, (70,), 2, 16),
    "many slots": (20, 40, (48, 48), 64, 1),
}
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]


@pytest.fixture
def anew(monkeypatch):
    """The op for a CPU, without any code that another test has compiled."""
    monkeypatch.setattr(lora, "VERSION", next(VERSIONS))
    return jax.jit(lambda *args: OPS["cpu"].low_rank(*args))


def call_of(shape: str, dtypes=("float32", "float32"), seed: int = 0):
    """Return x, pairs and slots; some rows have no slot."""
    num_rows, inputs, outputs, size, rank = SHAPES[shape]
    rng = np.random.default_rng([seed, num_rows])
    normal = lambda dtype, *sizes: rng.standard_normal(sizes, np.float32).astype(np.dtype(dtype))
    pairs = [LowRank(normal(dtypes[1], size, rank, inputs), normal(dtypes[1], size, rank, each)) for each in outputs]
    slots_t = rng.integers(-1, size, num_rows, np.int32)
    slots_t[0] = size - 1
    return normal(dtypes[0], num_rows, inputs), pairs, slots_t


def multiplied(low_rank, x_ti, pairs, slots_t) -> list[np.ndarray]:
    return [np.asarray(y_to) for y_to in low_rank(x_ti, pairs, slots_t)]


def assert_products(low_rank, x_ti, pairs, slots_t) -> None:
    """Compare with float64, by the size of the terms; rows without a slot are -0."""
    x, slots = np.asarray(x_ti, np.float64), np.asarray(slots_t)
    for y, pair in zip(multiplied(low_rank, x_ti, pairs, slots_t), pairs, strict=True):
        a, b = (np.asarray(each, np.float64) for each in pair)
        expected, size = np.zeros(y.shape), np.zeros(y.shape)
        for t in np.flatnonzero(slots >= 0):
            expected[t] = a[slots[t]] @ x[t] @ b[slots[t]]
            size[t] = abs(a[slots[t]]) @ abs(x[t]) @ abs(b[slots[t]])
        with np.errstate(invalid="ignore"):  # memory that is not written may hold anything
            assert (abs(y - expected) <= 1e-6 * size).all()
        assert np.signbit(y[slots < 0]).all()


# Each shape, and each pair of dtypes in one of them. All pairs of both are in the deep tier.
@optimized
@pytest.mark.parametrize(
    "shape, dtypes",
    [
        pytest.param(
            shape, dtypes, id="-".join([shape, *dtypes]),
            marks=[] if shape == "parts" or dtypes == DTYPES[0] else [pytest.mark.deep],
        )
        for shape in SHAPES for dtypes in DTYPES
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", OPS)
def test_it_is_the_product_with_the_matrices_of_a_rows_slot(name, shape, dtypes):
    assert_products(LOW_RANK[name], *call_of(shape, dtypes))


@optimized
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_of_the_row_alone(shape):
    x_ti, pairs, slots_t = call_of(shape)
    whole = multiplied(LOW_RANK["cpu"], x_ti, pairs, slots_t)
    back = multiplied(LOW_RANK["cpu"], x_ti[::-1], pairs, slots_t[::-1])
    for t in range(0, len(x_ti), 5):
        alone = multiplied(LOW_RANK["cpu"], x_ti[t : t + 1], pairs, slots_t[t : t + 1])
        for several, reverse, single in zip(whole, back, alone, strict=True):
            np.testing.assert_array_equal(several[t].view(np.int32), single[0].view(np.int32))
            np.testing.assert_array_equal(several[t].view(np.int32), reverse[::-1][t].view(np.int32))


@optimized
def test_a_row_has_the_same_bits_in_every_slot():
    x_ti, pairs, _ = call_of("units")
    same = [LowRank(*(np.broadcast_to(each[:1], each.shape) for each in pair)) for pair in pairs]
    found = [multiplied(LOW_RANK["cpu"], x_ti, same, np.full(len(x_ti), slot, np.int32)) for slot in (0, 3)]
    for first, last in zip(*found, strict=True):
        np.testing.assert_array_equal(first, last)


@optimized
def test_slots_of_no_row_are_not_read():
    """And slots past the last one count as none."""
    x_ti, pairs, _ = call_of("units")
    for each in (each for pair in pairs for each in pair):
        each[[0, 2, 3]] = np.nan
    slots_t = np.array([1, -1, 1, -7, 1, 4, 1, 2**31 - 1, 1], np.int32)
    for y in multiplied(LOW_RANK["cpu"], x_ti, pairs, slots_t):
        assert np.isfinite(y).all() and (y[1::2] == 0).all() and np.signbit(y[1::2]).all() and y[::2].all()


@optimized
def test_no_rows():
    x_ti, pairs, slots_t = call_of("parts")
    assert [y.shape for y in multiplied(LOW_RANK["cpu"], x_ti[:0], pairs, slots_t[:0])] == [(0, 130), (0, 3)]


@optimized
@pytest.mark.parametrize("name", OPS)
def test_derivatives(name):
    x_ti, pairs, slots_t = call_of("parts")

    def loss(x_ti, pairs, low_rank) -> jax.Array:
        return sum((y_to**2).sum() for y_to in low_rank(x_ti, pairs, slots_t))

    def by_definition(x_ti, pairs, slots_t) -> list[jax.Array]:
        is_own_tn = jax.nn.one_hot(slots_t, len(pairs[0].a))
        return [jnp.einsum("tn,ti,nri,nro->to", is_own_tn, x_ti, *pair, precision="highest") for pair in pairs]

    found, expected = (
        jax.jit(jax.grad(lambda *args, op=op: loss(*args, op), argnums=(0, 1)))(x_ti, pairs)
        for op in (OPS[name].low_rank, by_definition)
    )  # fmt: skip
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(np.asarray(other)).max())


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda x, pairs, slots: (x[0], pairs, slots), r"x_ti is float32\[50\], expected \[T, I\]"),
        (lambda x, pairs, slots: (x.astype("int32"), pairs, slots), r"x_ti is int32"),
        (lambda x, pairs, slots: (x, pairs, slots[1:]), r"slots_t is int32\[36\], expected int32\[37\]"),
        (lambda x, pairs, slots: (x, [], slots), r"^pairs: there are none$"),
        (lambda x, pairs, slots: (x[:, 1:], pairs, slots), r"a is float32\[3, 5, 50\], expected float32\[3, 5, 49\]"),
        (lambda x, pairs, slots: (x, [pairs[0]._replace(a=pairs[0].a[0])], slots), r"a is float32\[5, 50\]"),
        (lambda x, pairs, slots: (x, [pairs[0], pairs[1]._replace(b=pairs[1].b[:, 1:])], slots), r"b is float32\[3, 4"),
        (lambda x, pairs, slots: (x, [pairs[0]._replace(b=pairs[0].b.astype("float16"))], slots), r"b is float16"),
        (lambda x, pairs, slots: (x, [pairs[0]._replace(b=pairs[0].b[..., :0])], slots), r"b has shape \[3, 5, 0\]"),
    ],
)
def test_errors(change, error):
    with pytest.raises(ValueError, match=error):
        OPS["cpu"].low_rank(*change(*call_of("parts")))


BLOCK, REDUCE, EXPAND = lora._Writer._block, lora._Writer._reduce, lora._Writer._expand
FAULTS = {
    "matrices of the first slot": ("_block", lambda self, number: BLOCK(self, number)._replace(slot=number * 0)),
    "the last row of a block is left out": (
        "_block", lambda self, number: (block := BLOCK(self, number))._replace(stop=block.stop - 1)
    ),
    "rows as they stand": ("_row", lambda self, place: place),
    "z of the first pair": ("_z_at", lambda self, pair, place: place * self.rank),
    "a wrong part of the ranks": (
        "_reduce", lambda self, block, pair, first_r: REDUCE(self, block, pair, first_r // lora.UNIT_R)
    ),
    "outputs of whole vectors only": (
        "_expand", lambda self, block, pair, first, stop: EXPAND(self, block, pair, first, stop - stop % self.lanes)
    ),
    "rows without a slot are left as they are": (
        "_expand", lambda self, block, *rest: EXPAND(
            self, block._replace(slot=block.slot * 0, is_of_slot=block.slot.compare(">=", 0)), *rest)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, anew, monkeypatch):
    monkeypatch.setattr(lora._Writer, *FAULTS[fault])
    seed = 1 + [*FAULTS].index(fault)  # memory that is not written holds no result of the same numbers
    with pytest.raises(AssertionError):
        for shape in ("units", "parts"):
            assert_products(anew, *call_of(shape, seed=seed))


@pytest.mark.parametrize("lanes, registers", [(4, 16), (8, 16)])
def test_other_machines(lanes, registers, anew, monkeypatch):
    machine = code.Machine.host()
    if lanes > machine.lanes:
        pytest.skip("this machine has shorter vectors")
    other = machine._replace(lanes=lanes, registers=registers)
    monkeypatch.setattr(code.Machine, "host", classmethod(lambda cls: other))
    assert_products(anew, *call_of("parts", ("bfloat16", "float32")))
