"""Routers of other projects in front of unmodified servers: affinity by prefix, and the death of a worker."""

import asyncio
import collections
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import aiohttp
import pytest

from benchmarks.shared.server_process import ServerProcess
from tests.support.patience import PATIENCE_S

SCRIPTED = "tests.serving.scripted"
STORIES = [f"{name} had a {thing}. {name} took it along every day, and one day it was gone. " * 2
           for name in ("Max", "Lily", "Tom", "Ben") for thing in ("kite", "boat", "ball")]  # fmt: skip

needs_smg = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="smg is not installed: pip install smg")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def smg(*workers: str):
    """The router of SGLang's makers on a free port, in front of some servers; yields its URL."""
    port = free_port()
    program = shutil.which("smg", path=str(sys.executable).rpartition("/")[0])
    command = [
        program, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers, "--policy",
        "cache_aware", "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def ready(session: aiohttp.ClientSession, url: str, num_workers: int) -> None:
    """Wait until the router knows all workers and passes a request on."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            async with session.get(f"{url}/workers") as response:
                workers = (await response.json())["workers"]
            if len(workers) == num_workers and (await complete(session, url, "Hello"))[0] == 200:
                return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise AssertionError("the router passes nothing on")


async def complete(session, url, prompt, **options) -> tuple[int, str]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, await response.text()


@needs_smg
@pytest.mark.deep
async def test_smg_keeps_prefixes_together_and_loses_only_the_streams_of_a_killed_worker():
    flags = ("--step-seconds", "0.01")
    with (
        ServerProcess(*flags, module=SCRIPTED) as first,
        ServerProcess(*flags, module=SCRIPTED, clean=False) as second,
        smg(first.url, second.url) as url,
    ):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            await ready(session, url, 2)
            # At the same time, so that the router has a reason to use both workers.
            assert all(await asyncio.gather(*(stream(session, url, story) for story in STORIES)))
            before = [requests(server) for server in (first, second)]
            where = collections.defaultdict(collections.Counter)
            for turn in range(2):
                for number, story in enumerate(STORIES):
                    status, text = await complete(session, url, f"{story}On day {turn},")
                    assert status == 200, text
                    now = [requests(server) for server in (first, second)]
                    where[number][[new - old for new, old in zip(now, before)].index(1)] += 1
                    before = now
            assert all(len(workers) == 1 for workers in where.values()), where
            assert {worker for workers in where.values() for worker in workers} == {0, 1}, where
            chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
                assert response.status == 200, await response.text()

            streams = [asyncio.create_task(stream(session, url, f"{story}And then")) for story in STORIES]
            await asyncio.sleep(0.5)
            alive = await running(first)
            second.process.kill()
            ended = await asyncio.gather(*streams)
            assert 0 < alive < len(STORIES) and ended.count(True) == alive, (alive, ended)
            statuses = collections.Counter([(await complete(session, url, story))[0] for story in STORIES])
            assert statuses[200] >= len(STORIES) - 3, statuses


async def running(server: ServerProcess) -> int:
    return int(await asyncio.to_thread(server.metric, "vllm:num_requests_running"))


def requests(server: ServerProcess) -> int:
    return int(server.metric("vllm:request_prompt_tokens_count"))


async def stream(session: aiohttp.ClientSession, url: str, prompt: str) -> bool:
    """Whether a stream arrives whole."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 150, "stream": True, "ignore_eos": True}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            return "data: [DONE]" in (text := await response.text()) and '"error"' not in text
    except aiohttp.ClientError:
        return False
