"""Load: many concurrent streams, a full queue, slow and vanishing clients; concurrent and sequential requests give the
same responses. The cases of tests/attack/load.py run on servers in processes of their own."""

import asyncio
import random

import pytest

from benchmarks.shared.server_process import ServerProcess
from tests.attack.load import (
    WIDE,
    Answer,
    SlowReader,
    ask,
    body,
    clients,
    full_queue,
    problems,
    slow_reader,
    state_of,
    streams,
    terminated,
    until,
    vanishing,
)
from tests.serving.client import Client, smaller, texts
from tests.support.patience import PATIENCE_S

SCRIPTED = "tests.serving.scripted"
STREAMS = {"case": "streams", "streams": 2, "whole": 2, "wrong": 0, "garbled": 0, "most_running": 256,
           "max_running": 256}  # fmt: skip


@pytest.mark.deep
async def test_1000_streams_with_disconnects_a_slow_reader_and_sigterm_are_whole():
    with ServerProcess(*WIDE, start_within=600) as server:
        thousand = await streams(server.url, 1000, num_tokens=8, num_alone=50, max_running=256)
        assert not problems(thousand), thousand
        assert thousand["most_at_once"] > 256 and thousand["compared"] == 50, thousand
        half = await vanishing(server.url, 1000, num_tokens=64)
        assert not problems(half), half
        assert half["vanished"] > 400 and half["stayed"] == 500, half
        slow = await slow_reader(server.url, 10, num_tokens=8)
        assert not problems(slow), slow
        assert slow["grown_mib"] < 200, slow
        ended = await terminated(server, 40, num_tokens=48)
        assert not problems(ended), ended
        assert ended["unfinished"] > 20, ended


@pytest.mark.deep
async def test_256_concurrent_streams_are_whole_and_half_of_the_clients_may_disconnect():
    """Use a scripted model, which costs no time, with the server, the scheduler and the pool of a real one."""
    flags = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "2048")
    with ServerProcess(*flags, "--step-seconds", "0.05", module=SCRIPTED) as server:
        many = await streams(server.url, 300, num_tokens=24, num_alone=2, max_running=256)
        assert not problems(many), many
        assert many["most_at_once"] == 300, many
        half = await vanishing(server.url, 300, num_tokens=40)
        assert not problems(half), half
        assert half["vanished"] > 120 and half["stayed"] == 150, half


async def test_full_queue_rejects_with_503_and_serves_the_other_requests():
    flags = ("--max-queue", "8", "--max-num-seqs", "2", "--step-seconds", "0.01")
    with ServerProcess(*flags, module=SCRIPTED) as server:
        row = await full_queue(server.url, 100, num_tokens=30)
        assert not problems(row), row
        assert row["refused"] > 50 and row["whole"] >= 8, row

        async def idle() -> bool:
            return (await state_of(server.url)).idle

        await until(idle, PATIENCE_S)
        async with clients(server.url) as session:  # The server still works.
            assert (await ask(session, body(0, 4))).is_whole(4)
            async with session.get("/metrics") as response:
                counted = f'vllm:num_requests_rejected_total{{model_name="demo"}} {row["refused"]:.1f}'
                assert counted in await response.text()


async def test_disconnected_clients_leave_no_block_in_use(client):
    """Check that every used block is in a table of another request, or that a step in flight still writes it."""

    def check(engine):
        engine.scheduler.check_invariants()
        sequences = [s for r in engine.scheduler.running for s in r.sequences] + [*engine.scheduler.memory.leaving]
        held = {block for s in sequences for block in s.table.held}
        return len(engine.scheduler.running), len(engine.scheduler.waiting), engine.scheduler.pool.num_used, len(held)

    url = str(client.server.make_url("/"))
    async with clients(url) as leaving, clients(url) as staying:
        progress = [Answer() for _ in range(24)]  # At most 16 run.
        tasks = [
            asyncio.create_task(ask(leaving if i % 2 else staying, body(i, 150), answer=progress[i])) for i in range(24)
        ]

        async def all_came() -> bool:
            running, waiting, *_ = await client.service.engine.call(check)
            return running + waiting + sum(answer.done for answer in progress) == 24 and progress[0].token_ids != []

        await until(all_came, PATIENCE_S)
        async with client.held():
            for task in tasks[1::2]:
                task.cancel()
            unfinished = sum(not answer.done for answer in progress[::2])

            async def free() -> bool:
                running, waiting, used, held = await client.service.engine.call(check)
                return running + waiting <= unfinished and used == held

            await until(free, PATIENCE_S)
        assert all(answer.is_whole(150) for answer in await asyncio.gather(*tasks[::2]))


