"""Stream: the output of one call of `generate`, which the engine's thread sends and a task reads."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from jpaged.core.request import OutputDelta

logger = logging.getLogger(__name__)

Deltas = list[tuple[int, OutputDelta]]  # each with the index of its prompt


@dataclass
class Part:
    """New output: deltas in their order, the number of prompts that end after them, and an error that ends the rest."""

    deltas: Deltas = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None


class Stream:
    """Output that the task has not read yet. Only the event loop that made the stream may use it, except for `send`."""

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


def send(parts: Mapping[Stream, Part]) -> None:
    """Give streams their new output, from any thread. Each event loop is woken once, however many streams it has."""
    for loop in {stream.loop for stream in parts}:
        try:
            loop.call_soon_threadsafe(_put, {stream: part for stream, part in parts.items() if stream.loop is loop})
        except RuntimeError:  # the loop is closed, and its tasks have ended
            logger.debug("output for a closed event loop was dropped")


def _put(parts: Mapping[Stream, Part]) -> None:
    for stream, part in parts.items():
        stream.put(part)
