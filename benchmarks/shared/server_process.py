"""A server in a process of its own, met the way its users meet it: over a port, through its log, by signals."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
# Few shapes to compile, so that it starts in seconds; enough blocks for sixteen sequences.
SMALL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "512",
         "--num-gpu-blocks-override", "512")  # fmt: skip


class ServerProcess:
    """`python server.py --port 0 FLAGS`, ready within the `with` block, told to stop (SIGTERM) after it.

    It must then exit with 0 and have logged no traceback, unless `clean` is False or the block itself failed.

    Args:
        flags: of the command line, such as `*SMALL`.
        env: variables beside this process's own.
        module: run `python -m MODULE` instead of server.py; it too takes --port and logs that it is ready.
        program: run this instead of either.
        clean: whether a bad end is an error.
        start_within, stop_within: seconds. A process that does not stop in time is killed, which is a bad end.

    Attributes:
        url: `http://127.0.0.1:PORT`, without a slash at the end.
        process: the `subprocess.Popen`.
    """

    def __init__(
        self, *flags: str, env: Mapping[str, str] | None = None, module: str | None = None,
        program: Sequence[str] = (), clean: bool = True, start_within: float = 300.0, stop_within: float = 60.0,
    ):  # fmt: skip
        program = program or (sys.executable, *(("-m", module) if module else ("server.py",)))
        self.command = [*program, "--port", "0", *flags]
        self.env = dict(env or {})
        self.clean = clean
        self.start_within, self.stop_within = start_within, stop_within

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile(prefix="server", suffix=".log")
        self._last_log: str | None = None
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        try:
            self.url = self.wait_for_log(r"ready: model .* at (https?://\S+)", self.start_within)[1]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        code = self.stop()
        log = self._end()
        if self.clean and kind is None:
            assert code == 0, f"exit status {code}\n{log}"
            assert not self.tracebacks(), log

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, such as vllm:num_requests_running."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            families = text_string_to_metric_families(response.read().decode())
            found = [sample.value for family in families for sample in family.samples if sample.name == name]
        assert found, f"/metrics has no {name}"
        return sum(found)

    def log(self) -> str:
        """Return its standard output and error, so far or, after the block, in all."""
        return Path(self._log.name).read_text(errors="replace") if self._last_log is None else self._last_log

    def tracebacks(self) -> list[str]:
        """Return each traceback in the log, and up to 4,000 characters from there on.

        Those before the server was ready are left out: jax logs one where its CUDA plugin finds no GPU.
        """
        log = self.log().partition("ready: model ")[2]
        return [log[match.start() :][:4000] for match in re.finditer("Traceback", log)]

    def wait_for_log(self, pattern: str, within: float = 60.0) -> re.Match[str]:
        """Waits until the log has a regular expression. Raises AssertionError if it ends or the seconds pass before."""
        deadline = time.monotonic() + within
        while True:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.log()):
                return match
            assert not ended, f"the server has ended, status {self.process.returncode}\n{self.log()}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {within:g} seconds\n{self.log()}"
            time.sleep(0.05)

    def stop(self) -> int:
        """SIGTERM, if it runs; SIGKILL, if that does not end it in time. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.stop_within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _end(self) -> str:
        self.process.kill()
        self.process.wait()
        with self._log:
            self._last_log = self.log()
        return self._last_log
