"""Sampling compiled for some settings: the tokens and the logprobs are those of the executable for all settings."""

import dataclasses

import jax
import numpy as np
import pytest

from jpaged import BeamSearchParams, SamplingParams
from jpaged.llm import LLM
from jpaged.runtime.device_rows import empty_state
from jpaged.runtime.sampler import SampleOptions, sample
from jpaged.runtime.sampling_row import Sampling
from jpaged.runtime.sampling_row import pack as pack_row
from jpaged.runtime.sampling_settings import Settings
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.runtime.test_sampler import empty_sampling
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

ROWS, VOCAB = 6, 500


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0), Settings.GREEDY),
        (SamplingParams(temperature=0, top_p=0.5, top_k=3), Settings.GREEDY),  # nothing is drawn
        (SamplingParams(), Settings.DRAWN),
        (SamplingParams(top_k=-1), Settings.DRAWN),
        *((SamplingParams(**each), Settings.FILTERED) for each in ({"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1})),
        (SamplingParams(temperature=0, presence_penalty=1), Settings.ANY),
        (SamplingParams(temperature=0, logit_bias={1: 2.0}), Settings.ANY),
        (BeamSearchParams(beam_width=2), Settings.ANY),
    ],
)
def test_settings_are_those_that_a_row_uses(params, expected):
    assert pack_row(params, {})[1] is expected
    assert pack_row(params, {"num_top": 1})[1] is Settings.ANY


def sampling_with(settings: Settings, seed: int) -> Sampling:
    """Rows of which some use each setting up to the given ones."""
    rng = np.random.default_rng(seed)
    temperature = np.where(np.arange(ROWS) % 3 == 0, 0, rng.uniform(0.3, 2, ROWS)) * (settings >= Settings.DRAWN)
    filtered = settings >= Settings.FILTERED
    return empty_sampling(ROWS, VOCAB)._replace(
        temperature=temperature.astype(np.float32),
        top_k=(rng.choice([0, 1, 5, 200], ROWS) * filtered).astype(np.int32),
        top_p=np.where(filtered, rng.choice([1, 0.5, 0.99], ROWS), 1).astype(np.float32),
        min_p=(rng.choice([0, 0.05], ROWS) * filtered).astype(np.float32),
        seeds=rng.integers(0, 2**32, (ROWS, 2), np.uint32),
        positions=rng.integers(0, 99, ROWS).astype(np.int32),
    )


@pytest.mark.parametrize("settings", [Settings.GREEDY, Settings.DRAWN, Settings.FILTERED])
def test_each_executable_chooses_as_the_one_for_all_settings(settings):
    run = jax.jit(sample, static_argnums=3)
    state, options = empty_state(ROWS, VOCAB), lambda settings: SampleOptions(20, settings=settings)
    for seed in range(3):
        logits = (np.random.default_rng(seed).standard_normal((ROWS, VOCAB)) * (1 + seed)).astype(np.float32)
        sampling = sampling_with(settings, seed)
        found, expected = (run(logits, state, sampling, options(each)) for each in (settings, Settings.ANY))
        for name in found._fields:
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    if settings is not Settings.GREEDY:
        greedy = run(logits, state, sampling, options(Settings.GREEDY))
        assert (np.asarray(greedy.tokens) != np.asarray(expected.tokens)).any(), "the settings make a difference"


PROMPTS = [[*range(3, 8)], [*range(40, 60)], [7] * 9, [1, 2, 3, 4]]
DRAWN = dict(temperature=1.0, max_tokens=10, ignore_eos=True)
REQUESTS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0),
    SamplingParams(seed=5, **DRAWN),
    SamplingParams(seed=6, top_p=0.8, top_k=20, **DRAWN | dict(max_tokens=20)),
    SamplingParams(seed=7, repetition_penalty=1.3, logit_bias={5: 3.0}, **DRAWN),
]


@pytest.fixture(scope="module")
def llm():
    with few_shapes():
        return LLM(
            random_model(LLAMA, "float32", 0), block_size=8, num_gpu_blocks_override=24, progress=False, **LIMITS
        )


def test_an_engine_with_all_executables_generates_the_same(llm, monkeypatch):
    """Requests that come and end change the settings of steps; no other request's tokens change with them."""
    step = llm.engine.runner.step

    def generated(requests: list[SamplingParams]) -> list[list[int]]:
        outputs = llm.generate(PROMPTS[: len(requests)], requests, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    used, choose = [], step.choose
    monkeypatch.setattr(step, "choose", lambda *args: used.append(args[-1]) or choose(*args))
    alone, together = generated(REQUESTS[:1]), generated(REQUESTS)
    assert set(used) == {Settings.ANY} and alone == together[:1]
    monkeypatch.setattr(step, "settings", tuple(Settings))
    used.clear()
    assert generated([dataclasses.replace(REQUESTS[0], logprobs=None), *REQUESTS[1:3]]) == together[:3]
    assert set(used) == {Settings.GREEDY, Settings.FILTERED}, "until the filtered request ends, and after it"
    assert generated(REQUESTS) == together and set(used) == {Settings.GREEDY, Settings.FILTERED, Settings.ANY}
    llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)
    assert used[-1] is Settings.ANY
