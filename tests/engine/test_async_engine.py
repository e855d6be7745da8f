"""The engine's thread, over a fake runner: many at once, leaving early, ids in use, stopping, failing."""

import asyncio
import gc
import itertools
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.core.scheduler import Scheduler
from jpaged.engine.async_engine import AsyncEngine, EngineDead, QueueFull
from jpaged.engine.engine import Engine, StepOutput
from tests.support.fake_runner import VOCAB, FakeRunner, Flying, generate
from tests.support.patience import PATIENCE_S

NOTHING = StepOutput()


@pytest.fixture
async def make_engine():
    """make_engine(*observers): a started engine, which must be idle at the end of the test."""
    engines = []

    def make(*observers):
        scheduler = Scheduler(BlockPool(64, 4), Limits(100, 4, 16), vocab_size=VOCAB)
        engines.append(AsyncEngine(Engine(scheduler, FakeRunner(64, 4, scheduler=scheduler)), observers))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        if engine.alive:
            await idle(engine)
            await engine.stop()


@pytest.fixture
async def engine(make_engine):
    return make_engine()


async def idle(engine):
    async with asyncio.timeout(PATIENCE_S):
        while await engine.call(lambda e: e.has_work):
            await asyncio.sleep(0.001)
    await engine.call(lambda e: e.scheduler.check_invariants())
    assert await engine.call(lambda e: e.scheduler.pool.num_used) == 0


async def tokens(engine, name, prompt, count):
    async with engine.generate(name, [prompt], SamplingParams(max_tokens=count, seed=0)) as parts:
        return [token async for deltas in parts for _, delta in deltas for token in delta.token_ids]


async def hold(engine):
    """From here on steps do nothing, so that nothing ends by itself."""
    await engine.call(lambda e: setattr(e, "step", lambda: NOTHING))


async def release(engine):
    await engine.call(lambda e: delattr(e, "step"))


async def test_several_prompts_in_one_call(engine):
    """More than one batch of them, each with its own index, and all that has come meanwhile together."""
    prompts = [[1 + i % 7, 7] for i in range(70)]
    found = [[] for _ in prompts]
    async with engine.generate("all", prompts, SamplingParams(max_tokens=3, seed=0)) as parts:
        async for deltas in parts:
            assert deltas
            for index, delta in deltas:
                assert delta.request_id == f"all-{index}"
                found[index] += delta.token_ids
    assert found == [await tokens(engine, f"alone{i}", prompt, 3) for i, prompt in enumerate(prompts)]


async def test_a_refused_prompt_ends_those_before_it(engine):
    prompts = [[1]] * 40 + [[VOCAB]] + [[1]] * 40
    with pytest.raises(InvalidParameter, match="outside the vocabulary"):
        async with engine.generate("all", prompts, SamplingParams(max_tokens=90)):
            raise AssertionError("entered")
    await idle(engine)
    assert await tokens(engine, "all", [2], 3) == await tokens(engine, "other", [2], 3), "the ids are free again"


async def test_the_output_of_several_steps_comes_together_and_before_an_error(engine):
    left = iter(range(5))
    ran = threading.Event()

    def some_steps(e):
        run = e.step

        def step():
            if next(left, None) is not None:
                return run()
            ran.set()
            return NOTHING

        e.step = step

    await engine.call(some_steps)
    async with engine.generate("0", [[1], [2]], SamplingParams(max_tokens=90, seed=0, ignore_eos=True)) as parts:
        assert await asyncio.to_thread(ran.wait, PATIENCE_S)
        await engine.stop()
        deltas = await anext(parts)
        assert 5 < len(deltas) <= 10 and {index for index, _ in deltas} == {0, 1}
        with pytest.raises(EngineDead):
            await anext(parts)


async def test_many_at_once(engine):
    prompts = [[i, i + 1, 7] for i in range(20)]
    results = await asyncio.gather(*(tokens(engine, str(i), p, 5 + i) for i, p in enumerate(prompts)))
    assert results == [generate(p, 5 + i) for i, p in enumerate(prompts)]


async def test_requests_that_have_ended_are_freed_without_the_garbage_collector(make_engine):
    """A full collection would delay every stream."""
    requests = []
    engine = make_engine(SimpleNamespace(
        added=lambda request: requests.append(weakref.ref(request)), stepped=lambda *_: None, ended=lambda _: None,
    ))  # fmt: skip
    gc.disable()
    try:
        await asyncio.gather(*(tokens(engine, str(i), [i, 7], 3) for i in range(4)))
        async with engine.generate("aborted", [[1]], SamplingParams(max_tokens=99)) as deltas:
            await anext(deltas)
        await idle(engine)
        assert len(requests) == 5 and all(request() is None for request in requests)
    finally:
        gc.enable()


async def test_leaving_early_aborts(engine):
    async with engine.generate("0", [[1]], SamplingParams(max_tokens=99)) as deltas:
        async for _ in deltas:
            break
    await idle(engine)


