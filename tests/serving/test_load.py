"""Under load every stream is whole and in order, refusals are clean, and no client holds another up. The cases are
those of tests/attack/load.py, on servers in processes of their own."""

import asyncio
import os
import signal
import time

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

SCRIPTED = "tests.serving.scripted"
STREAMS = {"case": "streams", "streams": 2, "whole": 2, "wrong": 0, "garbled": 0, "most_running": 256,
           "max_running": 256}  # fmt: skip


@pytest.mark.deep
async def test_a_thousand_streams_half_of_the_clients_gone_a_slow_reader_and_sigterm():
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


async def test_256_streams_at_once_are_whole_and_half_of_their_clients_may_vanish():
    """The same with a scripted model, which costs nothing: the server, the scheduler and the pool are the same."""
    flags = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "2048")
    with ServerProcess(*flags, "--step-seconds", "0.05", module=SCRIPTED) as server:
        many = await streams(server.url, 300, num_tokens=24, num_alone=2, max_running=256)
        assert not problems(many), many
        assert many["most_at_once"] == 300, many
        half = await vanishing(server.url, 300, num_tokens=40)
        assert not problems(half), half
        assert half["vanished"] > 120 and half["stayed"] == 150, half


async def test_beyond_the_queues_limit_there_are_clean_503s_and_the_rest_is_whole():
    flags = ("--max-queue", "8", "--max-num-seqs", "2", "--step-seconds", "0.01")
    with ServerProcess(*flags, module=SCRIPTED) as server:
        row = await full_queue(server.url, 100, num_tokens=30)
        assert not problems(row), row
        assert row["refused"] > 50 and row["whole"] >= 8, row
        assert (await state_of(server.url)).idle
        async with clients(server.url) as session:  # it is not the worse for it
            assert (await ask(session, body(0, 4))).is_whole(4)
            async with session.get("/metrics") as response:
                counted = f'vllm:num_requests_rejected_total{{model_name="demo"}} {row["refused"]:.1f}'
                assert counted in await response.text()


async def test_clients_that_vanish_leave_no_block_behind(client):
    """Check to the block: every used block is in a table of the others, or a step in flight still writes it."""

    def check(engine):
        engine.scheduler.check_invariants()
        sequences = [s for r in engine.scheduler.running for s in r.sequences] + [*engine.scheduler.leaving]
        held = {block for s in sequences for block in s.table.block_ids}
        return len(engine.scheduler.running), len(engine.scheduler.waiting), engine.scheduler.pool.num_used, len(held)

    url = str(client.server.make_url("/"))
    async with clients(url) as leaving, clients(url) as staying:
        progress = [Answer() for _ in range(24)]  # 16 may run
        tasks = [
            asyncio.create_task(ask(leaving if i % 2 else staying, body(i, 150), answer=progress[i])) for i in range(24)
        ]

        async def all_came() -> bool:
            running, waiting, *_ = await client.service.engine.call(check)
            return running + waiting + sum(answer.done for answer in progress) == 24 and progress[0].token_ids != []

        await until(all_came, 30)
        async with client.held():
            for task in tasks[1::2]:
                task.cancel()
            unfinished = sum(not answer.done for answer in progress[::2])

            async def free() -> bool:
                running, waiting, used, held = await client.service.engine.call(check)
                return running + waiting <= unfinished and used == held

            await until(free, 2)
        assert all(answer.is_whole(150) for answer in await asyncio.gather(*tasks[::2]))


async def test_a_slow_reader_is_cut_off_when_its_time_is_up():
    with ServerProcess("--request-timeout", "3", module=SCRIPTED) as server:
        before = (await state_of(server.url)).files
        # Some ten megabytes: more than sockets hold.
        long = body(0, 400) | {"prompt": ["a", "b", "c", "d"], "n": 16, "logprobs": 20}
        with SlowReader(server.url, long) as reader:

            async def connected() -> bool:
                return (await state_of(server.url)).files > before

            async def cut_off() -> bool:
                now = await state_of(server.url)
                return now.idle and now.files <= before

            await until(connected, 30)
            await until(cut_off, 60)
            assert b"[DONE]" not in await asyncio.to_thread(reader.rest)  # of what its socket holds
        async with clients(server.url) as session:
            assert (await ask(session, body(0, 4))).is_whole(4)


@pytest.mark.parametrize("flags, signals", [(("--drain-timeout", "1"), 1), ((), 2)], ids=["timeout", "second signal"])
async def test_what_is_not_finished_when_draining_ends_is_told_so(flags, signals):
    with ServerProcess(*flags, "--step-seconds", "0.05", module=SCRIPTED) as server:
        async with clients(server.url) as session:
            requests = [body(i, 400, stream=i % 2 == 0) for i in range(8)]  # twenty seconds of them
            tasks = [asyncio.create_task(ask(session, request)) for request in requests]

            async def running() -> bool:
                return (await state_of(server.url)).running >= 8

            await until(running, 30)
            start = time.monotonic()
            for _ in range(signals):
                os.kill(server.process.pid, signal.SIGTERM)
                await asyncio.to_thread(server.wait_for_log, "shutting down: finishing")
            answers = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(server.process.wait, 30) == 0
        assert time.monotonic() - start < 15
        for request, answer in zip(requests, answers):
            assert answer.error and answer.error["code"] == "service_unavailable", answer
            assert answer.done and answer.status == (200 if request["stream"] else 503), answer
        assert "ending 8 requests that have not finished" in server.log()


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
def test_what_is_wrong_is_told(row, told):
    assert problems(row) == told
