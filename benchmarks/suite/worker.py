"""The process of a cell: `python -m benchmarks.suite.worker MESSAGES MODULE:FUNCTION OPTIONS`.

Messages are lines of JSON, [kind, value], appended to a file: they are on disk before the process can be killed.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.shared.device import environment, open_device, prepare_environment

Send = Callable[[str, Any], None]


def load(name: str) -> Callable[..., Any]:
    """Return a function by "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def work(function: str, options: dict[str, Any], send: Send) -> None:
    """Call a function with (options, send, device), and send its end."""
    end: dict[str, Any] = dict(status="ok")
    try:
        prepare_environment()
        device = open_device(options["tiny"] or options.get("on_cpu", False))
        send("environment", environment(device, options["tiny"]))
        load(function)(options, send, device)
    except BaseException as error:
        traceback.print_exc()
        end = dict(status="failed", reason=f"{type(error).__name__}: {error}"[:600])
    send("end", end)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a cell does not outlive the suite
    messages, function, options = sys.argv[1:]
    with open(messages, "a", buffering=1) as file:
        work(function, json.loads(options), lambda *message: print(json.dumps(message, default=float), file=file))
    sys.stdout.flush()
    os._exit(0)  # Python's clean-up may never end on a broken device
