"""The page's files and the feed of the pool, over an engine without a model."""

import asyncio
import base64
import json
import random
import re
import time
import zlib
from contextlib import asynccontextmanager
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from jpaged.core.params import SamplingParams
from jpaged.core.scheduler import Committed
from jpaged.engine.async_engine import AsyncEngine
from jpaged.engine.engine import Engine, StepOutput
from jpaged.serving.live import feed, static
from jpaged.serving.live.feed import Frame
from jpaged.serving.live.recorder import MAX_EVENTS, MAX_KNOWN, MAX_NUMBER, Recorder
from jpaged.serving.live.snapshot import MAX_LISTED, MAX_REQUESTS, MAX_TABLE, Snapshot, snapshot
from jpaged.serving.middleware import errors
from tests.core import traffic
from tests.fake_runner import VOCAB
from tests.models import byte_tokenizer


class Clock:
    """Counts how often it is asked."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class HeldEngine(Engine):
    """Steps as often as it is allowed to."""

    allowed = 0

    def step(self):
        if not self.allowed:
            time.sleep(0.002)
            return StepOutput(None, Committed(), [], [])
        self.allowed -= 1
        return super().step()


def make(*args, engine=Engine, **options):
    scheduler, runner = traffic.make(*args, **options)
    return engine(scheduler, runner, byte_tokenizer())


def step(engine, recorder):
    """The calls of AsyncEngine."""
    output = engine.step()
    recorder.stepped(engine.scheduler, output)
    for request in output.ended:
        recorder.ended(request)


def told(recorder, kind):
    return [{k: v for k, v in e.items() if k not in ("serial", "kind")} for e in recorder.events if e["kind"] == kind]


def expected(engine, recorder):
    """The blocks as a snapshot gives them, by the slow way."""
    scheduler = engine.scheduler
    pool, owners = scheduler.pool, [0] * scheduler.pool.num_blocks
    for block_id in range(pool.num_blocks):
        for request in scheduler.running:
            if any(block_id in sequence.table.block_ids for sequence in request.live):
                owners[block_id] = recorder.number(request)
                break
    states = [min(pool.ref_count(i), 127) + 128 * pool.is_cached(i) for i in range(pool.num_blocks)]
    return bytes([number & 255 for number in owners] + [number >> 8 for number in owners] + states)


def test_blocks_that_a_step_in_flight_still_writes_keep_their_owner():
    scheduler, runner = traffic.make(cache=False)
    engine, recorder = Engine(scheduler, runner, byte_tokenizer(), max_in_flight=2), Recorder()
    request = engine.add("0", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9))
    recorder.added(request)
    step(engine, recorder)
    engine.abort("0")
    recorder.ended(request)
    blocks = snapshot(engine.scheduler, recorder).blocks[: scheduler.pool.num_blocks]
    assert [i for i, number in enumerate(blocks) if number == 1] == request.sequences[0].table.block_ids != []
    step(engine, recorder)
    assert not any(snapshot(engine.scheduler, recorder).blocks)


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
    """The routes alone on a port of their own."""

    def __init__(self, engine, read=snapshot):
        self.inner, self.recorder, self.read = engine, Recorder(), read
        self.engine = AsyncEngine(engine, [self.recorder])

    def sample(self):
        return self.engine.call(lambda engine: self.read(engine.scheduler, self.recorder))

    async def __aenter__(self):
        app = web.Application(middlewares=[errors])
        app.add_routes([*static.routes(), *feed.routes(self.engine, self.sample, self.recorder)])
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
        """A mirror, and a function that takes the next frame in."""
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
        """Requests that run meanwhile."""
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


# The recorder and the snapshot


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_is_what_the_pool_says_block_by_block(seed):
    """Through every kind of request, preemptions by both ways, and aborts."""
    rng = random.Random(seed)
    engine, recorder = make(blocks=9, host=6, preemption=rng.choice(["swap", "recompute"])), Recorder()
    scheduler, number, shared = engine.scheduler, 0, 0
    for _ in range(150):
        if rng.random() < 0.3:
            prompt, params, options = traffic.draw(rng, scheduler)
            recorder.added(engine.add(str(number), prompt, params, **options))
            number += 1
        if scheduler.requests and rng.random() < 0.05:
            recorder.ended(engine.abort(rng.choice(list(scheduler.requests))))
        if engine.has_work:
            step(engine, recorder)
        seen = snapshot(engine.scheduler, recorder)
        assert seen.blocks == expected(engine, recorder)
        assert seen.facts["used"] == scheduler.pool.num_used
        assert seen.facts["held"] == sum(len(s.table.block_ids) for r in scheduler.running for s in r.live)
        assert [r["number"] for r in seen.facts["requests"]] == [recorder.number(r) for r in scheduler.running]
        assert [r["number"] for r in seen.facts["queue"]] == [recorder.number(r) for r in scheduler.waiting]
        shared += seen.facts["held"] > seen.facts["used"]
        json.dumps(seen.facts)
    assert scheduler.num_preemptions and shared
    while engine.has_work:
        step(engine, recorder)
    assert not recorder._courses and not recorder._expected


def test_what_is_told_of_requests_that_share():
    engine, recorder = make(blocks=32, size=4), Recorder()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for request_id in "ab":
        recorder.added(engine.add(request_id, prompt, SamplingParams(n=2, max_tokens=4, ignore_eos=True)))
        while engine.has_work:
            step(engine, recorder)
    # The second one finds two whole blocks; its two branches begin in the third, which one of them must copy.
    assert told(recorder, "hit") == [{"number": 2, "tokens": 8, "prompt": 10}]
    assert told(recorder, "fork") == [{"number": 1, "branches": 2}, {"number": 2, "branches": 2}]
    assert told(recorder, "end") == [{"number": n, "tokens": 8, "reason": "length"} for n in (1, 2)]
    copies = told(recorder, "copy")
    assert len(copies) == recorder.copies == 2 and all(copy["shared"] for copy in copies)
    assert [event["serial"] for event in recorder.events] == list(range(1, 1 + len(recorder.events)))


def test_a_copy_that_only_keeps_the_cached_original_says_so():
    engine, recorder = make(blocks=32, size=4), Recorder()
    for request_id, last in ("a", 9), ("b", 30):
        recorder.added(engine.add(request_id, [1, 2, 3, last, last], SamplingParams(max_tokens=1)))
        while engine.has_work:
            step(engine, recorder)
    (copy,) = told(recorder, "copy")
    assert not copy["shared"] and copy["source"] != copy["destination"]


@pytest.mark.parametrize("way, swapped", [("swap", True), ("recompute", False)])
def test_what_is_told_of_a_preemption(way, swapped):
    engine, recorder = make(blocks=6, size=4, host=6, preemption=way, cache=False), Recorder()
    for i in range(2):
        recorder.added(engine.add(str(i), [i] * 8, SamplingParams(max_tokens=10, ignore_eos=True)))
    while engine.has_work:
        step(engine, recorder)
    assert told(recorder, "preempt") == [{"number": 2, "swapped": swapped}]
    assert told(recorder, "resume") == [{"number": 2, "swapped": swapped}]
    assert told(recorder, "hit") == []


def test_latencies():
    """The clock ticks once for an arrival and once for a step."""
    engine, recorder = make(tokens=8), Recorder(Clock())
    for i in range(2):
        recorder.added(engine.add(str(i), [i] * 7, SamplingParams(max_tokens=3, ignore_eos=True)))
    while engine.has_work:
        step(engine, recorder)
    # Arrivals at 1 and 2, steps at 3, 4, ...: each of the first two ends a prompt.
    assert (recorder.first_tokens, recorder.first_token_seconds) == (2, (3 - 1) + (4 - 2))
    assert (recorder.tokens, recorder.timed_tokens, recorder.token_seconds) == (6, 5, 5.0)
    recorder.added(engine.add("2", [3], SamplingParams(max_tokens=1)))
    step(engine, recorder)
    assert (recorder.tokens, recorder.timed_tokens) == (7, 5), "time without work is nobody's time per token"


def test_strangers_and_requests_that_never_ran():
    engine, recorder = make(), Recorder()
    seen, unseen = (engine.add(name, [1], SamplingParams()) for name in ("seen", "unseen"))
    recorder.added(seen)
    for request in (seen, unseen):
        engine.abort(request.request_id)
        recorder.ended(request)
    assert told(recorder, "end") == [{"number": 1, "tokens": 0, "reason": "abort"}]
    late = engine.add("late", [1], SamplingParams(max_tokens=2))
    step(engine, recorder)
    assert (
        [r["number"] for r in snapshot(engine.scheduler, recorder).facts["requests"]] == [recorder.number(late)] == [2]
    )


def test_nothing_grows_without_bound():
    engine, recorder = make(blocks=64), Recorder()
    for i in range(MAX_KNOWN + 100):
        recorder.added(engine.add(str(i), [1, 2, 3], SamplingParams(max_tokens=1)))
        step(engine, recorder)
    assert not recorder._courses and not recorder._expected
    assert len(recorder.events) == MAX_EVENTS and len(recorder._known) == MAX_KNOWN
    assert recorder.known("99") is None and recorder.known("100") == 101
    recorder._arrivals = iter([MAX_NUMBER - 1, MAX_NUMBER])
    for number in (MAX_NUMBER, 1):
        request = engine.add("n", [1], SamplingParams(max_tokens=1))
        recorder.added(request)
        assert recorder.number(request) == number
        engine.abort("n")


def test_long_tables_and_many_requests_are_cut():
    engine, recorder = make(blocks=4000, size=1, seqs=40, tokens=4000, length=200), Recorder()
    for i in range(60):
        recorder.added(engine.add(str(i), [i % VOCAB] * 150, SamplingParams()))
    step(engine, recorder)
    facts = snapshot(engine.scheduler, recorder).facts
    assert facts["running"] == len(engine.scheduler.running) > len(facts["requests"]) == MAX_REQUESTS
    assert len(facts["queue"]) == MAX_REQUESTS
    tables = [branch["table"] for request in facts["requests"] for branch in request["branches"]]
    assert len(tables[0]) == MAX_TABLE and facts["requests"][0]["branches"][0]["blocks"] == 150
    assert sum(map(len, tables)) == MAX_LISTED


def test_a_whole_frame_of_100_000_blocks_is_small():
    """Though every block is another request's than its neighbours."""
    rng, blocks = random.Random(0), 100_000
    numbers = [rng.randrange(1, 257) for _ in range(blocks)]
    states = bytes(rng.choices([1, 129, 130], [5, 90, 5], k=blocks))
    planes = bytes(n & 255 for n in numbers) + bytes(n >> 8 for n in numbers) + states
    seen = Snapshot(planes, {}, [], 0.0, 0.0)
    frame = Frame(1, seen, seen)
    assert len(frame.whole) < 200_000 and len(frame.change) < 5_000
    assert zlib.decompress(base64.b64decode(json.loads(frame.whole[6:])["map"])) == planes


