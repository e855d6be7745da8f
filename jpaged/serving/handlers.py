"""Handlers of aiohttp for the endpoints."""

import asyncio
import json
from collections.abc import Callable
from functools import partial

from aiohttp import web

from jpaged.core.commands import ResetPrefixCache
from jpaged.serving import info
from jpaged.serving.codec import JsonObject
from jpaged.serving.endpoint import Handler, Operation
from jpaged.serving.errors import ApiError
from jpaged.serving.generate import respond
from jpaged.serving.middleware import client_of
from jpaged.serving.service import SERVICE, Service

BODY_TIMEOUT = 60.0  # seconds that a client has to send the body of its request


def answering(operation: Operation) -> Handler:
    """Return the handler of an operation on the body of a request."""

    async def answer(request: web.Request) -> web.StreamResponse:
        result = await operation(request.app[SERVICE], await _body(request), client_of(request))
        if isinstance(result, bytes):
            return web.Response(body=result, content_type="application/json")
        return await respond(request, result)

    return answer


def showing(view: Callable[[Service], JsonObject]) -> Handler:
    """Return the handler that shows facts about the service."""

    async def show(request: web.Request) -> web.StreamResponse:
        # `str` is for AddedTokens in the tokenizer's configuration.
        return web.json_response(view(request.app[SERVICE]), dumps=partial(json.dumps, default=str))

    return show


async def one_model(request: web.Request) -> web.Response:
    """Return the description of one model."""
    return web.json_response(info.model_card(request.app[SERVICE], request.match_info["model"]))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget all cached prefixes."""
    await request.app[SERVICE].engine.control(ResetPrefixCache())
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """Return HTTP 200 if the server accepts requests, else HTTP 503."""
    return web.Response(status=200 if request.app[SERVICE].healthy else 503)


async def metrics(request: web.Request) -> web.Response:
    """Return the metrics in Prometheus's text format."""
    text = await asyncio.to_thread(request.app[SERVICE].metrics.render)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def live(request: web.Request) -> web.StreamResponse:
    """Send the KV pool as it changes."""
    return await request.app[SERVICE].feed.watch(request)


async def live_number(request: web.Request) -> web.StreamResponse:
    """Return the number of a request on the map of the KV pool."""
    return await request.app[SERVICE].feed.number(request)


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
