"""Products and prompts in tile registers, and planted faults. They need a processor with AMX."""

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Weight
from pallas_kernels.cpu import amx, attention, digits, runs, strips
from pallas_kernels.cpu.code import I8, I64, Machine
from pallas_kernels.cpu.contexts import PART
from pallas_kernels.cpu.decode_tiles import TileDecodeWriter
from pallas_kernels.cpu.product import UNIT_T
from pallas_kernels.cpu.prompt_tiles import TilePromptWriter
from tests.kernels import cases
from tests.kernels.implementations import CPU, REFERENCE
from tests.kernels.products import FORMS, exact_matrix, weight_in, x_of
from tests.kernels.test_product import OPS, PRODUCT, PRODUCTS, assert_product

pytestmark = pytest.mark.skipif(not Machine.host().has_bf16_tiles, reason="this processor has no tiles of bfloat16")

FEW, BLOCK = strips.SMALL_T, UNIT_T
MANY = 2 * BLOCK + 45
ROWS = (1, 2, 16, 17, 33, 49, FEW, FEW + 1, FEW + 33, BLOCK, BLOCK + FEW + 1, MANY)
VERSIONS = itertools.count(10**6)  # of targets


def multiply(x_ti: np.ndarray, weight: Weight, **options) -> np.ndarray:
    """Return the product in float32."""
    return np.asarray(PRODUCT["cpu"](x_ti, weight, dtype="float32", **options))


@pytest.fixture
def multiply_anew(monkeypatch):
    """The op `product` with a float32 result, without any code that another test has compiled."""
    monkeypatch.setattr(sys.modules["pallas_kernels.cpu.product"], "VERSION", next(VERSIONS))
    return jax.jit(lambda x_ti, weight: OPS["cpu"].product(x_ti, weight, dtype=jnp.float32))


def exact_product(x_ti: np.ndarray, matrix_oi: np.ndarray) -> np.ndarray:
    return np.asarray(x_ti, np.float64) @ matrix_oi.T


each_form = pytest.mark.parametrize("form", ["bfloat16", "int8"])


# The usual tier has each number of outputs and each depth. Weights of int8 with 96 inputs are not multiplied in tiles.
@each_form
@pytest.mark.parametrize(
    "outputs, depth",
    [
        pytest.param(outputs, depth, marks=[] if i % 3 == j else [pytest.mark.deep])
        for i, outputs in enumerate((3, 16, 50, strips.WIDTH + 33)) for j, depth in enumerate((64, 96, 1152))
    ],
)  # fmt: skip
def test_each_number_of_rows_has_the_same_bits(outputs, depth, form):
    x_ti, weight = x_of(MANY, depth, "bfloat16"), weight_in(FORMS[form], outputs, depth)
    together = multiply(x_ti, weight)
    assert_product(together, exact_product(x_ti, exact_matrix(weight)), depth)
    for rows in ROWS:
        np.testing.assert_array_equal(multiply(x_ti[-rows:], weight), together[-rows:])


@each_form
@pytest.mark.parametrize("sizes", [[0, 9, 0, 0], [3, 2, 1, 3], [0, FEW + 86, 1, 40], [BLOCK + 50, 0, 30, BLOCK + 70]])
def test_experts_whose_rows_begin_inside_a_tile(sizes, form):
    weight, rows = weight_in(FORMS[form], 4, 50, 128, bias="float32"), sum(sizes)
    x_ti, first = x_of(rows + 3, 128, "bfloat16"), 0
    found = multiply(x_ti, weight, sizes_e=np.array(sizes))
    for expert, size in enumerate(sizes):
        matrix, stop = exact_matrix(weight)[expert], first + size
        exact = exact_product(x_ti[first:stop], matrix) + weight.bias[expert]
        assert_product(found[first:stop], exact, 128)
        first = stop
    assert not found[rows:].any()


