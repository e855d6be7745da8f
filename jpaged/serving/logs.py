"""Server log and access log.

A thread of its own writes them. Lines that can't be written are lost: a full disk or a blocked pipe delays no request.
"""

import contextlib
import logging
import os
import queue
import select
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from typing import TextIO

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

MAX_WAITING = 10_000  # lines
LEVELS = ("debug", "info", "warning", "error", "critical")
FLUSH_TIMEOUT_S = 2.0  # seconds for the last lines, and for the reader of a pipe
PIECE = select.PIPE_BUF // 4  # characters of up to four bytes; a pipe that poll reports as ready takes this many


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


def _shorten_client_errors(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record in one line, without its traceback, if a client sent no HTTP or a bad body, or disconnected."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
        return record
    warning = {"levelno": logging.WARNING, "levelname": "WARNING", "msg": f"a client's fault: {error!r:.300}"}
    return logging.makeLogRecord(record.__dict__ | warning | {"args": (), "exc_info": None})


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Handler that skips lines if a pipe is full: a thread blocked by a write would keep the process from exiting."""

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        self._room = select.poll()
        self._room.register(stream, select.POLLOUT)
        self._timeout_s = FLUSH_TIMEOUT_S

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            for start in range(0, len(line), PIECE):
                if not self._room.poll(self._timeout_s * 1000):
                    self._timeout_s = 0.0  # until somebody reads again
                    return
                self._timeout_s = FLUSH_TIMEOUT_S
                self.stream.write(line[start : start + PIECE])
                self.flush()
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def logging_to(stream: TextIO, access_log: str, level: str = "info") -> Iterator[None]:
    """Write the log to the stream within the context, and the access log to its file.

    Args:
        access_log: path of the file; "-": the stream; "none": no access log.
        level: one of LEVELS, the lowest level of logged messages. The access log has all its lines at any level.

    Raises:
        OSError: the file can't be opened.
    """
    log = _StreamHandler(stream)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addFilter(lambda record: record.name != "jpaged.access")
    access: logging.Handler = logging.NullHandler()
    if access_log == "-":
        access = _StreamHandler(stream)
    elif access_log != "none":
        access = WatchedFileHandler(access_log)  # a new file replaces one that has been moved away
    access.addFilter(lambda record: record.name == "jpaged.access")
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    # Only the message is queued: the handlers of the listener add the time and the name of the logger.
    entry = _Dropping(waiting)
    entry.addFilter(_shorten_client_errors)
    logging.getLogger("jpaged.access").setLevel(logging.INFO)
    logging.basicConfig(level=level.upper(), format="%(message)s", handlers=[entry], force=True)
    reports, logging.raiseExceptions = logging.raiseExceptions, False  # no report of a line that can't be written
    listener = QueueListener(waiting, log, access)
    listener.start()
    try:
        yield
    finally:
        last = threading.Thread(target=listener.stop, daemon=True)
        last.start()
        last.join(FLUSH_TIMEOUT_S)
        logging.raiseExceptions = reports
        try:
            stream.flush()
        except OSError:
            # Python flushes the stream once more when it exits, and would then exit with an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
