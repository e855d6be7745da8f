"""A server of any kind, started by a command of the shell."""

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

START_S = 3600.0


class Running(NamedTuple):
    """A server that answers.

    Attributes:
        group: the process group of the server and all its processes.
        start_s: seconds from the start of the command to the first answer.
    """

    url: str
    group: int
    start_s: float

    @property
    def resident_bytes(self) -> int:
        """Resident memory of all processes of the server; pages that several share count once."""
        lines = [line for text in self._read("smaps_rollup") for line in text.splitlines()]
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes of the server."""
        ticks = [text.rpartition(")")[2].split()[11:13] for text in self._read("stat")]
        return sum(map(int, itertools.chain.from_iterable(ticks))) / os.sysconf("SC_CLK_TCK")

    def wait_until_idle(self) -> None:
        """Wait until the server uses less than a twentieth of a CPU, for example after a start that goes on behind."""
        deadline, before = time.monotonic() + START_S, -math.inf
        while (now := self.cpu_s) - before > 0.05:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.url} is still busy after {START_S:g} seconds")
            before = now
            time.sleep(1)

    def _read(self, name: str) -> Iterator[str]:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == self.group:
                    yield (folder / name).read_text()


@contextlib.contextmanager
def serving(name: str, command: str, *, path: str = "/v1/models", **values: object) -> Iterator[Running]:
    """Run a server until the block ends.

    Args:
        command: {port} and the names of `values` are replaced.
        path: is answered with HTTP 200 once the server is ready.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command.format(port=port, **values), shell=True, stdout=log, stderr=log, start_new_session=True,
            # An installation has its modules compiled; an environment may say that Python keeps none of them.
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""},
        )  # fmt: skip
        try:
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() - start > START_S:
                    log.seek(0)
                    raise RuntimeError(f"{name} does not serve: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.1)
            yield Running(url, process.pid, time.monotonic() - start)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False
