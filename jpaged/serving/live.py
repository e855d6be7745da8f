"""The page at `/` and its feed: the KV pool as it is, to everybody who watches, and nobody's text."""

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

from aiohttp import web

from jpaged.async_engine import AsyncEngine, EngineDead
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine import Engine, StepOutput
from jpaged.serving.protocol import ApiError

logger = logging.getLogger(__name__)

CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGE = resources.files("jpaged.serving").joinpath("page")
# By their paths; nothing else is ever sent, whatever a request asks for.
PAGE_FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file.name
    for file in PAGE.iterdir()
    if file.name.rpartition(".")[2] in CONTENT_TYPES
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

MAX_NUMBER = 2**16 - 1  # requests are numbered from 1 to this, then from 1 again
MAX_EVENTS = 32  # the latest are kept
MAX_COPIES = 8  # that one step tells of
MAX_KNOWN = 1024  # requests whose numbers may be asked for
MAX_REQUESTS = 24  # that a frame lists, of those running and of those waiting
MAX_BRANCHES = 8  # of each
MAX_TABLE = 128  # blocks of each
MAX_LISTED = 2048  # blocks in all

MAX_VIEWERS = 64
LEAST_PAUSE = 0.1  # seconds from one sample to the next
SHARE = 0.02  # of the engine's time that samples may take
HEARTBEAT = 1.0  # seconds after which a frame is sent though nothing has changed
PATIENCE = 30.0  # seconds that a viewer may take to accept a frame


@dataclass(slots=True)
class _Course:
    """How far a request has come: when it arrived, what its next step means, whether it has any output."""

    number: int
    arrival: float
    next_step: str | None = "admit"  # or "resume", after a preemption
    begun: bool = False


class Recorder:
    """What happens, in numbers: totals and the latest events. An observer of the engine, and its thread's alone but for
    `known`. Requests go by the order in which they came, so neither their ids nor their texts leave it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.tokens = 0  # of output
        self.timed_tokens = 0  # those that came in a step right after another one
        self.token_seconds = 0.0  # what these took, in all
        self.first_tokens = 0
        self.first_token_seconds = 0.0  # from the arrivals of their requests, in all
        self.copies = 0
        self._clock = clock
        self._courses: dict[Request, _Course] = {}
        self._expected: dict[Request, _Course] = {}  # those of whom their next step has something to tell
        self._known: dict[str, int] = {}
        self._arrivals, self._serials = itertools.count(), itertools.count(1)
        self._last_step: float | None = None

    def number(self, request: Request) -> int:
        """What a live request goes by. One that came unseen is counted now."""
        return (self._courses.get(request) or self._count(request)).number

    def known(self, request_id: str) -> int | None:
        """The number of a request that runs or ran lately, for those who know its id."""
        return self._known.get(request_id)

    def added(self, request: Request) -> None:
        self._count(request)

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        now, decision = self._clock(), output.decision
        made = len(output.deltas)
        if output.ended:  # some of which may give all their tokens at once
            made = sum(len(delta.samples) for delta in output.deltas)
        self.tokens += made
        if self._last_step is not None:
            self.timed_tokens += made
            self.token_seconds += made * (now - self._last_step)
        self._last_step = now if scheduler.has_work else None
        for request in decision.preempted:
            if course := self._courses.get(request):
                swapped = any(sequence.table.block_ids for sequence in request.live)
                self._tell("preempt", number=course.number, swapped=swapped)
                course.next_step = "resume"
                self._expected[request] = course
        for request in decision.resumed:
            if course := self._courses.get(request):
                self._tell("resume", number=course.number, swapped=True)
                course.next_step = None
        self.copies += len(decision.block_copies)
        for source, destination in decision.block_copies[:MAX_COPIES]:
            shared = scheduler.pool.ref_count(source) > 0
            self._tell("copy", source=source, destination=destination, shared=shared)
        if self._expected:  # in most steps of a steady load it is empty
            for sequence in decision.num_scheduled_tokens:
                if course := self._expected.get(sequence.request):
                    self._advanced(sequence.request, course, now)

    def ended(self, request: Request) -> None:
        self._expected.pop(request, None)
        if course := self._courses.pop(request, None):
            tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
            self._tell("end", number=course.number, tokens=tokens, reason=request.sequences[0].finish_reason)

    def _count(self, request: Request) -> _Course:
        course = _Course(1 + next(self._arrivals) % MAX_NUMBER, self._clock())
        self._courses[request] = self._expected[request] = course
        self._known[request.request_id] = course.number
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return course

    def _advanced(self, request: Request, course: _Course, now: float) -> None:
        first, number = request.sequences[0], course.number
        if course.next_step == "resume":
            self._tell("resume", number=number, swapped=False)
        elif course.next_step == "admit" and first.num_cached_tokens:
            self._tell("hit", number=number, tokens=first.num_cached_tokens, prompt=first.num_prompt_tokens)
        course.next_step = None
        if not course.begun and first.num_output_tokens:
            course.begun = True
            self.first_tokens += 1
            self.first_token_seconds += now - course.arrival
            if len(request.sequences) > 1:
                self._tell("fork", number=number, branches=len(request.sequences))
        if course.begun:
            del self._expected[request]

    def _tell(self, kind: str, **facts: Any) -> None:
        self.events.append({"serial": next(self._serials), "kind": kind, **facts})


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, between two steps.

    Attributes:
        blocks: three bytes for each block, as three planes, each in the order of the blocks: the number of the first
            request that holds it (0 for none), its low and its high byte; then `BlockPool.states`.
        facts: everything else, ready for JSON.
        events: the latest, oldest first.
        cost: seconds that it took from the engine's thread.
    """

    blocks: bytes
    facts: dict[str, Any]
    events: list[dict[str, Any]]
    time: float = field(compare=False)
    cost: float = field(compare=False)