async def test_slow_reader_is_disconnected_after_the_request_timeout():
    with ServerProcess("--request-timeout", "1", module=SCRIPTED) as server:
        before = (await state_of(server.url)).files
        # The response has some six megabytes, more than the sockets' buffers hold.
        long = body(0, 250) | {"prompt": ["a", "b", "c", "d"], "n": 16, "logprobs": 20}
        with SlowReader(server.url, long) as reader:

            async def connected() -> bool:
                return (await state_of(server.url)).files > before

            async def cut_off() -> bool:
                now = await state_of(server.url)
                return now.idle and now.files <= before

            await until(connected, PATIENCE_S)
            await until(cut_off, PATIENCE_S)
            assert b"[DONE]" not in await asyncio.to_thread(reader.rest)  # The bytes in the socket's buffer.
        async with clients(server.url) as session:
            assert (await ask(session, body(0, 4))).is_whole(4)


TRAFFIC = [
    pytest.param({}, id="plenty", marks=pytest.mark.deep),
    pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16", marks=pytest.mark.deep),
    pytest.param({"enable_prefix_caching": False}, id="no prefix cache", marks=pytest.mark.deep),
    pytest.param({"num_blocks": 28}, id="preemption"),
    pytest.param(
        {"num_blocks": 28, "enable_prefix_caching": False}, id="preemption, no prefix cache", marks=pytest.mark.deep
    ),
]


@pytest.fixture(scope="module")
def traffic():
    """Return the prompts and lengths of 64 requests, some with a common prefix."""
    rng = random.Random(5)
    common = "The quick brown fox jumps over the lazy dog. "
    prompts = [
        (common if rng.random() < 0.4 else "") + "".join(rng.choices("abc xyz", k=rng.randint(1, 120)))
        for _ in range(64)
    ]  # fmt: skip
    lengths = [rng.randint(1, 40) for _ in prompts]
    return prompts, lengths


@pytest.fixture(scope="module")
def sequential(loaded, traffic):
    """Return the responses to the same requests, sent one after the other."""

    async def one_by_one():
        async with Client(*loaded) as client:
            return [answer(await client.complete(p, max_tokens=n, logprobs=0)) for p, n in zip(*traffic)]

    return asyncio.run(one_by_one())


def answer(body):
    (choice,) = body["choices"]
    return choice["text"], choice["logprobs"]["tokens"]


@pytest.mark.parametrize("config", TRAFFIC)
async def test_64_concurrent_requests_give_the_responses_of_sequential_ones(loaded, traffic, sequential, config):
    async with smaller(loaded, **config) as (engine, *rest), Client(engine, *rest) as client:
        bodies = await asyncio.gather(
            *(client.complete(prompt, max_tokens=length, logprobs=0) for prompt, length in zip(*traffic))
        )
        await client.idle()
    assert [answer(body) for body in bodies] == sequential
    if "num_blocks" in config:
        assert engine.scheduler.num_preemptions > 10
    assert client.service.in_flight == set()


async def test_concurrent_sampled_requests_give_the_responses_of_sequential_ones(api):
    fields = [{"seed": i, "temperature": 1.0, "max_tokens": 8 + i} for i in range(24)]
    together = await asyncio.gather(*(api.complete("The little fox", **each) for each in fields))
    for i in (0, 11, 23):
        assert texts(await api.complete("The little fox", **fields[i])) == texts(together[i])


@pytest.mark.parametrize(
    "row, told",
    [
        (STREAMS | {"whole": 1}, ["whole is 1, not 2"]),
        (STREAMS | {"wrong": 1}, ["wrong is 1, not 0"]),
        (STREAMS | {"most_running": 16}, ["most_running is 16, not 256"]),
        ({"case": "full queue", "requests": 9, "refused": 5, "clean": 4, "whole": 4}, ["clean is 4, not 5"]),
        (
            {"case": "vanishing", "stayed": 2, "whole": 2, "seconds_to_free": 2.5, "cpu_to_free_s": 2.1},
            ["blocks were free after 2.5 s"],
        ),
        (
            {"case": "slow reader", "others": 1, "whole": 1, "still_reading": True, "without_s": 0.1, "beside_s": 2.0},
            ["others took 2.00 s, not 0.10 s"],
        ),
        (
            {"case": "terminated", "requests": 2, "whole": 1, "exit_status": 0, "after_status": 0, "late_status": 503},
            ["whole is 1, not 2"],
        ),
    ],
)
def test_problems_of_a_result_are_reported(row, told):
    assert problems(row) == told
