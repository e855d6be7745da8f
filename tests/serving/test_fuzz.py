"""What benchmarks/fuzz.py sends, in a smaller number, to a real server; and that it finds what is wrong with one."""

import http.server
import json
import random
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from benchmarks import fuzz_bytes, fuzz_described, fuzz_fields
from benchmarks.fuzz import FLAGS, Tally, fuzz
from benchmarks.server_process import ServerProcess
from jpaged.serving.openapi import description


def test_no_request_breaks_it():
    """The process itself ends well and logs no traceback, or the block fails."""
    with ServerProcess(*FLAGS) as server:
        *attackers, everything = fuzz(server.url, 1500, seed=1, progress=False)
        assert "a request failed" not in server.log()
    for row in attackers:
        assert row["status"] == "ok", row["told"]
        assert row["requests"] == 500 and row["outcomes"].get("400", 0) > 50, row
    assert {row["attacker"] for row in attackers if row["outcomes"].get("200", 0) > 10} >= {"described", "fields"}
    assert everything["status"] == "ok", everything
    assert (everything["running"], everything["waiting"], everything["kv_usage"]) == (0, 0, 0)
    assert everything["grown_mib"] < 150 and everything["files_end"] <= everything["files_warm"] + 5, everything


LEAST = "-9223372036854775808"
NESTED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 10**5}}]}
FOUND = {
    "a power that is no float": ({"use_beam_search": True, "n": 2, "length_penalty": 1e308}, "length_penalty"),
    "a number that ends the compiler of grammars": (
        {"structured_outputs": {"json": {"const": int(LEAST)}}},
        "structured_outputs",
    ),
    "the same, as text": ({"structured_outputs": {"json": f'{{"enum": [{LEAST}]}}'}}, "structured_outputs"),
    "the same, in a grammar": (
        {"structured_outputs": {"grammar": f'start: %json {{"const": {LEAST}}}'}},
        "structured_outputs",
    ),
    "more stop strings than every step can look for": ({"stop": ["a"] * 65}, "stop"),
    "more bad words than that": ({"bad_words": ["a"] * 1025}, "bad_words"),
    "a great many wrong items": ({"stop_token_ids": [0.5] * 200_000}, "stop_token_ids"),
    "arguments that are nested too deeply": ({"messages": [{"role": "user", "content": "a"}, NESTED]}, "messages"),
}


@pytest.mark.parametrize("fields, param", FOUND.values(), ids=FOUND)
async def test_what_was_found_is_refused_by_name(client, fields, param):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    prompt = {} if "messages" in fields else {"prompt": "a"}
    start = time.monotonic()
    error = (await client.post(path, prompt | {"max_tokens": 2} | fields, 400))["error"]
    assert error["param"] == param and time.monotonic() - start < 10
    await client.complete("still", max_tokens=1)


async def test_a_body_that_can_not_be_decoded(client):
    async with client.session.post(
        "/v1/completions", data=b"no gzip", headers={"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 400 and "can't be decoded" in (await response.json())["error"]["message"]


@contextmanager
def answering(status: int, content_type: str, body: bytes):
    """A server that answers everything, but for its description, in one way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/openapi.json"
            data = json.dumps(description()).encode() if known else body
            self.send_response(200 if known else status)
            self.send_header("Content-Type", "application/json" if known else content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "attack, answer, problem",
    [
        (fuzz_described.attack, (500, "application/json", b"{}"), "ndocumented"),  # status 500 is not described
        (fuzz_described.attack, (400, "text/plain", b"no"), "ontent-Type"),
        (fuzz_described.attack, (400, "application/json", b'{"error": "no"}'), "violates schema"),
        (fuzz_bytes.attack, (500, "text/plain", b"Traceback"), "status 500"),
        (fuzz_fields.attack, (503, "application/json", b'{"error": {"code": 503}}'), "status 503"),
        (fuzz_fields.attack, (400, "application/json", b'{"error": {"code": 500}}'), "not the API's form"),
        (fuzz_fields.attack, (200, "application/json", b""), "an empty answer"),
        (fuzz_fields.attack, (200, "text/event-stream", b"data: {}\n\n"), "a stream that ends in"),
        (
            fuzz_fields.attack,
            (200, "text/event-stream", b'data: {"error": {"type": "InternalServerError"}}\n\ndata: [DONE]\n\n'),
            "an error in a stream",
        ),
    ],
)
def test_each_attacker_tells_what_is_wrong(attack, answer, problem):
    tally = Tally(20, lambda: None)
    with answering(*answer) as url:
        attack(url, 3, tally)
    assert tally.done == 20
    assert any(problem in failure for failure in tally.failures), tally.failures[:3]


def test_a_server_that_does_not_end_a_connection_is_told_of(monkeypatch):
    monkeypatch.setattr(fuzz_bytes, "TIMEOUT", 0.1)
    tally = Tally(10, lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        fuzz_bytes.attack(f"http://127.0.0.1:{silent.getsockname()[1]}", 3, tally)
    assert any("no end within" in failure for failure in tally.failures)


def test_what_is_sent_depends_on_the_seed_alone():
    for make in (fuzz_bytes.mutated, fuzz_fields.generation, fuzz_fields.other):
        first, again, other = ([make(rng) for _ in range(50)] for rng in map(random.Random, (1, 1, 2)))
        assert first == again != other