async def test_cancelling_at_any_moment_aborts(engine):
    await hold(engine)
    for delay in (0, 0, 0.001, 0.005):
        task = asyncio.create_task(tokens(engine, "0", [1], 99))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)


class Gate:
    """An observer that holds the engine's thread inside `add` until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def added(self, request):
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    def stepped(self, scheduler, output):
        pass

    def ended(self, request):
        pass


async def test_cancelling_while_a_request_is_added_aborts(make_engine):
    gate = Gate()
    engine = make_engine(gate)
    await hold(engine)
    task = asyncio.create_task(tokens(engine, "0", [1], 99))
    await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    assert not await engine.call(lambda e: e.has_work)


async def test_a_refusal_reaches_the_caller_and_hurts_nobody(engine):
    await hold(engine)
    async with engine.generate("taken", [[1]], SamplingParams(max_tokens=50, seed=0)) as deltas:
        with pytest.raises(InvalidParameter, match="'taken-0' is already in use"):
            await tokens(engine, "taken", [2], 3)
        with pytest.raises(InvalidParameter, match="outside the vocabulary"):
            await tokens(engine, "other", [VOCAB], 3)
        await release(engine)
        assert [t async for part in deltas for _, d in part for t in d.token_ids] == generate([1], 50)


async def test_many_calls_are_spread_over_several_steps(engine):
    """A step waits for the calls before it, and every stream with it."""
    steps, seen, nothing = itertools.count(), [], StepOutput()

    def step():
        next(steps)
        return nothing

    def call(e):
        time.sleep(0.001)
        seen.append(next(steps))

    await engine.call(lambda e: setattr(e, "step", step))
    async with engine.generate("0", [[1]], SamplingParams(max_tokens=99)):
        await asyncio.gather(*(engine.call(call) for _ in range(60)))
    await release(engine)
    assert sum(later - earlier > 1 for earlier, later in itertools.pairwise(seen)) >= 5


async def test_one_client_may_not_fill_the_queue():
    scheduler = Scheduler(BlockPool(64, 4), Limits(100, 1, 16), vocab_size=VOCAB)
    engine = AsyncEngine(Engine(scheduler, FakeRunner(64, 4, scheduler=scheduler)), max_queue=8)
    engine.start()
    await hold(engine)
    refused, leave = [], asyncio.Event()

    async def ask(client, i):
        try:
            async with engine.generate(f"{client}{i}", [[1]], SamplingParams(), client=client):
                await leave.wait()
        except QueueFull:
            refused.append(client)

    tasks = []
    for client, count in (("a", 8), ("b", 3), (None, 4)):
        tasks += [asyncio.create_task(ask(client, i)) for i in range(count)]
        while await engine.call(lambda e: len(e.scheduler.requests)) + len(refused) < len(tasks):
            await asyncio.sleep(0.001)
    assert refused == ["a"] * 3 + ["b", None, None, None], "five of eight, two of three, the last one"
    leave.set()
    await asyncio.gather(*tasks)
    await release(engine)
    await idle(engine)
    await engine.stop()


async def test_stopping_tells_everybody(engine):
    await hold(engine)
    running = asyncio.create_task(tokens(engine, "0", [1], 99))
    while not await engine.call(lambda e: e.has_work):
        await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineDead, match="was stopped"):
        await running
    assert not engine.alive
    with pytest.raises(EngineDead):
        await tokens(engine, "1", [1], 1)


async def test_a_failure_tells_everybody(engine):
    def fail(plan, make_masks):
        raise RuntimeError("no luck")

    await engine.call(lambda e: setattr(e.runner, "dispatch", fail))
    results = await asyncio.gather(*(tokens(engine, str(i), [1], 9) for i in range(3)), return_exceptions=True)
    assert all(isinstance(error, EngineDead) and "no luck" in str(error) for error in results)
    assert not engine.alive


async def test_a_request_that_comes_while_a_step_runs_is_in_the_next_step(monkeypatch):
    """The second of two steps in flight is dispatched only when the first one's `wait` returns."""
    runs, ends, plans = threading.Event(), threading.Event(), []
    monkeypatch.setattr(Flying, "wait", lambda _: (runs.set(), ends.wait(PATIENCE_S)))
    scheduler = Scheduler(BlockPool(64, 4), Limits(100, 4, 16), vocab_size=VOCAB)
    runner = FakeRunner(64, 4, scheduler=scheduler)
    monkeypatch.setattr(runner, "dispatch", lambda *args: plans.append(args[0]) or FakeRunner.dispatch(runner, *args))
    engine = AsyncEngine(Engine(scheduler, runner, max_in_flight=2))
    engine.start()
    first = asyncio.create_task(tokens(engine, "a", [1], 9))
    await asyncio.to_thread(runs.wait, PATIENCE_S)
    second = asyncio.create_task(tokens(engine, "b", [2], 9))
    while engine._calls.empty():
        await asyncio.sleep(0.001)
    assert len(plans) == 2
    ends.set()
    assert len(await first) == len(await second) == 9
    assert [len(plan.admitted) for plan in plans[:3]] == [1, 0, 1]
    await engine.stop()
