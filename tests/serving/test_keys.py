"""Access to the server, open paths, and protected things: files, and the log lines of others."""

import ast
import asyncio
import inspect
import json
import re
import statistics
import time

import pytest
from aiohttp.test_utils import make_mocked_request

from benchmarks.shared.server_process import ServerProcess
from jpaged.cli.main import load, parser
from jpaged.cli.serve import API_KEY_VARIABLE, server_config
from jpaged.serving import middleware
from jpaged.serving.live import static
from jpaged.serving.middleware import authorize
from tests.serving.client import Client

NO_HEADER = "Bearer \x7f"  # by HTTP's own rules
KEYS = ("sesame", "other-key", "clé-🦊")
# docs/operation.md names them.
OPEN = {"/", "/health", "/ping", "/version", "/metrics", "/openapi.json"} | static.PAGE_FILES.keys()


@pytest.fixture
async def guarded(loaded):
    async with Client(*loaded, api_keys=KEYS) as client:
        yield client
        await client.idle()


async def raw_answer(port: int, data: bytes) -> bytes:
    """As it comes off the wire: client libraries tidy paths up, and refuse to send what is no text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


async def status(client, authorization: str | bytes | None, path: str = "/v1/models") -> int:
    line = b"" if authorization is None else b"Authorization: " + _bytes(authorization) + b"\r\n"
    head = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + line + b"\r\n"
    answer = await raw_answer(client.server.port, head)
    return int(answer.split(b" ", 2)[1])


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   "])
async def test_every_key_opens_whatever_the_schemes_case(guarded, key, scheme):
    assert await status(guarded, scheme + key) == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None, "", "Bearer", "Bearer ", "sesame", "Basic sesame", "Bearer sesam", "Bearer sesame1", "Bearer SESAME",
        "Bearer sesame sesame", "Bearer sesame,other-key", "Bearer Bearer sesame", "Bearer\tsesame", "Bearersesame",
        NO_HEADER, "Bearer " + "a" * 8000, b"Bearer \xff\xfe", b"\xff sesame", "Bearer cl\u00e9", "Bearer None",
        "Bearer " + "sesame" * 500,
    ],
    ids=repr,
)  # fmt: skip
async def test_nothing_else_does(guarded, authorization):
    assert await status(guarded, authorization) == (400 if authorization == NO_HEADER else 401)


async def test_the_refusal_says_what_is_needed_and_not_what_was_given(guarded):
    headers = {"Authorization": "Bearer my-other-secret"}
    async with guarded.session.get("/v1/models", headers=headers) as response:
        assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"
        text = await response.text()
    assert json.loads(text)["error"]["type"] == "AuthenticationError"
    assert "secret" not in text and "sesame" not in text


async def test_open_is_what_is_documented_and_nothing_else(guarded):
    """Every route that there is, and every method of it."""
    found = set()
    for route in guarded.app.router.routes():
        path = route.resource.canonical
        async with guarded.session.request(route.method, re.sub("{.*}", "x", path)) as response:
            if response.status != 401:
                found.add(path)
    assert found == OPEN
    assert len(guarded.app.router.routes()) > len(OPEN) + 8


@pytest.mark.parametrize(
    "path",
    [
        "/page/../v1/models", "/page/%2e%2e/v1/models", "/page/..%2fv1/models", "//v1/models", "/./v1/models",
        "/health/../v1/models", "/page//v1/models", "/v1/models/", "/V1/models", "/v1%2fmodels", "/v1/models?a=/page/",
        "/v1/models#/page/", "http://localhost/v1/models", "/v1/models;/page/", "/v1/models/%00", "/%76%31/models",
        "/page/..\\v1\\models", "/v1/models%20", "*", "/metrics/../live",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_path_gets_around_the_key(guarded, path):
    assert await status(guarded, None, path) in (400, 401, 404)


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-the-file\n\n  another  \n")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-the-environment")
    parse = parser("serve", load("serve"), "jpaged serve").parse_args
    config = server_config(parse(["--api-key", "one", "two", "--api-key-file", str(file)]))
    assert sorted(config.api_keys) == ["another", "from-the-environment", "from-the-file", "one", "two"]
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match=r"--api-key-file: .* holds no key"):
        server_config(parse(["--api-key-file", str(file)]))
    with pytest.raises(ValueError, match="api_keys must not hold an empty one"):
        server_config(parse(["--api-key", ""]))


async def test_a_key_may_be_any_bytes():
    """The environment may hold them."""
    with ServerProcess(env={API_KEY_VARIABLE: "k\udcff"}, module="tests.serving.scripted") as server:
        for key, expected in ((b"k", b"401"), (b"k\xff", b"200")):
            head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer %b\r\n\r\n"
            assert (await raw_answer(server.port, head % key)).split(b" ")[1] == expected


def test_keys_are_compared_by_digests_in_constant_time():
    """What the time depends on can be read: `compare_digest` alone meets the keys, on digests of one length, and with
    every key whatever the others gave. So it is read; the measured test below would find a plain comparison only of
    keys far longer than any is."""
    tree = ast.parse(inspect.getsource(authorize))
    (comparison,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.ListComp) and "keys" in ast.unparse(node.generators[0])
    ]
    assert ast.unparse(comparison) == (
        "[hmac.compare_digest(digest, hashlib.sha256(key.encode(errors='surrogateescape')).digest()) for key in keys]"
    )
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not any("given" in each or "digest" in each for each in compared), compared


async def test_the_beginning_of_a_key_takes_as_long_as_anything(loaded, monkeypatch):
    """Measured where it is decided, in turns, by the fastest of many."""
    key = "a" * 4000
    async with Client(*loaded, api_keys=(key,)) as client:
        guesses = {"nothing in common": "b" * 3999, "all but the last": "a" * 3999}
        seconds = {name: [] for name in guesses}

        async def never(request):
            raise AssertionError("let in")

        for _ in range(300):
            for name, guess in guesses.items():
                request = _request(client.app, guess)
                start = time.perf_counter()
                with pytest.raises(middleware.ApiError):
                    await authorize(request, never)
                seconds[name].append(time.perf_counter() - start)
        quick, slow = sorted(statistics.median(each) for each in seconds.values())
        assert slow < 1.5 * quick, (quick, slow)


def _request(app, key: str):
    return make_mocked_request("GET", "/v1/models", {"Authorization": f"Bearer {key}"}, app=app)


SENTINEL = "the-text-of-a-file-that-no-request-may-read"
STRINGS = {
    "/v1/completions": [
        "prompt", "model", "stop", "bad_words", "cache_salt", "user", "safety_identifier", "prompt_cache_key", "suffix",
        "structured_outputs.regex", "structured_outputs.grammar", "structured_outputs.json",
    ],
    "/v1/chat/completions": [
        "messages.0.content", "messages.0.role", "chat_template", "tool_choice", "model", "response_format.type",
        "structured_outputs.grammar",
    ],
    "/tokenize": ["prompt", "model"], "/detokenize": ["model"],
}  # fmt: skip
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "echo": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a", "return_token_strs": True}, "/detokenize": {"tokens": [5]},
}  # fmt: skip


def spellings(file) -> list[str]:
    """Of a file's name, by all the ways that have ever worked anywhere."""
    path = str(file)
    up = "/.." * 12
    return [
        path, up + path, f"file://{path}", f"@{path}", f"page{up}{path}", up.replace("..", "%2e%2e") + path,
        up.replace("/", "%2f") + path.replace("/", "%2f"), up.replace("..", "..%00") + path, f"{path}%00.html",
        up.replace("..", "....//") + path, up.replace("/", "\\") + path, f"{{% include '{path}' %}}",
        f"start: %import {path}", f"%include {path}",
    ]  # fmt: skip


