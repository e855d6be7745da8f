"""The process of a cell, seen from its parent."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.device import CHECKOUT
from benchmarks.suite.cells import Cell

KILL_S = 5.0  # for a process to disappear after SIGKILL; then it is left behind


class Process:
    """A running cell, with messages and a log in a folder. `receive` is given (cell, kind, value) of each message."""

    def __init__(self, cell: Cell, folder: Path, options: dict[str, Any], receive: Callable[[Cell, str, Any], None]):
        self.cell, self._receive = cell, receive
        name = f"{cell.part}_{re.sub(r'[^a-zA-Z0-9]+', '_', cell.name)}"
        self._messages, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self._messages.touch()
        self._start = self._heard = time.monotonic()
        self._offset, self._logged = 0, 0
        self._end: dict[str, Any] | None = None
        worker = sys.executable, "-m", "benchmarks.suite.worker", str(self._messages), cell.function
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(cell.environment)  # others have memory too
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*cell.command, *worker, json.dumps(options)], cwd=CHECKOUT, env=os.environ | environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> dict[str, Any] | None:
        """Receive new messages. Return the end of the process as fields of a row, None while it runs."""
        exited = self._process.poll() is not None  # before the file is read, so that the last message is read too
        self._read()
        now, cell = time.monotonic(), self.cell
        if exited:
            reason = f"the process ended with exit status {self._process.returncode} and sent no result"
            return self.kill(**self._end or dict(status="failed", reason=reason))  # children may be left
        if now - self._heard > cell.silence_s:
            return self.kill("killed", f"sent nothing for {cell.silence_s:g} s")
        if now - self._start > cell.limit_s:
            return self.kill("killed", f"still ran after {cell.limit_s:g} s")
        return None

    def kill(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """End the process and its children. Return the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            reason = f"{reason}, and did not end within {KILL_S:g} s of SIGKILL"
        self._read()
        log = self._log.read_bytes()[-4000:].decode(errors="replace")  # its end explains a failure
        return dict(status=status, reason=reason, seconds=time.monotonic() - self._start, text=log)

    def _read(self) -> None:
        with self._messages.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        lines = new[: new.rfind(b"\n") + 1]  # the process may be writing the last one
        self._offset += len(lines)
        if lines or self._log.stat().st_size != self._logged:
            self._heard, self._logged = time.monotonic(), self._log.stat().st_size
        for kind, value in map(json.loads, lines.splitlines()):
            if kind == "end":
                self._end = value
            else:
                self._receive(self.cell, kind, value)
