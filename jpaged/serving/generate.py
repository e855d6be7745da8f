"""Response to an accepted request: whole, or streamed as server-sent events.

`generate` yields the parts of the body and knows nothing of HTTP; `respond` sends them with aiohttp.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from aiohttp import web
from pydantic import BaseModel

from jpaged.core.request import NON_FINITE, FinishReason
from jpaged.engine.async_engine import Deltas
from jpaged.engine.engine import RequestOptions
from jpaged.serving.answer import Answer
from jpaged.serving.codec import JsonObject, dumps_long
from jpaged.serving.endpoint import Operation
from jpaged.serving.errors import ApiError, invalid
from jpaged.serving.middleware import CLIENT, RECORD, as_api_error, client_of
from jpaged.serving.parse import parse
from jpaged.serving.prepare import Exchange
from jpaged.serving.service import SERVICE, Service

SMALL_BYTES = 128 * 2**10  # about a millisecond of work
EVENT_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
ERROR_FLUSH_TIMEOUT_S = 5.0  # seconds that a client has to take the error that ends its stream
type Work[B] = Callable[[Service, B], Exchange | bytes]


def in_turns[B: BaseModel](kind: type[B], work: Work[B], *, renders: bool = True) -> Operation:
    """Return the operation that parses bodies of a kind and does some work on them, in the turns of clients.

    Args:
        renders: the work may wait for a chat template.
    """

    async def operate(service: Service, data: bytes, turn: str) -> Exchange | bytes:
        parse_and_work = lambda: work(service, parse(kind, data, ignore_unknown=service.config.ignore_unknown_fields))
        await service.check_body(kind, data, turn)
        if renders:
            return await service.chat_turns.run(turn, parse_and_work)
        return await service.run(parse_and_work, len(data), turn)

    return operate


async def generate(service: Service, exchange: Exchange, turn: str, tenant: str | None) -> AsyncGenerator[bytes]:
    """Generate for every prompt at once, and yield the body of the response: JSON, or server-sent events of a stream.

    Without `stream`, the whole body is one part. A stream begins with the part, possibly empty, that follows the
    acceptance of all prompts; each further part has the news of all choices. Closing the iterator aborts the request.

    Args:
        turn: client for the turns at long work.
        tenant: client for fair use of the queue and of steps; None: every request is a client of its own in the
            queue, and steps are not shared.

    Raises:
        Exception: any failure, also in the middle of a stream. `Answer.stream_end` returns the end of such a stream.
    """
    body, params, bad_words, answer, shown_tokens = exchange
    frames = answer.dialect.frames
    with body.rename_error_fields():
        options = RequestOptions(bad_words=bad_words, client=tenant or answer.id, tenant=tenant)
        options |= {"priority": body.priority or 0, "cache_salt": body.cache_salt or "", "pin_s": body.pin_seconds}
        options["shown_tokens"] = shown_tokens
        options["adapter"] = service.adapter_of(body.model)
        if params.structured_outputs is not None:
            assert service.grammars is not None, "structured outputs were accepted without a tokenizer"
            work = partial(service.grammars.compile_here, params.structured_outputs)
            options["constraint"] = await service.grammar_turns.run(turn, work)
        prompts = [prompt.token_ids for prompt in answer.prompts]
        async with service.engine.generate(answer.id, prompts, params, **options) as parts:
            outputs = _until_failure(parts)
            if not body.stream:
                async for deltas in outputs:
                    await _run(service, partial(_add, answer, deltas), deltas, turn)
                yield await service.run(lambda: dumps_long(answer.whole()), answer.size, turn)
                return
            yield frames(answer.opening())
            async for deltas in outputs:
                if events := await _run(service, partial(_chunks, answer, deltas), deltas, turn):
                    yield events
        yield frames(answer.closing()) + answer.dialect.end


def timed_out(service: Service) -> ApiError:
    """Return the error of a request that exceeds the time limit of the server."""
    return ApiError(504, f"the answer was not complete after {service.config.request_timeout:g} seconds")


async def respond(request: web.Request, exchange: Exchange) -> web.StreamResponse:
    """Generate for every prompt at once, and return the response.

    All prompts are accepted before anything is sent, so an invalid request still gets an HTTP 400. A failure in the
    middle of a stream becomes an event of the stream.
    """
    service, body = request.app[SERVICE], exchange.body
    response = web.StreamResponse(headers=EVENT_HEADERS)
    try:
        async with (
            asyncio.timeout(service.config.request_timeout),
            aclosing(generate(service, exchange, client_of(request), request.get(CLIENT))) as parts,
        ):
            async for part in parts:
                if not body.stream:
                    return web.Response(body=part, content_type="application/json")
                if not response.prepared:
                    await response.prepare(request)
                if part:
                    await response.write(part)
            await response.write_eof()
    except ConnectionResetError:
        raise  # the client has disconnected
    except Exception as failure:
        if isinstance(failure, TimeoutError):
            failure = timed_out(service)
        if not response.prepared:
            raise failure from None
        await _end(request, response, exchange.answer.stream_end(as_api_error(failure)))
    finally:
        request[RECORD] |= exchange.answer.record()
    return response


async def _run[T](service: Service, work: Callable[[], T], deltas: Deltas, turn: str) -> T:
    """Return the result of some work on deltas, on a worker thread only if that costs less than the work."""
    samples = (sample for _, delta in deltas for sample in (*delta.samples, *(delta.prompt_samples or ())))
    size = 64 * sum(1 + len(sample.top_tokens) for sample in samples)  # approximate bytes of their JSON
    return await service.run(work, size, turn) if size > SMALL_BYTES else work()


def _add(answer: Answer, deltas: Deltas) -> dict[int, None]:
    """Return the choices with additions, in order."""
    return {answer.add(*delta): None for delta in deltas}


def _chunks(answer: Answer, deltas: Deltas) -> bytes:
    events: list[JsonObject] = []
    for index in _add(answer, deltas):
        events += answer.events(index)
    return answer.dialect.frames(events)


async def _end(request: web.Request, response: web.StreamResponse, end: bytes) -> None:
    """Send the end of a stream that fails. A client that does not even read that is disconnected."""
    await response.write(end)
    try:
        async with asyncio.timeout(ERROR_FLUSH_TIMEOUT_S):
            # aiohttp's drain can't be awaited again after the time limit of the request has cancelled it.
            while request.transport is not None and request.transport.get_write_buffer_size():
                await asyncio.sleep(0.05)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
    await response.write_eof()


async def _until_failure(parts: AsyncIterator[Deltas]) -> AsyncIterator[Deltas]:
    """Yield deltas up to the first failure, and raise that."""
    async for deltas in parts:
        for place, (_, delta) in enumerate(deltas):
            if delta.finish_reason == FinishReason.ERROR:
                if place:
                    yield deltas[:place]
                if delta.stop_reason == NON_FINITE:
                    raise ApiError(500, f"{delta.stop_reason}; the server's log has more")
                raise invalid("structured_outputs", str(delta.stop_reason))
        yield deltas