@pytest.mark.parametrize("trusted", [False, True])
async def test_no_request_reads_a_file_by_its_name(loaded, tmp_path, trusted):
    """In every path that has a variable, under every path that has none, and in every field that takes a text; also
    where requests may bring templates."""
    file = tmp_path / "sentinel.html"
    file.write_text(SENTINEL)
    async with Client(*loaded, trust_request_chat_template=trusted) as client:
        routes = {route.resource.canonical for route in client.app.router.routes()}
        prefixes = {re.sub("{.*}", "", path) for path in routes} | {path.rstrip("/") + "/" for path in routes}
        for spelling in spellings(file):
            quoted = spelling.replace(" ", "%20")
            for prefix in prefixes:
                head = f"GET {prefix}{quoted} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                answer = await raw_answer(client.server.port, head.encode())
                assert SENTINEL.encode() not in answer, head
            for path, fields in STRINGS.items():
                for field in fields:
                    async with client.session.post(path, json=with_field(BODIES[path], field, spelling)) as response:
                        text = await response.text()
                    assert SENTINEL not in text and response.status < 500, (path, field, spelling, text)
        await client.idle()


def with_field(body: dict, name: str, value: str) -> dict:
    """A copy of a body in which a field, by its dotted name, has a value."""
    body = json.loads(json.dumps(body))
    *outer, last = name.split(".")
    place = body
    for key in outer:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[last] = value
    return body


