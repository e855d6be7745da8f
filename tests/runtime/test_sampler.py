"""The sampler against float64 numpy written from the definitions: choices, draws and logprobs."""

import functools
import itertools
import math
import re
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.config import MAX_DRAFTS
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted
from jpaged.runtime import step
from jpaged.runtime.device_rows import SamplingState, empty_state, host_row
from jpaged.runtime.sampler import (
    Sampled,
    SampleOptions,
    _keep_likely,
    _process,
    _threshold_of_list,
    count,
    count_kept,
    sample,
    token_logprobs,
)
from jpaged.runtime.sampling_row import COLUMNS, FILTERS, Sampling
from pallas_kernels import Ops, load
from pallas_kernels.dispatch import REFERENCE

OPS = Ops(load(REFERENCE))


def count_and_sample(logits, state, sampling, num_top, processed=False, ops=OPS):
    state = count(state, sampling)
    sampled = sample(logits, state, sampling, SampleOptions(num_top, processed, ops=ops))
    return sampled, count_kept(state, sampling, sampled.tokens)


SAMPLE = jax.jit(count_and_sample, static_argnums=(3, 4))
COMPILED = jax.jit(functools.partial(count_and_sample, ops=Ops(load("pallas_kernels.cpu"))), static_argnums=(3, 4))
KEEP = jax.jit(_keep_likely)
PROCESS = jax.jit(_process)
COUNT, COUNT_KEPT = jax.jit(count), jax.jit(count_kept)
DRAFTS_BEFORE = jax.jit(step._drafts)
THRESHOLD = jax.jit(functools.partial(_threshold_of_list, ops=OPS))
V = 77  # no multiple of 32
LARGE = 400  # a vocabulary of more than the list of the likely has
K = 9