# The feed


async def test_frames_put_together_are_the_pool():
    async with Server(make(blocks=40, engine=HeldEngine)) as server, server.watch() as (mirror, following):
        first = await following()
        assert first["whole"] and first["num_blocks"] == 40 and first["used"] == 0
        async with server.running(5, n=2):
            for steps in (1, 1, 3, 9):
                await server.allow(steps)
                state = await server.engine.call(lambda engine: expected(engine, server.recorder))
                while mirror.blocks != state:
                    await asyncio.wait_for(following(), 5)
        assert any(state), "nothing was ever in the pool"
    assert [frame["whole"] for frame in mirror.frames] == [True] + [False] * (len(mirror.frames) - 1)
    serials = [event["serial"] for frame in mirror.frames for event in frame["events"]]
    assert serials == list(range(1, 1 + len(serials))) and serials, "an event is missing or comes twice"


async def test_nobodys_text_or_id_is_in_the_feed():
    secret, text = "request-of-somebody", "a text that is nobody's business"
    async with Server(make(blocks=64)) as server, server.session.get("/live") as response:
        options = {"prompt": text, "cache_salt": "salt-of-somebody"}
        tokens = [ord(c) % VOCAB for c in text]
        output = ""
        async with server.engine.generate(secret, [tokens], SamplingParams(max_tokens=20), **options) as parts:
            async for deltas in parts:
                output += "".join(delta.text for _, delta in deltas)
        raw = b""
        while b'"kind":"end"' not in raw:
            raw += await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)
    assert len(output) >= 10
    for private in (secret, "somebody", text, "nobody", output, ",".join(map(str, tokens[:6]))):
        assert private.encode() not in raw and json.dumps(private)[1:-1].encode() not in raw


