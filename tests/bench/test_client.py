"""Streams, cut anywhere by the network, and their failures."""

import itertools

import pytest

from jpaged.bench.client import Client, EventReader, ServerError
from tests.bench.fake_server import FakeServer

STREAM = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\\n"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_whole_wherever_they_were_cut(size):
    reader = EventReader()
    parts = ["".join(map(chr, part)).encode() for part in itertools.batched(STREAM, size)]
    assert [data for part in parts for data in reader.feed(part)] == [b'{"a": 1}', b'{"b": "\\n"}', b"[DONE]"]


async def read(url, **options):
    body = {"model": "fake", "prompt": "a", "max_tokens": 3, "stream": True}
    async with Client(url, **options) as client:
        return [event async for _, event in client.stream("/v1/completions", body)]


async def test_a_whole_stream():
    with FakeServer(cut=3).serving() as url:
        events = await read(url + "/v1/")
    assert [event["choices"][0]["text"] for event in events] == ["word "] * 3


@pytest.mark.parametrize(
    "failure, kind, words",
    [
        ("refuse", "HTTP 503", "too busy"),
        ("break", "broken stream", "127.0.0.1"),
        ("endless", "broken stream", r"it ended without \[DONE\]"),
        ("error", "error in the stream", "the engine has failed"),
        ("garbage", "no JSON", "Expecting property name"),
        ("number", "no JSON", "an object was expected, not 5"),
        ("hang", "timeout", "took more than 0.2 seconds"),
    ],
)
async def test_failures_have_kinds(failure, kind, words):
    with FakeServer({0: failure}).serving() as url, pytest.raises(ServerError, match=words) as error:
        await read(url, timeout=0.2 if failure == "hang" else None)
    assert error.value.kind == kind and str(error.value).startswith(f"{kind}: ")


async def test_nobody_listens():
    with FakeServer().serving() as url:
        pass
    with pytest.raises(ServerError, match=f"no connection: {url}"):
        await read(url)


@pytest.mark.parametrize("key, refused", [(None, True), ("wrong", True), ("right", False)])
async def test_keys(key, refused):
    with FakeServer(api_key="right").serving() as url:
        async with Client(url, key) as client:
            if refused:
                with pytest.raises(ServerError, match="HTTP 401: a valid API key is needed"):
                    await client.models()
            else:
                assert (await client.models())[0]["id"] == "fake"


async def test_what_is_no_url_and_no_api():
    with pytest.raises(ValueError, match="url: must begin with http:// or https://, not 'localhost:8000'"):
        Client("localhost:8000")
    with FakeServer().serving() as url:
        async with Client(url) as client:
            with pytest.raises(ServerError, match="HTTP 404: 404: Not Found") as error:
                await client.post("/v1/nothing", {})
    assert error.value.kind == "HTTP 404"
