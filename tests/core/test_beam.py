"""BeamSearch against transformers' generate(num_beams=...), on a dense forward of the same checkpoints, and against
brute force on tiny vocabularies."""

import dataclasses
import functools
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from benchmarks.shared.deviceless import OPTIMIZED
from jpaged.core import beam
from jpaged.core.beam import Beam, BeamSearch, Candidate
from jpaged.models.checkpoint import Form, load_safetensors
from jpaged.models.registry import read_config
from pallas_kernels import rotate
from tests.oracle import make_beam_fixtures
from tests.support import checkpoints

Tokens = tuple[int, ...]
LogProbs = Callable[[list[Tokens]], np.ndarray]
Live = list[tuple[Tokens, float]]
Shuffle = Callable[[Live], Live]
FIXTURES = json.loads(make_beam_fixtures.FIXTURE.read_text())
ROWS, LENGTH = 4, 64


def steps(
    search: BeamSearch[Tokens], log_probs: LogProbs, eos: list[int], shuffle: Shuffle | None = None
) -> Iterator[tuple[int, float]]:
    """Runs a search over log_probs(outputs) [len(outputs), V], with just enough candidates or, if the beams are
    shuffled, with all; after each step, its length and the best score among the live beams."""
    enough = None if shuffle else search.width + len(eos)
    live: Live = [((), 0.0)]
    for length in range(1, search.max_tokens + 1):
        live = shuffle(live) if shuffle else live
        beams = []
        for (_, score), row in zip(live, log_probs([tokens for tokens, _ in live])):
            best = np.argsort(-row, stable=True)[:enough]
            beams.append(Beam(score, best.tolist(), row[best].tolist()))

        def ends(token: int, length=length) -> bool:
            return token in eos or length == search.max_tokens

        def grown(candidate: Candidate, live=live) -> Tokens:
            return (*live[candidate.beam][0], candidate.token)

        next_live = search.advance(beams, length, lambda c: grown(c) if ends(c.token) else None)
        live = [(grown(c), c.score) for c in next_live]
        assert len(live) <= search.width and len(search.hypotheses) <= search.width
        assert search.hypotheses == sorted(search.hypotheses, key=lambda h: -h[0])
        assert search.done == (not live)
        open_scores = [beam.score + logprob for beam in beams for token, logprob in zip(*beam[1:]) if not ends(token)]
        yield length, max(open_scores, default=-np.inf)
        if search.done:
            return


def run(search: BeamSearch[Tokens], log_probs: LogProbs, eos: list[int], shuffle: Shuffle | None = None) -> list:
    for _ in steps(search, log_probs, eos, shuffle):
        pass
    assert search.done
    return search.hypotheses


# Against transformers


def dense(model: nnx.Module) -> Callable[[list[jax.Array], np.ndarray, int], jax.Array]:
    """Return a jitted (leaves of the model, tokens [R, T], last) -> log-probabilities [R, V] after position `last` of
    every row."""
    graphdef, params = nnx.split(model)
    treedef = jax.tree.structure(params)

    def forward(leaves: list[jax.Array], tokens_rt: jax.Array, last: jax.Array) -> jax.Array:
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        def attend(layer, q_tnh, k_tkh, v_tkh, cos, sin):
            q_tnh, k_tkh = (rotate(x, cos, sin) for x in (q_tnh, k_tkh))
            return jax.nn.dot_product_attention(q_tnh[None], k_tkh[None], v_tkh[None], is_causal=True)[0]

        def row(tokens_t):
            return merged(tokens_t, jnp.arange(LENGTH), attend)[last]

        return jax.nn.log_softmax(merged.logits(jax.vmap(row)(tokens_rt)))

    return jax.jit(forward, compiler_options=OPTIMIZED)


@pytest.fixture(scope="module")
def log_probs(tmp_path_factory):
    """log_probs(model, seed, rows of tokens): the checkpoint's, with each row computed once."""
    known: dict[tuple[str, int, Tokens], np.ndarray] = {}
    forward_of: dict[str, Callable] = {}

    @functools.cache
    def leaves_of(name: str, seed: int) -> list[jax.Array]:
        config, directory = checkpoints.CASES[name], tmp_path_factory.mktemp(name)
        checkpoints.write(directory, config)
        save_file(make_beam_fixtures.sharpen(checkpoints.tensors(config, seed)), directory / "model.safetensors")
        model = load_safetensors(directory, read_config(directory), Form("float32"), progress=False)
        forward_of.setdefault(name, dense(model))
        return jax.tree.leaves(nnx.split(model)[1])

    def get(name: str, seed: int, rows: list[Tokens]) -> np.ndarray:
        missing = [row for row in rows if (name, seed, row) not in known]
        for start in range(0, len(missing), ROWS):
            some = missing[start : start + ROWS]
            padded = np.zeros((ROWS, LENGTH), np.int32)
            padded[: len(some), : len(some[0])] = some
            leaves = leaves_of(name, seed)
            for row, values in zip(some, np.asarray(forward_of[name](leaves, padded, len(some[0]) - 1))):
                known[name, seed, row] = values
        return np.stack([known[name, seed, row] for row in rows])

    return get


