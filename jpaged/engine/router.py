"""Several engines of one process behind the interface of one: each prompt goes to the engine that knows its prefix."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Unpack

from jpaged.core.commands import Command, ResetPrefixCache, Sleep, UpdateParams
from jpaged.core.params import Params
from jpaged.engine.async_engine import AsyncEngine, Deltas, EngineDead, QueueFull
from jpaged.engine.engine import EngineStats, RequestOptions
from jpaged.engine.prefix_table import PrefixTable

Context = AbstractAsyncContextManager[AsyncIterator[Deltas]]  # of one call of `generate`


class Router:
    """Client of several engines with the same model, each on other devices.

    A prompt goes to the engine that last got its longest known prefix. If that engine is too busy, or there is none, it
    goes to the engine with the fewest requests. An engine that has failed gets no more requests, and the others go on.

    Args:
        table: the prefixes of past prompts; None: a new one, whose prefixes end with the engines' blocks.
    """

    def __init__(self, engines: Sequence[AsyncEngine], table: PrefixTable[int] | None = None):
        self._engines = tuple(engines)
        self._table = PrefixTable[int](step=engines[0].stats().block_size) if table is None else table
        self._num_live = [0] * len(engines)  # prompts of requests that have not ended

    @property
    def alive(self) -> bool:
        """Whether an engine can serve requests."""
        return any(engine.alive for engine in self._engines)

    def start(self) -> None:
        """Start all engines."""
        for engine in self._engines:
            engine.start()

    async def stop(self, *, save: bool = True) -> None:
        """Stop all engines."""
        await asyncio.gather(*(engine.stop(save=save) for engine in self._engines))

    def stats(self) -> EngineStats:
        """Return the sums of the engines' numbers."""
        stats = [engine.stats() for engine in self._engines]
        return EngineStats(*map(sum, zip(*stats)))._replace(block_size=stats[0].block_size)

    async def control(self, command: Command) -> None:
        """Run a command in every engine that is alive, with the errors of `Engine.control`.

        Args:
            command: the source of `UpdateParams` is one for all engines, each of which copies it to its own devices, or
                a list with one for each engine.

        Raises:
            EngineDead: every engine has failed.
        """
        commands = [command] * len(self._engines)
        if isinstance(command, UpdateParams) and isinstance(command.source, list):
            commands = [replace(command, source=source) for source in command.source]
            if len(commands) != len(self._engines):
                raise ValueError(f"params: must be a list of {len(self._engines)} sources, one for each engine")
        if not self.alive:
            raise EngineDead("every engine has failed")
        await asyncio.gather(*(e.control(each) for e, each in zip(self._engines, commands) if e.alive))
        if isinstance(command, UpdateParams | Sleep | ResetPrefixCache):
            for number in range(len(self._engines)):
                self._table.forget(number)

    @property
    def is_paused(self) -> bool:
        """Whether no engine begins a step until `Resume`."""
        return all(engine.is_paused for engine in self._engines)

    @property
    def is_asleep(self) -> bool:
        """Whether no engine begins a step until `WakeUp`."""
        return all(engine.is_asleep for engine in self._engines)

    @asynccontextmanager
    async def generate(
        self, request_id: str, prompts: Sequence[list[int]], params: Params, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[AsyncIterator[Deltas]]:
        """Queue a request for each prompt, as `AsyncEngine.generate` does.

        Raises:
            InvalidParameter: a request could never run.
            QueueFull: too many requests are waiting at every engine.
            EngineDead: every engine has failed, or one fails that has begun with a prompt.
        """
        places: dict[int, list[int]] = {}  # of each engine, the indexes of its prompts

        def begin(engine: AsyncEngine, indexes: list[int]) -> Context:
            return engine.generate(request_id, [prompts[index] for index in indexes], params, **options)

        async with AsyncExitStack() as stack:
            for index, prompt in enumerate(prompts):
                loads = {number: live for number, live in enumerate(self._num_live) if self._engines[number].alive}
                salt = options.get("adapter"), options.get("cache_salt", "")
                number = self._table.choose(prompt, loads or {0: 0}, salt=salt)
                self._table.remember(prompt, number, salt=salt)
                places.setdefault(number, []).append(index)
                self._add_live(stack, number, 1)  # before the engine accepts it, because other requests come meanwhile
            streams = [(await self._enter(stack, number, places[number], begin), places[number]) for number in places]
            (stream, _), *others = streams
            yield _merged(streams) if others else stream

    async def _enter(
        self, stack: AsyncExitStack, number: int, indexes: list[int], begin: Callable[[AsyncEngine, list[int]], Context]
    ) -> AsyncIterator[Deltas]:
        """Begin with some prompts at the chosen engine, or else at the least loaded one that accepts them."""
        problem: Exception = EngineDead("every engine has failed")
        for each in sorted(range(len(self._engines)), key=lambda other: (other != number, self._num_live[other])):
            if not self._engines[each].alive:
                continue
            try:
                stream = await stack.enter_async_context(begin(self._engines[each], indexes))
            except (QueueFull, EngineDead) as error:
                problem = error
                continue
            if each != number:
                self._add_live(stack, number, -len(indexes))
                self._add_live(stack, each, len(indexes))
            return stream
        raise problem

    def _add_live(self, stack: AsyncExitStack, number: int, change: int) -> None:
        """Change the number of an engine's live prompts until the request ends."""

        def add(change: int) -> None:
            self._num_live[number] += change

        add(change)
        stack.callback(add, -change)


async def _merged(streams: Sequence[tuple[AsyncIterator[Deltas], list[int]]]) -> AsyncIterator[Deltas]:
    """Yield the deltas of several streams as they come, with the indexes of the whole request."""

    async def following(number: int) -> tuple[int, Deltas | None]:
        stream, indexes = streams[number]
        deltas = await anext(stream, None)
        return number, deltas and [(indexes[index], delta) for index, delta in deltas]

    tasks = {asyncio.ensure_future(following(number)) for number in range(len(streams))}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number, deltas = task.result()
                tasks.remove(task)
                if deltas is not None:
                    tasks.add(asyncio.ensure_future(following(number)))
                    yield deltas
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


EngineClient = AsyncEngine | Router  # the engines of a server
