"""New parameters during traffic: later tokens depend on them only, and nothing is copied or compiled."""

import asyncio
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jpaged import LLM, AsyncEngine, BeamSearchParams, SamplingParams
from jpaged.core.commands import Pause, ResetPrefixCache, Resume, Sleep, UpdateParams, WakeUp
from jpaged.core.plan import ParamsDeleted
from jpaged.core.request import FinishReason
from tests.runtime.test_runner import LIMITS, LLAMA, Compilations
from tests.serving.client import limit_steps
from tests.support.few_shapes import few_shapes
from tests.support.random_model import random_model

pytestmark = pytest.mark.slow

ENGINE = {"block_size": 8, "num_gpu_blocks_override": 40, "progress": False, "warm_up": True} | LIMITS
PROMPTS = [[*range(seed, seed + length)] for seed, length in ((3, 5), (40, 30), (90, 17), (7, 50))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=8, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, min_tokens=20, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def models():
    return [random_model(LLAMA, "float32", seed) for seed in range(2)]


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
    served.resume()
    served.update_params(models[0])
    served.wake_up()
    served.pause("abort")  # leftovers of a failed test
    served.resume()
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


@pytest.mark.parametrize("steps", [2, 9, *(pytest.param(steps, marks=pytest.mark.deep) for steps in (0, 1, 3))])
def test_no_token_after_an_update_depends_on_the_old_parameters(llm, fresh, models, steps):
    engine = llm.engine
    requests = start(engine)
    for _ in range(steps):
        engine.step()
    before = [request.sequences[0].output_token_ids for request in requests]
    assert steps < 9 or all(before)
    with Compilations() as compilations:
        engine.control(UpdateParams(nnx.state(models[1])))
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
    engine.control(UpdateParams(models[1], "wait"))
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
    other = random_model(LLAMA, "float32", 2)
    engine.control(UpdateParams(other, "wait"))
    engine.control(UpdateParams(models[1], "wait"))
    for request in requests:
        engine.abort(request.request_id)
    assert engine.has_work
    finish(engine)
    assert pointers(engine.runner.params) == pointers(jax.tree.leaves(nnx.state(models[1])))
    engine.control(UpdateParams(models[0], "wait"))
    assert not engine.is_updating and not engine.has_work


def test_a_step_that_fails_does_not_lose_an_update_that_waits(llm, models, monkeypatch):
    engine = llm.engine
    requests = start(engine)
    engine.step()
    engine.control(UpdateParams(models[1], "wait"))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.runner, "dispatch", _fail)
        finish(engine)
    assert engine.is_updating and not any(request.finished for request in requests)
    finish(engine)
    assert all(request.finished for request in requests)
    assert pointers(engine.runner.params) == pointers(jax.tree.leaves(nnx.state(models[1])))


def test_an_update_that_was_deleted_while_it_waited_is_an_error_and_the_old_parameters_serve(llm):
    engine, gone = llm.engine, random_model(LLAMA, "float32", 3)
    start(engine)
    engine.step()
    engine.control(UpdateParams(gone, "wait"))
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
    model = random_model(LLAMA, "float32", 1)
    llm.update_params(model)
    train = jax.jit(lambda state: jax.tree.map(lambda x: x * 1, state), donate_argnums=0)
    state = train(nnx.state(model))
    with pytest.raises(ParamsDeleted, match=r"^params: .* deleted, .* update_params, .* without donation$"):
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
    engine.control(UpdateParams(models[1]))
    engine.scheduler.check_invariants()
    finish(engine)
    assert [len(s.output_token_ids) for s in (*beam.outputs, *fork.outputs)] == [12] * 6
    assert engine.scheduler.pool.num_used == 0