def processed(row: np.ndarray, prompt: list[int], output: Tokens, options: dict) -> np.ndarray:
    """A row of log-probabilities after transformers' processors, which don't normalise it again."""
    row = row.copy()
    seen = [*{*prompt, *output}]
    row[seen] *= options.get("repetition_penalty", 1)
    row[[token for (token,) in options.get("bad_words_ids", ())] + options.get("suppress_tokens", [])] = -np.inf
    if len(output) < options.get("min_new_tokens", 0):
        row[options.get("eos_token_id", [])] = -np.inf
    return row


def differs(kind: type[BeamSearch], case: dict, log_probs) -> bool:
    """Whether a kind of search gives other hypotheses than transformers."""
    prompt, options = case["prompt"], case["options"]

    def rows(outputs: list[Tokens]) -> np.ndarray:
        raw = log_probs(case["model"], case["seed"], [(*prompt, *output) for output in outputs])
        return np.stack([processed(row, prompt, output, options) for row, output in zip(raw, outputs)])

    search = kind(options["num_beams"], options["max_new_tokens"], options["length_penalty"], options["early_stopping"])
    found, expected = run(search, rows, options.get("eos_token_id", [])), case["hypotheses"]
    return [list(tokens) for _, tokens in found] != [tokens for _, tokens in expected] or not np.allclose(
        [score for score, _ in found], [score for score, _ in expected], atol=1e-4, rtol=0
    )


# Each option is in the cases of the first model and seed.
@pytest.mark.parametrize(
    "model, seed",
    [
        pytest.param(model, seed, marks=[] if (model, seed) == ("gqa-tied", 0) else [pytest.mark.deep])
        for model in ("gqa-tied", "biases", "llama2") for seed in range(3)
    ],
)  # fmt: skip
def test_equals_transformers(model, seed, log_probs):
    cases = [case for case in FIXTURES if (case["model"], case["seed"]) == (model, seed)]
    assert cases and [i for i, case in enumerate(cases) if differs(BeamSearch, case, log_probs)] == []


@pytest.mark.deep
@pytest.mark.parametrize(
    "right, wrong",
    [
        pytest.param("place < self.width", "True", id="an ending below the width counts"),
        pytest.param("candidate.score / length", "candidate.score / (length + 1)", id="a hypothesis is longer"),
        pytest.param("= best / length", "= best / (length + 1)", id="a live beam is longer"),
        pytest.param("live[0].score", "live[-1].score", id="the worst live beam is judged"),
        pytest.param("self.hypotheses[-1]", "self.hypotheses[0]", id="by the best hypothesis"),
        pytest.param("self.early_stopping is True", "False", id="True is False"),
        pytest.param('self.early_stopping == "never"', "False", id="never is False"),
        pytest.param('self.early_stopping == "never"', "True", id="False is never"),
    ],
)
def test_the_comparison_notices(right, wrong, log_probs):
    source = inspect.getsource(beam)
    assert source.count(right) == 1
    namespace = {"__name__": "mutant"}
    exec(source.replace(right, wrong), namespace)
    assert any(differs(namespace["BeamSearch"], case, log_probs) for case in FIXTURES)


def test_fixtures_equal_transformers_where_torch_is_importable():
    pytest.importorskip("torch", reason="torch is not installed: the committed fixtures stand in for it")
    for case in FIXTURES:
        config = checkpoints.CASES[case["model"]]
        parameters = make_beam_fixtures.sharpen(checkpoints.tensors(config, case["seed"]))
        result = make_beam_fixtures.run(config, parameters, case["prompt"], case["options"])
        assert [tokens for _, tokens in result] == [tokens for _, tokens in case["hypotheses"]]
        np.testing.assert_allclose([s for s, _ in result], [s for s, _ in case["hypotheses"]], atol=1e-5)


# By hand


def test_a_candidate_that_ends_counts_only_above_the_width():
    search: BeamSearch[int] = BeamSearch(2, 9)
    beam = Beam(-1.0, range(4), [-0.5, -1.0, -1.5, -2.0])
    live = search.advance([beam], 1, lambda c: c.token if c.token in (0, 2) else None)
    assert live == [Candidate(-2.0, 0, 1, -1.0, 2), Candidate(-3.0, 0, 3, -2.0, 4)]
    assert [beam for _, beam in search.hypotheses] == [0]


def test_at_full_length_only_the_best_candidates_are_looked_at():
    search, seen = BeamSearch[int](width=4, max_tokens=1), []
    beams = [Beam(0.0, range(10), [-1.0 - token for token in range(10)])] * 4
    assert search.advance(beams, 1, lambda candidate: seen.append(candidate) or len(seen)) == []
    assert [(candidate.beam, candidate.token) for candidate in seen] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert search.done and [beam for _, beam in search.hypotheses] == [1, 2, 3, 4]


