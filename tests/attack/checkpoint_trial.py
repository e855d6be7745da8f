"""A process that loads hostile checkpoints, one after the other: `tests/attack/fuzz_checkpoints.py` asks it."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jpaged.child import confine, serve

MAX_MEMORY_BYTES = 12 * 2**30  # of address space, of which jax reserves some without use


def setup(_: Any) -> Callable[[str], dict[str, Any]]:
    from jpaged.demo import DIRECTORY

    _load(DIRECTORY)  # so that the first question does not pay for the imports of all
    return answer


def answer(directory: str) -> dict[str, Any]:
    """Return the end of a load: its error, if it has one, seconds, and MiB of memory at most beyond the start."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = _memory_mib("VmRSS"), time.monotonic()
    kind = message = None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the answers' own pipe
            _load(Path(directory))
    except BaseException as error:  # a panic in Rust is no Exception
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    return {"error": kind, "message": message, "seconds": seconds, "mib": _memory_mib("VmHWM") - before}


def _load(directory: Path) -> None:
    from jpaged.config import EngineConfig
    from jpaged.start.load import load_checkpoint
    from jpaged.start.setup import prepare
    from jpaged.tokenizer import encode

    setup = prepare(EngineConfig(model=str(directory)))
    load_checkpoint(setup, progress=False)
    if setup.tokenizer is not None:
        encode(setup.tokenizer, "Once upon a time")


def _memory_mib(name: str) -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 1024


if __name__ == "__main__":
    confine(MAX_MEMORY_BYTES)
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that are not in Python print too
    serve(setup)
