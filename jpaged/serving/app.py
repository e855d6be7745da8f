"""OpenAI-compatible application: its routes."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import HttpVersion11, web

from jpaged.core.commands import ResetPrefixCache
from jpaged.serving import control
from jpaged.serving.generate import chat_completion, completion, compute, respond
from jpaged.serving.info import model_info, server_info, tokenizer_config
from jpaged.serving.live import feed, static
from jpaged.serving.middleware import MIDDLEWARES, add_request_id, client_of
from jpaged.serving.openapi import description
from jpaged.serving.origins import add_origin_headers
from jpaged.serving.prepare import check_model
from jpaged.serving.protocol import ApiError
from jpaged.serving.service import SERVICE, Service

BODY_TIMEOUT = 60.0  # seconds that a client has to send the body of its request


def make_app(service: Service) -> web.Application:
    """Return the application.

    Run it with `handler_cancellation=True`, so that the request of a disconnected client is aborted.
    """
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
        web.get("/load", load),
        web.get("/tokenizer_info", tokenizer_info),
        web.get("/model_info", show_model_info),
        web.get("/get_model_info", show_model_info),
        web.get("/server_info", show_server_info),
        web.get("/get_server_info", show_server_info),
        web.get("/metrics", metrics),
        web.get("/openapi.json", openapi),
        *static.routes(),
        *feed.routes(service.engine, service.sample_pool, service.recorder),
    ]
    if service.config.enable_weight_updates:
        routes += control.routes()
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
    """Handle the Expect header as aiohttp's own handler does, which fails on a header that is not text."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is understood")
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle `/v1/completions`."""
    return await respond(request, await completion(request.app[SERVICE], await _body(request), client_of(request)))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handle `/v1/chat/completions`."""
    exchange = await chat_completion(request.app[SERVICE], await _body(request), client_of(request))
    return await respond(request, exchange)


async def models(request: web.Request) -> web.Response:
    """Return the list of models."""
    return web.json_response(model_list(request.app[SERVICE]))


async def one_model(request: web.Request) -> web.Response:
    """Return the description of one model."""
    service, name = request.app[SERVICE], request.match_info["model"]
    check_model(service, name)
    return web.json_response(_model(service, name))


async def tokenize(request: web.Request) -> web.Response:
    """Handle `/tokenize`."""
    return await _computed(request, "/tokenize")


async def detokenize(request: web.Request) -> web.Response:
    """Handle `/detokenize`."""
    return await _computed(request, "/detokenize")


async def _computed(request: web.Request, path: str) -> web.Response:
    answer = await compute(request.app[SERVICE], path, await _body(request), client_of(request))
    return web.Response(body=answer, content_type="application/json")


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes."""
    await request.app[SERVICE].engine.control(ResetPrefixCache())
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """Return HTTP 200 if the server accepts requests, else HTTP 503."""
    return web.Response(status=200 if request.app[SERVICE].healthy else 503)


async def load(request: web.Request) -> web.Response:
    """Return the number of requests that are being answered."""
    return web.json_response({"server_load": len(request.app[SERVICE].in_flight)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """Return the configuration of the tokenizer."""
    config = tokenizer_config(request.app[SERVICE])
    return web.json_response(config, dumps=partial(json.dumps, default=str))  # which may hold AddedTokens


async def show_version(request: web.Request) -> web.Response:
    """Return the version of the package."""
    return web.json_response({"version": version("jpaged")})


async def show_model_info(request: web.Request) -> web.Response:
    """Return facts about the model."""
    return web.json_response(model_info(request.app[SERVICE]))


async def show_server_info(request: web.Request) -> web.Response:
    """Return facts about the model and the server."""
    return web.json_response(server_info(request.app[SERVICE]))


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus's text format."""
    text = await asyncio.to_thread(request.app[SERVICE].metrics.render)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def openapi(request: web.Request) -> web.Response:
    """Return the OpenAPI document."""
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


def model_list(service: Service) -> dict[str, Any]:
    """Return the response of `/v1/models`."""
    return {"object": "list", "data": [_model(service, name) for name in service.model_names]}


def _model(service: Service, name: str) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}", "object": "model_permission", "created": service.created, "organization": "*",
        "group": None, "is_blocking": False, "allow_create_engine": False, "allow_sampling": True,
        "allow_logprobs": True, "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
    }  # fmt: skip
    return {
        "id": name, "object": "model", "created": service.created, "owned_by": "jpaged",
        "root": service.model_facts.get("model_path", service.model_name), "parent": None,
        "max_model_len": service.max_model_len, "permission": [permission],
    }  # fmt: skip
