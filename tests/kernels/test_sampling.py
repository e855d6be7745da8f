"""The ops of sampling: compiled for a CPU and as defined, against NumPy; bits by rows and machines; planted faults."""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Masks, Ops, load
from pallas_kernels.cpu import code, noise, sampling

STATIC = {"argmax_and_lse": None, "gumbel_argmax": None, "gumbel": None, "ranks": None, "top": 1}  # arguments of ops
OPS = {name: Ops(load(f"pallas_kernels.{name}")) for name in ("reference", "cpu")}
JITTED = {
    name: SimpleNamespace(**{op: jax.jit(getattr(ops, op), static_argnums=at) for op, at in STATIC.items()})
    for name, ops in OPS.items()
}
# Widths around the columns and the parts of the CPU's code.
WIDTHS = [("cpu", width) for width in (1, 63, 64, 65, 8191, 8192, 8193, 20_000)] + [("reference", 8193)]
VERSIONS = itertools.count(10**6)  # of targets
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def code_for_users(request):
    """Optimized code, unless a test has code of its own."""
    if "anew" not in request.fixturenames:
        request.getfixturevalue("optimized_code")


@pytest.fixture(params=JITTED)
def ops(request) -> SimpleNamespace:
    return JITTED[request.param]


@pytest.fixture
def anew(monkeypatch) -> SimpleNamespace:
    """The ops for a CPU, without any code that another test has compiled."""
    monkeypatch.setattr(sampling, "VERSION", next(VERSIONS))
    again = lambda name: lambda *args: getattr(OPS["cpu"], name)(*args)
    return SimpleNamespace(**{op: jax.jit(again(op), static_argnums=at) for op, at in STATIC.items()})


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, num_rows, vocab_size])
    return (4 * rng.standard_normal((num_rows, vocab_size))).astype(np.float32)


