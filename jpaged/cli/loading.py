"""Context of imports, loading and compilation, before a command can be used."""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process with status 130 as soon as SIGINT arrives, even inside native code.

    A KeyboardInterrupt would wait until native code returns, which takes minutes in a compilation. Libraries that are
    interrupted during their import print or swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        if sys.stderr.isatty():
            os.write(2, b"\n")  # The prompt of the shell starts below the progress bar.
        os._exit(130)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGINT:
                leave()
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = signal.signal(signal.SIGINT, leave)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="interrupt", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, handler)
        os.close(writer)
        watcher.join()


@contextlib.contextmanager
def loading() -> Iterator[bool]:
    """Enter the context of loading a model: Ctrl-C ends the process at once, and progress is shown.

    Yields:
        Whether to show progress bars. If stderr is not a terminal, log lines report the progress instead.
    """
    bars = sys.stderr.isatty()
    logger = logging.getLogger("jpaged")
    level = logger.level
    if not bars:
        logging.basicConfig(format="%(message)s")
        logger.setLevel(logging.INFO)
    try:
        with exit_on_interrupt():
            yield bars
    finally:
        logger.setLevel(level)
