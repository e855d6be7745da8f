"""Handlers of aiohttp for the endpoints.

Those for a trainer in another process, from `pause` on, have routes only if these are enabled.
"""

import asyncio
import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from jpaged.core.commands import (
    PARTS,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateParams,
    WakeUp,
)
from jpaged.serving import info
from jpaged.serving.codec import JsonObject
from jpaged.serving.endpoint import Handler, Operation
from jpaged.serving.errors import ApiError, invalid
from jpaged.serving.generate import respond
from jpaged.serving.middleware import client_of
from jpaged.serving.parse import parse
from jpaged.serving.protocol import LoadAdapterRequest, UnloadAdapterRequest, UpdateWeightsRequest
from jpaged.serving.service import SERVICE, Service

FLAGS = {"true": True, "1": True, "false": False, "0": False}
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


is_paused = showing(lambda service: {"is_paused": service.engine.is_paused})
is_sleeping = showing(lambda service: {"is_sleeping": service.engine.is_asleep})


async def pause(request: web.Request) -> web.Response:
    """Begin no step until `/resume`; running requests are aborted, end first, or wait."""
    service, query = _query(request, {"mode", "clear_cache"})
    mode = _choice("mode", query.get("mode", ["abort"]), get_args(PauseMode))
    clear = FLAGS[_choice("clear_cache", query.get("clear_cache", ["true"]), FLAGS)]
    await service.engine.control(Pause(mode))
    if clear:
        await service.engine.control(ResetPrefixCache())
    return web.json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """End a pause."""
    service, _ = _query(request, set())
    await service.engine.control(Resume())
    return web.json_response({"status": "resumed"})


async def update_weights(request: web.Request) -> web.Response:
    """Load parameters from a directory of the server's machine, and serve them."""
    service, _ = _query(request, set())
    body = await asyncio.to_thread(parse, UpdateWeightsRequest, await request.read())
    assert service.load_params is not None
    try:
        params = await asyncio.to_thread(service.load_params, Path(body.path))
    except (OSError, ValueError) as error:
        raise invalid("path", str(error)) from error
    try:
        await service.engine.control(UpdateParams(params, body.in_flight))
    except ValueError as error:
        raise ApiError(400, str(error), "path") from error
    return web.json_response({"status": "updated"})


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Serve an adapter from a directory of the server's machine under a name."""
    service, _ = _query(request, set())
    body = await asyncio.to_thread(parse, LoadAdapterRequest, await request.read())
    if body.lora_name in (service.model_name, *service.config.aliases):
        raise invalid("lora_name", f"{body.lora_name!r} is a name of the model")
    assert service.load_adapter is not None
    try:
        command = await asyncio.to_thread(service.load_adapter, body.lora_name, Path(body.lora_path))
        await service.engine.control(command)
    except (OSError, ValueError) as error:
        raise ApiError(400, str(error), "lora_path") from error
    return web.json_response({"status": "loaded"})


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Serve no adapter under a name."""
    service, _ = _query(request, set())
    body = await asyncio.to_thread(parse, UnloadAdapterRequest, await request.read())
    try:
        await service.engine.control(UnloadAdapter(body.lora_name))
    except ValueError as error:
        raise ApiError(404, str(error), "lora_name") from error
    return web.json_response({"status": "unloaded"})


async def sleep(request: web.Request) -> web.Response:
    """Free the memory of the KV pool and of the parameters."""
    service, query = _query(request, {"level"})
    level = int(_choice("level", query.get("level", ["1"]), ("1", "2")))
    try:
        await service.engine.control(Sleep(level))
    except ValueError as error:
        raise ApiError(400, str(error)) from error
    return web.json_response({"status": "asleep"})


async def wake_up(request: web.Request) -> web.Response:
    """Take back what `/sleep` has freed."""
    service, query = _query(request, {"tags"})
    tags = query.get("tags", PARTS)
    for tag in tags:
        _choice("tags", [tag], sorted(PARTS))
    try:
        await service.engine.control(WakeUp(tags))
    except ValueError as error:
        raise ApiError(400, str(error), "tags") from error
    return web.json_response({"status": "awake" if not service.engine.is_asleep else "asleep"})


def _query(request: web.Request, known: set[str]) -> tuple[Service, dict[str, list[str]]]:
    """Return the service, and the values of each parameter of the URL; ApiError 400 for an unknown one."""
    if unknown := sorted(request.query.keys() - known):
        raise ApiError(400, f"{unknown[0]}: is not a parameter of {request.path}", unknown[0])
    return request.app[SERVICE], {name: request.query.getall(name) for name in request.query}


def _choice(name: str, values: list[str], choices: Collection[str]) -> Any:
    """Return the one value of a parameter; ApiError 400 if it is none of the choices, or there are several."""
    if len(values) != 1 or values[0] not in choices:
        raise ApiError(400, f"{name}: must be one of {', '.join(choices)}, not {', '.join(values)}", name)
    return values[0]


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
