"""New parameters during traffic: later tokens depend on them only, and nothing is copied or compiled."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged import LLM, AsyncEngine, BeamSearchParams, SamplingParams
from jpaged.models.checkpoint import dummy_model
from tests.few_shapes import few_shapes
from tests.runtime.test_runner import LIMITS, LLAMA, Compilations

ENGINE = {"block_size": 8, "num_gpu_blocks_override": 40, "progress": False} | LIMITS
PROMPTS = [[*range(seed, seed + length)] for seed, length in ((3, 5), (40, 30), (90, 17), (7, 50))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=8, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, min_tokens=20, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def models():
    return [dummy_model(LLAMA, "float32", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def fresh(models):
    """An engine that has never had other parameters than the second model's."""
    with few_shapes():
        return LLM(models[1], **ENGINE)


@pytest.fixture(scope="module")
def served(models):
    with few_shapes():
        return LLM(models[0], **ENGINE)


@pytest.fixture
def llm(served, models):
    """An engine that serves the first model's parameters, and has cached prefixes of them."""
    served.update_params(models[0])
    served.generate(PROMPTS, PARAMS, use_tqdm=False)
    return served


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


def logprobs_of(samples):
    return [sample.logprob for sample in samples]


def listed(tokens, logprobs):
    """Products round otherwise in steps of another size."""
    found = [logprob[token].logprob for token, logprob in zip(tokens, logprobs, strict=True)]
    return pytest.approx(found, abs=1e-5)


def start(engine):
    return [engine.add(str(i), prompt, params) for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))]


def finish(engine):
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 9])
def test_no_token_after_an_update_depends_on_the_old_parameters(llm, fresh, models, steps):
    engine = llm.engine
    requests = start(engine)
    for _ in range(steps):
        engine.step()
    before = [request.sequences[0].output_token_ids for request in requests]
    assert steps < 9 or all(before)
    with Compilations() as compilations:
        engine.update_params(nnx.state(models[1]))
        finish(engine)
    assert compilations.count == 0
    assert pointers(engine.runner.params) == pointers(jax.tree.leaves(nnx.state(models[1])))
    for request, tokens, params in zip(requests, before, PARAMS):
        (sequence,) = request.sequences
        assert sequence.output_token_ids[: len(tokens)] == tokens and sequence.num_output_tokens == 20
        if params.repetition_penalty != 1 and tokens:
            continue  # a penalty tells a prompt from an output
        rest = dataclasses.replace(params, max_tokens=20 - len(tokens), min_tokens=0, ignore_eos=True)
        (alone,) = fresh.generate([request.prompt_token_ids + tokens], rest, use_tqdm=False)
        assert sequence.output_token_ids[len(tokens) :] == alone.outputs[0].token_ids
        if params.logprobs:
            assert logprobs_of(sequence.samples[len(tokens) :]) == listed(
                alone.outputs[0].token_ids, alone.outputs[0].logprobs
            )
        if params.prompt_logprobs and not tokens:
            assert logprobs_of(request.prompt_samples) == listed(alone.prompt_token_ids[1:], alone.prompt_logprobs[1:])


def test_cached_prefixes_of_the_old_parameters_are_never_matched(llm, fresh, models):
    llm.update_params(models[1])
    outputs = [engine.generate(PROMPTS, PARAMS, use_tqdm=False) for engine in (llm, fresh)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert all(output.num_cached_tokens == 0 for output in outputs[0])


def test_what_has_started_may_end_first_and_nothing_else_starts_meanwhile(llm, fresh, models):
    engine = llm.engine
    expected = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p, params in zip(PROMPTS, PARAMS)]
    requests = start(engine)
    for _ in range(4):
        engine.step()
    engine.update_params(models[1], finish_started=True)
    late = engine.add("late", PROMPTS[1], PARAMS[0])
    assert engine.is_updating
    while not all(request.finished for request in requests):
        engine.step()
        assert late.sequences[0].num_computed_tokens == 0
    assert [request.sequences[0].output_token_ids for request in requests] == expected
    finish(engine)
    assert not engine.is_updating
    (alone,) = fresh.generate([PROMPTS[1]], PARAMS[0], use_tqdm=False)
    assert late.sequences[0].output_token_ids == alone.outputs[0].token_ids


