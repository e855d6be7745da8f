"""Requests that are no HTTP, or no JSON, or not quite: valid ones, broken byte by byte and in every well-known way."""

import gzip
import json
import random
import re
import socket
import time
from collections.abc import Callable

from tests.attack.fuzz_target import Tally, Target, shortage

TIMEOUT = 30.0  # seconds for a server to end a connection whose client has nothing more to say
GLANCE = 0.05  # seconds for an answer that need not come
LOOK = 0.5  # seconds for one that should
STATUS_LINE = re.compile(rb"HTTP/\d\.\d (\d{3}) [^\r\n]*\r\n")
MOST = 2**20  # bytes of a request


def _post(path: str, body: dict | bytes, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def _chunked(path: str, body: dict) -> bytes:
    data = json.dumps(body).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(data[i : i + 7]), data[i : i + 7]) for i in range(0, len(data), 7))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + pieces + b"0\r\n\r\n"


def _get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


PROMPT = {"prompt": "Once upon a time", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 3}
VALID = [
    _post("/v1/completions", PROMPT), _post("/v1/completions", PROMPT | {"stream": True, "n": 2}),
    _post("/v1/chat/completions", CHAT, "Authorization: Bearer key"), _chunked("/v1/chat/completions", CHAT),
    _post("/v1/responses", {"input": "Who are you?", "max_output_tokens": 3, "stream": True}),
    _post("/v1/messages?beta=true", CHAT | {"model": "demo"}, "x-api-key: key", "anthropic-version: 2023-06-01"),
    _post("/v1/completions", PROMPT, "Expect: 100-continue"), _post("/tokenize", {"prompt": "a fox"}),
    _post("/v1/embeddings", {"input": ["a fox", "the sun"]}),
    _post("/v1/score", {"query": "Who?", "items": ["a", "b"], "label_token_ids": [5, 6]}),
    _post("/detokenize", {"tokens": [5, 6, 7]}), _post("/reset_prefix_cache", b""), _get("/v1/models"),
    _get("/v1/models/demo", "X-Request-Id: 1"), _get("/metrics", "Accept-Encoding: gzip"),
    _get("/", "If-None-Match: *"),
    _get("/v1/completions", "Origin: http://a.b", "Access-Control-Request-Method: POST", method="OPTIONS"),
    _post("/v1/completions", gzip.compress(json.dumps(PROMPT).encode(), mtime=0), "Content-Encoding: gzip"),
    _get("/health") + _get("/version") + _post("/tokenize", {"prompt": "a"}) + _get("/ping", method="HEAD"),
]  # fmt: skip

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/score", "/generative_scoring", "/tokenize", "/detokenize",
)  # fmt: skip
WORDS = [
    b"\r\n", b"\n", b"\r", b"\x00", b"\xff\xfe", b"\xc3", b"%00", b"%0d%0aX-Injected: yes", b"%ff", b"..",
    b"/../../etc",
    b"\r\nX-Injected: yes\r\n", b"\r\nContent-Length: 7\r\n", b"\r\nTransfer-Encoding: chunked\r\n", b"HTTP/2.0",
    b"HTTP/0.9", b"HTTP/1.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Connection: close\r\n", b"Content-Encoding: deflate\r\n", b"Content-Encoding: br\r\n", b"Expect: 200-maybe\r\n",
    b"-1", b"+3", b"0x10", b"1e9", b"99999999999999999999", b"1.5", b"NaN", b"null", b"true", b"[]", b"{}", b'"',
    b"\\u0000",
    b"\\ud800", b"\xed\xa0\x80", b"ZZ\r\n", b"-5\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"5;a=b\r\n", b"0\r\n\r\n",
]  # fmt: skip


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: 1 + rng.randrange(len(data))]


def _without(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 16) :] or b"\r\n"