async def test_only_who_knows_a_request_learns_its_number():
    async with Server(make(engine=HeldEngine)) as server, server.running(2):
        await server.allow(1)
        async with server.session.get("/live/requests/r1-0") as response:
            assert response.status == 200 and await response.json() == {"number": 2}
        async with server.session.get("/live/requests/r") as response:
            assert response.status == 404 and "request" in (await response.json())["error"]["message"]


async def test_a_slow_viewer_gets_fewer_frames_and_holds_nobody(monkeypatch):
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
                await asyncio.wait_for(following(), 5)
            assert len(stuck) == 1, "frames pile up"
            gate.set()
            while len(late.frames) < 2 or late.blocks != mirror.blocks:
                await asyncio.wait_for(next_late(), 5)
                await asyncio.wait_for(following(), 5)
        assert [frame["whole"] for frame in late.frames[:3]][:2] == [True, True]
        assert late.frames[1]["frame"] > late.frames[0]["frame"] + 5
        assert [frame["whole"] for frame in mirror.frames[1:]] == [False] * (len(mirror.frames) - 1)


async def test_a_viewer_that_never_reads_is_let_go(monkeypatch):
    monkeypatch.setattr(feed, "PATIENCE", 0.05)

    async def never(response, data):
        await asyncio.sleep(60)

    async with Server(make()) as server:
        with monkeypatch.context() as patched:
            patched.setattr(web.StreamResponse, "write", never)
            async with server.watch() as (_, following):
                with pytest.raises(aiohttp.ClientPayloadError):
                    await asyncio.wait_for(following(), 5)
        async with server.watch() as (_, following):
            assert (await following())["whole"]


