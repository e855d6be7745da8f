"""An engine without a model behind the routes of the page, and a viewer of its feed."""

import asyncio
import base64
import json
import time
import zlib
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from jpaged.core.params import SamplingParams
from jpaged.engine.async_engine import AsyncEngine
from jpaged.engine.engine import Engine, StepOutput
from jpaged.serving.endpoint import SERVED
from jpaged.serving.live import static
from jpaged.serving.live.feed import Feed
from jpaged.serving.live.recorder import Recorder
from jpaged.serving.live.snapshot import snapshot
from jpaged.serving.middleware import errors
from jpaged.serving.service import SERVICE, ServerConfig
from tests.core import traffic
from tests.support.models import byte_tokenizer


class HeldEngine(Engine):
    """An engine that takes as many steps as `allowed`."""

    allowed = 0

    def step(self):
        if not self.allowed:
            time.sleep(0.002)
            return StepOutput()
        self.allowed -= 1
        return super().step()


def make(*args, engine=Engine, clock=time.monotonic, **options):
    """Return an engine without a model."""
    scheduler, runner = traffic.make(*args, **options)
    return engine(scheduler, runner, byte_tokenizer(), clock=clock)


def expected(engine, recorder):
    """Return the blocks of a snapshot, computed from every table."""
    scheduler = engine.scheduler
    pool, owners = scheduler.pool, [0] * scheduler.pool.num_blocks
    for block_id in range(pool.num_blocks):
        for request in scheduler.running:
            if any(block_id in sequence.table.held for sequence in request.live):
                owners[block_id] = recorder.number(request)
                break
    states = [min(pool.ref_count(i), 127) + 128 * pool.is_cached(i) for i in range(pool.num_blocks)]
    return bytes([number & 255 for number in owners] + [number >> 8 for number in owners] + states)


class Mirror:
    """The state of a viewer."""

    def __init__(self):
        self.blocks, self.frames = b"", []

    def take(self, data: bytes):
        frame = json.loads(data.removeprefix(b"data: "))
        if "dead" not in frame:
            change = zlib.decompress(base64.b64decode(frame["map"]))
            if frame["whole"]:
                self.blocks = change
            else:
                assert frame["frame"] == self.frames[-1]["frame"] + 1
                self.blocks = bytes(a ^ b for a, b in zip(self.blocks, change, strict=True))
        self.frames.append(frame)
        return frame


class Server:
    """The routes of the page and its feed on a port of their own."""

    def __init__(self, engine, read=snapshot):
        self.inner, self.recorder, self.read = engine, Recorder(), read
        self.engine = AsyncEngine(engine, [self.recorder])

    def sample(self):
        return self.engine.call(lambda engine: self.read(engine.scheduler, self.recorder))

    async def __aenter__(self):
        app = web.Application(middlewares=[errors])
        app[SERVED], app[SERVICE] = (), SimpleNamespace(config=ServerConfig())
        feed = Feed(self.engine, self.sample, self.recorder)
        app.add_routes(web.get(path, static.sender(name)) for path, name in static.PAGE_FILES.items())
        app.add_routes([web.get("/live", feed.watch), web.get("/live/requests/{request_id}", feed.number)])
        self.engine.start()
        self.server = TestServer(app)
        await self.server.start_server()
        self.session = aiohttp.ClientSession(self.server.make_url("/"))
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.server.close()
        await self.engine.stop()

    @asynccontextmanager
    async def watch(self, **headers):
        """Yield a mirror and a function that applies the next frame."""
        async with self.session.get("/live", headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            mirror = Mirror()

            async def following():
                data = await response.content.readuntil(b"\n\n")
                return mirror.take(data)

            yield mirror, following

    @asynccontextmanager
    async def running(self, count, request_id="r{}", **params):
        """Run requests within the block."""
        params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | params)

        async def one(i):
            async with self.engine.generate(request_id.format(i), [[7, 8, 9, 10, i]], params) as parts:
                return [delta async for deltas in parts for _, delta in deltas]

        tasks = [asyncio.create_task(one(i)) for i in range(count)]
        yield tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def allow(self, steps):
        await self.engine.call(lambda engine: setattr(engine, "allowed", steps))
        while await self.engine.call(lambda engine: engine.allowed and engine.has_work):
            await asyncio.sleep(0.002)
