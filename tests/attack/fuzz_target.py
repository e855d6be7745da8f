"""The attacked server as its attackers see it: connections, keys, and a verdict on each answer."""

import http.client
import json
import random
import shlex
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MIB = 2**20
TIMEOUT = 120.0  # seconds without a byte of the answer are a hang
SHORTAGES = {503: "queue_full", 504: "timeout"}  # the only codes of HTTP 5xx that a healthy server sends
BACKOFF = 1.0  # seconds that a client waits after HTTP 503
# The last events of streams whose events have names, and the codes of errors there that are no faults.
ENDS = {"response.completed", "response.incomplete", "response.failed", "message_stop", "error"}
NO_FAULTS = {SHORTAGES[504], "invalid_value"}


@dataclass(frozen=True)
class Target:
    """A server.

    Attributes:
        keys: any of them opens it; a wrong one is sent now and then.
        certificate: the file with its own, self-signed one; None for plain HTTP.
    """

    url: str
    keys: tuple[str, ...] = ()
    certificate: Path | None = None

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        return None if self.certificate is None else ssl.create_default_context(cafile=self.certificate)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def http(self, timeout: float) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(*self.address, timeout=timeout)
        return http.client.HTTPSConnection(*self.address, timeout=timeout, context=self.tls)

    def connect(self, timeout: float) -> socket.socket:
        """Return a connection for bytes of any kind."""
        connection = socket.create_connection(self.address, timeout=timeout)
        if self.tls is None:
            return connection
        try:
            return self.tls.wrap_socket(connection, server_hostname=self.address[0])
        except BaseException:
            connection.close()
            raise

    def authorization(self, rng: random.Random) -> dict[str, str]:
        """Return a header with a valid key or, one time in fifty, without one."""
        if not self.keys:
            return {}
        key = rng.choice(self.keys) if rng.random() < 0.98 else rng.choice(("", "wrong", self.keys[0] + "x"))
        return {"Authorization": f"Bearer {key}"}


