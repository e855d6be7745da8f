"""The sets of tokens that samples are drawn from, on request."""

import dataclasses

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from tests.runtime.test_runner import LIMITS, LLAMA
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

SETTINGS = {"block_size": 8, "progress": False, "max_logprobs": -1} | LIMITS
BASE = dict(max_tokens=8, kept_tokens=True, logprobs=-1, ignore_eos=True)
ALL = LLAMA.vocab_size
PARAMS = {
    "all": SamplingParams(seed=1, **BASE),
    "greedy": SamplingParams(temperature=0, **BASE),
    "top_k": SamplingParams(top_k=3, seed=2, **BASE),
    "many": SamplingParams(top_k=100, temperature=0.7, seed=3, **BASE),
    "top_p": SamplingParams(top_p=0.6, temperature=0.8, seed=4, **BASE),
    "narrow": SamplingParams(top_p=0.5, temperature=0.1, top_k=40, seed=5, **BASE),
    "min_p": SamplingParams(min_p=0.4, seed=6, n=3, **BASE),
    "masked": SamplingParams(allowed_token_ids=[3, 5, 8, 13], min_p=0.2, seed=7, **BASE),
}


@pytest.fixture(scope="module")
def llm():
    with few_shapes():
        model = random_model(LLAMA, "float32", 0)
        return LLM(model, num_gpu_blocks_override=24, speculative_config={}, swap_space=0, exact=True, **SETTINGS)


def sets_of(output) -> list[set[int]]:
    """The sets of tokens of an output, from its bits."""
    rows = [np.frombuffer(bits, np.uint8) for bits in output.kept_tokens]
    assert {len(row) for row in rows} == {-(-ALL // 8)}
    return [set(np.flatnonzero(np.unpackbits(row, bitorder="little"))) for row in rows]


def expected(params, logprobs) -> tuple[set[int], set[int]]:
    """The tokens that are certainly kept, and those that may be, by the definition in float64."""
    x = np.full(ALL, -np.inf)
    for token, logprob in logprobs.items():
        if params.allowed_token_ids is None or token in params.allowed_token_ids:
            x[token] = logprob.logprob
    if params.temperature == 0:
        return {int(x.argmax())}, {int(x.argmax())}
    p = np.exp((x - x.max()) / params.temperature)
    found = []
    for margin in (1 - 1e-5, 1 + 1e-5):
        kept = (p > 0) & (p * margin >= params.min_p)
        if params.top_k > 0:
            kept &= p * margin >= np.sort(p)[-params.top_k] - (margin > 1) * 1e-9
        order = np.argsort(-p)
        before = np.cumsum(np.where(kept, p, 0)[order]) - np.where(kept, p, 0)[order]
        if params.top_p < 1:
            kept[order] &= before < params.top_p * margin * p[kept].sum()
        found.append(set(np.flatnonzero(kept)))
    return found[0], found[1]


def test_kept_tokens_are_those_that_the_filters_and_masks_leave(llm):
    outputs = llm.generate([[3, 4, 5]] * len(PARAMS), [*PARAMS.values()], use_tqdm=False)
    sizes = {}
    for (name, params), output in zip(PARAMS.items(), outputs):
        for one in output.outputs:
            sets = sets_of(one)
            assert len(sets) == 8 and all(token in kept for token, kept in zip(one.token_ids, sets))
            for kept, logprobs in zip(sets, one.logprobs):
                certain, possible = expected(params, logprobs)
                assert certain <= kept <= possible, name
            sizes.setdefault(name, []).extend(map(len, sets))
    assert set(sizes["all"]) == {ALL} and set(sizes["greedy"]) == {1} and set(sizes["top_k"]) == {3}
    assert set(sizes["many"]) == {100} and max(sizes["masked"]) <= 4
    assert min(sizes["top_p"]) >= 1 and max(sizes["top_p"]) < ALL and len(sizes["min_p"]) == 24


def test_kept_tokens_do_not_depend_on_the_schedule(llm):
    """Chunks, preemption in a small pool, drafts of repeated text, forks and requests without sets beside them."""
    prompts = [[7, 8, 9] * 9, [*range(30, 58)], [1]]
    changes = {"n": 2, "max_tokens": 30, "logprobs": None}
    params = [dataclasses.replace(PARAMS[name], **changes) for name in ("many", "top_p", "masked")]
    alone = {}
    for i, each in enumerate(params):
        for j, prompt in enumerate(prompts):
            alone[i, j] = [one.kept_tokens for one in llm.generate(prompt, each, use_tqdm=False)[0].outputs]
    keys = [*alone, *alone]
    jobs = [
        params[i] if k < len(alone) else dataclasses.replace(params[i], kept_tokens=False)
        for k, (i, _) in enumerate(keys)
    ]
    preempted = llm.engine.scheduler.num_preemptions
    outputs = llm.generate([prompts[j] for _, j in keys], jobs, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions > preempted and llm.engine.scheduler.num_drafts > 0
    for key, output in zip(keys[: len(alone)], outputs):
        assert [one.kept_tokens for one in output.outputs] == alone[key]
    assert {one.kept_tokens for output in outputs[len(alone) :] for one in output.outputs} == {None}


def test_nothing_is_computed_without_a_request_for_it(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.runner.step, "keep", pytest.fail)
    llm.generate([3, 4, 5], SamplingParams(max_tokens=3, top_k=5), use_tqdm=False)
