"""Sampling compiled for some settings: the tokens and the logprobs are those of the executable for all settings."""

import dataclasses

import jax
import numpy as np
import pytest

from jpaged import BeamSearchParams, SamplingParams
from jpaged.llm import LLM
from jpaged.models.checkpoint import dummy_model
from jpaged.runtime.row_table import SCALARS
from jpaged.runtime.sampler import Sampling, sample
from jpaged.runtime.sampling_settings import Settings, settings_of
from jpaged.runtime.sampling_state import empty_state
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.support.few_shapes import few_shapes

ROWS, VOCAB = 6, 500


def scalars_of(**columns) -> np.ndarray:
    scalars = np.zeros(3, SCALARS)
    scalars["top_p"] = scalars["repetition"] = 1
    for name, values in columns.items():
        scalars[name] = values
    return scalars


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, Settings.GREEDY),
        (dict(top_p=0.5, top_k=3), Settings.GREEDY),  # nothing is drawn
        (dict(temperature=[0, 1, 0]), Settings.DRAWN),
        (dict(temperature=[0, 1, 0], top_p=[0.5, 1, 1]), Settings.DRAWN),
        *((dict(temperature=1) | each, Settings.FILTERED) for each in ({"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1})),
        *(({name: [0, 0, 1]}, Settings.ANY) for name in ("stateful", "beam", "num_top")),
    ],
)  # fmt: skip
def test_settings_are_those_that_a_row_uses(columns, expected):
    scalars = scalars_of(**columns)
    assert settings_of(scalars, np.zeros(3, bool)) is expected
    assert settings_of(scalars, np.array([False, False, True])) is Settings.ANY


def sampling_with(settings: Settings, seed: int) -> Sampling:
    """Rows of which some use each setting up to the given ones."""
    rng = np.random.default_rng(seed)
    temperature = np.where(np.arange(ROWS) % 3 == 0, 0, rng.uniform(0.3, 2, ROWS)) * (settings >= Settings.DRAWN)
    filtered = settings >= Settings.FILTERED
    flat = np.zeros(ROWS, np.float32)
    return Sampling(
        temperature=temperature.astype(np.float32),
        top_k=(rng.choice([0, 1, 5, 200], ROWS) * filtered).astype(np.int32),
        top_p=np.where(filtered, rng.choice([1, 0.5, 0.99], ROWS), 1).astype(np.float32),
        min_p=(rng.choice([0, 0.05], ROWS) * filtered).astype(np.float32),
        seeds=rng.integers(0, 2**32, (ROWS, 2), np.uint32), positions=rng.integers(0, 99, ROWS).astype(np.int32),
        presence=flat, frequency=flat, repetition=flat + 1, rows=np.arange(ROWS, dtype=np.int32),
        stateful=flat > 0, counted=np.full(ROWS, -1, np.int32), beam=flat > 0, masked=flat > 0,
        allowed_bits=np.zeros((ROWS, -(-VOCAB // 32)), np.uint32), num_top=np.zeros(ROWS, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("settings", [Settings.GREEDY, Settings.DRAWN, Settings.FILTERED])
def test_each_executable_chooses_as_the_one_for_all_settings(settings):
    run = jax.jit(sample, static_argnums=(3,), static_argnames=("settings",))
    state = empty_state(ROWS, VOCAB)
    for seed in range(3):
        logits = (np.random.default_rng(seed).standard_normal((ROWS, VOCAB)) * (1 + seed)).astype(np.float32)
        sampling = sampling_with(settings, seed)
        found, expected = (run(logits, state, sampling, 20, settings=each) for each in (settings, Settings.ANY))
        for name in found._fields:
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    if settings is not Settings.GREEDY:
        greedy = run(logits, state, sampling, 20, settings=Settings.GREEDY)
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
        return LLM(dummy_model(LLAMA, "float32", 0), block_size=8, num_gpu_blocks_override=24, progress=False, **LIMITS)


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