def versions_of(request):
    (sequence,) = request.sequences
    return [sample.version for sample in sequence.samples]


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "wait"])
def test_samples_say_which_parameters_drew_them(llm, models, in_flight):
    engine = llm.engine
    requests, first = start(engine), engine.runner.params_version
    for _ in range(9):
        engine.step()
    engine.control(UpdateParams(models[1], in_flight))
    late = engine.add("late", PROMPTS[0], PARAMS[0])
    finish(engine)
    for request in requests:
        found = versions_of(request)
        assert found == sorted(found) and len(found) == 20
        assert set(found) == ({first} if in_flight == "wait" else {first, first + 1})
    assert set(versions_of(late)) == {first + 1}


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_requests_may_keep_the_kv_of_old_parameters_and_no_later_request_finds_it(llm, fresh, models, steps):
    engine = llm.engine
    requests = start(engine)
    for _ in range(steps):
        engine.step()
    preemptions = engine.scheduler.num_preemptions
    begun = [request.sequences[0].num_computed_tokens > 0 for request in requests]
    engine.control(UpdateParams(models[1], "keep"))
    finish(engine)
    assert engine.scheduler.num_preemptions == preemptions, "nothing is computed again"
    assert [request.sequences[0].num_output_tokens for request in requests] == [20] * 4
    prompts = [request.sequences[0].tokens for request in requests]
    outputs = [each.generate(prompts, PARAMS[0], use_tqdm=False) for each in (llm, fresh)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    assert any(begun) and not any(o.num_cached_tokens for o, early in zip(outputs[0], begun) if early)


def test_arrays_of_any_mesh_are_shared_and_compile_nothing(llm, fresh, models):
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"))
    state = jax.device_put(nnx.state(models[1]), NamedSharding(mesh, PartitionSpec("fsdp")))
    with Compilations() as compilations:
        llm.update_params(state)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        with jax.set_mesh(mesh):
            again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert compilations.count == 0
    assert pointers(llm.engine.runner.params) == pointers(jax.tree.leaves(state))
    expected = [o.outputs[0].token_ids for o in fresh.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in outputs] == expected == [o.outputs[0].token_ids for o in again]


def test_a_way_of_updating_that_does_not_exist_is_refused(llm, models):
    with pytest.raises(ValueError, match=r"^in_flight: must be one of 'recompute', 'keep', 'wait', not 'later'$"):
        llm.update_params(models[1], "later")
    with pytest.raises(ValueError, match=r"^pause: mode: must be one of 'keep', 'wait', 'abort', not 'stop'$"):
        llm.pause("stop")
    assert not llm.engine.is_paused


def test_a_paused_engine_keeps_its_requests_and_changes_no_token(llm):
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    engine = llm.engine
    llm.reset_prefix_cache()
    requests = start(engine)
    for _ in range(5):
        engine.step()
    engine.control(Pause())
    finish(engine)
    assert engine.is_paused and not any(request.finished for request in requests)
    engine.control(Resume())
    finish(engine)
    assert [request.sequences[0].output_token_ids for request in requests] == expected


def test_a_pause_may_wait_for_the_started_requests(llm):
    engine = llm.engine
    requests = start(engine)
    for _ in range(5):
        engine.step()
    engine.control(Pause("wait"))
    late = engine.add("late", PROMPTS[0], PARAMS[0])
    assert not engine.is_paused
    finish(engine)
    assert engine.is_paused and all(request.finished for request in requests) and not late.admitted
    engine.control(Resume())
    finish(engine)
    assert late.finished


def test_a_pause_may_abort_everything(llm):
    engine = llm.engine
    requests = start(engine)
    for _ in range(5):
        engine.step()
    output = engine.control(Pause("abort"))
    finish(engine)
    assert output.ended == requests
    assert [delta.finish_reason for delta in output.deltas] == [FinishReason.ABORT] * 4
    assert engine.scheduler.pool.num_used == 0 and not engine.scheduler.requests
    engine.control(Resume())


def device_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "device")


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_a_sleeping_engine_holds_neither_pool_nor_parameters_and_wakes_up_to_the_same_tokens(llm, models, level):
    model = random_model(LLAMA, "float32", 1)
    llm.update_params(model)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    engine, runner, state = llm.engine, llm.engine.runner, jax.device_get(nnx.state(model))
    llm.reset_prefix_cache()
    requests = start(engine)
    for _ in range(5):
        engine.step()
    engine.control(Pause())
    finish(engine)  # the results of steps in flight are on the device too
    engine.control(Resume())
    del model
    params = sum(array.nbytes for array in runner.params)
    pool = sum(array.nbytes for array in jax.tree.leaves((runner.blocks.pool, runner.rows.state)))
    runner.blocks.host.clear()  # on a CPU, copies of evicted blocks would count as the device's
    awake = device_bytes()
    with Compilations() as compilations:
        llm.sleep(level)
        assert device_bytes() == awake - params - pool
        assert engine.asleep == {"weights", "kv_cache"} and not engine.has_work
        with pytest.raises(RuntimeError, match=r"^the engine is asleep \(kv_cache, weights\): call wake_up first$"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        if level == 2:
            with pytest.raises(ValueError, match=r"^wake_up: the parameters were dropped \(level 2\)"):
                llm.wake_up()
            llm.update_params(jax.device_put(state))
        llm.wake_up(["weights"])
        assert engine.asleep == {"kv_cache"} and device_bytes() == awake - pool
        llm.wake_up(["kv_cache"])
        finish(engine)
    assert device_bytes() == awake and compilations.count == 0
    assert [request.sequences[0].output_token_ids for request in requests] == expected


def test_arrays_of_others_survive_sleep(llm, models):
    llm.sleep(2)
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(models[0])))
    llm.update_params(models[0])
    llm.wake_up()


