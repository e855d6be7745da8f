"""Self-test of the ops of an implementation on the device, before anything depends on them.

`SelfTest.run` starts a process that runs each op on one small case and compares it with the reference (trial.py). The
ops run in another process because a wrong kernel can hang, abort, or leave the device unusable for its process. Results
are stored on disk: a second start with the same device, software and shapes runs no test.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels import toolchain
from pallas_kernels.tuning import Tiles

logger = logging.getLogger(__name__)

# The op that each test is about, in the order in which they run: later ones are likelier to hang.
TESTS = {
    "write_kv": "write_kv",
    "write_kv with rope": "write_kv",
    "copy_blocks": "copy_blocks",
    "paged_decode_attention": "paged_decode_attention",
    "ragged_paged_attention": "ragged_paged_attention",
    "product": "product",
    "product of experts": "product",
    "product of 4 bits": "product",
    "delta_rule": "delta_rule",
}
PASSED, FAILED, UNTESTED = "passed", "failed", "untested"

# A kernel runs for milliseconds. Its first compilation takes seconds, and a minute on a slow or busy CPU.
LIMIT_S = 120.0
START_LIMIT_S = 300.0  # imports, the device's initialisation, the compilation of the reference
PROGRESS_S = 5.0
MAX_REASON = 500  # characters


@dataclasses.dataclass(frozen=True)
class Subject:
    """Implementation of the ops and the shape class that it is tested for.

    Attributes:
        program: the implementation's name, "mosaic" or "triton".
        module: the name that imports it.
        pool_head_dim: head dim of the pools, `head_dim` or more.
        sinks: whether attention has sinks.
        mxfp4: whether experts have weights in MXFP4, with biases and the activation swiglu_oai.
        tiles: how the kernels cut their work, by "decode" and "ragged".
    """

    program: str
    module: str
    device_kind: str
    dtype: str
    pool_dtype: str
    head_dim: int
    pool_head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    sinks: bool = False
    mxfp4: bool = False
    tiles: Mapping[str, Tiles] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one test.

    Attributes:
        status: PASSED, FAILED or UNTESTED.
        reason: the error of a failed test, or the reason why it could not run.
        tested_at: ISO 8601, UTC.
        remembered: whether the result was stored by an earlier start.
    """

    program: str
    test: str
    status: str
    reason: str
    tested_at: str
    remembered: bool = False


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Self-test of ops on one device, with the folder of stored results.

    Attributes:
        platform, device: the jax platform of the testing process, and the device's index there.
        retest: ignore stored results.
        limit_s: seconds for one op, including its compilation.
    """

    folder: Path
    platform: str = "cuda"
    device: int = 0
    retest: bool = False
    limit_s: float = LIMIT_S

    @classmethod
    def on(cls, device: jax.Device, folder: Path, *, retest: bool = False) -> "SelfTest | None":
        """Return the self-test for a device; None for one that runs the reference only."""
        if device.platform not in ("gpu", "cuda"):
            return None
        # The testing process has only this host's devices, and numbers them from 0.
        return cls(folder, device=device.local_hardware_id, retest=retest)

    def run(self, subject: Subject) -> tuple[Result, ...]:
        """Return one result per test. Tests without a stored result run now."""
        key = {  # everything that a result may depend on
            "subject": dataclasses.asdict(subject),
            "driver": toolchain.driver_version(),
            "cuda": toolchain.cuda_version(),
            "versions": toolchain.versions(),
            "source": _source_digest(subject.module),
        }
        path = self.folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
        results = {} if self.retest else _load(path, key, subject.program)
        missing = [test for test in TESTS if test not in results]
        if missing:
            results |= {result.test: result for result in self._run(subject, missing)}
            _store(path, key, results.values())
        return tuple(results[test] for test in TESTS)

    def _run(self, subject: Subject, tests: Sequence[str]) -> Iterator[Result]:
        """Run tests in order. After one that does not pass, the rest run in a fresh process."""
        waiting = list(tests)
        while waiting:
            with contextlib.closing(_Process(self, subject, waiting)) as process:
                if error := process.wait_until_ready():
                    yield from (_result(subject, test, UNTESTED, error) for test in waiting)
                    return
                error = ""
                while waiting and not error:
                    test = waiting.pop(0)
                    error = process.error_of(test, self.limit_s)
                    yield _result(subject, test, status_of(error), error)


def status_of(error: str) -> str:
    """Return the status of a test by its error, "" for none. Exhausted device memory leaves an op untested."""
    # In the words of XLA and of CUDA. A kernel that wants too much shared memory is told otherwise.
    full = "out of memory" in error.lower().replace("_", " ")
    return UNTESTED if full else FAILED if error else PASSED


class _Process:
    """Process that runs tests in order, until `close`."""

    def __init__(self, place: SelfTest, subject: Subject, tests: Sequence[str]):
        self._subject, self._error, self._unread = subject, "", b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._request = pickle.dumps((subject, tuple(tests), place.device, place.limit_s))
        environment = {
            # The next process, after a failure or at another start, does not compile the reference again.
            "JAX_COMPILATION_CACHE_DIR": str(place.folder / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **os.environ,
            "JAX_PLATFORMS": place.platform,
            # The program that waits for this test may hold most of the device's memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # The same code as in this process, wherever it was started.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from pallas_kernels import trial; trial.main()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, bufsize=0,
                start_new_session=True,  # so that it can be killed together with its children (ptxas)
            )  # fmt: skip
        except OSError as error:
            self._error = f"the test process did not start: {error}"

    def close(self) -> None:
        """End the process."""
        if not self._error:
            self._end()
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            self._process.stdout.close()
        self._stderr.close()

    def wait_until_ready(self) -> str:
        """Wait until the device is open and the cases are in its memory. Return the error if that fails."""
        if self._error:
            return self._error
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `error_of` says how
            self._process.stdin.write(self._request)
        self._process.stdin.close()
        return self.error_of("start", START_LIMIT_S)

    def error_of(self, doing: str, limit_s: float) -> str:
        """Return the error of the next test, "" for none, or the reason why the process sent none."""
        assert self._process.stdout
        start = time.monotonic()
        while b"\n" not in self._unread:
            passed = time.monotonic() - start
            if passed >= limit_s:
                self._end()
                return f"no result within {limit_s:g} seconds{self._tail()}"
            if not select.select([self._process.stdout], [], [], min(PROGRESS_S, limit_s - passed))[0]:
                logger.info("self-test of %s: %s, %.0f s so far (limit %g s)",
                            self._subject.module, doing, time.monotonic() - start, limit_s)  # fmt: skip
            elif not (piece := os.read(self._process.stdout.fileno(), 4096)):
                # WNOWAIT leaves the process unreaped, so that no other process can get the id of its group.
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
                status = self._end()
                how = signal.Signals(-status).name if status < 0 else f"status {status}"
                return f"the process ended ({how}){self._tail()}"
            else:
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return str(json.loads(line))

    def _tail(self) -> str:
        """Return the last lines that the process wrote to stderr, on one line."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 4096))
        lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines()]
        text = " | ".join([line for line in lines if line][-5:])[-MAX_REASON:]
        return f": {text}" if text else ""

    def _end(self) -> int:
        """Kill the process with everything that it started, and return its exit status."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _result(subject: Subject, test: str, status: str, reason: str) -> Result:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Result(subject.program, test, status, reason, now)


def _source_digest(module: str) -> str:
    """Return a digest of the source of this package and of an implementation outside it."""
    files = set(Path(__file__).parent.rglob("*.py"))
    spec = importlib.util.find_spec(module)
    if spec and spec.origin:
        files.add(Path(spec.origin))
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(path: Path, key: Mapping[str, Any], program: str) -> dict[str, Result]:
    """Return stored results by test; none if the file is missing, broken or of another key."""
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            return {}
        return {
            test: Result(program, test, said["status"], said["reason"], said["tested_at"], remembered=True)
            for test, said in content["results"].items()
            if test in TESTS and said["status"] in (PASSED, FAILED)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _store(path: Path, key: Mapping[str, Any], results: Iterable[Result]) -> None:
    """Store the results of tests that ran, in one step, so that no reader sees half a file."""
    said = {
        result.test: {"status": result.status, "reason": result.reason, "tested_at": result.tested_at}
        for result in results
        if result.status != UNTESTED
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump({"key": key, "results": said}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the self-test will run again at the next start: its results can't be written (%s)", error)
