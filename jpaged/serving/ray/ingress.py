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
from jpaged.serving.generate import stream_end
from jpaged.serving.middleware import as_api_error, check_key, error_headers
from jpaged.serving.origins import origin_headers, preflight_headers
from jpaged.serving.protocol import ApiError
from jpaged.serving.ray.call import Call, Description, prefix_of
from jpaged.serving.ray.metrics import merged_metrics
from jpaged.serving.service import LARGE_BYTES, ServerConfig

REPLICA = "Replica"  # name of the replicas' deployment
CALLS = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
MODELS = "/v1/models"
GET = {MODELS, "/health", "/ping", "/version", "/metrics"}
POST = CALLS | {"/reset_prefix_cache"}
ATTEMPTS = 2  # of a request whose replica fails before the beginning of its response
STATUS_AGE_S = 1.0


class Ingress:
    """HTTP server in front of the replicas: checks of requests, routes and streams.

    Args:
        replicas: handle of the replicas.
    """

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig):
        self._replicas, self._config = replicas, config
        self._description: Description | None = None
        self._num_healthy, self._checked = 0, -STATUS_AGE_S
        self._app_name = serve.get_replica_context().app_name

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
            response = JSONResponse(error.body, error.status, error_headers(error))
        response.headers.update(origin_headers(config, headers.get("Origin")))
        return response

    async def _respond(self, request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", "")).removeprefix(self._config.root_path)
        client = check_key(self._config.api_keys, path, request.headers.get("Authorization", ""))
        allowed = [method for method, paths in (("GET", GET), ("POST", POST)) if path in paths]
        if path.startswith(f"{MODELS}/"):
            allowed = ["GET"]
        if not allowed:
            raise ApiError(404, "Not Found")
        if request.method not in allowed:
            error = ApiError(405, "Method Not Allowed")
            return JSONResponse(error.body, error.status, {"Allow": ",".join(allowed)})
        if path in CALLS:
            return await self._call(Call(path, await self._body(request), client))
        match path:
            case "/health" | "/ping":
                return Response(status_code=200 if await self._num_replicas() else 503)
            case "/version":
                return JSONResponse({"version": version("jpaged")})
            case "/metrics":
                return Response(await self._metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
            case "/reset_prefix_cache":
                await self._replicas.broadcast("control", ResetPrefixCache()).results_async()
                return Response()
        models = (await self._describe()).models
        if path == MODELS:
            return JSONResponse(models)
        name = path.removeprefix(f"{MODELS}/")
        for model in models["data"]:
            if model["id"] == name:
                return JSONResponse(model)
        served = models["data"][0]["id"]
        raise ApiError(404, f"model: {name!r} is not served here; {served!r} is", "model", code="model_not_found")

    async def _call(self, call: Call) -> Response:
        """Return the response of a replica, or of another one if the first fails before its response begins."""
        call.prefix = prefix_of(call.body) if len(call.body) < LARGE_BYTES else await asyncio.to_thread(
            prefix_of, call.body
        )  # fmt: skip
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._replicas.options(method_name="respond", stream=True).remote(call)
            try:
                head = await anext(parts)
                if head.headers["Content-Type"].startswith("text/event-stream"):
                    return StreamingResponse(_stream(parts), head.status, head.headers)
                return Response(b"".join([part async for part in parts]), head.status, head.headers)
            except RayActorError:
                if attempt == ATTEMPTS:
                    raise
            except asyncio.CancelledError:
                parts.cancel()
                raise
        raise AssertionError("each attempt returns or raises")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            ApiError: 413 if it is too long.
        """
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

    async def _metrics(self) -> bytes:
        texts = await self._replicas.broadcast("metrics").results_async(return_exceptions=True)
        return merged_metrics(dict(text for text in texts if not isinstance(text, BaseException)))


async def _stream(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a stream. The failure of its replica becomes its last event."""
    try:
        async for part in parts:
            yield part
    except Exception as failure:
        yield stream_end(_as_api_error(failure))


def _as_api_error(failure: Exception) -> ApiError:
    match failure:
        case RayActorError():
            return ApiError(503, "the replica of this request has failed: send it again", retry_after=1)
        case BackPressureError():
            return ApiError(503, "all replicas are busy and the queue is full: retry later", code="queue_full",
                            retry_after=1)  # fmt: skip
    return as_api_error(failure)
