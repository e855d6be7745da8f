"""Large bodies, which another process checks before the server parses them."""

import asyncio
import json
import threading

import pytest

from jpaged.child import ChildFailed, Children
from jpaged.serving import generate
from jpaged.serving.errors import ApiError
from jpaged.serving.parse import parse
from jpaged.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from jpaged.serving.responses import ResponsesRequest
from jpaged.serving.service import LARGE_BYTES
from tests.serving.client import Client

ENOUGH = LARGE_BYTES + 1
TEXT = "a" * ENOUGH
UNKNOWN = {f"field {i}": 1 for i in range(ENOUGH // 8)}
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}
INVALID = {
    "cut off": ("/v1/completions", json.dumps({"prompt": TEXT})[:-1].encode()),
    "no UTF-8": ("/v1/completions", b'{"prompt": "%b\xff"}' % TEXT.encode()),
    "half a surrogate pair": ("/v1/chat/completions", b'{"messages": "%b\\ud800"}' % TEXT.encode()),
    "not an object": ("/v1/chat/completions", json.dumps([[]] * ENOUGH).encode()),
    "unknown fields": ("/v1/chat/completions", json.dumps(HELLO | UNKNOWN).encode()),
    "an unknown field": ("/v1/completions", json.dumps({"prompt": "a", "\u6f22": TEXT}).encode()),
    "wrong messages": ("/v1/chat/completions", json.dumps({"messages": [[]] * ENOUGH}).encode()),
    "wrong items": ("/v1/responses", json.dumps({"input": [[]] * ENOUGH}).encode()),
    "wrong ids": ("/v1/completions", json.dumps({"prompt": [0.5] * ENOUGH}).encode()),
    "both": ("/tokenize", json.dumps(HELLO | {"prompt": TEXT}).encode()),
    "neither": ("/tokenize", json.dumps({"model": TEXT}).encode()),
    "no tokens": ("/detokenize", json.dumps({"tokens": TEXT}).encode()),
}
TOO_LONG = {
    "text": ("/v1/completions", {"prompt": TEXT}, "prompt"),
    "one of several": ("/v1/completions", {"prompt": ["a", TEXT, "b"]}, "prompt"),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 40}] * 2000}, "messages"),
    "parts": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
        "messages",
    ),
    "text for its tokens": ("/tokenize", {"prompt": TEXT}, "prompt"),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": TEXT}]}, "input"),
    "blocks": (
        "/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}, "messages",
    ),
    "messages for their tokens": ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
}  # fmt: skip
VALID = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": HELLO | {"max_tokens": 3, "temperature": 0},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
KINDS = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest, "/v1/responses": ResponsesRequest,
}  # fmt: skip
VARYING = {"id", "created"}


@pytest.fixture
async def client(loaded):
    async with Client(*loaded) as client:
        yield client


@pytest.fixture
def unparsed(monkeypatch):
    """Fail if the server's process parses a body."""

    def fail(*_):
        raise AssertionError("the server's process parsed a body")

    monkeypatch.setattr(generate, "parse", fail)


@pytest.mark.parametrize("path, data", list(INVALID.values()), ids=list(INVALID))
async def test_fault_of_a_large_body_is_that_of_its_parser(client, unparsed, path, data):
    with pytest.raises(ApiError) as expected:
        parse(KINDS[path], data)
    assert await client.post(path, data, 400) == expected.value.body


@pytest.mark.parametrize("path, body, param", list(TOO_LONG.values()), ids=list(TOO_LONG))
async def test_too_long_text_is_refused_by_its_characters(client, unparsed, path, body, param):
    error = (await client.post(path, body, 400))["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == param
    length = 80_000 if len(body.get("messages", ())) > 1 else ENOUGH
    assert f"you sent {length} characters" in error["message"]


@pytest.mark.parametrize("path", list(VALID))
async def test_valid_large_body_has_the_answer_of_a_small_one(client, path):
    small = json.dumps(VALID[path]).encode()
    await client.post(path, small)  # both of the others find its tokens in the prefix cache
    expected, found = await client.post(path, small), await client.post(path, small.ljust(ENOUGH))
    assert {**found, **{name: expected[name] for name in VARYING & found.keys()}} == expected


async def test_body_is_parsed_here_if_the_process_fails(client, monkeypatch):
    def fail(*_):
        raise ChildFailed("crashed")

    monkeypatch.setattr(Children, "ask", fail)
    path = "/v1/completions"
    assert await client.post(path, json.dumps(VALID[path]).encode().ljust(ENOUGH))
    assert "Invalid JSON" in (await client.post(path, b"{".ljust(ENOUGH), 400))["error"]["message"]


async def test_small_bodies_do_not_wait_for_large_ones(client, monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def wait(*_):
        begun.set()
        end.wait(60)
        return 0, "prompt"

    monkeypatch.setattr(client.service.bodies, "text_length", wait)
    path = "/v1/completions"
    large = [asyncio.create_task(client.post(path, json.dumps(VALID[path]).encode().ljust(ENOUGH))) for _ in range(40)]
    try:
        await asyncio.to_thread(begun.wait)
        for small, body in VALID.items():
            assert await client.post(small, body)
        async with client.session.get("/metrics") as response:
            assert response.status == 200
        assert not any(task.done() for task in large)
    finally:
        end.set()
    assert len(await asyncio.gather(*large)) == 40
