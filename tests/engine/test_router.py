"""Several engines behind the interface of one: affinity by prefix, balance, failures of one engine, the server."""

import asyncio
import re

import aiohttp
import pytest

from benchmarks.shared.server_process import ServerProcess
from jpaged import SamplingParams
from jpaged.config import EngineConfig
from jpaged.core.commands import ResetPrefixCache, UpdateParams
from jpaged.core.params import InvalidParameter
from jpaged.engine.async_engine import AsyncEngine, EngineDead, QueueFull
from jpaged.engine.router import Router
from jpaged.start.load import start_engine
from jpaged.start.setup import on_further_devices, prepare
from tests.serving import scripted
from tests.serving.client import MAX_LEN, Client, do_nothing
from tests.support.few_shapes import few_shapes
from tests.support.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def settled(engine):
    """Whether an engine has begun with as many of its requests as may run."""
    stats = engine.stats()
    return stats.num_waiting == 0 or stats.num_running == engine.limits.max_num_seqs


class Counting:
    """An observer that keeps the prompts of an engine."""

    def __init__(self):
        self.prompts = []

    def added(self, request):
        self.prompts.append(request.prompt_token_ids)

    def stepped(self, scheduler, output):
        pass

    def ended(self, request):
        pass


class Lab:
    """Two scripted engines behind a router."""

    def __init__(self, *, max_queue=None, step_seconds=0.0):
        self.inner = [scripted.load(step_seconds)[0] for _ in range(2)]
        self.seen = [Counting() for _ in self.inner]
        self.engines = [AsyncEngine(engine, [seen], max_queue=max_queue) for engine, seen in zip(self.inner, self.seen)]
        self.router = Router(self.engines)

    async def __aenter__(self):
        self.router.start()
        return self

    async def __aexit__(self, *_):
        await self.router.stop()

    async def generate(self, request_id, prompts, params=GREEDY, **options):
        """Return the tokens of each prompt."""
        found = {index: [] for index in range(len(prompts))}
        async with self.router.generate(request_id, prompts, params, **options) as parts:
            async for deltas in parts:
                for index, delta in deltas:
                    found[index] += delta.token_ids
        return [found[index] for index in range(len(prompts))]

    @property
    def counts(self):
        return [len(seen.prompts) for seen in self.seen]


def prefix(number, length=64):
    return [5 + number] * length


async def test_prompts_of_one_prefix_stay_with_one_engine_and_prefixes_are_spread():
    async with Lab() as lab:
        for turn in range(5):
            for number in range(4):
                await lab.generate(f"{turn} {number}", [[*prefix(number), 30 + turn]])
        owners = [{prompt[0] for prompt in seen.prompts} for seen in lab.seen]
        assert not owners[0] & owners[1] and lab.counts == [10, 10]


async def test_salts_separate_prefixes():
    async with Lab() as lab:
        await lab.generate("a", [prefix(0)], cache_salt="a")
        await lab.generate("b", [prefix(0)], cache_salt="b")
        assert lab.counts == [1, 1]


async def test_prompts_of_one_request_are_divided_and_keep_their_indexes():
    prompts = [prefix(number, 20 + number) for number in range(9)]
    async with Lab() as lab:
        together = await lab.generate("all", prompts)
        assert sorted(lab.counts) == [4, 5]
        alone = [(await lab.generate(str(index), [prompt]))[0] for index, prompt in enumerate(prompts)]
        assert together == alone
        with pytest.raises(InvalidParameter):
            await lab.generate("too long", [prefix(1), prefix(2, 10**6)])
        assert await lab.generate("after", prompts) == alone
        assert all(engine.stats().num_running == 0 for engine in lab.engines)


async def test_requests_that_come_before_others_are_accepted_are_divided():
    """Their prompts are shorter than a block, so that no prefix tells the engines apart."""
    async with Lab() as lab:
        await asyncio.gather(*(lab.generate(str(n), [[6 + n]]) for n in range(8)))
        assert lab.counts == [4, 4]
        assert lab.router._num_live == [0, 0]


async def test_leaving_aborts_the_requests_of_all_engines():
    async with Lab(step_seconds=0.01) as lab:
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        async with lab.router.generate("a", [prefix(n) for n in range(6)], long) as parts:
            await anext(parts)
        async with asyncio.timeout(PATIENCE_S):
            while lab.router.stats().num_running:
                await asyncio.sleep(0.01)
        stats = lab.router.stats()
        assert stats.num_waiting == stats.num_used_blocks == 0
        assert stats.num_blocks == sum(engine.stats().num_blocks for engine in lab.engines)
        assert stats.block_size == lab.engines[0].stats().block_size


async def test_an_engine_that_fails_breaks_its_own_requests_and_no_others():
    async with Lab() as lab:
        long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        run, left = lab.inner[0].step, iter(range(5))

        def some_steps():
            if sum(lab.counts) < 4:
                return do_nothing()
            return run() if next(left, None) is not None else 1 / 0

        lab.inner[0].step = some_steps
        tasks = [asyncio.create_task(lab.generate(str(n), [prefix(n)], long)) for n in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results].count(EngineDead) == 2
        assert [len(each[0]) for each in results if isinstance(each, list)] == [60, 60]
        assert lab.router.alive and not lab.engines[0].alive
        before = lab.counts
        for n in range(6):
            assert len((await lab.generate(f"after {n}", [prefix(n)]))[0]) == 6
        assert lab.counts == [before[0], before[1] + 6]
        await lab.router.control(ResetPrefixCache())
        lab.inner[1].step = lambda: 1 / 0
        for n in range(2):
            with pytest.raises(EngineDead):
                await lab.generate(f"dead {n}", [prefix(0)])
        assert not lab.router.alive


