"""Turns of clients at work on threads."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jpaged.engine.async_engine import QueueFull

type Work = Callable[[], Any]


class ClientTurns:
    """Work of clients on a few threads: one piece of each client at a time, in turns.

    A client whose work takes long makes its own further work wait, and leaves the other threads to others.

    Args:
        name: name of the work, for error messages.
        submit: start some work on a thread.
        num_threads: number of threads.
        max_waiting: maximum pieces of one client that wait.
    """

    def __init__(self, name: str, submit: Callable[[Work], "Future[Any]"], num_threads: int, max_waiting: int):
        self._name = name
        self._submit = submit
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[tuple[Work, asyncio.Future[Any]]]] = OrderedDict()
        self._running: set[str] = set()

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
        for client in [client for client in self._waiting if client not in self._running]:
            if len(self._running) >= self._num_threads:
                return
            mine = self._waiting[client]
            while mine and mine[0][1].done():  # nobody waits for it any more
                mine.popleft()
            if mine:
                work, done = mine.popleft()
                self._running.add(client)
                asyncio.wrap_future(self._submit(work)).add_done_callback(
                    lambda result, client=client, done=done: self._end(client, result, done)  # type: ignore[misc]
                )
            else:
                del self._waiting[client]

    def _end(self, client: str, result: "asyncio.Future[Any]", done: "asyncio.Future[Any]") -> None:
        self._running.discard(client)
        if client in self._waiting:
            self._waiting.move_to_end(client)
        if not done.done():
            if error := result.exception():
                done.set_exception(error)
            else:
                done.set_result(result.result())
        elif not result.cancelled():
            result.exception()  # which is retrieved, and so not reported
        self._start()
