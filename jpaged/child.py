"""Python child processes for work that may crash, hang or take all memory: they answer lines of JSON."""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
# A question that takes longer than this runs at the lowest priority. Most questions take a millisecond.
RENICE_AFTER_S = 0.1
CHUNK_BYTES = 64 * 2**10


class ChildFailed(RuntimeError):
    """Crash or timeout of a child process."""


class _Ended(Exception):
    """Signal that the process has ended before it answered."""


class Child:
    """Handle of a process `python -m MODULE`, which ends with this object.

    Args:
        module: module that calls `confine`, then `serve`.
        setup: first line of the process's input; the process answers null once it is ready.
    """

    def __init__(self, module: str, setup: str):
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=os.environ | {"PYTHONPATH": path}, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        self.process = process
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._input, False)
        begin = setup.encode() + b"\n"
        # If the pipe has room for all of this, the process gets ready while its parent goes on.
        self._setup: bytes | None = begin[os.write(self._input, begin[:CHUNK_BYTES]) :]

    def ask(self, question: str, timeout_s: float) -> str:
        """Return the answer to a line.

        Raises:
            _Ended: the process has ended.
            TimeoutError: it did not take the line, or did not answer it, in time.
        """
        if self._setup is not None:
            self._exchange(self._setup, START_TIMEOUT_S)
            self._setup = None
        return self._exchange(question.encode() + b"\n", timeout_s, renice_after_s=RENICE_AFTER_S)

    def _exchange(self, data: bytes, timeout_s: float, renice_after_s: float = START_TIMEOUT_S) -> str:
        """Write to the process, and return the line that it answers."""
        begin = time.monotonic()
        deadline, renice_at = begin + timeout_s, begin + renice_after_s
        to_write, answer, is_late = memoryview(data), bytearray(), False
        while not answer.endswith(b"\n"):
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError
            if not is_late and now >= renice_at:
                is_late = True
                self._set_priority(19)  # the lowest
            until = deadline if is_late else min(deadline, renice_at)
            poll = select.poll()
            poll.register(self._output, select.POLLIN)
            if to_write:
                poll.register(self._input, select.POLLOUT)
            ready = {file for file, _ in poll.poll(1000 * (until - now) + 1)}
            try:
                if self._input in ready:
                    to_write = to_write[os.write(self._input, to_write[:CHUNK_BYTES]) :]
                if self._output in ready:
                    if not (chunk := os.read(self._output, CHUNK_BYTES)):
                        raise _Ended
                    answer += chunk
            except BrokenPipeError:
                raise _Ended from None
        if is_late:
            self._set_priority(0)
        return answer.decode()

    def _set_priority(self, priority: int) -> None:
        with contextlib.suppress(OSError):  # restoring a priority needs a privilege
            threads = f"/proc/{self.process.pid}/task"
            for thread in os.listdir(threads) if os.path.isdir(threads) else [self.process.pid]:
                os.setpriority(os.PRIO_PROCESS, int(thread), priority)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


class Children:
    """Processes of one module, one for each question that is asked at the same time. They end with this object.

    Args:
        module, setup: as in `Child`; the setup is a JSON value.
    """

    def __init__(self, module: str, setup: object):
        self._module = module
        self._setup = json.dumps(setup)
        self._idle: list[Child] = []
        self._killed: list[Child] = []  # until they have ended
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a process, without waiting for it, if none is idle."""
        with self._lock:
            if not self._idle:
                self._idle.append(Child(self._module, self._setup))

    def ask(self, question: str, timeout_s: float) -> Any:
        """Return the answer to a question in JSON. If a process ends before it answers, another one is asked once.

        Raises:
            ChildFailed: both processes ended, or one did not answer in time.
        """
        for _ in range(2):
            with self._lock:
                child = self._idle.pop() if self._idle else Child(self._module, self._setup)
                self._killed = [each for each in self._killed if each.process.poll() is None]
            try:
                answer = child.ask(question, timeout_s)
            except _Ended:
                continue
            except TimeoutError:
                child.process.kill()
                with self._lock:
                    self._killed.append(child)
                break
            with self._lock:
                self._idle.append(child)
            return json.loads(answer)
        raise ChildFailed(f"{self._module} crashed, or was not done within {timeout_s:g} seconds")


def confine(max_memory_bytes: int) -> None:
    """Limit the address space of this process, which is the child, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))


def serve(setup: Callable[[Any], Callable[[Any], object]]) -> None:
    """Answer the questions on stdin until it ends.

    Args:
        setup: function of the first line; it returns the function that answers the other lines.
    """
    answer = setup(json.loads(sys.stdin.readline()))
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
