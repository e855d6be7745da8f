"""Vectors of prompts: the model's hidden states, the same bits under every schedule."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.core.params import InvalidParameter
from jpaged.core.pooling import MOST, UNIT, normalized, pooled
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

SETTINGS = {"block_size": 8, "progress": False, "swap_space": 0, "num_gpu_blocks_override": 24} | LIMITS
PROMPTS = [[(5 * i + j * j) % LLAMA.vocab_size for j in range(length)] for i, length in enumerate((23, 9, 40, 1))]
POOLINGS = ("last", "mean")


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA, "float32", 0)


@pytest.fixture(scope="module")
def llm(model):
    with few_shapes():
        return LLM(model, speculative_config={}, max_logprobs=-1, **SETTINGS)


@pytest.fixture(scope="module")
def expected(llm):
    """The vectors of each prompt alone, without a cache."""
    found = {}
    for pooling in POOLINGS:
        for place, prompt in enumerate(PROMPTS):
            llm.reset_prefix_cache()
            (found[pooling, place],) = llm.embed([prompt], pooling=pooling, normalize=False)
    return found


def test_the_last_state_gives_the_logprobs_of_the_next_token(llm, model, expected):
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    for place, prompt in enumerate(PROMPTS):
        (by_token,) = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].logprobs
        logits = np.asarray(model.logits(expected["last", place][None]))[0]
        logprobs = [by_token[token].logprob for token in range(LLAMA.vocab_size)]
        np.testing.assert_allclose(logits - np.logaddexp.reduce(logits), logprobs, atol=1e-5)


def test_the_mean_is_that_of_the_last_states_of_all_beginnings(llm, expected):
    for place, prompt in enumerate(PROMPTS):
        beginnings = [prompt[: length + 1] for length in range(len(prompt))]
        states = llm.embed(beginnings, normalize=False)
        mean = states.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(expected["mean", place], mean, rtol=2**-23, atol=UNIT)


@pytest.mark.parametrize("chunk", [32, 8])
def test_neighbours_chunks_and_the_cache_change_no_bit(llm, expected, monkeypatch, chunk):
    scheduler = llm.engine.scheduler
    monkeypatch.setattr(scheduler, "limits", replace(scheduler.limits, max_num_batched_tokens=chunk))
    llm.reset_prefix_cache()
    for _ in range(2):  # the second time, beginnings of the prompts are cached
        for pooling in POOLINGS:
            found = llm.embed(PROMPTS, pooling=pooling, normalize=False)
            for place, vector in enumerate(found):
                np.testing.assert_array_equal(vector, expected[pooling, place])


def test_a_restart_in_the_middle_of_a_prompt_changes_no_bit(llm, expected):
    engine = llm.engine
    for pooling in POOLINGS:
        llm.reset_prefix_cache()
        engine.add("long", PROMPTS[2], SamplingParams(max_tokens=1, pooling=pooling))
        engine.step()
        engine.restart()
        engine.runner.recover()
        deltas = []
        while engine.has_work:
            deltas += engine.step().deltas
        (delta,) = deltas
        np.testing.assert_array_equal(np.float32(delta.pooled), expected[pooling, 2])


def test_vectors_have_length_one_and_fewer_dimensions(llm, expected):
    (vector,) = llm.embed(PROMPTS[:1], dimensions=5)
    np.testing.assert_allclose(vector, expected["last", 0][:5] / np.linalg.norm(expected["last", 0][:5]), rtol=1e-6)
    assert normalized([0.0, 0.0]) == [0.0, 0.0]
    with pytest.raises(InvalidParameter, match="dimensions: must be at least 1"):
        llm.embed("a", dimensions=0)


def test_large_states_are_bounded_in_a_mean():
    last = np.float32([4 * MOST, 1]).tobytes()
    sums = [np.array([MOST / UNIT, 3 / UNIT], np.int64).tobytes()]
    assert pooled("mean", last, sums, 2) == [MOST, 2.0] and pooled("last", last, [], 2) == [4 * MOST, 1.0]


@pytest.mark.parametrize("fields", [{"max_tokens": 2}, {"n": 2}, {"best_of": 2}, {"pooling": "first"}])
def test_impossible_parameters_are_refused(fields):
    with pytest.raises(InvalidParameter, match="pooling: "):
        SamplingParams(**{"max_tokens": 1, "pooling": "last"} | fields)


def test_outputs_have_a_vector_only_on_request(llm):
    for pooling in (None, *POOLINGS):
        params = SamplingParams(max_tokens=1, pooling=pooling)
        vector = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].pooled
        assert vector is None if pooling is None else len(vector) == LLAMA.hidden_size