async def test_a_full_queue_is_that_of_all_engines():
    async with Lab(max_queue=1) as lab:
        limit = lab.inner[0].limits.max_num_seqs
        for engine in lab.inner:

            def admit(scheduler=engine.scheduler, run=engine.step):
                return run() if scheduler.waiting and len(scheduler.running) < limit else do_nothing()

            engine.step = admit  # nothing ends
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        same = [[*prefix(0), 30 + n % 40] for n in range(2 * limit + 8)]
        tasks = []
        for n, prompt in enumerate(same):
            tasks.append(asyncio.create_task(lab.generate(str(n), [prompt], long, client=None)))
            while sum(lab.counts) + sum(task.done() for task in tasks) <= n or not all(map(settled, lab.inner)):
                await asyncio.sleep(0.001)
        done = [task for task in tasks if task.done()]
        assert done and all(isinstance(task.exception(), QueueFull) for task in done)
        assert min(lab.counts) >= limit, "the other engine takes those that find the queue of the first full"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_parameters_are_given_to_each_engine():
    async with Lab() as lab:
        given = []
        for index, engine in enumerate(lab.engines):

            async def control(command, index=index):
                given.append((index, command.source, command.in_flight))

            engine.control = control
        await lab.router.control(UpdateParams(["a", "b"], "wait"))
        assert sorted(given) == [(0, "a", "wait"), (1, "b", "wait")]
        with pytest.raises(ValueError, match=r"^params: must be a list of 2 sources, one for each engine$"):
            await lab.router.control(UpdateParams(["a"]))
        await lab.engines[0].stop()
        given.clear()
        await lab.router.control(UpdateParams(["a", "b"]))
        await lab.router.control(UpdateParams("c"))
        assert given == [(1, "b", "recompute"), (1, "c", "recompute")], "an ended engine keeps its place in the list"
        await lab.engines[1].stop()
        with pytest.raises(EngineDead):
            await lab.router.control(ResetPrefixCache())


async def test_one_metrics_page_has_both_engines():
    engines, tokenizer = zip(*(scripted.load() for _ in range(2)))
    async with Client(engines, tokenizer[0], model_name="demo") as client:
        await asyncio.gather(*(client.complete([6 + n] * 40, max_tokens=2) for n in range(4)))
        async with client.session.get("/metrics") as response:
            text = await response.text()
        for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:prompt_tokens_total"):
            assert set(re.findall(rf'{name}\{{engine="(\d)"', text)) == {"0", "1"}, name
        counts = re.findall(r'^vllm:prompt_tokens_total\{engine="\d",model_name="demo"\} (.*)$', text, re.M)
        assert list(map(float, counts)) == [80, 80]
        async with client.session.get("/get_server_info") as response:
            info = await response.json()
        assert (info["dp_size"], info["tp_size"], info["status"]) == (2, 1, "ready")


PROMPTS = ["Once upon a time", "The little fox", "Who are you?", "One day, a girl named"]
GENERATED = re.compile(r'^vllm:generation_tokens_total\{engine="\d",model_name="demo"\} (.*)$', re.M)


def texts(demo) -> list[str]:
    """Return the texts of one engine after the prompts."""
    params = SamplingParams(temperature=0, max_tokens=16)
    return [output.outputs[0].text for output in demo.generate(PROMPTS, params, use_tqdm=False)]


async def test_two_engines_on_devices_of_their_own_equal_one(tiny, loaded):
    config = EngineConfig(
        model=str(tiny), max_num_seqs=16, max_num_batched_tokens=64, max_model_len=MAX_LEN, block_size=8
    )
    setups = on_further_devices(prepare(config), 2)
    with few_shapes():
        engines = tuple(start_engine(each, progress=False) for each in setups)
    assert len({each.runner.placement.device for each in engines}) == 2
    async with Client(*loaded) as client:
        expected = await client.complete(PROMPTS, max_tokens=16)
    async with Client(engines, setups[0].tokenizer, model_name="demo") as client:
        body = await client.complete(PROMPTS, max_tokens=16)
        async with client.session.get("/metrics") as response:
            tokens = GENERATED.findall(await response.text())
    assert [choice["text"] for choice in body["choices"]] == [choice["text"] for choice in expected["choices"]]
    assert len(tokens) == 2 and all(float(each) > 0 for each in tokens)


@pytest.mark.deep
@pytest.mark.parametrize("num_devices", [1, 2])
async def test_a_server_with_two_engines_equals_one(demo, num_devices):
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "256",
             "--num-gpu-blocks-override", "64")  # fmt: skip
    parallel = ("--data-parallel-size", "2", "--tensor-parallel-size", str(num_devices))
    with ServerProcess(*flags, *parallel, env={"JAX_NUM_CPU_DEVICES": str(2 * num_devices)}) as server:
        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": PROMPTS, "temperature": 0, "max_tokens": 16}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                found = [choice["text"] for choice in (await response.json())["choices"]]
            async with session.get(f"{server.url}/server_info") as response:
                info = await response.json()
            async with session.get(f"{server.url}/metrics") as response:
                text = await response.text()
    assert found == texts(demo)
    assert (info["dp_size"], info["tp_size"], info["model_type"]) == (2, num_devices, "llama")
    tokens = GENERATED.findall(text)
    assert len(tokens) == 2 and all(float(each) > 0 for each in tokens)
