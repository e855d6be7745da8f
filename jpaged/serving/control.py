"""Routes for a trainer in another process: pause, new parameters, sleep. They exist only if they are enabled."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from jpaged.core.commands import PARTS, Pause, PauseMode, ResetPrefixCache, Resume, Sleep, UpdateParams, WakeUp
from jpaged.serving.errors import ApiError, invalid
from jpaged.serving.handlers import showing
from jpaged.serving.parse import parse
from jpaged.serving.protocol import UpdateWeightsRequest
from jpaged.serving.service import SERVICE, Service

FLAGS = {"true": True, "1": True, "false": False, "0": False}

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
    """Return the service, and the values of each parameter of the URL.

    Raises:
        ApiError: 400 for an unknown parameter.
    """
    if unknown := sorted(request.query.keys() - known):
        raise ApiError(400, f"{unknown[0]}: is not a parameter of {request.path}", unknown[0])
    return request.app[SERVICE], {name: request.query.getall(name) for name in request.query}


def _choice(name: str, values: list[str], choices: Collection[str]) -> Any:
    """Return the one value of a parameter.

    Raises:
        ApiError: 400 if it is none of the choices, or there are several.
    """
    if len(values) != 1 or values[0] not in choices:
        raise ApiError(400, f"{name}: must be one of {', '.join(choices)}, not {', '.join(values)}", name)
    return values[0]
