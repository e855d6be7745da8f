"""The process of one job: `python benchmarks/suite/worker.py MESSAGES WORK OPTIONS`; see `jobs.py`.

Messages are lines of JSON, [kind, value]. The last one is ["end", {"status": ..., "reason": ...}].
"""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.suite.jobs import HEARTBEAT_S, End

Send = Callable[[str, Any], None]
BEAT_S = 1.0  # between two messages of a job that waits for its turn
PR_SET_PDEATHSIG = 1

# name -> module and function (options, send); imported by the process that needs it.
WORK = {
    "cell": ("benchmarks.suite.cells", "run"),
    "experiments": ("benchmarks.suite.measured", "run"),
    "launch": ("benchmarks.suite.profiled", "launch"),
    "demo": ("benchmarks.suite.demo", "generate"),
    "server": ("benchmarks.suite.demo", "serve"),
    "flashinfer": ("benchmarks.suite.measured", "build_flashinfer"),
    "device": ("benchmarks.suite.measured", "describe_device"),
    "script": ("benchmarks.suite.worker", "script"),
}


def work(name: str, options: dict[str, Any], send: Send) -> End:
    """Do one piece of work. Return how it ended."""
    module, function = WORK[name]
    try:
        send("beat", "started")
        getattr(importlib.import_module(module), function)(options, send)
        return End("ok")
    except SystemExit as error:
        return End("failed", str(error))
    except BaseException as error:
        return End("failed", f"{type(error).__name__}: {error}"[:600], log=traceback.format_exc()[-4000:])


@contextlib.contextmanager
def turn(lock: str | None, send: Send) -> Iterator[None]:
    """Wait for a lock that one process at a time holds while it measures, and say every second that one waits.

    A process that holds the lock keeps others waiting: it may be silent no longer than a smoke cell.
    """
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                send("beat", "waiting")
                time.sleep(BEAT_S)
        send("silence", HEARTBEAT_S)
        yield


def script(options: dict[str, Any], send: Send) -> None:
    """Run another benchmark. Options: `module` and `flags`."""
    if importlib.import_module(options["module"]).main(options["flags"]):
        raise RuntimeError(f"{options['module']} found something wrong")


def main(path: str, name: str, options: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a job does not outlive the suite
    with open(path, "a", buffering=1) as file:

        def send(kind: str, value: Any) -> None:
            file.write(json.dumps([kind, value], default=float) + "\n")

        end = work(name, json.loads(options), send)
        if end.log:
            print(end.log, file=sys.stderr, flush=True)
        send("end", {"status": end.status, "reason": end.reason})
    sys.stdout.flush()
    os._exit(0)  # Python's clean-up may never end on a broken device


if __name__ == "__main__":
    main(*sys.argv[1:])