def test_an_update_that_waits_is_made_when_all_that_started_is_aborted_and_replaced_by_a_later_one(llm, models):
    engine = llm.engine
    requests = start(engine)
    engine.step()
    other = dummy_model(LLAMA, "float32", 2)
    engine.update_params(other, finish_started=True)
    engine.update_params(models[1], finish_started=True)
    for request in requests:
        engine.abort(request.request_id)
    assert engine.has_work
    finish(engine)
    assert pointers(engine.runner.params) == pointers(jax.tree.leaves(nnx.state(models[1])))
    engine.update_params(models[0], finish_started=True)
    assert not engine.is_updating and not engine.has_work


def test_a_step_that_fails_does_not_lose_an_update_that_waits(llm, models, monkeypatch):
    engine = llm.engine
    requests = start(engine)
    engine.step()
    engine.update_params(models[1], finish_started=True)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.runner, "dispatch", _fail)
        finish(engine)
    assert engine.is_updating and not any(request.finished for request in requests)
    finish(engine)
    assert all(request.finished for request in requests)
    assert pointers(engine.runner.params) == pointers(jax.tree.leaves(nnx.state(models[1])))


def test_an_update_that_was_deleted_while_it_waited_is_an_error_and_the_old_parameters_serve(llm):
    engine, gone = llm.engine, dummy_model(LLAMA, "float32", 3)
    start(engine)
    engine.step()
    engine.update_params(gone, finish_started=True)
    for leaf in jax.tree.leaves(nnx.state(gone)):
        leaf.delete()
    with pytest.raises(ValueError, match=r"^params: embed_tokens.embedding was deleted"):
        finish(engine)
    assert not engine.is_updating and not engine.has_work
    assert llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def _fail(*_):
    raise MemoryError


def test_parameters_that_differ_are_refused_and_nothing_changes(llm, models):
    state = nnx.to_pure_dict(nnx.state(models[1]))
    state["norm"]["scale"] = jnp.ones(3)
    before = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^params: norm.scale has the shape \[3\], not \[64\]$"):
        llm.update_params(state)
    after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]
    assert after[1].num_cached_tokens > 0


def test_donated_parameters_are_told_in_one_error_and_new_ones_mend_it(llm, fresh):
    model = dummy_model(LLAMA, "float32", 1)
    llm.update_params(model)
    train = jax.jit(lambda state: jax.tree.map(lambda x: x * 1, state), donate_argnums=0)
    state = train(nnx.state(model))
    with pytest.raises(RuntimeError, match=r"^params: the engine's arrays were deleted, .* update_params$"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.update_params(state)
    outputs = [engine.generate(PROMPTS, PARAMS, use_tqdm=False) for engine in (llm, fresh)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    llm.engine.scheduler.check_invariants()


def test_beams_and_forks_go_on_with_other_parameters(llm, models):
    engine = llm.engine
    beam = engine.add("beam", PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
    fork = engine.add("fork", PROMPTS[2], SamplingParams(n=3, max_tokens=12, temperature=1, seed=1, ignore_eos=True))
    for _ in range(5):
        engine.step()
    engine.update_params(models[1])
    engine.scheduler.check_invariants()
    finish(engine)
    assert [len(s.output_token_ids) for s in (*beam.outputs, *fork.outputs)] == [12] * 6
    assert engine.scheduler.pool.num_used == 0


async def test_async_engine_updates_at_once_or_after_what_has_started(llm, fresh, models):
    engine = AsyncEngine(llm.engine)
    engine.start()
    expected = [output.outputs[0].token_ids for output in fresh.generate(PROMPTS, PARAMS, use_tqdm=False)]

    async def tokens(name, prompt, params, begun=None):
        found = []
        async with engine.generate(name, [prompt], params) as parts:
            async for delta in (delta async for deltas in parts for _, delta in deltas):
                found += delta.token_ids
                if begun is not None:
                    begun.set()
        return found

    try:
        begun = asyncio.Event()
        first = asyncio.create_task(tokens("first", PROMPTS[0], PARAMS[0], begun))
        await begun.wait()
        await engine.update_params(models[1], finish_started=True)
        assert await first != expected[0] and len(await first) == 20
        found = await asyncio.gather(*(tokens(f"{i}", p, params) for i, (p, params) in enumerate(zip(PROMPTS, PARAMS))))
        assert found == expected
        with pytest.raises(ValueError, match=r"^params: embed_tokens.embedding is missing$"):
            await engine.update_params({})
        waiting = asyncio.create_task(engine.update_params(models[0]))
        waiting.cancel()
        await engine.update_params(models[0])
        await engine.reset_prefix_cache()
    finally:
        await engine.stop()