def snapshot(engine: Engine, recorder: Recorder) -> Snapshot:
    """Reads the pool, the requests and the totals; to be called where nothing changes them meanwhile."""
    began = time.thread_time()
    scheduler = engine.scheduler
    pool, running = scheduler.pool, list(scheduler.running)
    owners = array("H", bytes(2 * pool.num_blocks))
    held = branches = 0
    for request in reversed(running):  # the first one writes last
        number = recorder.number(request)
        for sequence in request.live:
            branches += 1
            held += len(sequence.table.block_ids)
            for block_id in sequence.table.block_ids:
                owners[block_id] = number
    if sys.byteorder == "big":
        owners.byteswap()
    numbers = owners.tobytes()
    facts = {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "caching": pool.enable_prefix_caching,
        "max_blocks": -(-scheduler.limits.max_model_len // pool.block_size),
        "used": pool.num_used,
        "held": held,  # by each table for itself: what is shared counts more than once
        "branches": branches,
        "running": len(running),
        "waiting": len(scheduler.waiting),
        "requests": _listed(running, recorder),
        "queue": [
            {"number": recorder.number(request), "tokens": request.sequences[0].num_tokens}
            for request in itertools.islice(scheduler.waiting, MAX_REQUESTS)
        ],
        "totals": {
            "tokens": recorder.tokens,
            "timed_tokens": recorder.timed_tokens,
            "token_seconds": recorder.token_seconds,
            "first_tokens": recorder.first_tokens,
            "first_token_seconds": recorder.first_token_seconds,
            "copies": recorder.copies,
            "preemptions": scheduler.num_preemptions,
            "swapped_blocks": scheduler.num_swapped_blocks,
            "prefix_queries": scheduler.prefix_queries,
            "prefix_hits": scheduler.prefix_hits,
        },
    }
    blocks = numbers[::2] + numbers[1::2] + pool.states()
    return Snapshot(blocks, facts, list(recorder.events), time.monotonic(), time.thread_time() - began)


def _listed(running: list[Request], recorder: Recorder) -> list[dict[str, Any]]:
    """The first of the running requests, with the beginnings of their block tables."""
    room, listed = MAX_LISTED, []
    for request in running[:MAX_REQUESTS]:
        branches = []
        for sequence in request.live[:MAX_BRANCHES]:
            table = sequence.table.block_ids[: min(MAX_TABLE, room)]
            room -= len(table)
            branches.append(
                {
                    "tokens": sequence.num_tokens,
                    "computed": sequence.num_computed_tokens,
                    "blocks": len(sequence.table.block_ids),
                    "table": table,
                }
            )
        listed.append(
            {
                "number": recorder.number(request),
                "prompt": len(request.prompt_token_ids),
                "cached": request.sequences[0].num_cached_tokens,
                "num_branches": len(request.live),
                "branches": branches,
            }
        )
    return listed


@dataclass(frozen=True)
class Frame:
    """A snapshot as it is sent: whole, or as what has changed since the frame before it.

    The map is a base64 text of `Snapshot.blocks`, deflated (zlib); in a frame that is not whole, of its exclusive or
    with the blocks before.
    """

    index: int
    now: Snapshot
    before: Snapshot

    @cached_property
    def whole(self) -> bytes:
        return self._encoded(self.now.blocks, self.now.events, whole=True)

    @cached_property
    def change(self) -> bytes:
        last = self.before.events[-1]["serial"] if self.before.events else 0
        events = [event for event in self.now.events if event["serial"] > last]
        return self._encoded(_exclusive_or(self.now.blocks, self.before.blocks), events, whole=False)

    def _encoded(self, blocks: bytes, events: list[dict[str, Any]], *, whole: bool) -> bytes:
        facts = {"frame": self.index, "whole": whole, "time": round(self.now.time, 3), **self.now.facts}
        text = base64.b64encode(zlib.compress(blocks, 1)).decode()
        return _event(facts | {"events": events, "map": text})


def _event(facts: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(facts, separators=(",", ":")).encode() + b"\n\n"


def _exclusive_or(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a) ^ int.from_bytes(b)).to_bytes(len(a))


class Feed:
    """What those who watch are sent. One sampler serves them all, and there is none while nobody watches."""

    def __init__(self, engine: AsyncEngine, recorder: Recorder):
        self._engine = engine
        self._recorder = recorder
        self._viewers: set[asyncio.Queue[Frame | None]] = set()  # each with the newest frame alone; None ends it
        self._sampler: asyncio.Task[None] | None = None
        self._latest: Frame | None = None
        self._indices = itertools.count(1)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, a frame each, until the client goes, the engine dies or the server shuts down."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(503, f"{len(self._viewers)} viewers watch the pool already; try again later")
        viewer: asyncio.Queue[Frame | None] = asyncio.Queue(1)
        self._viewers.add(viewer)
        try:
            if self._latest is not None:
                _offer(viewer, self._latest)
            if self._sampler is None or self._sampler.done():
                self._sampler = asyncio.create_task(self._sample())
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await self._send_frames(request, response, viewer)
            return response
        finally:
            self._viewers.discard(viewer)

    async def number(self, request: web.Request) -> web.Response:
        """The number that a request goes by on the map: for its owner, who alone knows its id."""
        number = self._recorder.known(request.match_info["request_id"])
        if number is None:
            raise ApiError(404, "no request has this id, or it ended long ago")
        return web.json_response({"number": number})

    async def _send_frames(
        self, request: web.Request, response: web.StreamResponse, viewer: asyncio.Queue[Frame | None]
    ) -> None:
        last: int | None = None
        while (frame := await viewer.get()) is not None:
            follows = frame.index - 1 == last
            data = await asyncio.to_thread(getattr, frame, "change" if follows else "whole")
            last = frame.index
            try:
                async with asyncio.timeout(PATIENCE):
                    await response.write(data)
            except TimeoutError as error:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("a viewer does not read") from error
        if not self._engine.alive:
            await response.write(_event({"dead": True}))

    async def _sample(self) -> None:
        try:
            while self._viewers:
                now = await self._engine.call(lambda engine: snapshot(engine, self._recorder))
                before = self._latest.now if self._latest else now
                if self._latest is None or now != before or now.time - before.time >= HEARTBEAT:
                    frame = Frame(next(self._indices), now, before)
                    await asyncio.to_thread(getattr, frame, "change")  # once for all of them
                    self._latest = frame
                    for viewer in self._viewers:
                        _offer(viewer, frame)
                await asyncio.sleep(max(LEAST_PAUSE, now.cost / SHARE))
        except EngineDead:
            logger.info("the engine has ended, and with it the feed of its pool")
        except Exception:
            logger.exception("the feed of the pool has failed")
        finally:
            self._latest = None
            for viewer in self._viewers:
                _offer(viewer, None)


def _offer(viewer: asyncio.Queue[Frame | None], frame: Frame | None) -> None:
    """In place of what the viewer has not taken yet."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(frame)


def routes(engine: AsyncEngine, recorder: Recorder) -> list[web.RouteDef]:
    """The page with its files, `/live`, and `/live/requests/ID`. The recorder must be one of the engine's observers.

    The page (`PAGE_FILES`) holds no data and is for everybody; the rest belongs behind the API key.
    """
    feed = Feed(engine, recorder)
    page = [web.get(path, _sender(name)) for path, name in PAGE_FILES.items()]
    return [*page, web.get("/live", feed.watch), web.get("/live/requests/{request_id}", feed.number)]


def _sender(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that answers with one file, which is read now."""
    content = PAGE.joinpath(name).read_bytes()
    etag = hashlib.sha256(content).hexdigest()[:32]

    async def send(request: web.Request) -> web.Response:
        known = request.if_none_match or ()
        if any(tag.value in (etag, "*") for tag in known):
            response = web.Response(status=304)
        else:
            content_type = CONTENT_TYPES[name.rpartition(".")[2]]
            response = web.Response(body=content, content_type=content_type, charset="utf-8")
        response.headers.update(PAGE_HEADERS)
        response.etag = etag
        return response

    return send