async def test_viewers_are_limited(monkeypatch):
    monkeypatch.setattr(feed, "MAX_VIEWERS", 2)
    async with Server(make()) as server:
        async with server.watch() as (_, one), server.watch() as (_, two):
            await one()
            await two()
            async with server.session.get("/live") as response:
                assert response.status == 503
                assert "2 viewers" in (await response.json())["error"]["message"]
        for _ in range(100):  # until the server has noticed
            async with server.session.get("/live") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError("those who have left still count")


async def test_the_pool_is_read_only_while_somebody_watches_and_never_too_often(monkeypatch):
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
            await asyncio.sleep(0.4)
            last = len(readings)
            await asyncio.sleep(0.4)
            assert len(readings) == last, "it goes on with nobody there"


async def test_a_frame_without_news_comes_as_a_heartbeat_alone(monkeypatch):
    monkeypatch.setattr(feed, "LEAST_PAUSE", 0.02)
    monkeypatch.setattr(feed, "HEARTBEAT", 0.3)
    async with Server(make()) as server, server.watch() as (_, following):
        times = [(await following())["time"] for _ in range(4)]
    assert all(b - a >= 0.29 for a, b in pairwise(times))


async def test_the_engines_death_is_told_without_its_words():
    def die(plan, make_masks):
        raise RuntimeError("words of somebody")

    async with Server(make()) as server:
        async with server.session.get("/live") as response:
            await response.content.readuntil(b"\n\n")
            server.inner.runner.dispatch = die
            async with server.running(1):
                rest = await asyncio.wait_for(response.content.read(), 5)
        assert rest.endswith(b'data: {"dead":true}\n\n') and b"words" not in rest
        async with server.session.get("/live") as response:
            assert await response.content.read() == b'data: {"dead":true}\n\n'


# The page's files


async def test_the_files_and_their_headers():
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {"/", "/page/page.css", "/page/page.js"} <= static.PAGE_FILES.keys()
    async with Server(make()) as server:
        for path, name in static.PAGE_FILES.items():
            async with server.session.get(path) as response:
                assert response.status == 200
                assert response.content_type == types[name.rpartition(".")[2]] and response.charset == "utf-8"
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
                text, etag = await response.text(), response.headers["ETag"]
            own = path != "/page/marked.js"  # a library that recognizes addresses in texts, and loads nothing
            assert not (own and re.search(r"https?://(?!www\.w3\.org/2000/svg)|[\"'(]//", text)), "needs another server"
            async with server.session.get(path, headers={"If-None-Match": etag}) as response:
                assert response.status == 304 and await response.read() == b""
            async with server.session.get(path, headers={"If-None-Match": '"another"'}) as response:
                assert response.status == 200


@pytest.mark.parametrize("path", [
    "/page/", "/page/none.js", "/page/../feed.py", "/page/%2e%2e/feed.py", "/page/..%2ffeed.py", "/page//etc/passwd",
    "/page/index.html/..", "/pages",
])  # fmt: skip
async def test_nothing_else_is_a_file(path):
    async with Server(make()) as server:
        url = URL(str(server.server.make_url("/")).rstrip("/") + path, encoded=True)
        async with server.session.get(url) as response:
            assert response.status == 404


def test_the_page_needs_no_inline_code_and_every_file_is_there():
    html = static.PAGE.joinpath("index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert html.count("<script") == 1 and 'src="page/page.js"></script>' in html
    for name in static.PAGE_FILES.values():
        if name.endswith(".js"):
            source = static.PAGE.joinpath(name).read_text()
            assert "innerHTML" not in source and "eval(" not in source
            for line in source.splitlines():
                if line.startswith("import") or line.startswith("} from"):
                    assert f"/page/{line.split('./')[1].rstrip(chr(34) + ';')}" in static.PAGE_FILES