def keys_of(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return seeds and positions of rows."""
    rng = np.random.default_rng(num_rows)
    return rng.integers(0, 2**32, (num_rows, 2), np.uint32), rng.integers(0, 2**31 - 1, num_rows, np.int32)


def exact_noise(seed, position, tokens) -> np.ndarray:
    """Return the noise of tokens in float64, from the bits of `jax.random`."""
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32"), position)
    halves_k2 = np.asarray(jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token)))(tokens))
    uniform_k = ((halves_k2[:, 0] ^ halves_k2[:, 1]) >> 9) / 2**23
    return -np.log(-np.log(np.maximum(uniform_k, 2.0**-126)))


def assert_best_and_lse(ops, logits: np.ndarray) -> None:
    tokens, lse = (np.asarray(each) for each in ops.argmax_and_lse(logits))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    exact = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        highest = np.where(np.isfinite(exact.max(-1)), exact.max(-1), 0)
        expected = highest + np.log(np.exp(exact - highest[:, None]).sum(-1))
    np.testing.assert_allclose(lse, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name, vocab_size", WIDTHS)
def test_the_best_token_and_the_log_of_the_sum(name, vocab_size):
    assert_best_and_lse(JITTED[name], logits_of(5, vocab_size))


def test_a_sum_of_a_million_logits(ops):
    assert_best_and_lse(ops, logits_of(2, 1_000_000) + np.float32([[200], [-300]]))


@pytest.mark.parametrize("places", [(3, 70), (63, 8192), (8191, 19_999), (19_999, 19_999)])
def test_the_first_of_equal_tokens_is_the_best(ops, places):
    logits = logits_of(1, 20_000)
    logits[0, list(places)] = 50
    assert_best_and_lse(ops, logits)
    logits = np.full((1, 20_000), -1, np.float32)
    logits[0, list(places)] = -0.0, 0.0
    assert_best_and_lse(ops, logits)


@pytest.mark.parametrize("vocab_size", [65, 20_000])
def test_rows_with_infinite_logits_and_with_nan(ops, vocab_size):
    logits = logits_of(6, vocab_size)
    logits[0] = -INF
    logits[1, :-1] = -INF  # only the last token is allowed
    logits[2, 7:] = -INF
    logits[3, -3] = INF
    logits[4, 7] = logits[5, -1] = NAN
    tokens, lse = (np.asarray(each) for each in ops.argmax_and_lse(logits))
    assert tokens[:4].tolist() == [0, vocab_size - 1, logits[2].argmax(), vocab_size - 3]
    assert lse[0] == -INF and lse[1] == logits[1, -1] and lse[3] == INF and np.isnan(lse[4:]).all()
    assert np.isclose(lse[2], np.log(np.exp(logits[2, :7].astype(np.float64)).sum()))
    assert (tokens < vocab_size).all() and (tokens >= 0).all()


@pytest.mark.parametrize("count", [1, 7, 72, 1000])
def test_noise_is_that_of_the_seed_the_position_and_the_token(ops, count):
    seeds, positions = keys_of(3)
    tokens = np.random.default_rng(count).integers(0, 2**31 - 1, (3, count), np.int32)
    found = ops.gumbel(seeds, positions, tokens)
    for row, *key in zip(range(3), seeds, positions):
        np.testing.assert_allclose(found[row], exact_noise(*key, tokens[row]), rtol=3e-7, atol=3e-7)


def test_noise_has_the_same_bits_in_any_list(ops):
    seeds, positions = keys_of(2)
    tokens = np.arange(400, dtype=np.int32)
    whole = np.asarray(ops.gumbel(seeds, positions, np.tile(tokens, (2, 1))))
    for some in (tokens[::-1], tokens[17:20], tokens[399:]):
        np.testing.assert_array_equal(ops.gumbel(seeds, positions, np.tile(some, (2, 1))), whole[:, some])


def drawn(ops, logits, temperature, seeds, positions) -> np.ndarray:
    """Return the tokens that `gumbel_argmax` shall return, from the noise of `gumbel`."""
    tokens = np.tile(np.arange(logits.shape[1], dtype=np.int32), (len(logits), 1))
    noise = np.asarray(ops.gumbel(seeds, positions, tokens))
    cooled = logits / np.where(temperature > 0, temperature, 1)[:, None]
    return np.where(temperature > 0, (cooled + noise).argmax(-1), 0)


@pytest.mark.parametrize("name, vocab_size", WIDTHS)
def test_a_drawn_token_is_the_best_with_noise(name, vocab_size):
    ops = JITTED[name]
    logits, temperature = logits_of(6, vocab_size), np.float32([0.7, 1, 0, 1.9, 40, 0.01])
    logits[5, 0] = -INF
    arguments = logits, temperature, *keys_of(6)
    assert np.asarray(ops.gumbel_argmax(*arguments)).tolist() == drawn(ops, *arguments).tolist()


def test_a_row_that_allows_no_token_gets_token_0(ops):
    assert ops.gumbel_argmax(np.full((1, 300), -INF, np.float32), np.ones(1, np.float32), *keys_of(1)).tolist() == [0]


@pytest.mark.parametrize("name, vocab_size", WIDTHS)
def test_masks_allow_tokens(name, vocab_size):
    """Rows without a mask ignore its bits; a row that allows nothing gets token 0."""
    ops, rng = JITTED[name], np.random.default_rng(vocab_size)
    logits, masked = logits_of(5, vocab_size), np.array([1, 1, 0, 1, 1], bool)
    words = rng.integers(0, 2**32, (5, -(-vocab_size // 32)), np.uint32)
    words &= rng.integers(0, 2**32, words.shape, np.uint32) & rng.integers(0, 2**32, words.shape, np.uint32)
    words[3] = 0
    words[4] = 1 << 31
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    kept = np.where(masked[:, None] & ~allowed, np.float32(-INF), logits)
    masks = Masks(words, masked)
    tokens, lse = ops.argmax_and_lse(logits, masks)
    expected = ops.argmax_and_lse(kept)
    np.testing.assert_array_equal(tokens, kept.argmax(-1))
    np.testing.assert_array_equal(lse, expected[1])
    temperature, keys = np.float32([0.5, 1, 1.5, 1, 0]), keys_of(5)
    found = ops.gumbel_argmax(logits, temperature, *keys, masks)
    np.testing.assert_array_equal(found, ops.gumbel_argmax(kept, temperature, *keys))


@pytest.mark.parametrize("k", [0, 1, 20, 72, 128, 129])
def test_the_best_tokens_in_order(ops, k):
    logits = np.round(logits_of(7, 3000))  # with equal ones
    logits[1, ::2] = -INF
    logits[2] = -INF
    logits[3] = np.sort(logits[3])  # each is better than all before
    logits[4] = np.sort(logits[4])[::-1]
    logits[5, 2000] = INF
    tokens, best = (np.asarray(each) for each in ops.top(logits, k))
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(best, np.take_along_axis(logits, expected, 1))


@pytest.mark.parametrize("vocab_size", [1, 3, 17, 100])
def test_a_list_may_be_as_long_as_the_vocabulary(ops, vocab_size):
    logits = logits_of(2, vocab_size)
    assert ops.top(logits, vocab_size)[0].tolist() == np.argsort(-logits, axis=-1, kind="stable").tolist()


def test_wrong_arguments_are_refused_by_name():
    ops, logits, keys = OPS["cpu"], logits_of(2, 40), keys_of(2)
    with pytest.raises(ValueError, match=r"k is 41, expected 0 to 40"):
        ops.top(logits, 41)
    with pytest.raises(ValueError, match=r"masks: allowed_bits_sw is uint32\[2, 1\], expected uint32\[2, 2\]"):
        ops.argmax_and_lse(logits, Masks(np.zeros((2, 1), np.uint32), np.ones(2, bool)))
    with pytest.raises(ValueError, match=r"logits_sv is bfloat16"):
        ops.argmax_and_lse(jnp.asarray(logits, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"positions_s is int32\[1\], expected int32\[2\]"):
        ops.gumbel_argmax(logits, np.ones(2, np.float32), keys[0], keys[1][:1])


@pytest.mark.parametrize("vocab_size", [1, 65, 20_000])
def test_ranks(ops, vocab_size):
    logits = np.round(logits_of(6, vocab_size))  # with equal ones
    logits[4, -1] = NAN
    tokens, wanted = np.arange(6, dtype=np.int32) * 13 % vocab_size, np.array([1, 1, 0, 1, 1, 1], bool)
    higher = (logits > logits[np.arange(6), tokens][:, None]).sum(-1)
    assert ops.ranks(logits, tokens, wanted).tolist() == np.where(wanted, 1 + higher, 0).tolist()


def results_of(ops, logits: np.ndarray, keys: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    best, lse = ops.argmax_and_lse(logits)
    drawn = ops.gumbel_argmax(logits, np.full(len(logits), 0.8, np.float32), *keys)
    masks = Masks(np.full((len(logits), -(-logits.shape[1] // 32)), 0x9E3779B9, np.uint32), np.ones(len(logits), bool))
    allowed, noise = ops.argmax_and_lse(logits, masks)[0], ops.gumbel(*keys, np.asarray(best)[:, None])
    return [np.asarray(each) for each in (best, lse, drawn, allowed, noise, *ops.top(logits, 5))]


def test_a_row_has_the_same_bits_alone_and_beside_others(ops):
    logits, keys = logits_of(24, 20_000), keys_of(24)
    together = results_of(ops, logits, keys)
    for row in (0, 13, 23):
        alone = results_of(ops, logits[row : row + 1], tuple(each[row : row + 1] for each in keys))
        for found, expected in zip(alone, together):
            np.testing.assert_array_equal(found, expected[row : row + 1])


@pytest.mark.parametrize("lanes", [4, 8])
def test_vectors_of_other_machines_give_the_same_bits(lanes, anew, monkeypatch):
    logits, keys = logits_of(2, 8300), keys_of(2)
    expected = results_of(JITTED["cpu"], logits, keys)
    host = code.Machine.host()._replace(lanes=lanes)
    monkeypatch.setattr(code.Machine, "host", lambda: host)
    for found, each in zip(results_of(anew, logits, keys), expected):
        np.testing.assert_array_equal(found, each)


FOUND, ALLOWED = sampling._RowsWriter._found, sampling._RowsWriter._allowed


def take_later(code, best, token, other, other_token):
    """Keep the higher of two numbers, of equal ones the last."""
    with code.when(code.invert(other.compare("<", best.get()))):
        best.set(other)
        token.set(other_token)


FAULTS = {
    "the highest number is that of the first part": (
        sampling._RowsWriter, "_found",
        lambda self, unit, index, *kind: FOUND(self, unit - unit % self.parts if index == 0 else unit, index, *kind),
    ),
    "of equal tokens the last one": (sampling, "_take_better", take_later),
    "exponentials above 0": (sampling, "_base", lambda code, best: best * 0.0),
    "an infinite logit is a finite one": (sampling, "_base", lambda code, best: best),
    "bits of the row above": (
        sampling._RowsWriter, "_allowed", lambda self, row, at, lanes: ALLOWED(self, row, at, lanes)
        if not self.masks else ALLOWED(self, row - row.code.minimum(row, row * 0 + 1), at, lanes),
    ),
    "a wrong distance": (noise, "ROTATIONS", ((13, 15, 26, 7), (17, 29, 16, 24))),
    "another parity": (noise, "PARITY", 0x1BD11BDB),
    "noise of the neighbouring token": (
        sampling, "noise_of", lambda code, key, tokens: noise.gumbel(code, key, tokens + 1)
    ),
    "the position is not part of the key": (sampling, "fold_in", lambda code, key, number: key),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, anew, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_best_and_lse(anew, logits_of(5, 20_000) + np.float32(200))
        test_the_first_of_equal_tokens_is_the_best(anew, (8191, 19_999))
        test_rows_with_infinite_logits_and_with_nan(anew, 20_000)
        test_noise_is_that_of_the_seed_the_position_and_the_token(anew, 72)
        monkeypatch.setitem(JITTED, "cpu", anew)
        test_masks_allow_tokens("cpu", 65)