@pytest.mark.parametrize(
    "case",
    ["as before"]
    + [
        pytest.param(case, marks=pytest.mark.deep)
        for case in ("updated meanwhile", "changed meanwhile", "updated before")
    ],
)
def test_a_module_gives_back_the_parameters_that_sleep_has_dropped(models, fresh, case):
    model = random_model(LLAMA, "float32", 0)
    with few_shapes():
        llm = LLM(model, **ENGINE)
    if case == "updated before":
        llm.update_params(models[1])
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with Compilations() as compilations:
        llm.sleep(2)
        llm.sleep(1)  # which finds nothing to copy
        if case == "updated before":  # the dropped parameters are not the module's
            with pytest.raises(ValueError, match=r"^wake_up: the parameters were dropped \(level 2\)"):
                llm.wake_up()
        if case == "updated meanwhile":
            llm.update_params(models[1])
        elif case != "as before":
            nnx.update(model, nnx.state(models[1]))
        llm.wake_up(["kv_cache"])
        llm.wake_up()
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    assert compilations.count == 0
    if case in ("as before", "updated before"):
        assert found == expected
    else:
        assert found == [o.outputs[0].token_ids for o in fresh.generate(PROMPTS, PARAMS, use_tqdm=False)] != expected
    source = models[1] if case == "updated meanwhile" else model
    assert pointers(llm.engine.runner.params) == pointers(jax.tree.leaves(nnx.state(source)))


def test_unknown_levels_and_tags_are_refused(llm):
    with pytest.raises(ValueError, match=r"^level: must be 1 .* not 3$"):
        llm.sleep(3)
    with pytest.raises(ValueError, match=r"^tags: must be of \['kv_cache', 'weights'\], not \['params'\]$"):
        llm.wake_up(["params"])


