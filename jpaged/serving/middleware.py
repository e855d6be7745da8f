"""Middlewares, outermost first: record, errors, origins, keys, the count of running requests."""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence

from aiohttp import web

from jpaged.core.params import InvalidParameter
from jpaged.core.plan import ParamsDeleted
from jpaged.engine.async_engine import EngineDead, QueueFull, RequestFailed
from jpaged.serving.codec import JsonObject
from jpaged.serving.dialect import Dialect
from jpaged.serving.endpoint import SERVED, Handler, dialect_of, is_open
from jpaged.serving.errors import ApiError
from jpaged.serving.origins import check_origin
from jpaged.serving.service import SERVICE

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("jpaged.access")

REQUEST_ID = "X-Request-Id"
KEY = "X-Api-Key"
RECORD = web.RequestKey("record", JsonObject)  # further fields of a request in the access log
CLIENT = web.RequestKey("client", str)  # the key, where there are several


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, unless it has one, and write a line of the access log, as JSON."""
    header = request.headers.get(REQUEST_ID, "")
    request_id = header if re.fullmatch(r"[\x21-\x7e]{1,128}", header) else uuid.uuid4().hex
    request[RECORD] = {"request_id": request_id}
    start, status = time.monotonic(), 499  # nginx's status for a client that did not wait for the answer
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        seconds, route = time.monotonic() - start, request.match_info.route.resource
        path = route.canonical if route else "unknown"
        request.app[SERVICE].metrics.answered(request.method, path, status, seconds)
        line: dict[str, object] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "client": request.remote}
        line |= {"method": request.method, "path": request.path, "status": status, "seconds": round(seconds, 4)}
        access_logger.info("%s", json.dumps(line | request[RECORD]))


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id to the headers of the response."""
    if RECORD in request:
        for name in _dialect(request).id_headers:
            response.headers[name] = request[RECORD]["request_id"]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every failure in the API's form; errors of the client are 4xx and name the field."""
    try:
        return await handler(request)
    except ConnectionResetError:
        raise  # the client has gone; there is nobody to answer
    except Exception as failure:
        error = as_api_error(failure)
        if isinstance(failure, web.HTTPNotFound):
            error = ApiError(404, f"{request.path} is not served here; /openapi.json lists the routes")
        if isinstance(failure, QueueFull):
            request.app[SERVICE].metrics.rejected.inc()
        headers = error_headers(error)
        if isinstance(failure, web.HTTPMethodNotAllowed):
            headers["Allow"] = failure.headers["Allow"]
        return web.json_response(_dialect(request).error(error), status=error.status, headers=headers)


def _dialect(request: web.Request) -> Dialect:
    """Return the form of errors of a request's path."""
    endpoints = request.app[SERVED]
    return dialect_of(endpoints, _path(request))


def _path(request: web.Request) -> str:
    """Return the path of a request without that of a proxy."""
    return request.path.removeprefix(request.app[SERVICE].config.root_path)


def as_api_error(error: Exception) -> ApiError:
    """Return an exception as an error of the API; an unexpected one is logged."""
    match error:
        case ApiError():
            return error
        case InvalidParameter():
            return ApiError(400, str(error), error.field, code=error.code)
        case QueueFull():
            return ApiError(503, str(error), code="queue_full", retry_after=1)
        case EngineDead() | ParamsDeleted():
            return ApiError(503, str(error))
        case RequestFailed():
            return ApiError(500, str(error))
        case web.HTTPException():
            return ApiError(error.status, error.reason)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has more")


def error_headers(error: ApiError) -> dict[str, str]:
    """Return the headers of a response with an error."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return headers | {"WWW-Authenticate": "Bearer"} if error.status == 401 else headers


@web.middleware
async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject requests without a valid API key."""
    keys, endpoints = request.app[SERVICE].config.api_keys, request.app[SERVED]
    needs_key = not is_open(endpoints, _path(request))
    if needs_key and (client := check_key(keys, authorization_of(request.headers))):
        request[CLIENT] = client
    return await handler(request)


def authorization_of(headers: Mapping[str, str]) -> str:
    """Return the authorization of a request: that of its header, or Anthropic's header with a key."""
    if "Authorization" not in headers and KEY in headers:
        return f"Bearer {headers[KEY]}"
    return headers.get("Authorization", "")


def check_key(keys: Sequence[str], authorization: str) -> str | None:
    """Return the client of a request, where keys tell clients apart.

    Digests of equal length are compared with every key, so that the time reveals nothing about any of them.

    Args:
        keys: valid keys; without keys, every request is allowed.
        authorization: as of `authorization_of`.

    Raises:
        ApiError: 401 if there are keys, and the request has no valid one.
    """
    if not keys:
        return None
    kind, _, presented = authorization.partition(" ")
    digest = hashlib.sha256(presented.strip().encode(errors="surrogateescape")).digest()
    matches = [
        hmac.compare_digest(digest, hashlib.sha256(key.encode(errors="surrogateescape")).digest()) for key in keys
    ]
    if kind.lower() != "bearer" or not any(matches):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")
    return f"key {matches.index(True)}" if len(keys) > 1 else None


def client_of(request: web.Request) -> str:
    """Return the identity of a client for turns at long work: its key where there are several, else its address."""
    return request.get(CLIENT) or request.remote or ""


@web.middleware
async def drain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count generating requests, and reject new ones during shutdown."""
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


MIDDLEWARES = [record, errors, check_origin, authorize, drain]
