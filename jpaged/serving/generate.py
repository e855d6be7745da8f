"""Response to an accepted request: whole, or streamed as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import web

from jpaged.core.request import NON_FINITE, FinishReason
from jpaged.engine.async_engine import Deltas
from jpaged.serving.answer import Answer
from jpaged.serving.codec import dumps, dumps_long
from jpaged.serving.middleware import CLIENT, RECORD, as_api_error
from jpaged.serving.prepare import Prepared
from jpaged.serving.protocol import ApiError
from jpaged.serving.service import SERVICE, Service

SMALL_BYTES = 128 * 2**10  # about a millisecond of work
DONE = b"data: [DONE]\n\n"
ERROR_FLUSH_TIMEOUT_S = 5.0  # seconds that a client has to take the error that ends its stream


async def respond(request: web.Request, answer: Answer, prepared: Prepared[Any]) -> web.StreamResponse:
    """Generate for every prompt at once, and return the response.

    All prompts are accepted before anything is sent, so an invalid request still gets an HTTP 400. A failure in the
    middle of a stream becomes an event of the stream.
    """
    service, body, params = request.app[SERVICE], prepared.body, prepared.params
    options: dict[str, Any] = {
        "priority": body.priority or 0, "cache_salt": body.cache_salt or "", "bad_words": prepared.bad_words,
        # Without several keys, every request is a client of its own.
        "client": request.get(CLIENT, answer.id),
    }  # fmt: skip
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        async with asyncio.timeout(service.config.request_timeout):
            if params.structured_outputs is not None:
                assert service.grammars is not None, "structured outputs were accepted without a tokenizer"
                compiled = service.grammars.submit(params.structured_outputs)
                options["constraint"] = await asyncio.wrap_future(compiled)
            prompts = [prompt.token_ids for prompt in answer.prompts]
            async with service.engine.generate(answer.id, prompts, params, **options) as parts:
                outputs = _until_failure(parts)
                if not body.stream:
                    async for deltas in outputs:
                        await _run(service, partial(_add, answer, deltas), _size(deltas))
                    whole = await service.run(lambda: dumps_long(answer.whole()), answer.size)
                    return web.Response(body=whole, content_type="application/json")
                await response.prepare(request)
                await _send(response, _events(answer.opening()))
                async for deltas in outputs:
                    await _send(response, await _run(service, partial(_chunks, answer, deltas), _size(deltas)))
            if body.stream_options and body.stream_options.include_usage:
                await _send(response, _events([answer.usage_chunk()]))
            await response.write(DONE)
            await response.write_eof()
    except ConnectionResetError:
        raise  # there is nobody to tell
    except Exception as failure:
        if isinstance(failure, TimeoutError):
            failure = ApiError(504, f"the answer was not complete after {service.config.request_timeout:g} seconds")
        if not response.prepared:
            with body.rename_error_fields():
                raise failure from None
        await _end(request, response, as_api_error(failure))
    finally:
        request[RECORD] |= answer.record()
    return response


async def _run[T](service: Service, work: Callable[[], T], size: int) -> T:
    """Return the result of some work on the answer.

    It runs on a worker thread only if that costs less than the work.
    """
    return await service.run(work, size) if size > SMALL_BYTES else work()


def _add(answer: Answer, deltas: Deltas) -> dict[int, None]:
    """Return the choices with additions, in order."""
    return {answer.add(*delta): None for delta in deltas}


def _chunks(answer: Answer, deltas: Deltas) -> bytes:
    return _events(chunk for index in _add(answer, deltas) if (chunk := answer.chunk(index)))


def _size(deltas: Deltas) -> int:
    """Return the approximate bytes of JSON of some deltas."""
    samples = (sample for _, delta in deltas for sample in (*delta.samples, *(delta.prompt_samples or ())))
    return 64 * sum(1 + len(sample.top_tokens) for sample in samples)


def _events(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % dumps(chunk) for chunk in chunks)


async def _send(response: web.StreamResponse, events: bytes) -> None:
    if events:
        await response.write(events)


async def _end(request: web.Request, response: web.StreamResponse, error: ApiError) -> None:
    """Send an error as the stream's last event, because it is too late for a status.

    A client that does not even read that is disconnected.
    """
    await _send(response, _events([error.body]))
    await response.write(DONE)
    try:
        async with asyncio.timeout(ERROR_FLUSH_TIMEOUT_S):
            # aiohttp's own wait for this can't be begun again, once the request's time has ended it.
            while request.transport is not None and request.transport.get_write_buffer_size():
                await asyncio.sleep(0.05)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
    await response.write_eof()


def _failure(reason: int | str | None) -> ApiError:
    if reason == NON_FINITE:
        return ApiError(500, f"{reason}; the server's log has more")
    return ApiError(400, f"structured_outputs: {reason}", "structured_outputs")


async def _until_failure(parts: AsyncIterator[Deltas]) -> AsyncIterator[Deltas]:
    """Yield deltas up to the first failure, and raise that."""
    async for deltas in parts:
        failures = (place for place, (_, delta) in enumerate(deltas) if delta.finish_reason == FinishReason.ERROR)
        place = next(failures, None)
        if place is None:
            yield deltas
        else:
            if place:
                yield deltas[:place]
            raise _failure(deltas[place][1].stop_reason)
