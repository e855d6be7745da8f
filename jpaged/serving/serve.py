"""OpenAI-compatible application: the routes of its endpoints, and its run on sockets.

After a signal, running requests finish, new ones are rejected, and the server exits.
"""

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Sequence

from aiohttp import HttpVersion11, web

from jpaged.serving.endpoint import SERVED
from jpaged.serving.endpoints import served
from jpaged.serving.listen import allow_many_connections, limit_accept_reports, url
from jpaged.serving.middleware import MIDDLEWARES, add_request_id
from jpaged.serving.origins import add_origin_headers
from jpaged.serving.service import SERVICE, Service

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
ERROR_FLUSH_TIMEOUT_S = 5.0  # seconds for the errors that end unfinished requests


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


async def serve(service: Service, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
    """Listen on bound sockets and serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    loop, signalled, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    on_signal = lambda: (hurried if signalled.is_set() else signalled).set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    limit_accept_reports(loop)
    allow_many_connections()
    tune_interpreter()
    runner = web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        for each in sockets:
            # Accepted connections inherit the option. Without it, they would hold the port after the server's end.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await web.SockSite(runner, each, ssl_context=tls, backlog=1024).start()
        logger.info("ready: model %s at %s", service.model_name, url(sockets[0], "http" if tls is None else "https"))
        await signalled.wait()
        await _drain(service, hurried)
    finally:
        await runner.cleanup()
    logger.info("stopped")


def tune_interpreter() -> None:
    """Set up Python for short delays of streams; call it once the engine is loaded."""
    # When a step needs the GIL, a worker thread that prepares a large request keeps it for this interval.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # A full garbage collection delays every stream. After `freeze`, collections skip the modules and the engine.
    # Reference counts free the objects of a request. Few collections are therefore needed.
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


async def _drain(service: Service, hurried: asyncio.Event) -> None:
    service.draining = True
    limit = service.config.drain_timeout
    within = "" if limit is None else f" within {limit:g} seconds"
    logger.info("shutting down: finishing %d requests%s", len(service.in_flight), within)

    async def end_all() -> None:
        while service.in_flight:
            await asyncio.wait(service.in_flight)

    drained, second = asyncio.ensure_future(end_all()), asyncio.ensure_future(hurried.wait())
    await asyncio.wait([drained, second], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        logger.warning("shutting down: ending %d requests that have not finished", len(service.in_flight))
        await service.engine.stop(save=False)  # ends the requests with an error
        await asyncio.wait([drained], timeout=ERROR_FLUSH_TIMEOUT_S)
    second.cancel()
    drained.cancel()
