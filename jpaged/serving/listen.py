"""The server's sockets. They are bound before a model is loaded, and listen once it is ready: an address that is in use
is an error at once, and until the server is ready a client's connection is refused."""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host. They do not listen yet. Raises OSError if an address is in use."""
    try:
        # Without SO_REUSEADDR first: it lets two servers that start together bind a port to which neither listens yet.
        return asyncio.run(_bind(host, port, reuse_address=False))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return asyncio.run(_bind(host, port, reuse_address=True))  # connections of a server that has ended hold no port


async def _bind(host: str, port: int, *, reuse_address: bool) -> list[socket.socket]:
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, host, port, reuse_address=reuse_address, start_serving=False
    )
    sockets = [each.dup() for each in server.sockets]
    server.close()
    return sockets


@contextlib.contextmanager
def bound_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix domain socket; its file is removed at the end. A file that a server left behind is replaced.

    Raises OSError for a path where another server listens, or another file is.
    """
    with socket.socket(socket.AF_UNIX) as own:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode) and not _listens(path):
                path.unlink()
        own.bind(str(path))
        created = path.stat()
        try:
            yield own
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), created):
                    path.unlink()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def url(bound: socket.socket, scheme: str) -> str:
    """Return the address of a socket as clients write it."""
    if bound.family == socket.AF_UNIX:
        return f"{scheme}+unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