@each_form
@pytest.mark.parametrize("wanted", [[], [0], [5, 6, 70], range(BLOCK - 1, BLOCK + 9), range(0, BLOCK + 9, 2)])
def test_rows_that_nobody_wants_are_zero(wanted, form):
    x_ti, weight = x_of(BLOCK + 9, 128, "bfloat16"), weight_in(FORMS[form], 50, 128)
    wanted_t = np.isin(np.arange(len(x_ti)), wanted)
    whole = np.where(wanted_t[:, None], multiply(x_ti, weight), 0)
    with_nan = np.where(wanted_t[:, None], x_ti, np.full_like(x_ti, np.nan))
    np.testing.assert_array_equal(multiply(with_nan, weight, wanted_t=wanted_t), whole)


@each_form
@pytest.mark.parametrize("rows", [1, 7, 40, FEW + 40])
def test_a_gate_and_several_weights_in_one_pass(rows, form):
    x_ti, weights = x_of(rows, 128, "bfloat16"), [weight_in(FORMS[form], size, 128) for size in (70, 50, 1)]
    for found, weight in zip(PRODUCTS["cpu"](x_ti, *weights, dtype="float32"), weights, strict=True):
        np.testing.assert_array_equal(found, multiply(x_ti, weight))
    gate, up = (exact_product(x_ti, exact_matrix(weights[0])) for _ in range(2))
    assert_product(multiply(x_ti, weights[0], up=weights[0]), gate * up, 128 * 100)


def _pack_another(self, tile):
    PACK(self, self.code.maximum(tile - 1, tile * 0))


def _configure_one(self, rows, row_bytes):
    CONFIGURE(self, dict.fromkeys(rows, self.code.value(1, I64)), row_bytes)


