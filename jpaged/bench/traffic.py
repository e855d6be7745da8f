"""Sending of requests at their times, and a record of each response."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from jpaged.bench.client import Client, ServerError
from jpaged.bench.measure import Record


async def drive(
    client: Client,
    path: str,
    bodies: Sequence[dict[str, Any]],
    due: Sequence[float],
    concurrency: int | None = None,
    ended: Callable[[], object] = lambda: None,
) -> list[Record]:
    """Send each body at its due time and return a record for each, in order.

    While `concurrency` requests run, the next one waits until one of them ends. `ended` is called after each request.
    """
    room = asyncio.Semaphore(concurrency or len(bodies))
    start = time.perf_counter()

    async def one(body: dict[str, Any], at: float) -> Record:
        async with room:
            record = await send(client, path, body, at)
        ended()
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, offset in zip(bodies, due):
            if (wait := start + offset - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body, start + offset)))
    return [task.result() for task in tasks]


async def send(client: Client, path: str, body: dict[str, Any], due: float) -> Record:
    """Send a request now and read its response to the end. A failure is part of the record."""
    record = Record(due, sent=time.perf_counter())
    try:
        async with aclosing(client.stream(path, body)) as events:
            async for at, event in events:
                if _has_text(event):
                    record.chunks.append(at)
                if usage := event.get("usage"):
                    record.prompt_tokens = usage.get("prompt_tokens")
                    record.output_tokens = usage.get("completion_tokens")
    except ServerError as error:
        record.failure, record.detail = error.kind, error.detail
    record.ended = time.perf_counter()
    return record


def _has_text(event: dict[str, Any]) -> bool:
    """Return whether a chunk carries text of the model, and not only a role or a finish reason."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if choice.get("text") if delta is None else any(delta.get(name) for name in _SAID):
            return True
    return False


_SAID = ("content", "reasoning_content", "reasoning", "tool_calls")
