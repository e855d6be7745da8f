"""Several engines of one process behind the interface of one: each prompt goes to the engine that knows its prefix."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.engine.async_engine import AsyncEngine, Deltas, EngineDead, QueueFull
from jpaged.engine.engine import EngineStats, InFlight, PauseMode
from jpaged.engine.prefix_table import PrefixTable


class Router:
    """Client of several engines with the same model, each on devices of its own.

    A prompt goes to the engine that was last given its longest known prefix, unless that engine is too busy; else to
    the one with the fewest requests. An engine that has failed gets no more requests, and the others go on.

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

    async def stop(self) -> None:
        """Stop all engines."""
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def stats(self) -> EngineStats:
        """Return the sums of the engines' numbers."""
        stats = [engine.stats() for engine in self._engines]
        return EngineStats(*map(sum, zip(*stats)))._replace(block_size=stats[0].block_size)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of all engines."""
        await self._all(AsyncEngine.reset_prefix_cache)
        self._forget_prefixes()

    async def update_params(self, source: Any, in_flight: InFlight = "recompute") -> None:
        """Serve other parameters in all engines, with the arguments and errors of `Engine.update_params`.

        Args:
            source: a source for all engines, each of which copies it to its own devices, or a list with one for each.
        """
        sources = source if isinstance(source, list) else [source] * len(self._engines)
        if len(sources) != len(self._engines):
            raise ValueError(f"params: must be a list of {len(self._engines)} sources, one for each engine")
        of = dict(zip(self._engines, sources))
        await self._all(lambda engine: engine.update_params(of[engine], in_flight))
        self._forget_prefixes()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Begin no step in any engine until `resume`."""
        await self._all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        """End a pause of all engines."""
        await self._all(AsyncEngine.resume)

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of all KV pools and parameters."""
        await self._all(lambda engine: engine.sleep(level))
        self._forget_prefixes()

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take back what `sleep` has freed."""
        await self._all(lambda engine: engine.wake_up(tags))

    @property
    def is_paused(self) -> bool:
        """Whether no engine begins a step until `resume`."""
        return all(engine.is_paused for engine in self._engines)

    @property
    def is_asleep(self) -> bool:
        """Whether no engine begins a step until `wake_up`."""
        return all(engine.is_asleep for engine in self._engines)

    def _forget_prefixes(self) -> None:
        for number in range(len(self._engines)):
            self._table.forget(number)

    @asynccontextmanager
    async def generate(
        self, request_id: str, prompts: Sequence[list[int]], params: SamplingParams | BeamSearchParams, **options: Any
    ) -> AsyncIterator[AsyncIterator[Deltas]]:
        """Queue a request for each prompt, as `AsyncEngine.generate` does.

        Raises:
            InvalidParameter: a request could never run.
            QueueFull: too many requests are waiting at every engine.
            EngineDead: every engine has failed, or one fails that has begun with a prompt.
        """
        places: dict[int, list[int]] = {}  # of each engine, the indexes of its prompts
        async with AsyncExitStack() as stack:
            for index, prompt in enumerate(prompts):
                loads = {number: live for number, live in enumerate(self._num_live) if self._engines[number].alive}
                salt = options.get("cache_salt", "")
                number = self._table.choose(prompt, loads or {0: 0}, salt=salt)
                self._table.remember(prompt, number, salt=salt)
                places.setdefault(number, []).append(index)
                self._add_live(stack, number, 1)  # the engine accepts it later, and other requests come meanwhile
            streams = []
            for number, indexes in places.items():
                parts = [prompts[index] for index in indexes]
                stream = await self._enter(stack, number, request_id, parts, params, options)
                streams.append((stream, indexes))
            (stream, _), *others = streams
            yield _merged(streams) if others else stream

    async def _enter(
        self, stack: AsyncExitStack, number: int, request_id: str, prompts: Sequence[list[int]],
        params: SamplingParams | BeamSearchParams, options: dict[str, Any],
    ) -> AsyncIterator[Deltas]:  # fmt: skip
        """Begin with some prompts at the chosen engine, or else at the least loaded one that accepts them."""
        problem: Exception = EngineDead("every engine has failed")
        for each in sorted(range(len(self._engines)), key=lambda other: (other != number, self._num_live[other])):
            if not self._engines[each].alive:
                continue
            try:
                context = self._engines[each].generate(request_id, prompts, params, **options)
                stream = await stack.enter_async_context(context)
            except (QueueFull, EngineDead) as error:
                problem = error
                continue
            if each != number:
                self._add_live(stack, number, -len(prompts))
                self._add_live(stack, each, len(prompts))
            return stream
        raise problem

    def _add_live(self, stack: AsyncExitStack, number: int, change: int) -> None:
        """Change the number of an engine's live prompts until the request ends."""

        def add(change: int) -> None:
            self._num_live[number] += change

        add(change)
        stack.callback(add, -change)

    async def _all(self, call: Callable[[AsyncEngine], Any]) -> None:
        """Await a call of every engine that is alive.

        Raises:
            EngineDead: there is none.
        """
        if not self.alive:
            raise EngineDead("every engine has failed")
        await asyncio.gather(*(call(engine) for engine in self._engines if engine.alive))


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
