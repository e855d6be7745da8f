"""A server on a port of its own, as its clients see it."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.test_utils import TestServer

from jpaged.config import EngineConfig
from jpaged.core.scheduler import Committed
from jpaged.engine.build import load_engine
from jpaged.engine.engine import StepOutput
from jpaged.serving.app import make_app
from jpaged.serving.service import ServerConfig, make_service

MAX_LEN = 256


def build(tiny, **config):
    limits = {"max_model_len": MAX_LEN, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return load_engine(EngineConfig(model=str(tiny), **limits | config), progress=False)


class Client:
    """A server on a port of its own, and a session with it."""

    def __init__(self, engine, tokenizer, sampling_defaults=None, *, tool_format=None, **config):
        self.engine = engine
        self.service = make_service(
            engine, tokenizer, "tiny", ServerConfig(**config), sampling_defaults=sampling_defaults,
            tool_format=tool_format,
        )  # fmt: skip
        self.app = make_app(self.service)

    async def __aenter__(self):
        self.server = TestServer(self.app)
        await self.server.start_server()
        self.session = aiohttp.ClientSession(self.server.make_url("/"))
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.server.close()

    async def post(self, path, body, status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def complete(self, prompt, status=200, **fields):
        return await self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields, status)

    async def chat(self, content, status=200, **fields):
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields, status)

    async def reset_prefix_cache(self):
        async with self.session.post("/reset_prefix_cache") as response:
            assert response.status == 200 and await response.read() == b""

    async def stream(self, path, body):
        """The chunks of a streamed answer; the protocol's frame is checked."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = (await response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    @asynccontextmanager
    async def held(self):
        """Within it the engine's steps do nothing, so that no request ends by itself."""
        nothing = StepOutput(None, Committed(), [], [])
        await self.service.engine.call(lambda e: setattr(e, "step", lambda: nothing))
        yield
        await self.service.engine.call(lambda e: delattr(e, "step"))

    async def running(self):
        while not await self.service.engine.call(lambda e: e.has_work):
            await asyncio.sleep(0.005)

    async def idle(self):
        """Waits until nothing runs; then no block may be in use."""

        def check(engine):
            engine.scheduler.check_invariants()
            return engine.has_work, engine.scheduler.pool.num_used

        for _ in range(200):
            work, used = await self.service.engine.call(check)
            if not work:
                assert used == 0
                return
            await asyncio.sleep(0.02)
        raise AssertionError("requests are still running")
