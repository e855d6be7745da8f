"""Python child process for work that may crash, hang or take all memory: it answers lines of JSON."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0


class ChildFailed(RuntimeError):
    """Crash or timeout of the child process. The next question starts a new process."""


class Child:
    """Handle of a process `python -m MODULE`. It starts with the first question and ends with this object.

    Args:
        module: module that calls `confine`, then `serve`.
        setup: first line of the process's input; the process answers null once it is ready.
    """

    def __init__(self, module: str, setup: object):
        self._module = module
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def ask(self, question: object, timeout_s: float) -> Any:
        """Return the answer to a question.

        Raises:
            ChildFailed: the process crashed, or did not answer in time.
        """
        with self._lock:
            if self._process is None:
                self._start()
                self._exchange(self._setup, START_TIMEOUT_S)
            return self._exchange(question, timeout_s)

    def _start(self) -> None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module], env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)

    def _exchange(self, question: object, timeout_s: float) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            line = self._process.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        self._process = None
        self._end()
        raise ChildFailed(f"{self._module} crashed, or was not done within {timeout_s:g} seconds")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


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
