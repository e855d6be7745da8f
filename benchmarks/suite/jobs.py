"""Jobs: pieces of work that run in processes of their own, so that a fault or a hang costs one of them.

A job's process appends messages to a file and its parent reads them. Everything that was sent is on disk before either
process can be killed, and no process can block on a full pipe. This module imports neither jax nor numpy.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared.deadline import Deadline

HEARTBEAT_S = 40.0  # a job that has sent nothing for so long is killed
KILL_S = 5.0  # after SIGKILL a job gets so long to disappear; then it is left behind
WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))
LOG_BYTES = 4000  # of the end of a process's output that explain a failure


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: distinguishes the job from all others of a run.
        work: a key of `worker.WORK`.
        options: arguments of the work; JSON.
        silence_s: how long it may send nothing, until it sends a "silence" of its own.
        limit_s: how long it may run.
        command: runs the process in its place, such as a profiler with its flags.
        environment: variables of the process.
    """

    name: str
    work: str
    options: Mapping[str, Any]
    silence_s: float = HEARTBEAT_S
    limit_s: float = math.inf
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of the folder of its messages and its log."""
        return re.sub(r"[^\w.-]+", "_", self.name)  # XLA's flags are separated by spaces


class End(NamedTuple):
    """How a job ended: "ok", "failed" (an error, a crash), "killed" (silent or out of time)."""

    status: str
    reason: str | None = None
    seconds: float = 0.0
    log: str = ""


Receive = Callable[[Job, str, Any], None]
Chain = Generator[Job, End, None]  # jobs that follow from how the ones before them ended


class Process:
    """A running job."""

    def __init__(self, job: Job, folder: Path, receive: Receive, program: Sequence[str]):
        self.job, self._receive, self._silence_s = job, receive, job.silence_s
        (folder / job.folder).mkdir(parents=True)
        self._messages, self._log = folder / job.folder / "messages.jsonl", folder / job.folder / "log.txt"
        self._messages.touch()
        self._start = self._heard = time.monotonic()
        self._offset, self._rest = 0, b""
        self._end: End | None = None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*job.command, *program, str(self._messages), job.work, json.dumps(job.options)],
                env=os.environ | dict(job.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> End | None:
        """Receive new messages of the process. Return its end, None while it runs."""
        exited = self._process.poll() is not None  # before the file is read, so that the last message is read too
        self._read()
        now = time.monotonic()
        if exited:
            code = self._process.returncode
            end = self._end or End("failed", f"the process ended with exit status {code} and sent no result")
            return end._replace(seconds=now - self._start, log=self._tail())
        if now - self._heard > self._silence_s:
            return self.kill(f"sent nothing for {self._silence_s:g} s")
        if now - self._start > self.job.limit_s:
            return self.kill(f"still ran after {self.job.limit_s:g} s")
        return None

    def signal(self) -> None:
        """Tell the process and its children to end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self, reason: str) -> End:
        """End the process and its children."""
        self.signal()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            reason += f", and did not end within {KILL_S:g} s of SIGKILL"
        self._read()
        return End("killed", reason, time.monotonic() - self._start, self._tail())

    def _read(self) -> None:
        with self._messages.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        if not new:
            return
        self._offset += len(new)
        self._heard = time.monotonic()
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            kind, value = json.loads(line)
            if kind == "end":
                self._end = End(**value)
            elif kind == "silence":
                self._silence_s = value
            else:
                self._receive(self.job, kind, value)

    def _tail(self) -> str:
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace")


class Pool:
    """Runs chains of jobs, several at a time.

    Args:
        folder: for each job a folder with its messages and its log.
        receive: is given each message but the last one.
        program: the command line of a worker.
    """

    def __init__(self, folder: Path, receive: Receive, program: Sequence[str] = WORKER, poll_s: float = 0.05):
        self.folder, self._receive, self._program, self._poll_s = folder, receive, tuple(program), poll_s
        self._running: dict[str, tuple[Chain, Process]] = {}

    def start(self, chain: Chain) -> None:
        """Start a chain beside everything else."""
        self._next(chain, None)

    def run(self, chains: Sequence[Chain], deadline: Deadline, *, at_once: int) -> list[Chain]:
        """Run chains, `at_once` at a time. Return the chains that had not started at the deadline."""
        waiting, ids = list(chains), {id(chain) for chain in chains}
        while not deadline.passed:
            while waiting and len(self._of(ids)) < at_once:
                self.start(waiting.pop(0))
            if not self._of(ids):
                break
            self._poll()
        self.kill("the time of its part was up", chains)
        return waiting

    def wait(self, chains: Sequence[Chain], deadline: Deadline) -> None:
        """Wait for started chains, and kill the late ones."""
        ids = {id(chain) for chain in chains}
        while not deadline.passed and self._of(ids):
            self._poll()
        self.kill("the time of its part was up", chains)

    def kill(self, reason: str, chains: Sequence[Chain] | None = None) -> None:
        """Kill the running jobs of some chains, of all if None, and start no other job of them."""
        names = list(self._running) if chains is None else self._of({id(chain) for chain in chains})
        for name in names:
            self._running[name][1].signal()
        for name in names:
            chain, process = self._running.pop(name)
            end = process.kill(reason)
            try:
                chain.send(end)  # it takes note of the end
            except StopIteration:
                continue
            chain.close()

    def _of(self, ids: set[int]) -> list[str]:
        return [name for name, (chain, _) in self._running.items() if id(chain) in ids]

    def _poll(self) -> None:
        for name, (chain, process) in list(self._running.items()):
            end = process.poll()
            if end is not None:
                del self._running[name]
                self._next(chain, end)
        time.sleep(self._poll_s)

    def _next(self, chain: Chain, end: End | None) -> None:
        try:
            job = next(chain) if end is None else chain.send(end)
        except StopIteration:
            return
        self._running[job.name] = chain, Process(job, self.folder, self._receive, self._program)


class InProcess(Pool):
    """The same, one job after another in this process: starts faster, but a crash ends everything.

    Args:
        work: (name of the work, options, send) -> End, as `worker.work`.
    """

    def __init__(self, folder: Path, receive: Receive, work: Callable[..., End]):
        super().__init__(folder, receive)
        self._work = work

    def _next(self, chain: Chain, end: End | None) -> None:
        while True:
            try:
                job = next(chain) if end is None else chain.send(end)
            except StopIteration:
                return
            end = self._work(job.work, dict(job.options), lambda kind, value, job=job: self._receive(job, kind, value))