async def test_nothing_that_a_request_holds_begins_a_line_of_the_log():
    forged = '{"time": "now", "status": 200, "path": "/forged"}'
    heads = [
        f"GET /v1/models/a%0a{forged.replace(' ', '%20')} HTTP/1.1\r\nHost: a\r\n",
        f"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\n {forged}\r\n",
        f"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: {forged}\r\n",
        "GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: kept-1\r\n",
        f"GET /health HTTP/1.1\r\nHost: a\r\n\n{forged}\r\n",
        f"{forged} HTTP/1.1\r\nHost: a\r\n",
        f"GET /\x1b[2J%1b%e2%80%a8%c2%85{forged.replace(' ', '')} HTTP/1.1\r\nHost: a\r\n",
    ]
    body = json.dumps({"prompt": f"my secret\n{forged}", "user": forged, "model": f"demo\n{forged}"})
    with ServerProcess(module="tests.serving.scripted") as server:
        for head in [*heads, f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"]:
            data = f"{head}Connection: close\r\n\r\n{body if 'POST' in head else ''}"
            await raw_answer(server.port, data.encode())
    lines = server.log().splitlines()  # at all characters that a reader may take for a line's end
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert records and all({"client", "method", "request_id", "seconds"} <= record.keys() for record in records)
    assert not any(record["path"] == "/forged" for record in records)
    others = [line for line in lines if not line.startswith("{")]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line) for line in others), others
    assert "my secret" not in server.log() and "kept-1" in {record["request_id"] for record in records}


@pytest.mark.parametrize(
    "allowed, origin, expected",
    [
        ((), "https://chat.example.org", None),
        (("https://chat.example.org",), "https://chat.example.org", "https://chat.example.org"),
        (("https://chat.example.org",), "https://chat.example.org.evil.com", None),
        (("https://chat.example.org",), "https://CHAT.example.org", None),
        (("https://chat.example.org",), "http://chat.example.org", None),
        (("https://chat.example.org",), "null", None),
        (("https://chat.example.org",), None, None),
        (("*",), "https://anywhere.example", "https://anywhere.example"),
    ],
)
async def test_only_allowed_origins_may_read_the_answers(loaded, allowed, origin, expected):
    async with Client(*loaded, allowed_origins=allowed, api_keys=("k",)) as client:
        headers = {} if origin is None else {"Origin": origin}
        for method, path, more in [
            ("GET", "/health", {}),
            ("GET", "/v1/models", {}),  # a refusal, which a page may read too
            ("POST", "/v1/completions", {"Authorization": "Bearer k"}),
            ("OPTIONS", "/v1/completions", {"Access-Control-Request-Method": "POST"}),
        ]:
            async with client.session.request(method, path, headers=headers | more) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == expected, (method, path)
                assert "Access-Control-Allow-Credentials" not in response.headers
                assert response.headers.get("Vary") == ("Origin" if allowed else None)


@pytest.mark.parametrize(
    "expectation, statuses",
    [(b"100-continue", [100, 200]), (b"100-Continue", [100, 200]), (b"200-maybe", [417]), (b"\xff\xfe", [417])],
)
async def test_what_a_client_expects(client, expectation, statuses):
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 15\r\nExpect: %b\r\n\r\n"
    answer = await raw_answer(client.server.port, head % expectation + b'{"prompt": "a"}')
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)] == statuses
