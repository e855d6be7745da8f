"""Engine for servers: one thread steps it, and asyncio queues carry its output to waiting tasks."""

import asyncio
import functools
import itertools
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

from jpaged.core.commands import Command
from jpaged.core.params import Params
from jpaged.core.plan import ParamsDeleted
from jpaged.core.request import OutputDelta, Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine, EngineStats, RequestOptions, StepOutput
from jpaged.engine.guard import Guard

logger = logging.getLogger(__name__)

CALLS_TIMEOUT_S = 0.005  # of each step
BATCH = 32  # prompts that are begun, or ended, at once: other streams have their turn between two batches

Deltas = list[tuple[int, OutputDelta]]  # each with the index of its prompt


class EngineDead(RuntimeError):
    """End of the engine's thread, by an error or by `stop`; no more output follows."""


class RequestFailed(RuntimeError):
    """End of one request by an exception in the work on it; the log has the exception."""


class Observer(Protocol):
    """Receiver of events on the engine's thread, which waits for it. An exception is logged, and changes nothing."""

    def added(self, request: Request) -> None:
        """Handle an accepted request."""

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """Handle a committed step."""

    def ended(self, request: Request) -> None:
        """Handle a request that has finished or was aborted; its sequences' finish reasons say which."""


class QueueFull(RuntimeError):
    """Request rejected because the maximum number of requests is waiting."""


@dataclass
class Part:
    """New output: deltas in their order, the number of prompts that end after them, and an error that ends the rest."""

    deltas: Deltas = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None


class Stream:
    """Output that the task has not read yet. Only the event loop that made the stream uses it, but for `loop`."""

    def __init__(self, num_prompts: int):
        self.loop = asyncio.get_running_loop()
        self._num_running = num_prompts
        self._deltas: Deltas = []
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, part: Part) -> None:
        """Add new output."""
        self._deltas += part.deltas
        self._num_running -= part.num_ended
        self._error = self._error or part.error
        self._has_news.set()

    async def read(self) -> AsyncIterator[Deltas]:
        """Yield the new deltas together, until all prompts have ended. An error comes after them."""
        while self._deltas or (self._num_running and self._error is None):
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                yield deltas
            else:
                await self._has_news.wait()
                self._has_news.clear()
        if self._error is not None:
            raise self._error


