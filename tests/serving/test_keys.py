"""API keys, routes without a key, and files that no request may read."""

import ast
import inspect
import json
import re

import pytest
from aiohttp.test_utils import make_mocked_request

from jpaged.cli.main import load, parser
from jpaged.cli.serve import API_KEY_VARIABLE, server_config
from jpaged.core.scheduler import Scheduler
from jpaged.serving import middleware
from jpaged.serving.live import static
from jpaged.serving.middleware import authorize, check_key
from tests.serving.client import Client, exchange_bytes

NO_HEADER = "Bearer \x7f"  # not allowed in a header by HTTP
KEYS = ("sesame", "other-key", "clé-🦊")
# docs/operation.md names them.
OPEN = {"/", "/health", "/ping", "/version", "/metrics", "/openapi.json"} | static.PAGE_FILES.keys()


@pytest.fixture
async def guarded(loaded):
    async with Client(*loaded, api_keys=KEYS) as client:
        yield client
        await client.idle()


async def status(client, authorization: str | bytes | None, path: str = "/v1/models") -> int:
    line = b"" if authorization is None else b"Authorization: " + _bytes(authorization) + b"\r\n"
    head = b"GET " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + line + b"\r\n"
    # A client library would normalize the path and reject invalid headers.
    answer = await exchange_bytes(client.server.port, head)
    return int(answer.split(b" ", 2)[1])


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   "])
async def test_every_key_is_accepted_with_any_case_of_the_scheme(guarded, key, scheme):
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
async def test_any_other_authorization_is_rejected(guarded, authorization):
    assert await status(guarded, authorization) == (400 if authorization == NO_HEADER else 401)


@pytest.mark.parametrize("keys, tenants", [(KEYS[:2], ["key 0", "key 1"]), (KEYS[:1], [None]), ((), [None])])
async def test_several_keys_are_tenants(loaded, monkeypatch, keys, tenants):
    add, found = Scheduler.add, []

    def record(scheduler, *args, **options):
        found.append(options["tenant"])
        return add(scheduler, *args, **options)

    monkeypatch.setattr(Scheduler, "add", record)
    async with Client(*loaded, api_keys=keys) as client:
        for key in keys or ("none",):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "a", "max_tokens": 1}
            async with client.session.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
        await client.idle()
    assert found == tenants


async def test_rejection_names_no_key_and_asks_for_one(guarded):
    headers = {"Authorization": "Bearer my-other-secret"}
    async with guarded.session.get("/v1/models", headers=headers) as response:
        assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"
        text = await response.text()
    error = json.loads(text)["error"]
    assert error["type"] == "AuthenticationError" and "a valid API key is needed" in error["message"]
    assert "secret" not in text and "sesame" not in text


async def test_only_the_documented_routes_need_no_key(guarded):
    """Request every route with every method."""
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
async def test_no_spelling_of_a_path_bypasses_the_key(guarded, path):
    assert await status(guarded, None, path) in (400, 401, 404)


def test_keys_are_read_from_flags_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-the-file\n\n  another  \n")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-the-environment")
    parse = parser("serve", load("serve"), "jpaged serve").parse_args
    config = server_config(parse(["--api-key", "one", "two", "--api-key-file", str(file)]))
    assert sorted(config.api_keys) == ["another", "from-the-environment", "from-the-file", "one", "two"]
    file.write_text("# none yet\n")
    with pytest.raises(ValueError, match=r"--api-key-file: .* holds no key"):
        server_config(parse(["--api-key-file", str(file)]))
    with pytest.raises(ValueError, match="api_keys: must not hold an empty one"):
        server_config(parse(["--api-key", ""]))


async def test_key_of_the_environment_may_be_any_bytes(loaded, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "k\udcff")
    config = server_config(parser("serve", load("serve"), "jpaged serve").parse_args([]))
    async with Client(*loaded, api_keys=config.api_keys) as client:
        assert await status(client, b"Bearer k") == 401 and await status(client, b"Bearer k\xff") == 200


def test_keys_are_compared_by_digests_in_constant_time():
    """Read the source: only `compare_digest` sees the keys, on digests of one length, and it compares all keys.

    The measured test below would only find a plain comparison of keys much longer than real ones.
    """
    tree = ast.parse(inspect.getsource(check_key))
    (comparison,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.ListComp) and "keys" in ast.unparse(node.generators[0])
    ]
    assert ast.unparse(comparison) == (
        "[hmac.compare_digest(digest, hashlib.sha256(key.encode(errors='surrogateescape')).digest()) for key in keys]"
    )
    compared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    assert not any("presented" in each or "digest" in each for each in compared), compared


async def test_keys_are_compared_as_digests_of_one_length_and_all_of_them(loaded, monkeypatch):
    """The time of a rejection reveals nothing about a key: neither its length nor a matching beginning."""
    keys, compared, compare = ("a" * 4000, "b"), [], middleware.hmac.compare_digest
    monkeypatch.setattr(middleware.hmac, "compare_digest", lambda *pair: compared.append(pair) or compare(*pair))
    async with Client(*loaded, api_keys=keys) as client:

        async def never(request):
            raise AssertionError("let in")

        for guess in ("", "b" * 3999, "a" * 3999, "a" * 4001):
            compared.clear()
            with pytest.raises(middleware.ApiError):
                await authorize(_request(client.app, guess), never)
            assert len(compared) == len(keys) and {len(each) for pair in compared for each in pair} == {32}


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
    """Return spellings of a file's name that have bypassed the checks of some server."""
    path = str(file)
    up = "/.." * 12
    return [
        path, up + path, f"file://{path}", f"@{path}", f"page{up}{path}", up.replace("..", "%2e%2e") + path,
        up.replace("/", "%2f") + path.replace("/", "%2f"), up.replace("..", "..%00") + path, f"{path}%00.html",
        up.replace("..", "....//") + path, up.replace("/", "\\") + path, f"{{% include '{path}' %}}",
        f"start: %import {path}", f"%include {path}",
    ]  # fmt: skip


@pytest.mark.parametrize("trusted", [pytest.param(False, marks=pytest.mark.deep), True])
async def test_no_request_reads_a_file_by_its_name(loaded, tmp_path, trusted):
    """Put the name into every path with a variable, after every other path, and into every field with a text."""
    file = tmp_path / "sentinel.html"
    file.write_text(SENTINEL)
    async with Client(*loaded, trust_request_chat_template=trusted) as client:
        routes = {route.resource.canonical for route in client.app.router.routes()}
        prefixes = {re.sub("{.*}", "", path) for path in routes} | {path.rstrip("/") + "/" for path in routes}
        for spelling in spellings(file):
            quoted = spelling.replace(" ", "%20")
            for prefix in prefixes:
                head = f"GET {prefix}{quoted} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
                answer = await exchange_bytes(client.server.port, head.encode())
                assert SENTINEL.encode() not in answer, head
            for path, fields in STRINGS.items():
                for field in fields:
                    async with client.session.post(path, json=with_field(BODIES[path], field, spelling)) as response:
                        text = await response.text()
                    assert SENTINEL not in text and response.status < 500, (path, field, spelling, text)
        await client.idle()


def with_field(body: dict, name: str, value: str) -> dict:
    """Return a copy of a body in which a field, given by its dotted name, has a value."""
    body = json.loads(json.dumps(body))
    *outer, last = name.split(".")
    place = body
    for key in outer:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[last] = value
    return body
