"""The feed of the pool: its frames, its viewers, and the privacy of requests."""

import asyncio
import json
import time
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web

from jpaged.core.params import SamplingParams
from jpaged.serving.live import feed
from jpaged.serving.live.snapshot import Snapshot, snapshot
from tests.serving.live import HeldEngine, Server, expected, make
from tests.support.fake_runner import VOCAB
from tests.support.patience import PATIENCE_S


async def test_frames_together_give_the_pool():
    async with Server(make(blocks=40, engine=HeldEngine)) as server, server.watch() as (mirror, following):
        first = await following()
        assert first["whole"] and first["num_blocks"] == 40 and first["used"] == 0
        async with server.running(5, n=2):
            for steps in (1, 1, 3, 9):
                await server.allow(steps)
                state = await server.engine.call(lambda engine: expected(engine, server.recorder))
                while mirror.blocks != state:
                    await asyncio.wait_for(following(), PATIENCE_S)
        assert any(state), "nothing was ever in the pool"
    assert [frame["whole"] for frame in mirror.frames] == [True] + [False] * (len(mirror.frames) - 1)
    serials = [event["serial"] for frame in mirror.frames for event in frame["events"]]
    assert serials == list(range(1, 1 + len(serials))) and serials, "an event is missing or comes twice"


async def test_feed_contains_no_text_and_no_request_id():
    secret, text = "request-of-another-client", "a text that is private"
    async with Server(make(blocks=64)) as server, server.session.get("/live") as response:
        options = {"prompt": text, "cache_salt": "salt-of-another-client"}
        tokens = [ord(c) % VOCAB for c in text]
        output = ""
        async with server.engine.generate(secret, [tokens], SamplingParams(max_tokens=20), **options) as parts:
            async for deltas in parts:
                output += "".join(delta.text for _, delta in deltas)
        raw = b""
        while b'"kind":"end"' not in raw:
            raw += await asyncio.wait_for(response.content.readuntil(b"\n\n"), PATIENCE_S)
    assert len(output) >= 10
    for private in (secret, "another-client", text, "private", output, ",".join(map(str, tokens[:6]))):
        assert private.encode() not in raw and json.dumps(private)[1:-1].encode() not in raw


async def test_number_of_a_request_needs_its_id():
    async with Server(make(engine=HeldEngine)) as server, server.running(2):
        await server.allow(1)
        async with server.session.get("/live/requests/r1-0") as response:
            assert response.status == 200 and await response.json() == {"number": 2}
        async with server.session.get("/live/requests/r") as response:
            assert response.status == 404 and "request" in (await response.json())["error"]["message"]


async def test_slow_viewer_gets_fewer_frames_and_delays_no_other(monkeypatch):
    monkeypatch.setattr(feed, "LEAST_PAUSE", 0.01)
    gate, write = asyncio.Event(), web.StreamResponse.write
    stuck = []

    async def slow(response, data):
        if response._req.headers.get("Slow"):
            stuck.append(data)
            await gate.wait()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", slow)
    async with Server(make(blocks=40, engine=HeldEngine)) as server, server.running(3):
        async with server.watch(Slow="yes") as (late, next_late), server.watch() as (mirror, following):
            for _ in range(10):
                await server.allow(1)
                await asyncio.wait_for(following(), PATIENCE_S)
            assert len(stuck) == 1, "frames pile up"
            gate.set()
            while len(late.frames) < 2 or late.blocks != mirror.blocks:
                await asyncio.wait_for(next_late(), PATIENCE_S)
                await asyncio.wait_for(following(), PATIENCE_S)
        assert [frame["whole"] for frame in late.frames[:3]][:2] == [True, True]
        assert late.frames[1]["frame"] > late.frames[0]["frame"] + 5
        assert [frame["whole"] for frame in mirror.frames[1:]] == [False] * (len(mirror.frames) - 1)


async def test_viewer_that_never_reads_is_disconnected(monkeypatch):
    monkeypatch.setattr(feed, "FRAME_TIMEOUT_S", 0.05)

    async def never(response, data):
        await asyncio.sleep(60)

    async with Server(make()) as server:
        with monkeypatch.context() as patched:
            patched.setattr(web.StreamResponse, "write", never)
            async with server.watch() as (_, following):
                with pytest.raises(aiohttp.ClientPayloadError):
                    await asyncio.wait_for(following(), PATIENCE_S)
        async with server.watch() as (_, following):
            assert (await following())["whole"]


async def test_number_of_viewers_is_limited(monkeypatch):
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    async with Server(make()) as server:
        async with server.watch() as (_, one), server.watch() as (_, two):
            await one()
            await two()
            async with server.session.get("/live") as response:
                assert response.status == 503
                assert "2 viewers" in (await response.json())["error"]["message"]
        status = 503
        async with asyncio.timeout(PATIENCE_S):
            while status == 503:  # The server notices a disconnect later.
                async with server.session.get("/live") as response:
                    status = response.status
        assert status == 200


async def test_pool_is_read_only_for_viewers_and_at_a_limited_rate(monkeypatch):
    readings, costs = [], []

    def read(scheduler, recorder):
        readings.append(time.monotonic())
        seen = snapshot(scheduler, recorder)
        return Snapshot(seen.blocks, seen.facts, seen.events, seen.time, costs[-1])

    monkeypatch.setattr(feed, "HEARTBEAT", 0.1)
    async with Server(make(), read) as server:
        await asyncio.sleep(0.25)
        assert not readings
        for cost, least in (0.0, feed.LEAST_PAUSE), (0.005, 0.005 / feed.SHARE):
            costs.append(cost)
            readings.clear()
            async with server.watch() as (_, one), server.watch() as (_, two):
                while len(readings) < 4:
                    await asyncio.gather(one(), two())
            pauses = [b - a for a, b in pairwise(readings)]
            assert min(pauses) > 0.95 * least
            last = 0
            async with asyncio.timeout(PATIENCE_S):
                while len(readings) > last:  # The server notices a disconnect later.
                    last = len(readings)
                    await asyncio.sleep(0.4)


async def test_frame_without_changes_is_only_sent_as_a_heartbeat(monkeypatch):
    monkeypatch.setattr(feed, "LEAST_PAUSE", 0.02)
    monkeypatch.setattr(feed, "HEARTBEAT", 0.3)
    async with Server(make()) as server, server.watch() as (_, following):
        times = [(await following())["time"] for _ in range(4)]
    assert all(b - a >= 0.29 for a, b in pairwise(times))


async def test_engine_failure_is_sent_without_its_message():
    def die(plan, make_masks):
        raise RuntimeError("words of another client")

    async with Server(make()) as server:
        async with server.session.get("/live") as response:
            await response.content.readuntil(b"\n\n")
            server.inner.runner.dispatch = die
            async with server.running(1):
                rest = await asyncio.wait_for(response.content.read(), PATIENCE_S)
        assert rest.endswith(b'data: {"dead":true}\n\n') and b"words" not in rest
        async with server.session.get("/live") as response:
            assert await response.content.read() == b'data: {"dead":true}\n\n'
