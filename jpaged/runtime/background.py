"""Compilation beside the traffic that the executables serve which exist."""

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Sequence

from jpaged.progress import track
from jpaged.runtime.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)


class Background:
    """Thread that compiles, one job after the other. XLA compiles without Python's lock.

    Args:
        owner: the thread ends when it is gone, after the job that runs.
    """

    def __init__(self, owner: object, jobs: Sequence[Callable[[], None]]):
        self._jobs, self._stop = jobs, threading.Event()
        self._thread = threading.Thread(target=self._run, name="jpaged-compile", daemon=True)
        weakref.finalize(owner, self._stop.set)
        atexit.register(self._end)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            for job in track(self._jobs, len(self._jobs), "compiled", "further shape", bar=False):
                if self._stop.is_set():
                    return
                with compilation_cache():
                    job()
            logger.info("all shapes are compiled")
        except Exception:
            logger.exception("further shapes are missing, and larger ones serve their steps: they do not compile")
        finally:
            atexit.unregister(self._end)

    def _end(self) -> None:
        """End the thread before the interpreter, because XLA must not compile while it is unloaded."""
        self._stop.set()
        self._thread.join()
