"""Page at `/`, from files of this package."""

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGE = resources.files("jpaged.serving.live").joinpath("page")
# By their paths; no other file is ever sent.
PAGE_FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file.name
    for file in PAGE.iterdir()
    if file.name.rpartition(".")[2] in CONTENT_TYPES
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def sender(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers with one file, which is read now."""
    content = PAGE.joinpath(name).read_bytes()
    etag = hashlib.sha256(content).hexdigest()[:32]

    async def send(request: web.Request) -> web.Response:
        known = request.if_none_match or ()
        if any(tag.value in (etag, "*") for tag in known):
            response = web.Response(status=304)
        else:
            content_type = CONTENT_TYPES[name.rpartition(".")[2]]
            response = web.Response(body=content, content_type=content_type, charset="utf-8")
        response.headers.update(PAGE_HEADERS)
        response.etag = etag
        return response

    return send
