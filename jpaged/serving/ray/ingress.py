"""Ingress of Ray Serve: the OpenAI API over HTTP in front of the replicas."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jpaged.core.commands import ResetPrefixCache
from jpaged.serving.dialect import Dialect
from jpaged.serving.endpoint import dialect_of, is_open
from jpaged.serving.endpoints import served
from jpaged.serving.errors import ApiError, unknown_model
from jpaged.serving.middleware import as_api_error, authorization_of, check_key, error_headers
from jpaged.serving.origins import origin_headers, preflight_headers
from jpaged.serving.ray.messages import Description, Forwarded, merged_metrics, prefix_of
from jpaged.serving.service import LARGE_BYTES, ServerConfig

REPLICA = "Replica"  # name of the replicas' deployment
MODEL = "/v1/models/"  # followed by a name
ATTEMPTS = 2  # attempts at a request if replicas fail before its response begins
STATUS_AGE_S = 1.0


class Ingress:
    """HTTP server in front of the replicas: checks of requests, routes and streams."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig):
        self._replicas, self._config = replicas, config
        self._description: Description | None = None
        self._num_healthy, self._checked = 0, -STATUS_AGE_S
        self._app_name = serve.get_replica_context().app_name
        endpoints = served(config)
        self._endpoints = {path.partition("{")[0]: endpoint for endpoint in endpoints for path in endpoint.paths}

    async def __call__(self, request: Request) -> Response:
        """Return the response to a request."""
        config, headers = self._config, request.headers
        try:
            preflight = preflight_headers(config, request.method, headers)
            response = (
                Response(status_code=204, headers=preflight) if preflight is not None else await self._respond(request)
            )
        except Exception as failure:
            error = _as_api_error(failure)
            body = self._dialect(self._path(request)).error(error)
            response = JSONResponse(body, error.status, error_headers(error))
        response.headers.update(origin_headers(config, headers.get("Origin")))
        return response

    def _path(self, request: Request) -> str:
        """Return the path of a request without those of Ray Serve and of a proxy."""
        path: str = request.url.path
        return path.removeprefix(request.scope.get("root_path", "")).removeprefix(self._config.root_path)

    def _dialect(self, path: str) -> Dialect:
        return dialect_of(self._endpoints.values(), path)

    async def _respond(self, request: Request) -> Response:
        path = self._path(request)
        client = None
        if not is_open(self._endpoints.values(), path):
            client = check_key(self._config.api_keys, authorization_of(request.headers))
        endpoint = self._endpoints.get(MODEL if path.startswith(MODEL) else path)
        if endpoint is None:
            raise ApiError(404, "Not Found")
        if request.method not in endpoint.methods:
            error = ApiError(405, "Method Not Allowed")
            return JSONResponse(error.body, error.status, {"Allow": ",".join(endpoint.methods)})
        if endpoint.operation is not None:
            return await self._forward(Forwarded(path, await self._body(request), client))
        return await self._answer(path)

    async def _answer(self, path: str) -> Response:
        """Return the response of an endpoint without an operation."""
        match path:
            case "/health" | "/ping":
                return Response(status_code=200 if await self._num_replicas() else 503)
            case "/version":
                return JSONResponse({"version": version("jpaged")})
            case "/metrics":
                texts = await self._replicas.broadcast("metrics").results_async(return_exceptions=True)
                merged = merged_metrics(dict(text for text in texts if not isinstance(text, BaseException)))
                return Response(merged, media_type="text/plain; version=0.0.4; charset=utf-8")
            case "/reset_prefix_cache":
                await self._replicas.broadcast("control", ResetPrefixCache()).results_async()
                return Response()
            case "/v1/models":
                return JSONResponse((await self._describe()).models)
        if not path.startswith(MODEL):
            raise ApiError(404, "Not Found")
        models, name = (await self._describe()).models["data"], path.removeprefix(MODEL)
        for model in models:
            if model["id"] == name:
                return JSONResponse(model)
        raise unknown_model(name, models[0]["id"])

    async def _forward(self, forwarded: Forwarded) -> Response:
        """Return the response of a replica, or of another one if the first fails before its response begins."""
        body, is_large = forwarded.body, len(forwarded.body) >= LARGE_BYTES
        forwarded.prefix = await asyncio.to_thread(prefix_of, body) if is_large else prefix_of(body)
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._replicas.options(method_name="respond", stream=True).remote(forwarded)
            try:
                head = await anext(parts)
                if head.headers["Content-Type"].startswith("text/event-stream"):
                    return StreamingResponse(_stream(parts, self._dialect(forwarded.path)), head.status, head.headers)
                return Response(b"".join([part async for part in parts]), head.status, head.headers)
            except RayActorError:
                if attempt == ATTEMPTS:
                    raise
            except asyncio.CancelledError:
                parts.cancel()
                raise
        raise AssertionError("each attempt returns or raises")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request, or raise ApiError (413) if it is too long."""
        limit, parts, size = (await self._describe()).max_body_size, [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body exceeds {limit} bytes (--max-body-size)")
        return b"".join(parts)

    async def _describe(self) -> Description:
        if self._description is None:
            self._description = await self._replicas.options(method_name="describe").remote()
        return self._description

    async def _num_replicas(self) -> int:
        """Return the number of healthy replicas, at most a second old."""
        now = asyncio.get_running_loop().time()
        if now >= self._checked + STATUS_AGE_S:
            self._checked = now
            status = await asyncio.to_thread(serve.status)
            replicas = status.applications[self._app_name].deployments[REPLICA]
            self._num_healthy = replicas.replica_states.get("RUNNING", 0)
        return self._num_healthy


async def _stream(parts: AsyncIterator[bytes], dialect: Dialect) -> AsyncIterator[bytes]:
    """Yield the parts of a stream. The failure of its replica becomes its last event."""
    try:
        async for part in parts:
            yield part
    except Exception as failure:
        yield dialect.stream_end(_as_api_error(failure))


def _as_api_error(failure: Exception) -> ApiError:
    match failure:
        case RayActorError():
            return ApiError(503, "the replica of this request has failed: send it again", retry_after=1)
        case BackPressureError():
            message = "all replicas are busy and the queue is full: retry later"
            return ApiError(503, message, code="queue_full", retry_after=1)
    return as_api_error(failure)
