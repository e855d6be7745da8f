"""Shutdown: running requests finish or get an error, new ones are rejected, and the process exits with 0."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request

import pytest

from benchmarks.shared.server_process import ServerProcess
from tests.attack.load import ask, body, clients, state_of, until
from tests.serving.scripted import say
from tests.support.patience import PATIENCE_S

SCRIPTED = "tests.serving.scripted"


async def test_draining_server_rejects_new_requests_and_finishes_running_ones(client):
    async with client.held():
        task = asyncio.create_task(client.complete("Hello", max_tokens=200, ignore_eos=True))
        await client.running()
        client.service.draining = True
        assert "shutting down" in (await client.complete("late", 503))["error"]["message"]
        async with client.session.get("/health") as response:
            assert response.status == 503
    assert (await task)["usage"]["completion_tokens"] == 200
    client.service.draining = False


def test_sigterm_finishes_running_requests_rejects_new_ones_and_exits_with_0():
    def post(url):
        fields = {"prompt": say("word " * 60), "max_tokens": 120, "ignore_eos": True, "stream": True}
        data = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
        return urllib.request.urlopen(f"{url}/v1/completions", data, timeout=PATIENCE_S)

    with ServerProcess("--step-seconds", "0.01", module=SCRIPTED) as server:
        with post(server.url) as running:
            first = running.readline()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("shutting down: finishing 1 requests")
            with pytest.raises(urllib.error.URLError):  # HTTP 503, or a connection that is refused
                post(server.url).close()
            lines = [first, *running]
        assert server.process.wait(PATIENCE_S) == 0
    assert lines[-2] == b"data: [DONE]\n"
    assert json.loads(lines[-4].removeprefix(b"data: "))["usage"]["completion_tokens"] == 120


@pytest.mark.parametrize("flags, signals", [(("--drain-timeout", "1"), 1), ((), 2)], ids=["timeout", "second signal"])
async def test_request_that_is_unfinished_at_the_end_of_draining_gets_an_error(flags, signals):
    with ServerProcess(*flags, "--step-seconds", "0.05", module=SCRIPTED) as server:
        async with clients(server.url) as session:
            requests = [body(i, 400, stream=i % 2 == 0) for i in range(8)]  # twenty seconds each
            tasks = [asyncio.create_task(ask(session, request)) for request in requests]

            async def running() -> bool:
                return (await state_of(server.url)).running >= 8

            await until(running, PATIENCE_S)
            for _ in range(signals):
                os.kill(server.process.pid, signal.SIGTERM)
                await asyncio.to_thread(server.wait_for_log, "shutting down: finishing")
            answers = await asyncio.gather(*tasks)
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
        for request, answer in zip(requests, answers):
            assert answer.error and answer.error["code"] == "service_unavailable", answer
            assert answer.done and answer.status == (200 if request["stream"] else 503), answer
        assert "ending 8 requests that have not finished" in server.log()
