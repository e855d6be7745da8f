"""The engine for servers: one thread steps it, asyncio queues carry its output to whoever waits."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.request import OutputDelta, Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine import Engine, StepOutput

logger = logging.getLogger(__name__)

CALLS_TIMEOUT_S = 0.005  # of each step


class EngineDead(RuntimeError):
    """The engine's thread has ended, by an error or by `stop`; nothing more will come."""


class Observer(Protocol):
    """Hears what happens, on the engine's thread, which waits for it."""

    def added(self, request: Request) -> None:
        """A request has been accepted."""

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """A step has been run and committed."""

    def ended(self, request: Request) -> None:
        """A request has finished or was aborted; its sequences' finish reasons say which."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


@dataclass(frozen=True)
class _Stream:
    loop: asyncio.AbstractEventLoop
    deltas: "asyncio.Queue[OutputDelta | EngineDead | None]"  # None ends it


class AsyncEngine:
    """Owns an Engine: after `start` nobody else may touch it. Calls reach its thread between two steps, in order.

    Args:
        max_queue: how many requests may wait before further ones are refused; None is any number. One client may fill
            half of the room that the others leave, so that a newcomer finds some (Choudhury and Hahne's dynamic
            thresholds, 1998).
    """

    def __init__(self, engine: Engine, observers: Iterable[Observer] = (), *, max_queue: int | None = None):
        self._engine = engine
        self._max_queue = max_queue
        self._observers = tuple(observers)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # touched by the engine's thread alone
        self._updates: list[Future[None]] = []  # parameter updates that wait for requests to end; likewise
        self._error: EngineDead | None = None
        self._lock = threading.Lock()  # between a last call and the engine's end
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def grammars(self):
        return self._engine.grammars

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._error is None

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step it is in; what has not finished ends in EngineDead."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Runs `function(engine)` on the engine's thread, between two steps, and returns what it returns."""
        return await asyncio.wrap_future(self._submit(lambda: function(self._engine)))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self.call(Engine.reset_prefix_cache)

    async def update_params(self, state: Any, *, finish_started: bool = False) -> None:
        """Serve other parameters, with the arguments and errors of `Engine.update_params`; return once they serve."""
        updated: Future[None] = Future()

        def update() -> None:
            self._engine.update_params(state, finish_started=finish_started)
            if updated.set_running_or_notify_cancel():
                self._updates.append(updated)
            self._tell_updated()

        await asyncio.wrap_future(self._submit(update))
        await asyncio.wrap_future(updated)

    @asynccontextmanager
    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams, **options: Any
    ) -> AsyncIterator[AsyncIterator[OutputDelta]]:
        """Queues a request, with the options of `Engine.add`; inside the context its output comes step by step. Leaving
        early aborts it.

            async with engine.generate("1", [1, 2, 3], SamplingParams()) as deltas:
                async for delta in deltas: ...

        Raises, on entering, before any output: InvalidParameter for a request that could never run; QueueFull.
        """
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())

        def add() -> None:
            waiting, client = self._engine.scheduler.waiting, options.get("client")
            if self._max_queue is not None:
                room, own = self._max_queue - len(waiting), waiting.count(client)
                if room <= 0 or (client is not None and own > room):
                    raise QueueFull(
                        f"queue full ({len(waiting)} requests waiting, {own} of them of this client, limit "
                        f"{self._max_queue}): retry later"
                    )
            request = self._engine.add(request_id, prompt_token_ids, params, **options)
            self._streams[request_id] = stream
            for observer in self._observers:
                observer.added(request)

        def abort() -> None:
            if self._streams.get(request_id) is stream:  # and not another request's, whose id was taken
                del self._streams[request_id]
                if request := self._engine.abort(request_id):
                    self._tell_ended([request])

        try:
            await asyncio.wrap_future(self._submit(add))
            yield _deltas(stream)
        finally:
            self._submit(abort)  # behind `add`, so it also undoes one that nobody waits for any more

    def _submit(self, call: Callable[[], Any]) -> Future:
        future: Future = Future()
        with self._lock:
            if self._error:
                future.set_exception(self._error)
            else:
                self._calls.put((call, future))
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._handle_calls()
                if self._engine.has_work and not self._stopping:
                    self._deliver(self._engine.step())
                    self._tell_updated()
            self._die(EngineDead("the engine was stopped"))
        except BaseException as error:
            logger.exception("the engine has failed")
            self._die(EngineDead(f"the engine has failed: {error}"))

    def _handle_calls(self) -> None:
        """Make the calls that wait; without other work, at least one. Many calls are spread over several steps."""
        deadline = time.monotonic() + CALLS_TIMEOUT_S
        while not self._stopping and (time.monotonic() < deadline or not self._engine.has_work):
            try:
                item = self._calls.get(block=not self._engine.has_work)
            except queue.Empty:
                return
            if item is None:
                self._stopping = True
                return
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)

    def _deliver(self, output: StepOutput) -> None:
        # Before anybody can act on what they have not seen.
        for observer in self._observers:
            observer.stepped(self._engine.scheduler, output)
        self._tell_ended(output.ended)
        _put([(self._streams[delta.request_id], delta) for delta in output.deltas])
        _put([(self._streams.pop(request.request_id), None) for request in output.ended])

    def _tell_updated(self) -> None:
        if not self._engine.is_updating:
            for future in self._updates:
                future.set_result(None)
            self._updates.clear()

    def _tell_ended(self, requests: Iterable[Request]) -> None:
        for request in requests:
            for observer in self._observers:
                observer.ended(request)
            request.sequences.clear()  # breaks a reference cycle: no garbage collection is needed to free the request

    def _die(self, error: EngineDead) -> None:
        with self._lock:
            self._error = error
        _put([(stream, error) for stream in self._streams.values()])
        self._streams.clear()
        for future in self._updates:
            future.set_exception(error)
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(error)


async def _deltas(stream: _Stream) -> AsyncIterator[OutputDelta]:
    while (delta := await stream.deltas.get()) is not None:
        if isinstance(delta, EngineDead):
            raise delta
        yield delta


def _put(items: list[tuple[_Stream, OutputDelta | EngineDead | None]]) -> None:
    """Each event loop is woken once, however many of its streams get something."""
    for loop in {stream.loop for stream, _ in items}:
        ours = [(stream.deltas, item) for stream, item in items if stream.loop is loop]
        try:
            loop.call_soon_threadsafe(_put_all, ours)
        except RuntimeError:  # it is closed: nobody waits any more
            logger.debug("output for a closed event loop was dropped")


def _put_all(items: list[tuple[asyncio.Queue, OutputDelta | EngineDead | None]]) -> None:
    for deltas, item in items:
        deltas.put_nowait(item)
