"""Client for servers with the OpenAI API: plain responses, and streamed responses as events with their times."""

import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Self

import aiohttp

# Shorter than the time-out of any server. A request on a connection that the server is about to close would fail.
KEEPALIVE_SECONDS = 2.0


class ServerError(ConnectionError):
    """Failure of a request: server unreachable, HTTP error, or broken response.

    `kind` is equal for failures of one sort, such as "timeout" or "HTTP 503".
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class EventReader:
    """Parser of a stream of server-sent events, which the network may split at any byte."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of the events that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Client:
    """Client of one server; close it, or use it as an asynchronous context manager.

    All requests raise ServerError.

    Args:
        url: address of the server, with or without /v1.
        timeout: maximum seconds of a request; None: no limit.

    Raises:
        ValueError: `url` is not a URL.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: must begin with http:// or https://, not {url!r}")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if "_session" in vars(self):
            await self._session.close()

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Session, created at the first request because it belongs to that request's event loop."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            headers=self._headers,
        )

    async def models(self) -> list[dict[str, Any]]:
        """Return the served models: `id`, and from some servers `max_model_len`."""
        answer = await self._request("GET", "/v1/models")
        if not answer.get("data"):
            raise ServerError("no model", f"{self.url}/v1/models lists none")
        models: list[dict[str, Any]] = answer["data"]
        return models

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the JSON body of the response."""
        return await self._request("POST", path, json=body)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[tuple[float, dict[str, Any]]]:
        """Yield the events of a streamed response, each with the `time.perf_counter` at which its bytes were read."""
        with self._failures("no connection"):
            response = await self._session.post(self.url + path, json=body)
        reader = EventReader()
        with self._failures("broken stream"):
            async with response:
                if response.status != 200:
                    raise await self._refusal(response)
                async for received in response.content.iter_any():
                    now = time.perf_counter()
                    for data in reader.feed(received):
                        if data == b"[DONE]":
                            return
                        event = _object(json.loads(data))
                        if event.get("error"):
                            raise ServerError("error in the stream", _message(event))
                        yield now, event
            raise ServerError("broken stream", "it ended without [DONE]")

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._failures("no connection"):
            async with self._session.request(method, self.url + path, **options) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                return _object(json.loads(await response.read()))

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServerError:
        text = (await response.read()).decode(errors="replace")
        with suppress(ValueError):
            text = _message(json.loads(text))
        return ServerError(f"HTTP {response.status}", text or str(response.reason))

    @contextmanager
    def _failures(self, kind: str) -> Iterator[None]:
        try:
            yield
        except ServerError:
            raise
        except TimeoutError as error:
            raise ServerError("timeout", f"{self.url} took more than {self._timeout or 0:g} seconds") from error
        except (aiohttp.ClientError, OSError) as error:
            said = str(getattr(error, "os_error", error)) or type(error).__name__
            raise ServerError(kind, f"{self.url}: {said}") from error
        except ValueError as error:
            raise ServerError("no JSON", f"{self.url}: {error}") from error


def _object(parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise ValueError(f"an object was expected, not {parsed!r:.60}")
    return parsed


def _message(body: Any) -> str:
    """Return the message in the body of an error, in the API's form or in another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
