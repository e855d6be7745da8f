"""The failures in docs/operation.md, as clients and operators see them."""

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

import openai
import pytest

from benchmarks.shared.server_process import ROOT, ServerProcess
from jpaged.serving import logs
from jpaged.serving.logs import MAX_WAITING, logging_to
from tests.attack.server_state import wait_until_idle
from tests.serving.scripted import FAIL, say

SCRIPTED = "tests.serving.scripted"
SLOW = ("--step-seconds", "0.02")
FEW_SHAPES = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
DISK = "/dev/full"

full_disk = pytest.mark.skipif(not os.path.exists(DISK), reason=f"needs {DISK}")


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_process_that_is_killed():
    """Streams break off, nothing says that they were whole; and it can be started again at once, on the same port."""
    with ServerProcess(*SLOW, module=SCRIPTED, clean=False) as server:
        with client(server.url) as api:
            stream = api.completions.create(model="demo", prompt=say("word " * 100), max_tokens=200, stream=True)
            pieces = [next(stream).choices[0].text for _ in range(3)]
            assert "".join(pieces).startswith("w")
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIConnectionError):
                list(stream)
            with pytest.raises(openai.APIConnectionError):
                api.completions.create(model="demo", prompt="a")
        assert server.process.wait(30) == -signal.SIGKILL
        with ServerProcess("--port", str(server.port), module=SCRIPTED) as again, client(again.url) as api:
            assert again.url == server.url
            assert api.completions.create(model="demo", prompt=say("back")).choices[0].text == "back"


def test_a_runner_that_fails():
    """Running requests get an error; later requests are refused; the process stays up, and ends well."""
    with ServerProcess(*SLOW, module=SCRIPTED, clean=False) as server:
        with client(server.url) as api:
            other = api.completions.create(model="demo", prompt=say("word " * 100), max_tokens=200, stream=True)
            next(other)
            body = {"prompt": say(f"Once{FAIL}"), "stream": True}
            data = json.dumps(body).encode()
            with urllib.request.urlopen(f"{server.url}/v1/completions", data, timeout=30) as response:
                *events, last, _ = response.read().split(b"\n\n")
            error = json.loads(events[-1].removeprefix(b"data: "))["error"]
            assert (
                last == b"data: [DONE]"
                and error["type"] == "ServiceUnavailableError"
                and error["code"] == "service_unavailable"
            )
            assert error["message"] == "the engine has failed: the script fails here"
            with pytest.raises(openai.APIError, match="the engine has failed"):
                list(other)
            for request in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
                with pytest.raises(openai.InternalServerError, match="the engine has failed") as refused:
                    api.completions.create(model="demo", **request)
                assert refused.value.status_code == 503
        assert get(f"{server.url}/health")[0] == 503
        assert [get(f"{server.url}{path}")[0] for path in ("/metrics", "/v1/models", "/version")] == [200, 200, 200]
        log = server.wait_for_log("RuntimeError: the script fails here")
        assert "ERROR jpaged.engine.async_engine: the engine has failed\nTraceback" in log.string
        assert server.stop() == 0


def test_a_client_that_goes_away():
    with ServerProcess(*SLOW, module=SCRIPTED) as server:
        with client(server.url) as api:
            stream = api.completions.create(model="demo", prompt=say("word " * 100), max_tokens=200, stream=True)
            next(stream)
            stream.close()
        line = json.loads(server.wait_for_log(r'\{.*"status": 499.*', within=2)[0])
        assert line["path"] == "/v1/completions" and line["completion_tokens"] < 100
        state, _ = wait_until_idle(server.url, 2)
        assert state.idle


@contextmanager
def process(stderr, *program: str):
    """A server without a log that could be read, on a port that was free."""
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


def serves(port: int, count: int) -> None:
    """It answers so many requests, each of which makes a long line of its access log."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(count):
        connection.request("GET", f"/v1/models/{'m' * 1000}")
        response = connection.getresponse()
        assert response.status == 404 and response.read()
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True}))
    assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 2
    connection.close()


@full_disk
def test_a_full_disk_is_no_reason_not_to_start_to_serve_or_to_end_well():
    with open(DISK, "w") as disk, process(disk, "server.py", *FEW_SHAPES) as (server, port):
        serves(port, 100)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


@full_disk
def test_a_full_disk_under_the_access_log_is_not_even_logged():
    with ServerProcess("--access-log", DISK, module=SCRIPTED) as server:
        serves(server.port, 100)
    assert "No space" not in server.log() and "m" * 1000 not in server.log()


def test_a_pipe_that_nobody_reads_holds_up_neither_requests_nor_the_end():
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as unread, process(unread, "-m", SCRIPTED) as (server, port):
        serves(port, 300)  # a pipe holds 64 KiB
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_pipe_whose_reader_has_gone():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as unread, process(unread, "-m", SCRIPTED) as (server, port):
        os.close(reading)
        serves(port, 10)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


@pytest.fixture
def root_logger():
    """As it was, after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_what_waits_to_be_written_is_bounded_and_later_lines_come_once_somebody_reads(root_logger, monkeypatch):
    monkeypatch.setattr(logs, "PATIENCE", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as pipe, logging_to(pipe, "none"):
        logger = logging.getLogger("jpaged.test")
        for index in range(2 * MAX_WAITING):
            logger.info("line %d %s", index, "x" * 200)
        (entry,) = logging.getLogger().handlers
        assert entry.queue.qsize() <= MAX_WAITING
        os.set_blocking(reader.fileno(), False)
        for _ in range(200):
            logger.info("somebody reads again")
            time.sleep(0.05)
            if b"somebody reads again" in (reader.read() or b""):
                break
        else:
            raise AssertionError("nothing was written again")


def test_a_traceback_that_is_longer_than_a_pipe_has_room_for_comes_whole(root_logger):
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as pipe:
        received: list[str] = []
        thread = threading.Thread(target=lambda: received.append(reader.read()))
        thread.start()
        with logging_to(pipe, "none"):
            logging.getLogger("jpaged.test").error("x" * 200_000 + " end")
        pipe.close()
        thread.join(10)
    assert re.fullmatch(r".* ERROR jpaged.test: x{200000} end\n", received[0])
