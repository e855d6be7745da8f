"""Sockets of the server.

They are bound before a model is loaded, and listen once it is ready. An address in use is an error at once, and
clients' connections are refused until the server is ready.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # asyncio tries again a second later
REPORT_INTERVAL_S = 60.0
MANY_CONNECTIONS = 65_536


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host. They do not listen yet.

    Raises:
        OSError: an address is in use.
    """
    try:
        # First without SO_REUSEADDR, with which two servers could bind the same port before either listens.
        return asyncio.run(_bind(host, port, reuse_address=False))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return asyncio.run(_bind(host, port, reuse_address=True))  # connections of an ended server may hold the port


async def _bind(host: str, port: int, *, reuse_address: bool) -> list[socket.socket]:
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, host, port, reuse_address=reuse_address, start_serving=False
    )
    sockets = [each.dup() for each in server.sockets]
    server.close()
    return sockets


def allow_many_connections() -> None:
    """Raise this process's limit of open files: a connection takes one, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_CONNECTIONS if hard == resource.RLIM_INFINITY else min(MANY_CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_accept_reports(loop: asyncio.AbstractEventLoop) -> None:
    """Log in one line, at most once a minute, that connections can't be accepted.

    asyncio makes up to a thousand attempts at once, reports each with a traceback, and tries again a second later, even
    on a socket that has been closed meanwhile.
    """
    reported = -math.inf

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in SHORTAGES:
            if loop.time() >= reported + REPORT_INTERVAL_S:
                reported = loop.time()
                logger.warning("new connections wait until others end: %s", error)
        elif not ("_start_serving" in context["message"] and isinstance(error, ValueError)):  # a closed socket
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)


@contextlib.contextmanager
def bound_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix domain socket within the context; its file is removed at the end. A stale file is replaced.

    Raises:
        OSError: another server listens at the path, or there is another file.
    """
    with socket.socket(socket.AF_UNIX) as bound:
        with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as client:
            if stat.S_ISSOCK(path.stat().st_mode) and client.connect_ex(str(path)):
                path.unlink()
        bound.bind(str(path))
        created = path.stat()
        try:
            yield bound
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), created):
                    path.unlink()


def url(bound: socket.socket, scheme: str) -> str:
    """Return the URL of a socket."""
    if bound.family == socket.AF_UNIX:
        return f"{scheme}+unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