def _splice(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(VALID)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(WORDS) + data[at:]


def _insert_between_words(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice([match.start() for match in re.finditer(rb"\b|\r\n", data)] or [0])
    return data[:at] + rng.choice(WORDS) + data[at:]


def _another_length(data: bytes, rng: random.Random) -> bytes:
    value = rng.choice(
        [b"0", b"1", b"7", b"100000", b"-1", b"9" * 30, b"0x20", b"5, 5", b"", b" 5\r\nContent-Length: 6"]
    )
    return re.sub(rb"(?<=Content-Length: )\d+", lambda _: value, data)


def _another_header(data: bytes, rng: random.Random) -> bytes:
    value = rng.choice(
        [b"a" * 9000, b"a" * 70_000, b"\xff" * 40, b"\x01\x02", b"", b"a\r\n b", b"\xc3\xa9", b"Bearer " * 50]
    )
    names = (
        b"X-Request-Id",
        b"Authorization",
        b"Origin",
        b"Cookie",
        b"Content-Type",
        b"",
        b"a b",
        b"\xff",
        b"A" * 9000,
    )
    return data.replace(b"Host: ", rng.choice(names) + b": " + value + b"\r\nHost: ", 1)


def _many_headers(data: bytes, rng: random.Random) -> bytes:
    return data.replace(b"Host: ", b"".join(b"X-%d: 1\r\n" % i for i in range(rng.choice((100, 2000)))) + b"Host: ", 1)


def _another_path(data: bytes, rng: random.Random) -> bytes:
    paths = (
        b"*",
        b"http://a/b",
        b"//",
        b"/%",
        b"/v1/models/" + b"a" * 9000,
        b"/?" + b"&" * 900,
        b"/page/../v1/models",
        b"a:80",
    )
    return re.sub(rb"(?<= )/[^ ]*", lambda _: rng.choice(paths), data, count=1)


def _another_body(data: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((50, 300, 100_000))
    bodies = (
        b"[" * depth,
        b'{"prompt":' * depth,
        b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * depth + b"}",
        b'{"prompt": "a", "temperature": 1e' + b"9" * depth + b"}",
        b'{"prompt": "a", "temperature": 0.' + b"0" * depth + b"1}",
        b'{"prompt": "' + b"\xff" * depth + b'"}',
        b'{"prompt": "' + b"\\u0000" * 50 + b'", "max_tokens": 1}',
        b'{"prompt": "a", "prompt": 1, "n": 1, "n": 2}',
        b'{"messages": [' + b'{"role": "user", "content": "a"},' * 50 + b"{}]}",
        b"\xef\xbb\xbf{}",
        b"NaN",
        b"\x00" * depth,
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a", "structured_outputs": {"regex": "' + b"(" * depth + b'"}}',
    )
    return _post(rng.choice(PATHS), rng.choice(bodies))


def _noise(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 10, 1000, 100_000)))


def _pipelined(data: bytes, rng: random.Random) -> bytes:
    return b"".join(rng.choice(VALID) for _ in range(rng.randint(2, 40))) + data


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    _flip, _flip, _cut, _without, _splice, _insert, _insert_between_words, _insert_between_words, _another_length,
    _another_header, _many_headers, _another_path, _another_body, _another_body, _noise, _pipelined,
]  # fmt: skip


def mutated(rng: random.Random, key: str = "") -> bytes:
    """A request after one or more changes; the request itself brings the key, if there is one."""
    data = rng.choice(VALID)
    if key:
        data = data.replace(b"Host: localhost", b"Host: localhost\r\nAuthorization: Bearer " + key.encode())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng)
    return data[:MOST]


def attack(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send one request. A client that "ends" says that it has no more to send, and waits for the server to end the
    connection too; the others keep it open, and go after a glance, at once, or without a goodbye."""
    data = mutated(rng, rng.choice(target.keys) if target.keys else "")
    manner = rng.choice(("ends", "ends", "ends", "glances", "leaves", "resets"))
    start, problem, answer = time.monotonic(), None, b""
    try:
        if target.tls is not None and rng.random() < 0.1:
            target = Target(target.url)  # plain bytes where TLS is expected
        with target.connect(TIMEOUT) as connection:
            _send_all(connection, data)
            if manner == "resets":
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            if target.tls is not None and manner == "ends":
                # A half-closed TLS connection is closed to the server, so the response is read first.
                connection.settimeout(LOOK)
                answer = _received(connection)
                connection.settimeout(TIMEOUT)
            if manner == "ends":
                socket.socket.shutdown(connection, socket.SHUT_WR)  # an SSLSocket's own would give up TLS
            elif manner == "glances":
                connection.settimeout(GLANCE)
            if manner in ("ends", "glances"):
                answer += _received(connection)
    except TimeoutError:
        if manner == "ends":
            problem = f"no end within {TIMEOUT:g} seconds"
    except ConnectionRefusedError as error:
        problem = repr(error)
    except OSError:
        pass  # a server may close the connection after invalid bytes
    statuses = [int(status) for status in STATUS_LINE.findall(answer)]
    if answer and not answer.startswith(b"HTTP/") and not _is_tls_alert(answer):
        problem = f"no HTTP: {answer[:80]!r}"
    if b"\r\nX-Injected" in answer:
        problem = "a header was injected"
    outcome = max(statuses) if statuses else "no answer"
    problem = problem or (shortage(max(statuses), answer) if statuses else None)
    # Only a whole stream can be told from among other answers.
    generated = outcome == 200 and b'"finish_reason": "' in answer
    tally.add(outcome, time.monotonic() - start, f"{manner} {data[:1000]!r}", problem, generated=generated)


def _is_tls_alert(answer: bytes) -> bool:
    return answer.startswith(b"\x15\x03") and len(answer) <= 7


def _send_all(connection: socket.socket, data: bytes) -> None:
    """In two pieces now and then, as networks do."""
    if len(data) % 7 == 0:
        connection.sendall(data[: len(data) // 2])
        data = data[len(data) // 2 :]
    connection.sendall(data)


def _received(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while piece := connection.recv(2**16):
            answer += piece
    except (TimeoutError, ConnectionResetError):
        if connection.gettimeout() == TIMEOUT:
            raise
    return answer
