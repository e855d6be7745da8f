"""The definition of an endpoint."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import BaseModel

from jpaged.serving.dialect import CHATS, Dialect
from jpaged.serving.prepare import Exchange
from jpaged.serving.service import Service

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# From a service, the body of a request, and the client whose turn at long work it takes, to the body of the response,
# or to a request for generation. Raises ApiError 400 or 404.
type Operation = Callable[[Service, bytes, str], Awaitable[Exchange | bytes]]


@dataclass(frozen=True, eq=False)
class Endpoint:
    """Path of the API with its handler.

    Attributes:
        path: the path; {name} stands for the rest of a path, which the handler reads.
        summary: what the endpoint does, for the OpenAPI document and docs/server.md.
        handler: handler of aiohttp.
        operation: the part of the handler that the ingress of Ray Serve lets a replica do; None: there is none.
        methods: HTTP methods. GET includes HEAD.
        aliases: further paths with the same function.
        bodies: models of the request's body, which has the form of one of them.
        contents: content types of the response.
        refusals: descriptions of the statuses of errors, besides the usual ones.
        is_open: no API key is needed, because no text of any request is returned.
        is_described: the OpenAPI document has the endpoint.
        setting: field of ServerConfig without which the endpoint does not exist.
        dialect: form of errors and streams.
    """

    path: str
    summary: str
    handler: Handler
    operation: Operation | None = None
    methods: tuple[str, ...] = ("GET",)
    aliases: tuple[str, ...] = ()
    bodies: tuple[type[BaseModel], ...] = ()
    contents: tuple[str, ...] = (JSON,)
    refusals: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False
    is_described: bool = True
    setting: str | None = None
    dialect: Dialect = CHATS

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths."""
        return self.path, *self.aliases


SERVED = web.AppKey("served", tuple[Endpoint, ...])


def is_open(endpoints: Iterable[Endpoint], path: str) -> bool:
    """Return whether a request with a path needs no API key. Files of the page that don't exist are open, too."""
    return path.startswith("/page/") or any(path in endpoint.paths for endpoint in endpoints if endpoint.is_open)


def dialect_of(endpoints: Iterable[Endpoint], path: str) -> Dialect:
    """Return the form of errors for a path."""
    return next((endpoint.dialect for endpoint in endpoints if endpoint.path == path), CHATS)
