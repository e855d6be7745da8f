"""The OpenAI-compatible application: routes, errors, and how a request becomes an answer, whole or streamed."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jpaged.async_engine import AsyncEngine, EngineDead
from jpaged.core.params import InvalidParameter
from jpaged.core.request import OutputDelta
from jpaged.serving.answer import Answer, ChatAnswer, CompletionAnswer, Prompt
from jpaged.serving.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, Params, parse
from jpaged.tokenizer import encode, render_chat

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
OPEN_PATHS = {"/health"}  # to those who have no key, too


@dataclass(eq=False)
class Service:
    """What the handlers share.

    Attributes:
        tokenizer: the Hugging Face tokenizer, for prompts and chat templates.
        sampling_defaults: what a request leaves open, as the model's generation_config.json has it.
        draining: finish what runs, refuse what comes.
        in_flight: generating requests, each by its task.
    """

    engine: AsyncEngine
    tokenizer: Any
    model_name: str
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    api_key: str | None = None
    draining: bool = False
    in_flight: set[asyncio.Task] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))


SERVICE = web.AppKey("service", Service)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a client that goes away aborts its request."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors, authorize, drain])
    app[SERVICE] = service
    app.cleanup_ctx.append(_engine)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", models),
            web.post("/reset_prefix_cache", reset_prefix_cache),
            web.get("/health", health),
        ]
    )
    return app


async def _engine(app: web.Application) -> AsyncIterator[None]:
    app[SERVICE].engine.start()
    yield
    await app[SERVICE].engine.stop()


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure in the API's form; the caller's own are 4xx and name the field."""
    try:
        return await handler(request)
    except ConnectionResetError:
        raise  # the client has gone; there is nobody to answer
    except Exception as failure:
        error = _as_api_error(failure)
        return web.json_response(error.body, status=error.status)


def _as_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            return ApiError(400, str(error), error.field)
        case EngineDead():
            return ApiError(503, str(error))
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has more")


@web.middleware
async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
    key = request.app[SERVICE].api_key
    if key and request.path not in OPEN_PATHS:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")
    return await handler(request)


@web.middleware
async def drain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts what generates; refuses more once the server is shutting down."""
    service = request.app[SERVICE]
    if request.method != "POST":
        return await handler(request)
    if service.draining:
        raise ApiError(503, "the server is shutting down")
    task = asyncio.current_task()
    assert task is not None
    service.in_flight.add(task)
    try:
        return await handler(request)
    finally:
        service.in_flight.discard(task)


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = parse(CompletionRequest, await request.read())
    with body.refusals_in_its_words():
        params, given = body.params(service.sampling_defaults), body.prompts()
        _check(service, body)
        prompts = [await asyncio.to_thread(_prompt, service, prompt, params) for prompt in given]
        answer = CompletionAnswer(service.model_name, service.engine.tokenizer, body, prompts)
        return await _respond(request, answer, params, body)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = parse(ChatRequest, await request.read())
    with body.refusals_in_its_words():
        params = body.params(service.sampling_defaults)
        _check(service, body)
        messages = [message.for_template() for message in body.messages]
        try:
            token_ids = await asyncio.to_thread(render_chat, service.tokenizer, messages, service.chat_template)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        prompt = Prompt(params.truncated(token_ids, service.max_model_len))
        answer = ChatAnswer(service.model_name, service.engine.tokenizer, body, prompt)
        return await _respond(request, answer, params, body)


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "jpaged"}
    return web.json_response({"object": "list", "data": [model | {"max_model_len": service.max_model_len}]})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await request.app[SERVICE].engine.call(lambda engine: engine.scheduler.pool.reset_prefix_cache())
    return web.Response()


async def health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.Response(status=200 if service.engine.alive and not service.draining else 503)


def _check(service: Service, body: GenerationRequest) -> None:
    if body.model not in (None, service.model_name):
        raise ApiError(404, f"model: {body.model!r} is not served here; {service.model_name!r} is", "model")
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options: only allowed with stream", "stream_options")


def _prompt(service: Service, given: str | list[int], params: Params) -> Prompt:
    if not isinstance(given, str):
        return Prompt(params.truncated(given, service.max_model_len))
    token_ids = encode(service.tokenizer, given)
    kept = params.truncated(token_ids, service.max_model_len)
    return Prompt(kept, given if len(kept) == len(token_ids) else None)


async def _respond(request: web.Request, answer: Answer, params: Params, body: GenerationRequest) -> web.StreamResponse:
    """Generates for every prompt at once. Each is accepted before anything is sent, so a refusal is still a 400."""
    service = request.app[SERVICE]
    options = {"priority": body.priority or 0, "cache_salt": body.cache_salt or ""}
    async with _generate(service.engine, answer, params, options) as deltas:
        if not body.stream:
            async for prompt, delta in deltas:
                answer.add(prompt, delta)
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            for chunk in answer.opening():
                await _send(response, chunk)
            async for prompt, delta in deltas:
                part = answer.chunk(prompt, delta)
                if part is not None:
                    await _send(response, part)
            if body.stream_options and body.stream_options.include_usage:
                await _send(response, answer.usage_chunk())
        except ConnectionResetError:
            raise
        except Exception as error:  # too late for a status of its own
            await _send(response, _as_api_error(error).body)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")


@asynccontextmanager
async def _generate(
    engine: AsyncEngine, answer: Answer, params: Params, options: Mapping[str, Any]
) -> AsyncIterator[AsyncIterator[tuple[int, OutputDelta]]]:
    """The outputs of several prompts as one stream of (index of the prompt, delta), once all of them are accepted.
    Leaving it aborts those that still run."""
    merged: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    prompts = [prompt.token_ids for prompt in answer.prompts]
    accepted: list[asyncio.Future[None]] = [loop.create_future() for _ in prompts]

    async def pump(index: int) -> None:
        try:
            async with engine.generate(f"{answer.id}-{index}", prompts[index], params, **options) as deltas:
                accepted[index].set_result(None)
                async for delta in deltas:
                    merged.put_nowait((index, delta))
            merged.put_nowait(None)
        except Exception as error:
            if accepted[index].done():
                merged.put_nowait(error)
            else:
                accepted[index].set_exception(error)

    async def outputs() -> AsyncIterator[tuple[int, OutputDelta]]:
        for _ in prompts:
            while (item := await merged.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item

    tasks = [asyncio.create_task(pump(index)) for index in range(len(prompts))]
    try:
        await asyncio.gather(*accepted)
        yield outputs()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