def test_a_live_beam_that_can_only_draw_level_ends_the_search():
    search: BeamSearch[int] = BeamSearch(1, 9)
    beam = Beam(0.0, range(2), [-1.0, -1.0])
    assert search.advance([beam], 1, lambda c: None if c.token else 0) == [] and search.done


def test_of_equal_candidates_the_first_beam_and_its_first_token_go_on():
    search: BeamSearch[int] = BeamSearch(3, 9)
    beams = [Beam(-2.0, [7, 9, 8], [-1.0, -1.0, -3.0]), Beam(0.0, [], []), Beam(-1.0, [5, 4], [-2.0, -math.inf])]
    live = search.advance(beams, 1, lambda _: None)
    assert [(c.beam, c.token, c.rank) for c in live] == [(0, 7, 1), (0, 9, 2), (2, 5, 1)]


# Against brute force


class Table:
    """A random distribution over V tokens after every output, from which `banned` are then taken."""

    def __init__(self, seed: int, vocab_size: int, banned: list[int]):
        @functools.cache
        def row(tokens: Tokens) -> np.ndarray:
            logits = 2 * np.random.default_rng([seed, *(1 + t for t in tokens)]).standard_normal(vocab_size)
            return np.where(np.isin(range(vocab_size), banned), -np.inf, logits - np.logaddexp.reduce(logits))

        self.row, self.vocab_size = row, vocab_size

    def __call__(self, outputs: list[Tokens]) -> np.ndarray:
        return np.stack([self.row(tokens) for tokens in outputs])

    def outputs(self, max_tokens: int, eos: list[int]) -> Iterator[tuple[Tokens, float]]:
        """Every possible output, with its sum of log-probabilities."""
        for tokens in itertools.product(range(self.vocab_size), repeat=max_tokens):
            length = next((i + 1 for i, token in enumerate(tokens) if token in eos), max_tokens)
            score = sum(self.row(tokens[:i])[tokens[i]] for i in range(length))
            if score > -np.inf and not any(tokens[length:]):  # one of the many with this beginning
                yield tokens[:length], score


def searches(kind: type[BeamSearch], max_width: int = 4, early_stopping=(True, False, "never")):
    return st.builds(
        kind, st.integers(1, max_width), st.integers(1, 8), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        st.sampled_from(early_stopping),
    )  # fmt: skip


def tables(min_vocab: int, max_vocab: int):
    return st.builds(
        Table, st.integers(0, 2**32), st.integers(min_vocab, max_vocab), st.lists(st.integers(0, 2), max_size=1)
    )


TABLES = tables(3, 5)
EOS = st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)


class Endless(BeamSearch):
    def _can_improve(self, *_) -> bool:
        return True


@given(
    tables(1, 3), st.integers(1, 4), EOS | st.just([]),
    st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.sampled_from([True, False, "never"]),
)  # fmt: skip
def test_as_wide_as_all_outputs_it_finds_them_all(table, max_tokens, eos, length_penalty, early_stopping):
    search = BeamSearch(table.vocab_size**max_tokens, max_tokens, length_penalty, early_stopping)
    found = run(search, table, eos)
    scores = {tokens: score / len(tokens) ** length_penalty for tokens, score in table.outputs(max_tokens, eos)}
    assert {beam: score for score, beam in found} == pytest.approx(scores)
    assert len(found) == len(scores)


@given(searches(BeamSearch), TABLES, EOS)
def test_it_is_done_when_and_only_when_early_stopping_says(search, table, eos):
    for length, best in steps(search, table, eos):
        favoured = search.max_tokens if search.early_stopping == "never" and search.length_penalty > 0 else length
        judged = -np.inf if search.early_stopping is True else best / favoured**search.length_penalty
        full = len(search.hypotheses) == search.width
        assert search.done == (best == -np.inf or (full and judged <= search.hypotheses[-1][0]))


@given(searches(BeamSearch, early_stopping=("never",)), TABLES, EOS)
def test_never_stops_too_early(search, table, eos):
    endless = Endless(search.width, search.max_tokens, search.length_penalty)
    assert run(search, table, eos) == run(endless, table, eos)


@given(searches(BeamSearch, max_width=1, early_stopping=(True, False)), TABLES, EOS)
def test_a_width_of_one_is_greedy(search, table, eos):
    tokens: Tokens = ()
    while len(tokens) < search.max_tokens and not {*tokens} & {*eos}:
        tokens += (int(table.row(tokens).argmax()),)
    assert [beam for _, beam in run(search, table, eos)] == [tokens]


@given(searches(BeamSearch), TABLES, EOS, st.randoms(use_true_random=False))
def test_neither_order_of_beams_nor_surplus_of_candidates_matters(search, table, eos, rng):
    again = dataclasses.replace(search, hypotheses=[])
    assert run(again, table, eos, shuffle=lambda live: rng.sample(live, len(live))) == run(search, table, eos)