def test_generate_takes_the_new_arrays_of_its_module(fresh):
    model = random_model(LLAMA, "float32", 0)
    with few_shapes():
        llm = LLM(model, **ENGINE)
    before = weakref.ref(jax.tree.leaves(nnx.state(model))[0])
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.engine.runner.params_version == 0
    nnx.update(model, nnx.state(random_model(LLAMA, "float32", 1)))
    outputs = [engine.generate(PROMPTS, PARAMS, use_tqdm=False) for engine in (llm, fresh)]
    assert [o.outputs[0].token_ids for o in outputs[0]] == [o.outputs[0].token_ids for o in outputs[1]]
    gc.collect()
    assert llm.engine.runner.params_version == 1 and before() is None, "the old arrays are freed"
    for leaf in jax.tree.leaves(nnx.state(model)):
        leaf.delete()
    with pytest.raises(ParamsDeleted):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    nnx.update(model, nnx.state(random_model(LLAMA, "float32", 1)))
    assert llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_a_running_call_of_generate_takes_updates_and_pauses(llm, models):
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(1) as other:
        call = other.submit(lambda: llm.generate([PROMPTS[0]], params, use_tqdm=False))
        while not any(request.sequences[0].num_output_tokens for request in list(engine.scheduler.requests.values())):
            assert not call.done()
        llm.pause()
        (request,) = engine.scheduler.requests.values()
        count = request.sequences[0].num_output_tokens
        llm.update_params(models[1])
        llm.resume()
        (output,) = call.result()
    found = versions_of(request)
    assert len(output.outputs[0].token_ids) == 40
    assert 0 < count <= found.count(found[0]) <= count + 2 < 40, "steps in flight at the pause are committed"


async def test_a_trainer_that_deletes_the_engines_arrays_ends_requests_and_not_the_engine(served, models):
    gone = random_model(LLAMA, "float32", 3)
    served.update_params(gone)
    engine = AsyncEngine(served.engine)
    engine.start()

    async def count(name):
        async with engine.generate(name, [PROMPTS[0]], PARAMS[0]) as parts:
            return sum([len(delta.token_ids) async for deltas in parts for _, delta in deltas])

    try:
        for leaf in jax.tree.leaves(nnx.state(gone)):
            leaf.delete()
        for name in "ab":
            with pytest.raises(ParamsDeleted, match="update_params"):
                await count(name)
        await engine.control(UpdateParams(models[0]))
        assert engine.alive and await count("c") == 20
        assert not served.engine.scheduler.requests
    finally:
        await engine.stop()


async def test_async_engine_pauses_sleeps_and_wakes_up(llm):
    engine = AsyncEngine(llm.engine)
    engine.start()

    async def reasons(name, begun=None):
        found = []
        async with engine.generate(name, [PROMPTS[0]], PARAMS[0]) as parts:
            async for delta in (delta async for deltas in parts for _, delta in deltas):
                found.append(delta.finish_reason)
                if begun is not None:
                    begun.set()
        return found[-1]

    try:
        begun = asyncio.Event()
        await engine.call(lambda e: limit_steps(e, 5))
        task = asyncio.create_task(reasons("a", begun))
        await begun.wait()
        await engine.control(Pause("abort"))
        assert engine.is_paused and await task == FinishReason.ABORT
        await engine.call(lambda e: delattr(e, "step"))
        await engine.control(Resume())
        begun.clear()
        task = asyncio.create_task(reasons("b", begun))
        await begun.wait()
        await engine.control(Pause("wait"))
        assert await task == FinishReason.LENGTH
        task = asyncio.create_task(reasons("c"))
        await engine.control(Resume())
        await engine.control(Sleep())
        assert engine.is_asleep
        await engine.control(WakeUp())
        assert await task == FinishReason.LENGTH and not engine.is_asleep and not engine.is_paused
    finally:
        await engine.stop()


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
        await engine.control(UpdateParams(models[1], "wait"))
        assert await first != expected[0] and len(await first) == 20
        found = await asyncio.gather(*(tokens(f"{i}", p, params) for i, (p, params) in enumerate(zip(PROMPTS, PARAMS))))
        assert found == expected
        with pytest.raises(ValueError, match=r"^params: must have parameters of the model, and has none$"):
            await engine.control(UpdateParams({}))
        waiting = asyncio.create_task(engine.control(UpdateParams(models[0])))
        waiting.cancel()
        await engine.control(UpdateParams(models[0]))
        await engine.control(ResetPrefixCache())
    finally:
        await engine.stop()
