"""The OpenAI-compatible application: its routes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import HttpVersion11, web

from jpaged.serving import prepare
from jpaged.serving.answer import ChatAnswer, CompletionAnswer
from jpaged.serving.codec import dumps_long
from jpaged.serving.generate import respond
from jpaged.serving.live import feed, static
from jpaged.serving.middleware import MIDDLEWARES, add_request_id
from jpaged.serving.openapi import description
from jpaged.serving.origins import add_origin_headers
from jpaged.serving.prepare import check_model, prepare_chat, prepare_completion
from jpaged.serving.protocol import ApiError
from jpaged.serving.service import SERVICE, Service

BODY_TIMEOUT = 60.0  # seconds that a client has to send the body of its request


def make_app(service: Service) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a client that goes away aborts its request."""
    app = web.Application(client_max_size=service.max_body_size, middlewares=MIDDLEWARES)
    app[SERVICE] = service
    app.cleanup_ctx.append(_engine)
    app.on_response_prepare.extend([add_request_id, add_origin_headers])
    routes = [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", one_model),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        web.get("/health", health),
        web.get("/ping", health),
        web.post("/ping", health),
        web.get("/version", show_version),
        web.get("/metrics", metrics),
        web.get("/openapi.json", openapi),
        *static.routes(),
        *feed.routes(service.engine, service.sample_pool, service.recorder),
    ]
    for route in routes:
        route.kwargs["expect_handler"] = _expect
    app.add_routes(routes)
    if root := service.config.root_path:
        app.add_routes([web.RouteDef(each.method, root + each.path, each.handler, each.kwargs) for each in routes])
    return app


async def _engine(app: web.Application) -> AsyncIterator[None]:
    app[SERVICE].engine.start()
    yield
    await app[SERVICE].engine.stop()


async def _expect(request: web.Request) -> None:
    """As aiohttp's own handler, which fails on a header that is no text."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is understood")
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent


async def completions(request: web.Request) -> web.StreamResponse:
    service, data = request.app[SERVICE], await _body(request)
    prepared = await service.run(partial(prepare_completion, service, data), len(data))
    answer = CompletionAnswer(service.model_name, service.vocabulary, prepared.body, prepared.prompts)
    return await respond(request, answer, prepared)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service, data = request.app[SERVICE], await _body(request)
    prepared = await service.run(partial(prepare_chat, service, data), len(data))
    answer = ChatAnswer(service.model_name, service.vocabulary, prepared.body, prepared.prompts[0], prepared.new_parser)
    return await respond(request, answer, prepared)


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.json_response({"object": "list", "data": [_model(service, name) for name in service.model_names]})


async def one_model(request: web.Request) -> web.Response:
    service, name = request.app[SERVICE], request.match_info["model"]
    check_model(service, name)
    return web.json_response(_model(service, name))


async def tokenize(request: web.Request) -> web.Response:
    return await _computed(request, prepare.tokenize)


async def detokenize(request: web.Request) -> web.Response:
    return await _computed(request, prepare.detokenize)


async def _computed(request: web.Request, function: Callable[[Service, bytes], dict[str, Any]]) -> web.Response:
    service, data = request.app[SERVICE], await _body(request)
    answer = await service.run(lambda: dumps_long(function(service, data)), len(data))
    return web.Response(body=answer, content_type="application/json")


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await request.app[SERVICE].engine.reset_prefix_cache()
    return web.Response()


async def health(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[SERVICE].healthy else 503)


async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": version("jpaged")})


async def metrics(request: web.Request) -> web.Response:
    text = await asyncio.to_thread(request.app[SERVICE].metrics.render)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def openapi(request: web.Request) -> web.Response:
    root = request.app[SERVICE].config.root_path
    return web.json_response(description() | ({"servers": [{"url": root}]} if root else {}))


async def _body(request: web.Request) -> bytes:
    limit = request.app[SERVICE].max_body_size
    too_large = ApiError(413, f"the body exceeds {limit} bytes (--max-body-size)")
    if (request.content_length or 0) > limit:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:  # such as a broken Content-Encoding
        raise ApiError(400, "the body can't be decoded") from None
    except TimeoutError:
        raise ApiError(408, f"the body was not complete after {BODY_TIMEOUT:g} seconds") from None


def _model(service: Service, name: str) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": service.created, "owned_by": "jpaged"}
    return model | {"max_model_len": service.max_model_len}
