"""Check of the web pages that may use the server.

A browser sends requests for any page that it shows. An unauthenticated server on this machine is therefore open to
every site that its user visits, unless the server rejects them.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from jpaged.serving.errors import ApiError
from jpaged.serving.service import SERVICE, ServerConfig

MAX_AGE_S = 86_400  # a browser may remember the answer to a preflight for so long
EXPOSED_HEADERS = "X-Request-Id, Retry-After"
# Client libraries send headers of their own, such as x-stainless-lang.
HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,1024}")


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is that of the loopback interface."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


@web.middleware
async def check_origin(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Reject pages of other origins with HTTP 403, and answer preflights of the allowed ones."""
    headers = preflight_headers(request.app[SERVICE].config, request.method, request.headers)
    return await handler(request) if headers is None else web.Response(status=204, headers=headers)


def preflight_headers(config: ServerConfig, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the headers of the response to a preflight of an allowed page; None for other allowed requests.

    Args:
        headers: of the request, by names without regard to case.

    Raises:
        ApiError: 403 for a page or a host that is not allowed, 400 for an invalid host.
    """
    host, origin = headers.get("Host", ""), headers.get("Origin")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as "[]"
        raise ApiError(400, f"Host: {host!r} is no name or address") from None
    if config.allowed_hosts is not None and not (not host or is_loopback(name) or name in config.allowed_hosts):
        # A site whose name leads to 127.0.0.1 has the same origin as this server (DNS rebinding).
        raise ApiError(403, f"Host: {name!r} is not a name of this server (--allowed-hosts)")
    if origin is None:
        return None
    try:
        # Behind a proxy, Host may not be the name that the browser knows, but pages can't set Sec-Fetch-Site.
        is_own = headers.get("Sec-Fetch-Site") == "same-origin" or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # such as "http://["
        is_own = False
    if is_own:
        return None
    if not _is_allowed(config, origin):
        raise ApiError(403, f"Origin: pages of {origin!r} may not use this server (--allowed-origins)")
    if method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
        return None
    allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(MAX_AGE_S)}
    asked = headers.get("Access-Control-Request-Headers", "")
    return allowed | {"Access-Control-Allow-Headers": asked} if HEADER_NAMES.fullmatch(asked) else allowed


async def add_origin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let a page of an allowed origin read the response."""
    for name, value in origin_headers(request.app[SERVICE].config, request.headers.get("Origin")).items():
        response.headers.add(name, value)


def origin_headers(config: ServerConfig, origin: str | None) -> dict[str, str]:
    """Return the headers that let a page of an allowed origin read a response."""
    headers = {}
    if origin and _is_allowed(config, origin):
        headers = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED_HEADERS}
    return headers | {"Vary": "Origin"} if config.allowed_origins else headers


def _is_allowed(config: ServerConfig, origin: str) -> bool:
    return "*" in config.allowed_origins or origin in config.allowed_origins