PACK, CONFIGURE = amx.Input._pack, amx.Registers.configure
FAULTS = {
    "a tile of rows is not packed": (amx.Input, "_pack", lambda self, tile: None),
    "another tile of rows is packed": (amx.Input, "_pack", _pack_another),
    "a tile of weights of one output": (amx.Registers, "configure", _configure_one),
    "sums that are not turned": (strips.Strips, "_transpose", lambda self, sums, to: None),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.deep] if fault == "sums that are not turned" else []) for fault in FAULTS],
)
def test_planted_faults_are_found(fault, multiply_anew, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    x_ti, weight = x_of(40, 64, "bfloat16"), weight_in(FORMS["bfloat16"], 50, 64)
    with pytest.raises(AssertionError):
        assert_product(multiply_anew(x_ti, weight), exact_product(x_ti, exact_matrix(weight)), 64)


class TestDigits:
    """Rows of x as whole numbers, next to weights of int8."""

    DEPTH = 2 * digits.BLOCK + 192

    def product(self, x_ti: np.ndarray, values_oi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of rows with weights that have the scale 1, and the exact one of the same numbers."""
        rows = np.float32(x_ti).astype(jnp.bfloat16)
        weight = Weight(values_oi.astype(np.int8), np.ones(len(values_oi), np.float32))
        return multiply(rows, weight).astype(np.float64), rows.astype(np.float64) @ values_oi.T

    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_largest_numbers_do_not_overflow(self, sign):
        """255 / 128 has the largest mantissa. The high digit cannot hold it: it becomes 32,639 of 32,640 units."""
        largest = np.full((9, self.DEPTH), sign * 255 / 128)
        found, exact = self.product(largest, np.full((16, self.DEPTH), -128))
        np.testing.assert_allclose(found, exact, rtol=0 if sign < 0 else 1 / digits.LARGEST)

    def test_small_numbers_next_to_large_ones(self):
        """The error is at most half a unit, 2^-15 of the power of two below the largest number, for each input."""
        rng = np.random.default_rng(0)
        x_ti = rng.standard_normal((20, self.DEPTH))
        x_ti[:, 5] = 1000
        values_oi = rng.integers(-127, 128, (50, self.DEPTH))
        values_oi[:, 5] = 0
        found, exact = self.product(x_ti, values_oi)
        units = np.where(np.arange(self.DEPTH) < digits.BLOCK, 512, 4) * 2.0**-digits.FRACTION
        assert (np.abs(found - exact) <= np.abs(values_oi) @ units / 2 + 1e-5 * self.DEPTH).all()
        assert np.abs(found - exact).max() > 1e-5 * self.DEPTH, "no number was rounded"

    @pytest.mark.parametrize("size", [1e-45, 1e-30, 1e30, 3e38])
    def test_numbers_of_any_size(self, size):
        x_ti = np.full((3, self.DEPTH), size)
        x_ti[1] = 0
        found, exact = self.product(x_ti, np.eye(20, self.DEPTH))
        tiny = 2.0**-114  # the unit of blocks without larger numbers
        np.testing.assert_allclose(found, exact, rtol=2**-14, atol=tiny)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_number_that_is_not_finite_stays_in_its_row(self, bad):
        x_ti = np.ones((10, self.DEPTH))
        x_ti[3, 700] = bad
        found, exact = self.product(x_ti, np.ones((20, self.DEPTH)))
        assert np.isnan(found[3]).all()
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(exact, 3, 0))

    def _first_block(self, tile, begin):
        return FACTORS(self, tile, begin * 0)

    def _no_low_digit(self, at, inverse):
        high, low = DIGITS(self, at, inverse)
        return high, low & 0

    @pytest.mark.parametrize(
        "owner, name, fault",
        [
            (digits.Digits, "factors", _first_block), (digits.Digits, "_digits", _no_low_digit),
            (digits.Digits, "address", lambda self, tile, k: ADDRESS(self, tile, k * 0)),
        ],
        ids=["factors of another block", "no low digits", "digits of other inputs"],
    )  # fmt: skip
    def test_planted_faults_are_found(self, owner, name, fault, multiply_anew, monkeypatch):
        monkeypatch.setattr(owner, name, fault)
        x_ti, weight = x_of(40, self.DEPTH, "bfloat16"), weight_in(FORMS["int8"], 50, self.DEPTH)
        x_ti = x_ti * np.where(np.arange(self.DEPTH) < 700, 8, 1).astype(x_ti.dtype)
        with pytest.raises(AssertionError):
            assert_product(multiply_anew(x_ti, weight), exact_product(x_ti, exact_matrix(weight)), 64 * self.DEPTH)


FACTORS, ADDRESS, DIGITS = digits.Digits.factors, digits.Digits.address, digits.Digits._digits


class TestPrompts:
    """Attention in tiles. tests/kernels/test_cpu_attention.py has its bits in chunks and in blocks of other sizes."""

    @pytest.mark.parametrize(
        "kind",
        [
            dict(head_dim=32, group=1), dict(head_dim=128, group=4, sinks=True), dict(group=3, window=100),
            dict(head_dim=256, num_kv_heads=1, group=2, soft_cap=2.0, window=70), dict(group=3, window=33, fp8=True),
            dict(head_dim=96, group=2), dict(head_dim=80, pool_head_dim=96),
        ],
    )  # fmt: skip
    def test_kinds_of_heads(self, kind):
        batch = cases.make_batch([210, 70, 33], q_lens=[130, 70, 1], return_lse=True, padding_rows=3, **kind)
        batch.check(batch.run(CPU.ragged_paged_attention))

    def test_keys_whose_scale_is_0(self):
        batch = cases.make_batch([100], q_lens=[100], group=3, fp8=True)
        batch.options["k_scale_k"] = np.zeros_like(batch.options["k_scale_k"])
        found, expected = (batch.run(each.ragged_paged_attention) for each in (CPU, REFERENCE))
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=0.02)

    @pytest.mark.parametrize("fault", ["pairs of one value", "keys of the first tile"])
    def test_planted_faults_are_found(self, fault, monkeypatch):
        pair, scores = TilePromptWriter._pair, TilePromptWriter._scores
        faults = {
            "pairs of one value": ("_pair", lambda self, places, c, h: pair(self, places, c // 2 * 2, h) << 16),
            "keys of the first tile": (
                "_scores",
                lambda self, rows, tile, to, keys, factor: scores(
                    self, rows, tile, to, (keys[0], self.code.minimum(keys[1], keys[0] + 32)), factor
                ),
            ),
        }
        monkeypatch.setattr(TilePromptWriter, *faults[fault])
        monkeypatch.setattr(attention, "VERSION", next(VERSIONS))
        batch = cases.make_batch([100], q_lens=[100], group=3)
        with pytest.raises(AssertionError):
            batch.check(batch.run(CPU.ragged_paged_attention))


KINDS = [
    dict(head_dim=32, group=1), dict(group=3), dict(head_dim=128, num_kv_heads=1, group=16, sinks=True),
    dict(group=5, window=PART + 40), dict(head_dim=256, num_kv_heads=1, group=2, soft_cap=2.0, window=70),
    dict(group=3, window=33, fp8=True), dict(head_dim=96, group=2), dict(head_dim=80, pool_head_dim=96),
]  # fmt: skip


def sharing(kind: dict, contexts: list[int], own: list[int]) -> cases.Batch:
    """Return decode tokens with contexts of one text, whose blocks from a number in `own` on are their own.

    Blocks before the window of the longest context are 0, because the others see some of them.
    """
    batch = cases.make_batch([max(contexts)] * len(contexts), **kind)
    tables = np.repeat(np.asarray(batch.block_tables)[:1], len(contexts), axis=0)
    for s, first in enumerate(own):
        tables[s, first:] = batch.block_tables[s, first:]
    k_pool, v_pool = (np.where(np.isnan(pool), np.zeros_like(pool), pool) for pool in (batch.k_pool, batch.v_pool))
    context_lens = np.array(contexts, np.int32)
    return dataclasses.replace(batch, k_pool=k_pool, v_pool=v_pool, block_tables=tables, context_lens=context_lens)


def alone(batch: cases.Batch, s: int) -> cases.Batch:
    row = slice(s, s + 1)
    tables, lens = batch.block_tables[row], batch.context_lens[row]
    return dataclasses.replace(batch, q=batch.q[row], block_tables=tables, context_lens=lens)


class TestDecodeTokens:
    """Attention of decode tokens in tiles, some of which share blocks."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds_of_heads(self, kind):
        contexts = [0, 1, 31, PART - 1, PART, PART + 1, 2 * PART + 40]
        batch = cases.make_batch(contexts, return_lse=True, **kind)
        batch.check(batch.run(CPU.paged_decode_attention))

    @pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=[] if i % 2 else [pytest.mark.deep]) for i, kind in enumerate(KINDS)]
    )
    def test_a_row_has_the_same_bits_next_to_others_of_its_text(self, kind):
        end, whole = 2 * PART + 40, 2 * PART // 16 + 3
        contexts = [end - 3, end - 2, end - 1, end, PART + 5, end, end, 7]
        batch = sharing(kind, contexts, [whole] * 5 + [20, 3, whole])
        together = batch.run(CPU.paged_decode_attention)
        for s in range(len(together)):
            np.testing.assert_array_equal(together[s], alone(batch, s).run(CPU.paged_decode_attention)[0])

    @pytest.mark.parametrize("fault", ["all share", "the first one is the longest", "weights of another tile"])
    def test_planted_faults_are_found(self, fault, monkeypatch):
        add, weights = runs._add, TileDecodeWriter._write_weights

        def add_without_longest(frame, *args):
            length = frame.length
            frame.length = lambda s: s * 0
            add(frame, *args)
            frame.length = length

        faults = {
            "all share": (runs, "_shares", lambda frame, part, s, other: s * 0 + 1),
            "the first one is the longest": (runs, "_add", add_without_longest),
            "weights of another tile": (
                TileDecodeWriter,
                "_write_weights",
                lambda self, row, *args: weights(self, (row[0], self.code.at(row[1], 64, I8)), *args),
            ),
        }
        batch = sharing(dict(group=3), [PART - 20, PART + 30, PART + 31], [30, 30, 3])
        right = batch.run(CPU.paged_decode_attention)
        monkeypatch.setattr(*faults[fault])
        monkeypatch.setattr(attention, "VERSION", next(VERSIONS))
        assert (batch.run(CPU.paged_decode_attention) != right).any()
