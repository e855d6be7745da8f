"""Running the application until it is told to stop: finish what runs, refuse what comes, leave."""

import asyncio
import logging
import signal

from aiohttp import web

from jpaged.serving.app import Service, make_app

logger = logging.getLogger(__name__)


async def serve(service: Service, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends at once. Raises OSError if it can't listen."""
    loop, signalled, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurried if signalled.is_set() else signalled).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    runner = web.AppRunner(make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        logger.info("ready: model %s at http://%s:%d", service.model_name, address[0], address[1])
        await signalled.wait()
        service.draining = True
        logger.info("shutting down: finishing %d requests", len(service.in_flight))
        await asyncio.wait(
            [asyncio.ensure_future(_drained(service)), asyncio.ensure_future(hurried.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        await runner.cleanup()
    logger.info("stopped")


async def _drained(service: Service) -> None:
    while service.in_flight:
        await asyncio.wait(service.in_flight)
