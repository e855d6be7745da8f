"""Where the server's log and its access log go. Writing them is a thread of its own, and what can't be written is lost:
a full disk or a pipe that nobody reads holds no request up."""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from typing import TextIO

MAX_WAITING = 10_000  # lines
PATIENCE = 2.0  # seconds for the last of them


class _Dropping(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


class _Quiet:
    """A handler that says nothing of what it could not write."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _StreamHandler(_Quiet, logging.StreamHandler):
    pass


class _FileHandler(_Quiet, WatchedFileHandler):
    """Goes on in a new file when the old one has been moved away."""


@contextlib.contextmanager
def logging_to(stream: TextIO, access_log: str) -> Iterator[None]:
    """Within it everything goes to the stream, but the access log to its file: "-" is the stream too, "none" nowhere.

    Raises OSError if the file can't be opened.
    """
    log = _StreamHandler(stream)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addFilter(lambda record: record.name != "jpaged.access")
    access: logging.Handler = logging.NullHandler()
    if access_log == "-":
        access = _StreamHandler(stream)
    elif access_log != "none":
        access = _FileHandler(access_log)
    access.addFilter(lambda record: record.name == "jpaged.access")
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
    logging.basicConfig(level=logging.INFO, handlers=[_Dropping(waiting)], force=True)
    listener = QueueListener(waiting, log, access)
    listener.start()
    try:
        yield
    finally:
        last = threading.Thread(target=listener.stop, daemon=True)
        last.start()
        last.join(PATIENCE)
