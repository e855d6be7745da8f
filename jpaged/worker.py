"""Thread that runs calls for other threads, one at a time."""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

# A signal that arrives just before a thread blocks does not wake it, and is noticed only when it runs again.
POLL_S = 0.2


class Worker:
    """Thread that runs calls one after the other, each to its end, even if its caller is interrupted.

    Python raises KeyboardInterrupt in the main thread, between any two instructions. Code that must not be interrupted
    half-way therefore runs here. The thread ends with its Worker and does not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._interludes: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name="worker", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def run[T](self, function: Callable[[threading.Event], T]) -> T:
        """Run `function(stop)` on the thread after earlier calls; return its result, or raise its exception.

        An interrupt of the caller sets `stop`, and is raised once the function has returned. A second interrupt is
        raised at once; later calls still wait for the function.
        """
        return cast(T, self._finish(_Task(function), self._calls.put))

    def interlude[T](self, function: Callable[[], T]) -> T:
        """Run a function between two steps of the running call, or at once if none runs; otherwise as `run` does."""

        def put(call: _Task) -> None:
            self._interludes.put(call)
            self._calls.put(_Task(lambda stop: self.run_interludes()))  # if no running call takes it

        return cast(T, self._finish(_Task(lambda stop: function()), put))

    def run_interludes(self, timeout: float = 0.0) -> None:
        """Run the interludes that wait, as a call does between its steps; wait `timeout` seconds for a first one."""
        try:
            while True:
                self._interludes.get(timeout > 0, timeout or None)()
                timeout = 0.0
        except queue.Empty:
            pass

    def _finish(self, call: "_Task", put: "Callable[[_Task], None]") -> Any:
        try:
            put(call)
            result, error = call.wait()
        except BaseException:
            call.stop.set()
            if call.begun:
                put(call)  # The result may have been taken already. The task, run again, puts another.
                call.wait()
            raise
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # The traceback of the error holds this frame.


class _Task:
    """Function, and the queue for its result or exception. It has no effect once `stop` is set.

    An interrupt can leave the lock of an Event, a Condition or a Future locked (python/cpython#74174), so the two
    threads share none of these locks: a SimpleQueue is implemented in C, and `is_set` takes no lock.
    """

    def __init__(self, function: Callable[[threading.Event], Any]):
        self.function = function
        self.stop = threading.Event()
        self.begun = False
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def __call__(self) -> None:
        self.begun = True
        try:
            self._results.put((None if self.stop.is_set() else self.function(self.stop), None))
        except BaseException as error:
            self._results.put((None, error))

    def wait(self) -> tuple[Any, BaseException | None]:
        """Return the result or the exception once there is one."""
        while True:
            try:
                return self._results.get(timeout=POLL_S)
            except queue.Empty:
                pass


def _run(calls: "queue.SimpleQueue[_Task | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # The function may hold the owner of the Worker.
