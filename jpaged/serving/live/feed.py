"""Feed of the page's map: the present KV pool, for all viewers."""

import asyncio
import base64
import itertools
import json
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property

from aiohttp import web

from jpaged.engine.async_engine import EngineDead
from jpaged.engine.router import EngineClient
from jpaged.serving.codec import JsonObject
from jpaged.serving.errors import ApiError
from jpaged.serving.live.recorder import Recorder
from jpaged.serving.live.snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_VIEWERS = 64
LEAST_PAUSE = 0.1  # least seconds from one sample to the next
SHARE = 0.02  # share of the engine's time that samples may take
HEARTBEAT = 1.0  # seconds after which a frame is sent though nothing has changed
FRAME_TIMEOUT_S = 30.0  # seconds that a viewer may take to accept a frame


@dataclass(frozen=True)
class MapFrame:
    """Snapshot in the form that viewers get: complete, or as changes since the previous frame.

    The map is `Snapshot.blocks`, compressed with zlib, in base64. A frame of changes has the exclusive or of these
    bytes and the previous ones instead.
    """

    index: int
    now: Snapshot
    before: Snapshot

    @cached_property
    def whole(self) -> bytes:
        """The complete frame as a server-sent event."""
        return self._encoded(self.now.blocks, self.now.events, whole=True)

    @cached_property
    def change(self) -> bytes:
        """The changes since the previous frame as a server-sent event."""
        last = self.before.events[-1]["serial"] if self.before.events else 0
        events = [event for event in self.now.events if event["serial"] > last]
        blocks = self.now.blocks
        changed = int.from_bytes(blocks) ^ int.from_bytes(self.before.blocks)
        return self._encoded(changed.to_bytes(len(blocks)), events, whole=False)

    def _encoded(self, blocks: bytes, events: list[JsonObject], *, whole: bool) -> bytes:
        facts = {"frame": self.index, "whole": whole, "time": round(self.now.time, 3), **self.now.facts}
        text = base64.b64encode(zlib.compress(blocks, 1)).decode()
        return _event(facts | {"events": events, "map": text})


def _event(facts: JsonObject) -> bytes:
    return b"data: " + json.dumps(facts, separators=(",", ":")).encode() + b"\n\n"


class Feed:
    """Sender of frames to all viewers. One task samples the pool for them, and only while there are viewers.

    Args:
        engine: used only for whether it is alive.
        sample: returns a snapshot of the engine's pool. Raises EngineDead.
        recorder: numbers the requests in the snapshot.
    """

    def __init__(self, engine: EngineClient, sample: Callable[[], Awaitable[Snapshot]], recorder: Recorder):
        self._engine = engine
        self._sample_pool = sample
        self._recorder = recorder
        self._viewers: set[asyncio.Queue[MapFrame | None]] = set()  # with only the newest frame, or None at the end
        self._sampler: asyncio.Task[None] | None = None
        self._latest: MapFrame | None = None
        self._indices = itertools.count(1)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events, one for each frame, until the client or the engine ends or the server shuts down."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(503, f"{len(self._viewers)} viewers watch the pool already; try again later")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        if request.method == "HEAD":
            return response
        viewer: asyncio.Queue[MapFrame | None] = asyncio.Queue(1)
        self._viewers.add(viewer)
        try:
            if self._latest is not None:
                _offer(viewer, self._latest)
            if self._sampler is None or self._sampler.done():
                self._sampler = asyncio.create_task(self._sample())
            await response.prepare(request)
            last: int | None = None
            while (frame := await viewer.get()) is not None:
                data = await asyncio.to_thread(getattr, frame, "change" if frame.index - 1 == last else "whole")
                last = frame.index
                try:
                    async with asyncio.timeout(FRAME_TIMEOUT_S):
                        await response.write(data)
                except TimeoutError as error:
                    if request.transport is not None:
                        request.transport.abort()
                    raise ConnectionResetError("a viewer does not read") from error
            if not self._engine.alive:
                await response.write(_event({"dead": True}))
            return response
        finally:
            self._viewers.discard(viewer)

    async def number(self, request: web.Request) -> web.Response:
        """Return the number of a request on the map; only its owner knows the id that is asked for."""
        number = self._recorder.known(request.match_info["request_id"])
        if number is None:
            raise ApiError(404, "no request has this id, or it ended long ago")
        return web.json_response({"number": number})

    async def _sample(self) -> None:
        try:
            while self._viewers:
                now = await self._sample_pool()
                before = self._latest.now if self._latest else now
                if self._latest is None or now != before or now.time - before.time >= HEARTBEAT:
                    frame = MapFrame(next(self._indices), now, before)
                    await asyncio.to_thread(getattr, frame, "change")  # computed once for all viewers
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


def _offer(viewer: asyncio.Queue[MapFrame | None], frame: MapFrame | None) -> None:
    """Replace the frame that the viewer has not read yet."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(frame)
