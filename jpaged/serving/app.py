"""OpenAI-compatible application: the routes of its endpoints."""

from collections.abc import AsyncIterator

from aiohttp import HttpVersion11, web

from jpaged.serving.endpoint import SERVED
from jpaged.serving.endpoints import served
from jpaged.serving.middleware import MIDDLEWARES, add_request_id
from jpaged.serving.origins import add_origin_headers
from jpaged.serving.service import SERVICE, Service


def make_app(service: Service) -> web.Application:
    """Return the application.

    Run it with `handler_cancellation=True`, so that the request of a disconnected client is aborted.
    """
    app = web.Application(client_max_size=service.max_body_size, middlewares=MIDDLEWARES)
    app[SERVICE], app[SERVED] = service, served(service.config)
    app.cleanup_ctx.append(_engine)
    app.on_response_prepare.extend([add_request_id, add_origin_headers])
    app.add_routes(
        web.route(method, root + path.replace("}", ":.+}"), endpoint.handler, expect_handler=_expect)
        for root in dict.fromkeys(["", service.config.root_path])
        for endpoint in app[SERVED]
        for path in endpoint.paths
        for method in endpoint.methods
    )
    return app


async def _engine(app: web.Application) -> AsyncIterator[None]:
    app[SERVICE].engine.start()
    yield
    await app[SERVICE].engine.stop()


async def _expect(request: web.Request) -> None:
    """Handle the Expect header as aiohttp's own handler does, which fails on a header that is not text."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is understood")
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent
