"""The fuzzer of tests/attack/fuzz.py: a few of its requests to a real server, and planted errors that it must find."""

import http.server
import json
import random
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from jpaged.serving.codec import dumps
from jpaged.serving.endpoints import served
from jpaged.serving.openapi import description
from jpaged.serving.service import ServerConfig
from tests.attack import fuzz_bytes, fuzz_checkpoints, fuzz_described, fuzz_fields, fuzz_mixed, fuzz_target
from tests.attack.fuzz import CLIENTS, attacked, problems
from tests.attack.fuzz_target import Tally, Target, ends_in_shortage, has_tokens, shortage


def check(rows):
    *attackers, server = rows
    for row in attackers:
        assert row["status"] == "ok", row["told"]
    assert server["status"] == "ok", server
    assert server["exit_status"] == 0 and not server["tracebacks"], server
    assert server["generated"] > server["requests"] / 2, server
    return {row["attacker"]: row for row in rows}


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made with openssl")
def test_server_withstands_120_hostile_requests():
    """Use keys, TLS, priorities, swapping and a full queue; `problems` reports each that did not occur."""
    rows = attacked(120, seed=1, progress=False)
    missed = {"no timed_out", "no queue_full", "no too_large"}  # So few requests may not cause these.
    rows[-1]["problems"] = [problem for problem in rows[-1]["problems"] if problem not in missed]
    rows[-1]["status"] = "failed" if rows[-1]["problems"] else "ok"
    check(rows)


@pytest.mark.deep
def test_server_withstands_5000_hostile_requests():
    rows = attacked(5000, seed=2, progress=False)
    found = check(rows)
    assert rows[-1]["most_at_once"] > CLIENTS / 4, rows[-1]
    assert found["described"]["outcomes"]["200"] > 10 and found["fields"]["outcomes"]["200"] > 100
    assert found["bytes"]["outcomes"]["400"] > 50


SERVER = {
    "running": 0, "waiting": 0, "kv_usage": 0, "unhealthy": 0, "files_warm": 11, "files_end": 11, "generated": 60,
    "requests": 100, "preemptions": 1, "swapped_blocks": 1, "queue_full": 1, "timed_out": 1, "too_large": 1,
    "grown_mib": 50.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, []),
        ({"kv_usage": 0.5}, ["kv_usage is 0.5 at the end"]),
        ({"unhealthy": 2}, ["not healthy 2 times"]),
        ({"files_end": 20}, ["open files grew from 11 to 20"]),
        ({"grown_mib": 200.0}, ["memory grew by 200 MiB"]),
        ({"generated": 49}, ["49 of 100 requests generated tokens, less than half"]),
        ({"swapped_blocks": 0, "queue_full": 0}, ["no swapped_blocks", "no queue_full"]),
    ],
)
def test_problems_of_the_server_and_missed_conditions_are_reported(changes, told):
    assert problems(SERVER | changes) == told


def test_status_above_499_is_accepted_only_for_a_full_queue_or_a_timeout():
    full, late = b'{"error": {"code": "queue_full"}}', b'{"error": {"code": "timeout"}}'
    assert shortage(503, full) is None and shortage(504, late) is None and shortage(404, b"") is None
    assert shortage(503, late) and shortage(504, full) and shortage(500, full)
    told, done = dumps({"error": {"code": "timeout"}}), b"\n\ndata: [DONE]\n\n"  # as the server writes it
    assert ends_in_shortage(b"data: {}\n\ndata: " + told + done)
    assert not any(map(ends_in_shortage, (b"", b"data: {}" + done, b"data: " + full + done, b"data: " + told)))


def test_generated_tokens_are_counted_from_responses():
    role = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    assert not has_tokens(True, role) and has_tokens(True, 2 * role)
    for other in (b"data: [DONE]\n\n", b'data: {"error": {"code": 500}}\n\n', role[:-9]):
        assert not has_tokens(True, role + other), other
    assert has_tokens(False, b'{"usage": {"completion_tokens": 1}}') and not has_tokens(False, b'{"usage": null}')


@pytest.mark.parametrize("count", [15, pytest.param(40, marks=pytest.mark.deep)])
def test_hostile_checkpoint_loads_or_is_an_error_that_names_the_file(count):
    rows = fuzz_checkpoints.load_all(count, seed=3, progress=False)
    assert all(row["status"] == "ok" for row in rows), [row["told"] for row in rows]
    assert sum(row["outcomes"]["ValueError"] for row in rows) > count / 3


@pytest.mark.deep
def test_crafted_and_random_checkpoints_load_or_are_errors():
    rows = fuzz_checkpoints.load_all(len(fuzz_checkpoints.CRAFTED) + 200, seed=4, progress=False)
    assert all(row["status"] == "ok" for row in rows), [row["told"] for row in rows]


@pytest.mark.parametrize(
    "end, told",
    [
        ({"error": None, "mib": 3.0}, None),
        ({"error": "ValueError", "message": "/a/config.json: no", "mib": 3.0}, None),
        ({"error": "TypeError", "message": "/a/config.json: no", "mib": 3.0}, "TypeError, no ValueError"),
        ({"error": "ValueError", "message": "no", "mib": 3.0}, "names no file"),
        ({"error": None, "mib": 3000.0}, "3000 MiB of memory"),
    ],
)
def test_faults_of_a_load_are_reported(end, told):
    found = fuzz_checkpoints.fault("config.json", Path("/a"), end)
    assert (found is None) == (told is None) and (told or "") in (found or "")


LEAST = "-9223372036854775808"
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
}


@pytest.mark.parametrize("fields, param", FOUND.values(), ids=FOUND)
async def test_found_request_is_rejected_by_its_field(client, fields, param):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    prompt = {} if "messages" in fields else {"prompt": "a"}
    start = time.process_time()
    error = (await client.post(path, prompt | {"max_tokens": 2} | fields, 400))["error"]
    assert error["param"] == param and time.process_time() - start < 10
    await client.complete("still", max_tokens=1)


@contextmanager
def answering(status: int, content_type: str, body: bytes):
    """Run a server with one response to all requests except those for its description."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/openapi.json"
            data = json.dumps(description(served(ServerConfig()))).encode() if known else body
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


def described(target, seed, count, tally):
    fuzz_described.attack(target, seed, count, tally)


def one_by_one(attack):
    def many(target, seed, count, tally):
        for i in range(count):
            attack(target, random.Random(f"{seed} {i}"), tally)

    return many


@pytest.mark.deep
@pytest.mark.parametrize(
    "attack, answer, problem",
    [
        (described, (500, "application/json", b"{}"), "ndocumented"),  # status 500 is not described
        (described, (400, "text/plain", b"no"), "ontent-Type"),
        (described, (400, "application/json", b'{"error": "no"}'), "violates schema"),
        (fuzz_bytes, (500, "text/plain", b"Traceback"), "status 500"),
        (fuzz_bytes, (503, "text/plain", b"no reason"), "status 503"),
        (fuzz_fields, (503, "application/json", b'{"error": {"code": "service_unavailable"}}'), "status 503"),
        (fuzz_fields, (400, "application/json", b'{"error": {"code": 500}}'), "not the API's form"),
        (fuzz_fields, (200, "application/json", b""), "an empty answer"),
        (fuzz_fields, (200, "text/event-stream", b"data: {}\n\n"), "a stream that ends in"),
        (
            fuzz_fields,
            (200, "text/event-stream", b'data: {"error": {"type": "InternalServerError"}}\n\ndata: [DONE]\n\n'),
            "an error in a stream",
        ),
        (fuzz_mixed, (200, "application/json", b'{"choices": []}'), "choices [] ended"),
        (fuzz_mixed, (404, "application/json", b'{"error": {"code": "not_found"}}'), "HTTP 404, not 200"),
    ],
)
def test_attacker_reports_a_wrong_response(attack, answer, problem, monkeypatch):
    monkeypatch.setattr(fuzz_target, "BACKOFF", 0.0)
    tally = Tally()
    with answering(*answer) as url:
        (attack if attack is described else one_by_one(attack.attack))(Target(url), 3, 20, tally)
    assert tally.done == 20
    assert any(problem in failure for failure in tally.failures), tally.failures[:3]


def test_connection_that_is_not_closed_is_reported(monkeypatch):
    monkeypatch.setattr(fuzz_bytes, "TIMEOUT", 0.1)
    tally = Tally()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts connections and sends nothing.
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        one_by_one(fuzz_bytes.attack)(Target(url), 3, 10, tally)
    assert any("no end within" in failure for failure in tally.failures)


def test_requests_depend_only_on_the_seed():
    for make in (fuzz_bytes.mutated, fuzz_fields.generation, fuzz_fields.other):
        first, again, other = ([make(rng) for _ in range(50)] for rng in map(random.Random, (1, 1, 2)))
        assert first == again != other
    assert (
        list(fuzz_checkpoints.cases(30, 1))
        == list(fuzz_checkpoints.cases(30, 1))
        != list(fuzz_checkpoints.cases(30, 2))
    )
