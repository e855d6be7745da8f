"""Turns of clients at work on threads."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from jpaged.engine.async_engine import QueueFull

MAX_REST_S = 1.0

type Work = Callable[[], Any]
type Submit = Callable[[Work], Future[Any]]


class ClientTurns:
    """Work of clients on a few threads: one piece of each client at a time, in turns.

    While a client's work takes long, only further work of this client waits; others use the other threads.

    Args:
        name: name of the work, for error messages.
        submit: start some work on a thread.
        num_threads: number of threads.
        max_waiting: maximum pieces of one client that wait.
        rest: time that a client waits after a piece of work, as a multiple of its time; MAX_REST_S at most.
        counts_waits: the time of a piece of work includes its waits; otherwise it is the thread's processor time.
    """

    def __init__(
        self, name: str, submit: Submit, num_threads: int, max_waiting: int, rest: float = 0, counts_waits: bool = False
    ):
        self._name, self._submit, self._num_free = name, submit, num_threads
        self._max_waiting, self._rest = max_waiting, rest
        self._clock = time.perf_counter if counts_waits else time.thread_time
        self._waiting: OrderedDict[str, deque[tuple[Work, asyncio.Future[Any]]]] = OrderedDict()
        self._busy: set[str] = set()  # clients that run or rest

    async def run[T](self, client: str, work: Callable[[], T]) -> T:
        """Return the result of some work of a client.

        Raises:
            QueueFull: too much work of this client is waiting.
        """
        mine = self._waiting.setdefault(client, deque())
        if len(mine) >= self._max_waiting:
            raise QueueFull(f"{len(mine)} requests of this client wait for {self._name}: retry later")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        mine.append((work, done))
        self._start()
        return await done

    def _start(self) -> None:
        """Start waiting work, as far as threads are free."""
        for client in [client for client in self._waiting if client not in self._busy]:
            if not self._num_free:
                return
            mine = self._waiting[client]
            while mine and mine[0][1].done():  # abandoned by its caller
                mine.popleft()
            if mine:
                work, done = mine.popleft()
                self._busy.add(client)
                self._num_free -= 1
                spent: list[float] = []
                running = asyncio.wrap_future(self._submit(partial(self._timed, work, spent)))
                running.add_done_callback(partial(self._end, client, spent, done))
            else:
                del self._waiting[client]

    def _end(self, client: str, spent: list[float], done: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
        self._num_free += 1
        if rest := min(self._rest * sum(spent), MAX_REST_S):
            asyncio.get_running_loop().call_later(rest, self._release, client)
        else:
            self._busy.discard(client)
        if client in self._waiting:
            self._waiting.move_to_end(client)
        if not done.done():
            if error := result.exception():
                done.set_exception(error)
            else:
                done.set_result(result.result())
        elif not result.cancelled():
            result.exception()  # asyncio reports an exception that nobody has retrieved
        self._start()

    def _release(self, client: str) -> None:
        """End the rest of a client."""
        self._busy.discard(client)
        self._start()

    def _timed(self, work: Work, spent: list[float]) -> Any:
        """Return the result of some work, and append its time to `spent`."""
        start = self._clock()
        try:
            return work()
        finally:
            spent.append(self._clock() - start)