@dataclass
class Tally:
    """The outcomes of one attacker's requests. Its clients share it.

    Attributes:
        outcomes: how many ended in each status, or in each way without one.
        generated: how many brought tokens of a model.
        failures: descriptions of wrong answers, each with its request.
    """

    advance: Callable[[], None] = lambda: None
    outcomes: Counter[str] = field(default_factory=Counter)
    generated: int = 0
    failures: list[str] = field(default_factory=list)
    done: int = 0
    slowest: float = 0.0
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(
        self, outcome: int | str, seconds: float, request: object, problem: str | None = None, *,
        generated: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            self.done += 1
            self.generated += generated
            self.outcomes[str(outcome)] += 1
            self.slowest = max(self.slowest, seconds)
            if problem:
                self.failures.append(f"{problem}: {str(request)[:2000]}")
        self.advance()


def shortage(status: int, data: bytes) -> str | None:
    """Return the fault of an HTTP 5xx; None if it tells of a full queue or of a time limit."""
    if status < 500 or (status in SHORTAGES and f'"code": "{SHORTAGES[status]}"'.encode() in data):
        return None
    return f"status {status}: {data[-300:]!r}"


def call(
    target: Target, rng: random.Random, path: str, body: Mapping[str, Any] | bytes, tally: Tally, *,
    leaves: bool = True, check: Callable[[int, bytes], str | None] = lambda status, data: None,
) -> None:  # fmt: skip
    """Send a request, and judge its answer. Some clients leave before its end.

    Args:
        check: returns a further fault of a whole answer of the given status.
    """
    patience = rng.choice((0, 1, 100, 1000)) if leaves and rng.random() < 0.15 else None
    headers = {"Content-Type": "application/json"} | target.authorization(rng)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    start, problem, answer = time.monotonic(), None, b""
    outcome: int | str = "left"
    streamed = False
    connection = target.http(TIMEOUT)
    try:
        connection.request("POST", path, data, headers)
        if patience != 0:
            response = connection.getresponse()
            outcome, streamed = response.status, response.headers.get_content_type() == "text/event-stream"
            answer = response.read(patience)
            if patience is None:
                problem = fault(response.status, streamed, answer)
                refused = response.status in (401, *SHORTAGES)
                problem = problem or (None if refused or ends_in_shortage(answer) else check(response.status, answer))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        outcome = "no answer"
        # A server may hang up on a body that it refuses for its size before all of it has come.
        problem = None if len(data) > MIB and isinstance(error, ConnectionError) else repr(error)
    finally:
        connection.close()
    generated = outcome == 200 and has_tokens(streamed, answer)
    tally.add(outcome, time.monotonic() - start, f"{path} {data[:2000].decode(errors='replace')}", problem,
              generated=generated)  # fmt: skip
    if outcome == 503:
        time.sleep(BACKOFF)


def fault(status: int, streamed: bool, data: bytes) -> str | None:
    """Return a fault in the form of a whole answer. Raises ValueError if it is no JSON."""
    if not data:
        return "an empty answer"
    if status != 200:
        answer = json.loads(data)
        kept = "error" in answer and isinstance(answer["error"]["code"], str)
        return shortage(status, data) if kept else f"status {status}, not the API's form: {data[:200]!r}"
    if not streamed:
        json.loads(data)
        return None
    if data.startswith(b"event: "):
        return _named_fault(data)
    *events, done, end = data.split(b"\n\n")
    if (done, end) != (b"data: [DONE]", b""):
        return f"a stream that ends in {data[-80:]!r}"
    for event in events:
        chunk = json.loads(event.removeprefix(b"data: "))
        if "error" in chunk and chunk["error"]["type"] != "BadRequestError" and not ends_in_shortage(data):
            return f"an error in a stream: {chunk}"
    return None


def _named_fault(data: bytes) -> str | None:
    """Return a fault in a stream whose events have names."""
    *frames, end = data.split(b"\n\n")
    last = [json.loads(frame.partition(b"\ndata: ")[2]) for frame in frames][-1]
    if end or last["type"] not in ENDS:
        return f"a stream that ends in {data[-80:]!r}"
    error = _error(last)
    return f"an error in a stream: {last}" if error and error["code"] not in NO_FAULTS else None


def _error(event: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a stream whose events have names; an empty one if it has none."""
    return event.get("error") or event.get("response", {}).get("error") or {}


def ends_in_shortage(data: bytes) -> bool:
    """Whether a stream was cut off by a time limit."""
    if data.startswith(b"event: "):
        return data.endswith(b"\n\n") and _error(_chunk(data.split(b"\n\n")[-2])).get("code") == SHORTAGES[504]
    *_, last, done, end = [b"", b"", *data.split(b"\n\n")]
    return (done, end) == (b"data: [DONE]", b"") and _chunk(last).get("error", {}).get("code") == SHORTAGES[504]


def has_tokens(streamed: bool, data: bytes) -> bool:
    """Whether an answer, or its beginning, holds generated tokens."""
    if streamed:
        chunks = list(map(_chunk, data.split(b"\n\n")))
        if data.startswith(b"event: "):
            return any(str(chunk.get("type")).endswith("delta") for chunk in chunks)
        return sum(bool(chunk.get("choices")) for chunk in chunks) > 1  # the first event of a chat has a role alone
    try:
        usage = json.loads(data)["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens", 0)) > 0
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _chunk(event: bytes) -> dict[str, Any]:
    """Return the object that an event of a stream holds; an empty one for its end, or where it is cut off."""
    try:
        return json.loads(event[event.find(b"data: ") :].removeprefix(b"data: "))
    except ValueError:
        return {}


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate of 127.0.0.1 and its key, by means of the program openssl."""
    chain, key = folder / "chain.pem", folder / "key.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command = f"openssl req {kind} -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {chain}"
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return chain, key
