"""The log and the access log: their lines, and files and pipes that cannot be written."""

import fcntl
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from benchmarks.shared.server_process import ROOT, ServerProcess
from jpaged.serving import logs
from jpaged.serving.logs import MAX_WAITING, logging_to
from tests.serving.client import exchange_bytes, request
from tests.serving.scripted import completion
from tests.support.patience import PATIENCE_S, until

SCRIPTED = "tests.serving.scripted"
DISK = "/dev/full"


full_disk = pytest.mark.skipif(not os.path.exists(DISK), reason=f"needs {DISK}")


async def test_access_log_has_a_json_line_for_a_request(server, exchange):
    await exchange(request("POST", "/v1/completions", completion("Hi", stream=True), X_Request_Id="look-for-me"))
    line = json.loads(server.wait_for_log('.*"look-for-me".*')[0])
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["finish_reasons"] == ["stop"] and line["completion_tokens"] == 2


async def test_lines_of_the_log_are_never_made_by_requests(server):
    forged = '{"time": "now", "status": 200, "path": "/forged"}'
    heads = [
        f"GET /v1/models/a%0a{forged.replace(' ', '%20')} HTTP/1.1\r\nHost: localhost\r\n",
        f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\n {forged}\r\n",
        f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {forged}\r\n",
        "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: kept-1\r\n",
        f"GET /health HTTP/1.1\r\nHost: localhost\r\n\n{forged}\r\n",
        f"{forged} HTTP/1.1\r\nHost: localhost\r\n",
        f"GET /\x1b[2J%1b%e2%80%a8%c2%85{forged.replace(' ', '')} HTTP/1.1\r\nHost: localhost\r\n",
    ]
    body = json.dumps({"prompt": f"my secret\n{forged}", "user": forged, "model": f"demo\n{forged}"})
    heads.append(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n")
    start = len(server.log())
    for head in heads:
        await exchange_bytes(server.port, f"{head}Connection: close\r\n\r\n{body if 'POST' in head else ''}".encode())
    await exchange_bytes(server.port, request("GET", "/health", X_Request_Id="last-1", Connection="close"))
    log = server.wait_for_log('"last-1".*\n').string[start:]
    lines = log.splitlines()  # It splits at every character that a reader may take for the end of a line.
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert records and all({"client", "method", "request_id", "seconds"} <= record.keys() for record in records)
    assert not any(record["path"] == "/forged" for record in records)
    others = [line for line in lines if not line.startswith("{")]
    assert others and {record["status"] for record in records} == {200, 404}
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line) for line in others), others
    assert "my secret" not in log and "kept-1" in {record["request_id"] for record in records}


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def process(stderr, *program: str):
    """Start a server whose log cannot be read, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen(
        [sys.executable, *program, "--port", str(port)], cwd=ROOT, stdin=subprocess.DEVNULL, stderr=stderr
    )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert running.poll() is None and time.monotonic() < deadline, running.returncode
            try:
                assert get(f"http://127.0.0.1:{port}/health")[0] == 200
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield running, port
    finally:
        running.kill()
        running.wait()


def serve(port: int, count: int) -> None:
    """Check the responses to requests with long lines in the access log, and to a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    for _ in range(count):
        connection.request("GET", f"/v1/models/{'m' * 1000}")
        response = connection.getresponse()
        assert response.status == 404 and response.read()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True}))
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 2
    connection.close()


@full_disk
def test_full_disk_does_not_stop_a_server():
    with open(DISK, "w") as disk, process(disk, "-m", SCRIPTED) as (server, port):
        serve(port, 100)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


@full_disk
def test_full_disk_of_the_access_log_is_ignored():
    with ServerProcess("--access-log", DISK, module=SCRIPTED) as server:
        serve(server.port, 100)
    assert "No space" not in server.log() and "m" * 1000 not in server.log()


def test_pipe_without_a_reader_delays_neither_requests_nor_the_exit():
    reading, writing = os.pipe()
    if set_size := getattr(fcntl, "F_SETPIPE_SZ", None):
        fcntl.fcntl(writing, set_size, 2**14)
    with os.fdopen(reading), os.fdopen(writing, "w") as unread, process(unread, "-m", SCRIPTED) as (server, port):
        serve(port, 60 if set_size else 300)  # Elsewhere, a pipe holds 64 KiB.
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def test_closed_pipe_does_not_stop_a_server():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as unread, process(unread, "-m", SCRIPTED) as (server, port):
        os.close(reading)
        serve(port, 10)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


@pytest.fixture
def root_logger():
    """Restore the root logger after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_waiting_lines_are_bounded_and_later_lines_are_written_once_the_pipe_is_read(root_logger, monkeypatch):
    monkeypatch.setattr(logs, "FLUSH_TIMEOUT_S", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as pipe, logging_to(pipe, "none"):
        logger = logging.getLogger("jpaged.test")
        for index in range(2 * MAX_WAITING):
            logger.info("line %d %s", index, "x" * 200)
        (entry,) = logging.getLogger().handlers
        assert entry.queue.qsize() <= MAX_WAITING
        os.set_blocking(reader.fileno(), False)
        until(lambda: logger.info("the pipe is read again") or b"the pipe is read again" in (reader.read() or b""))


def test_traceback_longer_than_the_buffer_of_a_pipe_is_written_whole(root_logger):
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as pipe:
        received: list[str] = []
        thread = threading.Thread(target=lambda: received.append(reader.read()))
        thread.start()
        with logging_to(pipe, "none"):
            logging.getLogger("jpaged.test").error("x" * 200_000 + " end")
        pipe.close()
        thread.join(PATIENCE_S)
    assert re.fullmatch(r".* ERROR jpaged.test: x{200000} end\n", received[0])