@dataclass(frozen=True)
class Row:
    """One row as its request would put it. `pending`: the output's last token is not counted in the state yet."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    stateful: bool = True
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    pending: bool = False
    bias: dict[int, float] = field(default_factory=dict)
    banned: frozenset[int] = frozenset()
    beam: bool = False
    allowed: frozenset[int] | None = None  # by the mask
    num_top: int = 0
    listed: tuple[int, ...] = ()  # its own tokens to list


NOTHING = Row(stateful=False)


def empty_sampling(num_samples: int, vocab_size: int) -> Sampling:
    """Return arrays for greedy samples, without filters or state."""
    columns = {
        name: np.full((num_samples, *column.shape), column.neutral, column.dtype) for name, column in COLUMNS.items()
    }
    bits, drafts = np.zeros((num_samples, -(-vocab_size // 32)), np.uint32), np.full((num_samples, MAX_DRAFTS), -1)
    return Sampling(**columns, allowed_bits=bits, drafts=drafts.astype(np.int32))


def filters(top_k, top_p, min_p) -> Sampling:
    """Return settings of which the filters alone are looked at."""
    columns = np.asarray(top_k, np.int32), np.asarray(top_p, np.float32), np.asarray(min_p, np.float32)
    return empty_sampling(len(columns[0]), 1)._replace(**dict(zip(FILTERS, columns, strict=True)))


@functools.cache
def shapes_of_state(num_rows: int, vocab_size: int) -> SamplingState:
    """Return the shapes of an empty state, which is zeros."""
    return jax.eval_shape(lambda: empty_state(num_rows, vocab_size))


def pack(rows: list[Row], vocab_size: int = V) -> tuple[SamplingState, Sampling]:
    """Rows as arrays; sequence i has row S - i of a state whose row 0 is spare, and may not change."""
    s = len(rows)
    sampling = empty_sampling(s, vocab_size)
    sampling.rows[:] = 0  # the spare one, unless stateful
    state = SamplingState(*(np.zeros(array.shape, array.dtype) for array in shapes_of_state(s + 1, vocab_size)))
    for array, value in zip(state, (100, True, 50.0)):
        array[0] = value
    for i, row in enumerate(rows):
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
            getattr(sampling, name)[i] = getattr(row, name)
        sampling.seeds[i] = row.seed >> 32, row.seed & 0xFFFFFFFF
        sampling.positions[i] = row.position
        sampling.beam[i], sampling.num_top[i] = row.beam, row.num_top
        is_pending = row.pending and bool(row.output)
        sampling.num_prompt_tokens[i] = row.position - 1 if is_pending else np.iinfo(np.int32).max
        sampling.last_tokens[i] = row.output[-1] if is_pending else 0
        if row.stateful:
            sampling.stateful[i], sampling.rows[i] = True, s - i
            counted = row.output[:-1] if row.pending else row.output
            params = SamplingParams(logit_bias=row.bias, logprob_token_ids=row.listed or None)
            admitted = Admitted(0, (*row.prompt, *counted, 0), len(row.prompt), params, 0, ((),), banned=row.banned)
            values = host_row(admitted, vocab_size)
            for array, value in zip(state, values, strict=True):
                array[s - i] = value
        if row.allowed is not None:
            sampling.masked[i] = True
            for token in row.allowed:
                sampling.allowed_bits[i, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return state, sampling


# The definitions, one row at a time.


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def beam_stage(x, row):
    return log_softmax(x) if row.beam else x


def mask_stage(x, row):
    keep = np.full(len(x), row.allowed is None)
    keep[list(row.allowed or ())] = True
    return np.where(keep, x, -np.inf)


def bias_stage(x, row):
    x = x.copy()
    for token, value in row.bias.items():
        x[token] += value
    x[list(row.banned)] = -np.inf
    return x


def repetition_stage(x, row):
    x = x.copy()
    for token in {*row.prompt, *row.output}:
        x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
    return x


def frequency_stage(x, row):
    return x - row.frequency * np.bincount(row.output, minlength=len(x))


def presence_stage(x, row):
    return x - row.presence * np.isin(np.arange(len(x)), row.output)


OF_STATE = bias_stage, repetition_stage, frequency_stage, presence_stage
STAGES = beam_stage, mask_stage, *OF_STATE


def process(logits, row: Row, stages=STAGES):
    x = logits.astype(np.float64)
    for stage in stages:
        if row.stateful or stage not in OF_STATE:
            x = stage(x, row)
    return x


def kept(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """By sorting: min-p, then top-k, then top-p; tokens as likely as the last one kept stay too. [V] bool."""
    x = x.astype(np.float64)
    keep = x >= x.max() + np.log(min_p) if min_p > 0 else x > -np.inf
    if top_k:
        keep &= x >= np.sort(x[keep])[::-1][:top_k][-1]
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        keep &= p >= p[order[min(count, len(p)) - 1]]
    return keep


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    x = process(logits, row) / row.temperature
    p = np.where(kept(x, row.top_k, row.top_p, row.min_p), np.exp(x - x.max()), 0)
    return p / p.sum()


@functools.partial(jax.jit, static_argnums=2)
def _noise(seed, position, size):
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,))


def noise(row: Row, size: int) -> np.ndarray:
    seed = np.uint32([row.seed >> 32, row.seed & 0xFFFFFFFF])
    return np.asarray(_noise(seed, np.int32(row.position), size), np.float64)


def check(rows: list[Row], logits: np.ndarray, *, exact: bool, num_top: int, stages=STAGES) -> None:
    """`exact`: float32 makes no error in processing these logits, so that equal is equal to both."""
    state, sampling = pack(rows, logits.shape[1])
    got, after = jax.tree.map(np.asarray, SAMPLE(logits, state, sampling, num_top))
    assert not any(np.isnan(array).any() for array in got)
    total = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1)).astype(np.float32)
    base = logits - np.where(sampling.beam, total, np.float32(0))[:, None]
    processed = np.asarray(PROCESS(base, after, sampling))
    for i, row in enumerate(rows):
        raw, x, token = logits[i].astype(np.float64), process(logits[i], row, stages), got.tokens[i]
        equal_within = {"atol": 0, "rtol": 0} if exact and not row.beam else {"atol": 1e-5, "rtol": 1e-6}
        np.testing.assert_allclose(processed[i], x, **equal_within)
        _check_choice(row, x, token, exact=exact and not row.beam)
        assert abs(got.logprobs[i] - log_softmax(raw)[token]) < 1e-5
        assert got.ranks[i] == (1 + (raw > raw[token]).sum() if row.num_top else 0)
        _check_list(row, x if row.beam else log_softmax(raw), got, i, by_id=not row.beam)
        counts = np.bincount(row.output, minlength=logits.shape[1])
        assert not row.stateful or after.output_counts[len(rows) - i].tolist() == counts.tolist()
    assert (after.output_counts[0] == 100).all()
    np.testing.assert_array_equal(after.in_prompt, state.in_prompt)
    np.testing.assert_array_equal(after.bias, state.bias)


def _check_choice(row: Row, x: np.ndarray, token: int, *, exact: bool) -> None:
    tolerance = 0 if exact else 1e-4
    if x.max() == -np.inf:
        assert token == 0
    elif row.temperature == 0:
        assert token == x.argmax() if exact else x[token] >= x.max() - tolerance
    else:
        x = x / row.temperature
        # float32 sums may end the nucleus a token early or late.
        candidates = (
            np.where(kept(x, row.top_k, p, row.min_p), x + noise(row, len(x)), -np.inf)
            for p in (row.top_p, row.top_p - 1e-6, row.top_p + 1e-6)
        )
        assert any(c[token] >= c.max() - 1e-4 for c in candidates)


def _check_list(row: Row, values: np.ndarray, got: Sampled, i: int, *, by_id: bool) -> None:
    """By value; and by id where equal values are equal in float32 too."""
    size = min(row.num_top, got.top_tokens.shape[1])
    tokens, logprobs = got.top_tokens[i, :size], got.top_logprobs[i, :size]
    assert (got.top_tokens[i, size:] == -1).all() and (got.top_logprobs[i, size:] == -np.inf).all()
    own = row.listed if row.stateful else ()
    best = np.int32(own[:size]) if own else np.lexsort((np.arange(len(values)), -values))[:size]
    assert len({*tokens.tolist()}) == size
    np.testing.assert_allclose(logprobs, values[best], atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(values[tokens], values[best], atol=1e-5, rtol=1e-6)
    if by_id or own:
        assert tokens.tolist() == best.tolist()


# Rows of every kind.

TOKENS = st.lists(st.integers(0, V - 1), max_size=6).map(tuple)
ON_THE_GRID = {
    "temperature": [0.0, 0.5, 1.0, 2.0],
    "presence": [0.0, 0.75, -2.0, 2.0],
    "frequency": [0.0, 0.5, -1.25, 2.0],
    "repetition": [1.0, 2.0, 0.5],
    "bias": [0.0, 1.5, -3.0, 100.0, -100.0],
}
ANYWHERE = {
    "temperature": [0.0, 0.3, 1.0, 1.7],
    "presence": [0.0, 0.1, -1.3],
    "frequency": [0.0, 0.7, -0.3],
    "repetition": [1.0, 1.3, 0.9, 3.0],
    "bias": [0.1, -7.7, 33.3],
}


def rows_of(values: dict[str, list[float]]) -> st.SearchStrategy[Row]:
    return st.builds(
        Row,
        **{name: st.sampled_from(of) for name, of in values.items() if name != "bias"},
        top_k=st.sampled_from([0, 1, 2, 7, 1000]),
        top_p=st.sampled_from([1.0, 0.99, 0.7, 0.31, 1e-6]),
        min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 2**20),
        stateful=st.booleans(),
        prompt=TOKENS,
        output=TOKENS,
        pending=st.booleans(),
        bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from(values["bias"]), max_size=4),
        banned=TOKENS.map(frozenset),
        beam=st.booleans(),
        allowed=st.none() | st.frozensets(st.integers(0, V - 1), max_size=40),
        num_top=st.sampled_from([0, 1, 5, K, V]),
        listed=st.lists(st.integers(0, V - 1), max_size=K, unique=True).map(tuple),
    ).map(_settled)


def _settled(row: Row) -> Row:
    """No beam is drawn or has tokens of its own to list."""
    if row.beam:
        return replace(row, temperature=0.0, listed=())
    return replace(row, num_top=len(row.listed)) if row.listed else row


def logits_of(seed: int, rows: int, *, grid: bool = False, vocab_size: int = V) -> np.ndarray:
    x = np.random.default_rng(seed).normal(0, 3, (rows, vocab_size))
    return (np.round(x * 4) / 4 if grid else x).astype(np.float32)


@settings(max_examples=30)
@given(st.lists(rows_of(ON_THE_GRID), min_size=6, max_size=6), st.integers(0, 2**32), st.sampled_from([K, V + 1]))
def test_rows_of_every_kind_beside_each_other_with_many_ties(rows, seed, num_top):
    check(rows, logits_of(seed, 6, grid=True), exact=True, num_top=num_top)


SIMPLE = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    stateful=st.just(False),
    num_top=st.sampled_from([0, 1]),
    allowed=st.none() | TOKENS.map(frozenset),
)
FILTERED = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 40, 71, 72, 73, 250, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.3]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    stateful=st.just(False),
)


@settings(max_examples=50)
@given(st.lists(FILTERED, min_size=3, max_size=3), st.integers(0, 2**32), st.booleans())
def test_filters_that_keep_more_or_fewer_tokens_than_the_list_of_the_likely_has(rows, seed, grid):
    logits = logits_of(seed, 3, grid=grid, vocab_size=LARGE) / 2
    check(rows, logits, exact=grid, num_top=20)
    alone = [
        SAMPLE(logits, *pack([row if i == j else NOTHING for j in range(3)], LARGE), 20)[0].tokens[i]
        for i, row in enumerate(rows)
    ]
    assert SAMPLE(logits, *pack(rows, LARGE), 20)[0].tokens.tolist() == alone


@pytest.mark.parametrize("size", [8, 40])
def test_the_threshold_of_a_list_is_that_of_the_vocabulary_if_the_list_has_all_that_is_kept(size):
    """Every combination of filters, on values of which many are equal."""
    kinds = list(itertools.product([0, 1, 2, 3, 7, 8, 9, 40, 1000], [1.0, 0.99, 0.7, 0.3, 0.05], [0, 0.1, 0.5, 1]))
    sampling = filters(*zip(*kinds))
    rng, decided = np.random.default_rng(1), 0
    with_ties = [np.round(2 * rng.normal(0, 1.5, 40)) / 2 for _ in range(4)]
    one_less_than_the_list = np.where(np.arange(40) < 7, -0.1 * np.arange(40), -20)
    almost_certain = np.where(np.arange(40) < 1, 0, -30.0 - np.arange(40))
    for values in (*with_ties, one_less_than_the_list, almost_certain):
        x = np.tile(np.float32(values), (len(kinds), 1))
        best = -np.sort(-x, axis=-1)[:, :size]
        thresholds = np.asarray(THRESHOLD(x, best, sampling)[:, 0])
        for x_v, threshold, (top_k, top_p, min_p) in zip(x, thresholds, kinds):
            expected = kept(x_v, top_k, top_p, min_p)
            # The share of top-p is that of all that top-k keeps.
            is_total = top_k <= size or top_k >= 40 or kept(x_v, top_k, 1.0, min_p).sum() < size
            if size == 40 or (expected.sum() < size and is_total):
                assert (x_v >= threshold).tolist() == expected.tolist(), (top_k, top_p, min_p)
                decided += 1
            else:
                assert threshold <= best[0, -1], (top_k, top_p, min_p)
    assert decided > 500


def test_a_draw_from_the_list_equals_one_from_the_whole_vocabulary():
    rows = [Row(temperature=1.0, top_k=50, top_p=0.9, seed=seed, stateful=False) for seed in range(200)]
    logits, another = np.tile(logits_of(0, 1, vocab_size=LARGE), (3, 1)), Row(temperature=1.0, stateful=False)
    tokens_of = lambda *rows: SAMPLE(logits, *pack(rows, LARGE), 20)[0].tokens[:2].tolist()
    pairs = [*itertools.batched(rows, 2)]
    listed = [tokens_of(*pair, pair[0]) for pair in pairs]
    assert listed == [tokens_of(*pair, another) for pair in pairs] and len({*itertools.chain(*listed)}) > 5


def test_noise_is_that_of_the_whole_vocabulary():
    row = Row(seed=3 << 32 | 7, position=5)
    some = np.int32([[1999, 0, 77, 1000]])
    found = OPS.gumbel(np.uint32([[3, 7]]), np.int32([5]), some)
    np.testing.assert_array_equal(found[0], noise(row, 2000)[some[0]])
    with jax.default_prng_impl("rbg"):  # of the program, not of the engine
        np.testing.assert_array_equal(OPS.gumbel(np.uint32([[3, 7]]), np.int32([5]), some), found)


@settings(max_examples=60)
@given(st.lists(SIMPLE, min_size=6, max_size=6), st.integers(0, 2**32))
def test_rows_that_are_drawn_from_all_tokens_with_short_lists(rows, seed):
    check(rows, logits_of(seed, 6), exact=False, num_top=K)


# What `processed` changes is found with the reference's operations below; the operations are the same ones.
@pytest.mark.parametrize("processed", [False, pytest.param(True, marks=pytest.mark.deep)])
@settings(max_examples=60)
@given(
    st.lists(rows_of(ANYWHERE), min_size=6, max_size=6) | st.lists(SIMPLE, min_size=6, max_size=6),
    st.integers(0, 2**32),
)
def test_compiled_ops_choose_and_describe_what_the_definitions_do(processed, rows, seed):
    logits, arguments = logits_of(seed, 6), pack(rows)
    found, expected = (run(logits, *arguments, K, processed)[0] for run in (COMPILED, SAMPLE))
    for name in ("tokens", "ranks", "top_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=3e-6, err_msg=name)


@settings(max_examples=60)
@given(st.lists(rows_of(ANYWHERE), min_size=6, max_size=6), st.integers(0, 2**32), st.sampled_from([K, V + 1]))
def test_rows_of_every_kind_beside_each_other(rows, seed, num_top):
    check(rows, logits_of(seed, 6), exact=False, num_top=num_top)


@settings(max_examples=60)
@given(st.lists(rows_of(ON_THE_GRID), min_size=6, max_size=6), st.integers(0, 2**32))
def test_processed_logprobs_are_those_of_the_distribution_that_tokens_are_drawn_from(rows, seed):
    logits = logits_of(seed, 6, grid=True)
    state, sampling = pack(rows)
    own, _ = SAMPLE(logits, state, sampling, K)
    got, _ = jax.tree.map(np.asarray, SAMPLE(logits, state, sampling, K, True))
    np.testing.assert_array_equal(got.tokens, own.tokens)
    for i, row in enumerate(rows):
        x = process(logits[i], row)
        if row.beam:
            _check_list(row, x, got, i, by_id=False)
            continue
        if x.max() == -np.inf:
            assert got.logprobs[i] == -np.inf
            continue
        with np.errstate(divide="ignore"):
            logprobs = np.log(distribution(logits[i], row)) if row.temperature else log_softmax(x)
        assert abs(got.logprobs[i] - logprobs[got.tokens[i]]) < 1e-4
        assert got.ranks[i] == (1 + (logprobs > logprobs[got.tokens[i]] + 1e-9).sum() if row.num_top else 0)
        listed = got.top_tokens[i][: row.num_top]
        np.testing.assert_allclose(got.top_logprobs[i][: len(listed)], logprobs[listed], atol=1e-4)


# A row with drafts: after its last output token 3, the drafts 5, 5 and 7 stand before its further samples.
DRAFTED = Row(presence=0.5, frequency=0.75, repetition=1.5, prompt=(1, 2), output=(4, 4, 3), pending=True, position=6)
DRAFTS = (5, 5, 7)


def with_drafts(beside: Row) -> tuple[SamplingState, Sampling]:
    """Return the arrays of another row, of a row with its drafts, and of the other row again with a draft."""
    state, sampling = pack([beside, *[DRAFTED] * 4, beside])
    last, counts = sampling.last_tokens, [0, 0, 1, 2, 3, 0]
    last[2:5], sampling.rows[1:5] = DRAFTS, sampling.rows[1]
    sampling.positions[1:5] += np.arange(4)
    sampling.num_prompt_tokens[1:5] = DRAFTED.position - 1
    drafts = DRAFTS_BEFORE(np.array(counts), np.array(last))
    return state, sampling._replace(num_drafts=np.array(counts, np.int32), drafts=np.asarray(drafts))


def test_a_sample_after_drafts_is_that_of_an_output_with_these_tokens():
    other = Row(presence=1.0, frequency=0.5, output=(5, 9), pending=True, position=3)
    state, sampling = with_drafts(other)
    outputs = [replace(DRAFTED, output=(*DRAFTED.output, *DRAFTS[:n])) for n in range(4)]
    logits = np.repeat(logits_of(4, 1), 6, axis=0)
    for expected, x in zip([other, *outputs, other], np.asarray(PROCESS(logits, COUNT(state, sampling), sampling))):
        np.testing.assert_allclose(x, process(logits[0], expected), rtol=1e-5)


@pytest.mark.parametrize("drawn", [[8, 8, 8], [5, 8, 7], [5, 5, 8], [5, 5, 7], [8, 5, 7]], ids=str)
def test_drafts_are_counted_up_to_the_first_that_was_not_drawn(drawn):
    state, sampling = with_drafts(Row(stateful=False))
    before = COUNT(state, sampling)
    tokens = np.int32([5, *drawn, 1, 5])  # sample i is drawn after token i
    counts = np.asarray(COUNT_KEPT(before, sampling, tokens).output_counts)
    expected = np.array(before.output_counts)
    row = sampling.rows[1]
    assert expected[row, 3] == 1 and expected[row, 5] == 0, "no draft is counted with the last token"
    kept = [draft for draft, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(DRAFTS, drawn))]
    np.add.at(expected[row], kept, 1)
    np.testing.assert_array_equal(counts, expected)


def outputs_only(x, row):
    return repetition_stage(x, replace(row, prompt=()))


def without_the_pending(x, row):
    return frequency_stage(x, replace(row, output=row.output[:-1]))


@pytest.mark.parametrize(
    "planted",
    [
        (beam_stage, mask_stage, bias_stage, frequency_stage, presence_stage, repetition_stage),
        (beam_stage, mask_stage, bias_stage, frequency_stage, repetition_stage, presence_stage),
        (beam_stage, mask_stage, bias_stage, presence_stage, repetition_stage, frequency_stage),
        (beam_stage, mask_stage, repetition_stage, frequency_stage, presence_stage, bias_stage),
        (beam_stage, bias_stage, repetition_stage, frequency_stage, presence_stage),
        (mask_stage, bias_stage, repetition_stage, frequency_stage, presence_stage, beam_stage),
        (beam_stage, mask_stage, bias_stage, outputs_only, frequency_stage, presence_stage),
        (beam_stage, mask_stage, bias_stage, repetition_stage, without_the_pending, presence_stage),
    ],
    ids=lambda stages: "-".join(stage.__name__.removesuffix("_stage") for stage in stages),
)
def test_the_comparison_finds_a_planted_error(planted):
    row = Row(
        presence=0.75, frequency=0.5, repetition=2.0, prompt=(1, 2, 3), output=(3, 4, 4, 5), pending=True,
        bias={1: 4.0, 4: -5.0}, allowed=frozenset(range(50)), num_top=V,
    )  # fmt: skip
    rows, logits = [row, replace(row, beam=True)] * 3, logits_of(0, 6, grid=True)
    check(rows, logits, exact=True, num_top=V + 1)
    with pytest.raises(AssertionError):
        check(rows, logits, exact=True, num_top=V + 1, stages=planted)


def test_a_batch_that_asks_for_nothing_is_greedy():
    logits = logits_of(0, 6, grid=True)
    check([NOTHING] * 6, logits, exact=True, num_top=K)
    got, _ = SAMPLE(logits, *pack([NOTHING] * 6), K)
    assert got.tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "asked",
    [
        {"stateful": True, "bias": {3: 9.0}}, {"allowed": frozenset([5, 6])}, {"beam": True}, {"num_top": 1},
        {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "min_p": 0.5},
    ],
    ids=lambda asked: list(asked)[-1],
)  # fmt: skip
def test_a_batch_that_asks_for_one_thing_alone_gets_it(asked):
    rows = [Row(**{"stateful": False, "seed": seed, **asked}) for seed in range(6)]
    check(rows, logits_of(0, 6, grid=True), exact=True, num_top=K)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("beam", [False, True])
def test_nothing_allowed_is_token_0_and_no_nan(temperature, beam):
    every = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "presence": 1.0, "frequency": 1.0, "repetition": 2.0, "num_top": 5}
    nothing = Row(temperature=temperature, beam=beam, allowed=frozenset(), prompt=(1,), output=(2,), **every)
    banned = replace(nothing, allowed=None, banned=frozenset(range(V)))
    logits = logits_of(0, 6)
    state, sampling = pack([nothing, banned, nothing, Row(), banned, Row()])
    got, _ = SAMPLE(logits, state, sampling, K)
    for array in got:
        assert not np.isnan(array).any()
    assert got.tokens.tolist() == [0, 0, 0, logits[3].argmax(), 0, logits[5].argmax()]
    if beam:
        assert got.top_tokens[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1]
        assert (got.top_logprobs[0] == -np.inf).all()


def test_a_token_drawn_from_a_row_of_nan_is_one_of_the_vocabulary():
    logits = np.full((6, V), np.nan, np.float32)
    for temperature in (0.0, 1.0):
        tokens = SAMPLE(logits, *pack([Row(temperature=temperature, top_k=3)] * 6), K)[0].tokens
        assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("repetition", [0.5, 2.0, 1e-46])  # the last is 0 in float32
def test_minus_infinity_stays(temperature, repetition):
    logits = logits_of(0, 6)
    logits[:, 5:] = -np.inf
    seen = (2, *range(5, V))
    row = Row(
        temperature=temperature, repetition=repetition, presence=-2.0, frequency=-2.0, prompt=seen, output=seen,
        bias=dict.fromkeys(range(5, V), 100.0), num_top=V,
    )  # fmt: skip
    got, _ = jax.tree.map(np.asarray, SAMPLE(logits, *pack([row, replace(row, beam=True)] * 3), V + 1))
    assert (got.tokens < 5).all() and not any(np.isnan(array).any() for array in got)
    assert (got.top_logprobs[:, 5:] == -np.inf).all() and (got.top_logprobs[:, :5] > -np.inf).all()
    assert (got.top_tokens[:, 5:] == np.arange(5, V)).all()


@pytest.mark.parametrize("beam", [False, True])
def test_equal_tokens_are_listed_by_id(beam):
    logits = logits_of(0, 6, grid=True)
    rows = [Row(stateful=False, num_top=num_top, beam=beam) for num_top in (K, V, 1, 0, 5, 2)]
    got, _ = jax.tree.map(np.asarray, SAMPLE(logits, *pack(rows), V + 1))
    for i, row in enumerate(rows):
        _check_list(row, log_softmax(logits[i].astype(np.float64)), got, i, by_id=True)


@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 5003])
@pytest.mark.parametrize("k", [1, 20, 128, 5003])
def test_the_best_tokens_of_vocabularies_large_and_small(vocab_size, k):
    k = min(k, vocab_size)
    x = logits_of(0, 5, grid=True, vocab_size=vocab_size)
    x[1] = -2.5  # all the same
    x[2, 3:] = -np.inf
    x[3, ::2] = -np.inf
    x[4] = np.sort(x[4])[::-1]  # all the best in the first chunks
    tokens, values = jax.jit(OPS.top, static_argnums=1)(x, k)
    best = np.lexsort((np.broadcast_to(np.arange(vocab_size), x.shape), -x))[:, :k]
    np.testing.assert_array_equal(tokens, best)
    np.testing.assert_array_equal(values, np.take_along_axis(x, best, 1))


# Kept tokens, and the frequency of draws.


def is_kept(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the mask of the tokens that the filters keep. Rows are padded to 50 tokens: all calls have one shape."""
    padded = np.full((2, 50), -np.inf, np.float32)
    padded[:, 0] = 0
    padded[: len(x), : x.shape[1]] = x
    return np.isfinite(KEEP(padded, filters([top_k] * 2, [top_p] * 2, [min_p] * 2)))[: len(x), : x.shape[1]]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2, 7, 49, 50, 1000]),
    st.sampled_from([1.0, 0.99, 0.7, 0.31, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    st.booleans(),
)
def test_the_tokens_kept_are_those_a_sort_would_keep(seed, top_k, top_p, min_p, grid):
    x = logits_of(seed, 1, grid=grid, vocab_size=50)
    got = is_kept(x, top_k, top_p, min_p)[0]
    # float32 sums may end the nucleus a token early or late.
    options = [kept(x[0], top_k, p, min_p).tolist() for p in (top_p, top_p - 1e-7, min(top_p + 1e-7, 1))]
    assert got.tolist() in options


@pytest.mark.parametrize("top_k, top_p", [(2, 1.0), (0, 0.5)])
def test_ties_stay_together(top_k, top_p):
    x = np.asarray([[1.0, 2.0, 2.0, 2.0, -5.0], [-1.0, 0.0, -0.0, 0.0, -5.0]], np.float32)
    assert is_kept(x, top_k, top_p, 0).tolist() == [[False, True, True, True, False]] * 2


@pytest.mark.parametrize("low", np.nextafter(np.float32([1.0, 1.0, -1.0, -1.0]), np.float32([1.0, 2.0, -1.0, -2.0])))
def test_adjacent_numbers_are_told_apart(low):
    x = np.float32([[low, np.nextafter(low, np.float32(9))]])
    assert is_kept(x, 1, 1, 0).tolist() == [[False, True]]


def test_no_nucleus_is_taken_where_top_p_is_1():
    """The first token alone has a probability of 1 in float32."""
    x = np.float32([[0.0, -30.0, -60.0]])
    assert is_kept(x, 0, 1, 0).all()


DRAWS = 20000
SOME = np.float32([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 0.25, 1.75])


def draws(row: Row, logits: np.ndarray = SOME, *, seeds=None, positions=None) -> np.ndarray:
    """[DRAWS] tokens; all rows of the batch read one row of the state."""
    state, one = pack([row], len(logits))
    many = jax.tree.map(lambda array: np.repeat(array, DRAWS, axis=0), one)
    many.seeds[:, 1] = np.arange(DRAWS) if seeds is None else seeds
    many.positions[:] = 7 if positions is None else positions
    got, _ = SAMPLE(np.broadcast_to(logits, (DRAWS, len(logits))), state, many, 0)
    return np.asarray(got.tokens)


def follows(tokens: np.ndarray, p: np.ndarray) -> bool:
    """Pearson's chi-square test at a level of one in a million; the quantile after Wilson and Hilferty (1931)."""
    possible = p > 0
    counts, expected = np.bincount(tokens, minlength=len(p)), len(tokens) * p[possible]
    assert expected.min() > 5
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = possible.sum() - 1
    quantile = degrees * (1 - 2 / (9 * degrees) + 4.7534 * math.sqrt(2 / (9 * degrees))) ** 3
    return bool(counts[possible].sum() == len(tokens) and statistic < quantile)


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.5),
        Row(temperature=2.0, top_p=0.8),
        Row(top_k=3),
        Row(temperature=2.0, min_p=0.4),  # of the scaled logits it keeps five tokens, of the others four
        Row(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
        Row(repetition=1.5, prompt=(0, 1, 4), output=(2, 3, 3)),
        Row(presence=0.5, frequency=0.25, output=(0, 0, 0, 1, 7)),
        Row(bias={0: -1.5, 5: 4.0}, banned=frozenset({2})),
        Row(allowed=frozenset({0, 1, 3, 4, 6})),
        Row(temperature=0.8, top_k=4, top_p=0.9, repetition=1.2, prompt=(0,), output=(7, 1, 1), presence=0.3,
            frequency=0.2, bias={3: 1.5}, allowed=frozenset(range(7))),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(row):
    row = replace(row, temperature=row.temperature or 1.0)
    expected = distribution(SOME, row)
    over_seeds = draws(row)
    assert follows(over_seeds, expected)
    assert follows(draws(row, seeds=5, positions=np.arange(DRAWS)), expected)
    hotter = distribution(SOME, replace(row, temperature=row.temperature * 1.15))
    assert not follows(over_seeds, hotter)  # the test is sharp enough to tell


def test_draws_at_neighbouring_positions_are_independent():
    first, second = (draws(Row(temperature=1.0), positions=position) for position in (7, 8))
    p = distribution(SOME, Row(temperature=1.0))
    p = np.append(p[:4], p[4:].sum())  # too few pairs of the rare ones
    first, second = np.minimum(first, 4), np.minimum(second, 4)
    assert follows(first * 5 + second, np.outer(p, p).ravel())
    assert not follows(first * 5 + first, np.outer(p, p).ravel())


# Dependencies of a row's result.


def test_a_row_depends_on_nothing_beside_it():
    vocab_size, s = LARGE, 64
    logits, rng = logits_of(2, s, vocab_size=vocab_size), np.random.default_rng(3)
    some = lambda: tuple(rng.integers(0, vocab_size, 5).tolist())
    rows = [
        Row(
            temperature=[0.0, 0.7, 1.0, 1.6][i % 4], top_k=[0, 50, 5][i % 3], top_p=[1.0, 0.9][i % 2], seed=i,
            min_p=[0.0, 0.01][i // 2 % 2], position=3 * i, presence=0.2, frequency=0.1, repetition=1.0 + i % 5 / 10,
            stateful=i % 3 > 0, prompt=some(), output=some(), pending=i % 2 == 0, bias=dict.fromkeys(some(), 1.5),
            beam=i % 7 == 0, allowed=frozenset(range(i, 300)) if i % 5 == 0 else None, num_top=i % 11 * 2,
        )
        for i in range(s)
    ]  # fmt: skip

    def run(logits, rows):
        return jax.tree.map(np.asarray, SAMPLE(logits, *pack(rows, vocab_size), 20)[0])

    def row_bytes(got):
        return [b"".join(array[i].tobytes() for array in got) for i in range(len(got.tokens))]

    sampled = run(logits, rows)
    together = row_bytes(sampled)
    assert len({*together}) == s
    order = rng.permutation(s)
    assert row_bytes(run(logits[order], [rows[i] for i in order])) == [together[i] for i in order]
    for i in range(0, s, 5):
        beside_padding = [rows[i] if j == 9 else NOTHING for j in range(s)]
        assert row_bytes(run(np.where(np.arange(s)[:, None] == 9, logits[i], 0), beside_padding))[9] == together[i]
        # XLA sums in another order where the shape is another, so logprobs may differ in their last bits.
        alone = run(logits[i : i + 3] if i < s - 2 else logits[[i] * 3], [rows[i], NOTHING, NOTHING])
        for name, array, whole in zip(Sampled._fields, alone, sampled):
            if array.dtype == np.int32:
                assert array[0].tolist() == whole[i].tolist(), name
            else:
                np.testing.assert_allclose(array[0], whole[i], rtol=1e-6, atol=1e-6, err_msg=name)
    moved = run(logits, [replace(row, position=row.position + 1) for row in rows])
    reseeded = run(logits, [replace(row, seed=row.seed + 2**32) for row in rows])
    assert (moved.tokens != sampled.tokens).any() and (reseeded.tokens != sampled.tokens).any()
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    assert all((other.tokens == sampled.tokens)[greedy].all() for other in (moved, reseeded))


# Cost.


def widths_of_sorts(text: str) -> list[int]:
    """Return the numbers of columns that each sort and each top-k of a lowered program takes."""
    sorts = re.findall(r"stablehlo\.sort.*?\}\) : \(tensor<\d+x(\d+)x", text, re.DOTALL)
    return [int(n) for n in sorts + re.findall(r"chlo\.top_k.*? : tensor<\d+x(\d+)x", text)]


@pytest.mark.parametrize("num_top", [pytest.param(20, marks=pytest.mark.deep), 128])
def test_no_sort_of_the_vocabulary(num_top):
    vocab_size = 128256
    logits = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)
    for sort in (lambda x: jax.lax.sort((x, x)), lambda x: jax.lax.top_k(x, 20)):
        assert widths_of_sorts(jax.jit(sort).lower(logits).as_text()) == [vocab_size]
    state = jax.eval_shape(lambda: empty_state(2, vocab_size))
    text = SAMPLE.lower(logits, state, empty_sampling(2, vocab_size), num_top).as_text()
    widths = widths_of_sorts(text)
    assert len(widths) == text.count('"stablehlo.sort"') + text.count(" chlo.top_k") > 0 and max(widths) <= 4096


@pytest.mark.parametrize("num_top", [pytest.param(20, marks=pytest.mark.deep), 128])
def test_xla_makes_no_sort_of_the_vocabulary_of_a_selection(num_top):
    vocab_size = 20_000
    state, sampling = jax.eval_shape(lambda: empty_state(2, vocab_size)), empty_sampling(2, vocab_size)

    def sorted_arrays(run, *arguments):
        text = run.lower(*arguments).compile().as_text()
        assert "TopK" in text
        return [line for line in text.splitlines() if " sort(" in line and f",{vocab_size}]" in line]

    logits = jax.ShapeDtypeStruct((2, vocab_size), jnp.float32)
    assert sorted_arrays(SAMPLE, logits, state, sampling, num_top) == []

    def with_slices(x):
        best, places = jax.lax.top_k(x, 72)
        return best[:, -1] - best[:, 0], places, jax.lax.top_k(x + 1, 3)

    assert sorted_arrays(jax.jit(with_slices), logits) != []  # the fault that this looks for


@pytest.mark.deep  # test_runner.py has the same of a step's executable
def test_the_state_is_changed_in_place():
    state, sampling = empty_state(256, 1000), empty_sampling(2, 1000)
    compiled = (
        jax.jit(count_and_sample, static_argnums=3, donate_argnums=1)
        .lower(np.zeros((2, 1000)), state, sampling, K)
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(array.nbytes for array in state)
    assert memory.temp_size_in_bytes < state.in_prompt.nbytes


# Given tokens.


@pytest.mark.parametrize(
    ("num_tokens", "num_top"),
    [
        (1, 0), (64, 5), (150, 100),
        *(pytest.param(*pair, marks=pytest.mark.deep) for pair in ((1, 5), (1, 100), (64, 0), (64, 100), (150, 0),
                                                                   (150, 5))),
    ],
)  # fmt: skip
def test_token_logprobs(num_tokens, num_top):
    rng = np.random.default_rng(num_tokens)
    x, w = rng.normal(0, 1, (num_tokens, 16)).astype(np.float32), rng.normal(0, 1, (16, V)).astype(np.float32)
    targets = rng.integers(-1, V, num_tokens).astype(np.int32)
    targets[0], targets[3:5] = 3, -1
    got = jax.jit(lambda x, targets: token_logprobs(lambda x: x @ w, x, targets, num_top, OPS))(x, targets)
    got = jax.tree.map(np.asarray, got)
    assert got.tokens.tolist() == targets.tolist() and got.top_tokens.shape == (num_tokens, min(num_top, V))
    for i, target in enumerate(targets):
        logits = (x[i : i + 1] @ w)[0].astype(np.float64)
        wanted = target >= 0
        assert abs(got.logprobs[i] - (log_softmax(logits)[target] if wanted else 0)) < 1e-5
        assert got.ranks[i] == (1 + (logits > logits[target]).sum() if wanted else 0)
        _check_list(Row(num_top=num_top if wanted else 0), log_softmax(logits), got, i, by_id=False)


@pytest.mark.parametrize("processed", [False, True])
def test_samples_that_are_computed_in_parts_have_the_same_results(processed):
    rng = np.random.default_rng(5)
    rows = [
        Row(
            temperature=i % 3 / 2, top_k=i % 4 * 9, top_p=0.5 + i % 2 / 2, seed=i, position=i, stateful=i % 5 == 0,
            presence=0.5, repetition=1.5, beam=i % 7 == 0, num_top=i % 4, output=(1, i),
            allowed=frozenset(range(i, V)) if i % 6 == 0 else None,
        )
        for i in range(24)
    ]  # fmt: skip
    state, sampling = pack(rows)
    logits = rng.normal(0, 2, (24, V)).astype(np.float32)
    results = []
    for at_once in (None, 10):
        options = SampleOptions(K, processed, at_once=at_once, ops=Ops(load("pallas_kernels.cpu")))
        run = jax.jit(functools.partial(sample, options=options))
        results.append([x.tobytes() for x in jax.tree.map(np.asarray, run(logits, state, sampling))])
        assert ("3x8x77xf32" in run.lower(logits, state, sampling).as_text()) == (at_once is not None)
    assert results[0] == results[1]


def test_token_logprobs_computes_a_tile_at_a_time_and_only_those_wanted():
    tiles = []

    def logits_of(x_td):
        jax.debug.callback(lambda x: tiles.append(x.shape), x_td)
        return jnp.tile(x_td, 300)

    targets = np.full(44, -1, np.int32)
    targets[[9, 17, 39]] = 0, 1, 2  # the tiles of 8 from 8, 16 and 32; not the last, of 4 and padding
    run = jax.jit(lambda x, targets: token_logprobs(logits_of, x, targets, 2, OPS, tile=8))
    x = np.ones((44, 4), np.float32)
    jax.block_until_ready(run(x, targets))
    jax.effects_barrier()
    assert tiles == [(8, 4)] * 3
    text = run.lower(x, targets).as_text()
    assert "tensor<8x1200xf32>" in text and not re.search("tensor<4[48]x1200xf32>", text)