class AsyncEngine:
    """Engine on a separate thread. After `start`, only this object may use the Engine.

    Calls reach the thread between two steps, in order.

    Args:
        max_queue: maximum number of waiting requests before further ones are rejected; None: no limit. One client may
            fill half of the room that the others leave, so that a new client finds room (Choudhury and Hahne's dynamic
            thresholds, 1998).
    """

    def __init__(self, engine: Engine, observers: Iterable[Observer] = (), *, max_queue: int | None = None):
        self._engine, self._guard = engine, Guard(engine)
        self._max_queue, self._observers = max_queue, tuple(observers)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # Only the engine's thread uses these two: the stream of each request with the index of its prompt, and the
        # commands that are not in effect yet.
        self._streams: dict[str, tuple[Stream, int]] = {}
        self._waits: list[tuple[Command, Future[None]]] = []
        self._error: EngineDead | None = None
        self._lock = threading.Lock()  # between a last call and the engine's end
        self._stopping, self._saves = False, True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has not failed."""
        return self._thread.is_alive() and self._error is None

    def stats(self) -> EngineStats:
        """Return the engine's numbers; any thread may call it at any time."""
        return self._engine.stats()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    async def stop(self, *, save: bool = True) -> None:
        """End the thread after its current step; unfinished requests end in EngineDead.

        Args:
            save: write the cached prefixes to `kv_cache_dir`, if there is one.
        """
        self._saves = save
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the engine's thread, between two steps, and return its result."""
        return await asyncio.wrap_future(self._submit(lambda: function(self._engine)))

    async def control(self, command: Command) -> None:
        """Run a command between two steps, with the errors of `Engine.control`; return once it is in effect."""
        in_effect: Future[None] = Future()

        def begin() -> None:
            output = self._engine.control(command)
            if output.ended:
                self._deliver(output)
            if in_effect.set_running_or_notify_cancel():
                self._waits.append((command, in_effect))
            self._tell_waits()

        await asyncio.wrap_future(self._submit(begin))
        await asyncio.wrap_future(in_effect)

    @property
    def is_paused(self) -> bool:
        """Whether no step begins until `Resume`; any thread may ask."""
        return self._engine.is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether no step begins until `WakeUp`; any thread may ask."""
        return bool(self._engine.asleep)

    @asynccontextmanager
    async def generate(
        self, request_id: str, prompts: Sequence[list[int]], params: Params, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[AsyncIterator[Deltas]]:
        """Queue a request for each prompt, with the options of `Engine.add`.

        The context's iterator yields the new deltas of all requests together. Leaving the context aborts running
        requests.

            async with engine.generate("1", [[1, 2, 3]], SamplingParams()) as parts:
                async for deltas in parts:
                    for index, delta in deltas: ...

        Args:
            request_id: prompt i becomes the request `request_id-i`.

        Raises:
            InvalidParameter: a request could never run; raised on entering, before any output.
            QueueFull: too many requests are waiting; raised on entering, before any output.
        """
        stream = Stream(len(prompts))
        ids = [f"{request_id}-{index}" for index in range(len(prompts))]
        begun = 0

        def add(index: int) -> None:
            self._check_room(options.get("client"))
            request = self._engine.add(ids[index], prompts[index], params, **options)
            self._tell(lambda observer: observer.added(request))
            self._streams[ids[index]] = stream, index

        try:
            for batch in itertools.batched(range(len(ids)), BATCH):
                begun += len(batch)
                calls = [asyncio.wrap_future(self._submit(functools.partial(add, index))) for index in batch]
                await asyncio.gather(*calls)
            yield stream.read()
        finally:
            for names in itertools.batched(ids[:begun], BATCH):
                # These calls follow every `add`, so that they also end a request whose caller did not wait for it.
                self._submit(functools.partial(self._abort, stream, names))

    def _check_room(self, client: str | None) -> None:
        """Raise QueueFull if a client may not queue another request."""
        if self._max_queue is None:
            return
        waiting = self._engine.scheduler.waiting
        room, num_of_client = self._max_queue - len(waiting), waiting.count(client)
        if room <= 0 or (client is not None and num_of_client > room):
            raise QueueFull(
                f"queue full ({len(waiting)} requests waiting, {num_of_client} of them of this client, limit "
                f"{self._max_queue}): retry later"
            )

    def _abort(self, stream: Stream, ids: Iterable[str]) -> None:
        """End the requests of a stream that have not ended. Another stream may have taken the id of an ended one."""
        for name in ids:
            if self._streams.get(name, (None,))[0] is stream:
                del self._streams[name]
                if request := self._engine.abort(name):
                    self._tell_ended([request])

    def _submit[T](self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._error:
                future.set_exception(self._error)
            else:
                self._calls.put((call, future))
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._engine.wait()
                self._handle_calls()
                if not self._engine.has_work or self._stopping:
                    continue
                try:
                    self._deliver(self._guard.step())
                except ParamsDeleted as error:  # no step is possible until the next update of the parameters
                    logger.error("%s", error)
                    self._fail_requests(error)
                self._tell_waits()
            self._die(EngineDead("the engine was stopped"))
            self._engine.close(save=self._saves)
        except BaseException as error:
            logger.exception("the engine has failed")
            self._die(EngineDead(f"the engine has failed: {error}"))

    def _fail_requests(self, error: Exception) -> None:
        """End all requests with an error."""
        _send({stream: Part(error=error) for stream, _ in self._streams.values()})
        for name in self._streams:
            if request := self._engine.abort(name):
                self._tell_ended([request])
        self._streams.clear()

    def _handle_calls(self) -> None:
        """Run the waiting calls; without other work, wait for one. Many calls are spread over several steps."""
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
        # Observers are told first: a client can act on tokens as soon as they are sent.
        self._tell(lambda observer: observer.stepped(self._engine.scheduler, output))
        self._tell_ended(output.ended)
        parts: defaultdict[Stream, Part] = defaultdict(Part)
        for delta in output.deltas:
            stream, index = self._streams[delta.request_id]
            parts[stream].deltas.append((index, delta))
        for request in output.ended:
            stream, _ = self._streams.pop(request.request_id)
            parts[stream].num_ended += 1
        for request in output.faults:
            stream, _ = self._streams.pop(request.request_id)
            parts[stream].error = RequestFailed("internal error; the server's log has more")
        self._tell_ended(output.faults)
        _send(parts)

    def _tell_waits(self) -> None:
        waits, self._waits = self._waits, []
        for command, future in waits:
            if self._engine.is_in_effect(command):
                future.set_result(None)
            else:
                self._waits.append((command, future))

    def _tell_ended(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._tell(lambda observer, request=request: observer.ended(request))  # type: ignore[misc]
            request.sequences.clear()  # breaks a reference cycle: no garbage collection is needed to free the request

    def _tell(self, event: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                event(observer)
            except Exception:
                logger.exception("%s has failed", type(observer).__name__)

    def _die(self, error: EngineDead) -> None:
        with self._lock:
            self._error = error
        self._fail_requests(error)
        for _, future in self._waits:
            future.set_exception(error)
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(error)


def _send(parts: Mapping[Stream, Part]) -> None:
    """Give streams their new output, from any thread. Each event loop is woken once, however many streams it has."""
    for loop in {stream.loop for stream in parts}:
        try:
            loop.call_soon_threadsafe(_put, [(stream, part) for stream, part in parts.items() if stream.loop is loop])
        except RuntimeError:  # the loop is closed, and its tasks have ended
            logger.debug("output for a closed event loop was dropped")


def _put(parts: Iterable[tuple[Stream, Part]]) -> None:
    for stream, part in parts:
        stream.put(part)
