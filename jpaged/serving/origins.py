"""Check of the web pages that may use the server.

A browser sends requests for any page that it shows. An unauthenticated server on this machine is therefore open to
every site that its user visits, unless the server rejects them.
"""

import re
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from jpaged.serving.protocol import ApiError
from jpaged.serving.service import SERVICE, ServerConfig

MAX_AGE_S = 86_400  # for which a browser may remember the answer to a preflight
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
    config = request.app[SERVICE].config
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as "[]"
        raise ApiError(400, f"Host: {host!r} is no name or address") from None
    if config.allowed_hosts is not None and not (not host or is_loopback(name) or name in config.allowed_hosts):
        # A site can point its own name at 127.0.0.1, and is then an origin of its own (DNS rebinding).
        raise ApiError(403, f"Host: {name!r} is not a name of this server (--allowed-hosts)")
    if origin is None or _is_own(request, origin, host):
        return await handler(request)
    if not _is_allowed(config, origin):
        raise ApiError(403, f"Origin: pages of {origin!r} may not use this server (--allowed-origins)")
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return await handler(request)
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(MAX_AGE_S)}
    asked = request.headers.get("Access-Control-Request-Headers", "")
    if HEADER_NAMES.fullmatch(asked):
        headers["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers=headers)


async def add_origin_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Let a page of an allowed origin read the response."""
    config, origin = request.app[SERVICE].config, request.headers.get("Origin")
    if origin and _is_allowed(config, origin):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
    if config.allowed_origins:
        response.headers.add("Vary", "Origin")


def _is_own(request: web.Request, origin: str, host: str) -> bool:
    # Behind a proxy, Host may not be the name that the browser knows, but pages can't set Sec-Fetch-Site.
    if request.headers.get("Sec-Fetch-Site") == "same-origin":
        return True
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # such as "http://["
        return False


def _is_allowed(config: ServerConfig, origin: str) -> bool:
    return "*" in config.allowed_origins or origin in config.allowed_origins
