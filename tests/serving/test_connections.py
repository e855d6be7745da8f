"""HTTP/1.x byte by byte: connections, framing, and bytes that are not HTTP."""

import asyncio
import json
import re
import socket

import pytest

from tests.serving.client import Connection, check_choices, exchange_bytes, request
from tests.serving.scripted import chat, completion
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_response_ends_with_the_connection(server, stream):
    async with Connection(server.port) as connection:
        data = request("POST", "/v1/completions", completion("Hello", stream=stream), version="1.0")
        connection.send(data)
        answer = await connection.answer()
        assert "transfer-encoding" not in answer.headers and await connection.closed()
    choice = answer.events[-1]["choices"][0] if stream else answer.json["choices"][0]
    assert choice["finish_reason"] == "stop"


async def test_connection_serves_many_requests(server):
    async with Connection(server.port) as connection:
        for i in range(3):
            connection.send(request("POST", "/v1/completions", completion(f"plain {i}")))
            assert (await connection.answer()).json["choices"][0]["text"] == f"plain {i}"
            connection.send(request("POST", "/v1/chat/completions", chat(f"stream {i}", stream=True)))
            assert check_choices((await connection.answer()).events, 1) == [f"stream {i}"]
            connection.send(request("POST", "/v1/completions", b"nonsense"))
            assert (await connection.answer()).error["code"] == "invalid_value"
            connection.send(request("GET", "/nowhere"))
            assert (await connection.answer()).error["code"] == "not_found"
        connection.send(request("GET", "/health", Connection="close"))
        assert (await connection.answer()).status == 200 and await connection.closed()


async def test_pipelined_requests_are_answered_in_order(server):
    async with Connection(server.port) as connection:
        bodies = [completion(f"number {i} " + "and so on " * (5 - i), stream=bool(i % 2)) for i in range(6)]
        connection.send(b"".join(request("POST", "/v1/completions", body) for body in bodies))
        for i in range(6):
            answer = await connection.answer()
            text = check_choices(answer.events, 1)[0] if i % 2 else answer.json["choices"][0]["text"]
            assert text.startswith(f"number {i} ")


@pytest.mark.parametrize("size", [1, 7])
async def test_request_in_small_packets_is_read_whole(server, size):
    data = request("POST", "/v1/completions", completion("wörld 🦊"))
    async with Connection(server.port) as connection:
        connection.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.send(data[start : start + size])
            await asyncio.sleep(0)
        assert (await connection.answer()).json["choices"][0]["text"] == "wörld 🦊"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_chunked_request_is_read_whole(exchange, size):
    body = json.dumps(completion("wörld 🦊"), ensure_ascii=False).encode()
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunked = b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = request("POST", "/v1/completions", Transfer_Encoding="chunked")
    assert (await exchange(head + chunked)).json["choices"][0]["text"] == "wörld 🦊"


async def test_body_after_100_continue_is_read(server):
    async with Connection(server.port) as connection:
        head, _, body = request("POST", "/v1/completions", completion("Hi"), Expect="100-continue").partition(
            b"\r\n\r\n"
        )
        connection.send(head + b"\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(body)
        assert (await connection.answer()).json["choices"][0]["text"] == "Hi"


@pytest.mark.parametrize(
    "expectation, statuses",
    [(b"100-continue", [100, 200]), (b"100-Continue", [100, 200]), (b"200-maybe", [417]), (b"\xff\xfe", [417])],
)
async def test_expect_header_gets_100_or_417(server, expectation, statuses):
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 15\r\nExpect: %b\r\n\r\n"
    )
    answer = await exchange_bytes(server.port, head % expectation + b'{"prompt": "a"}')
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answer)] == statuses


async def test_body_shorter_than_its_length_is_not_answered(server):
    body = json.dumps(completion("Hi")).encode()
    async with Connection(server.port) as connection:
        connection.send(request("POST", "/v1/completions", body, Content_Length=str(len(body) + 1)))
        connection.writer.write_eof()
        assert await connection.closed()


async def test_bytes_after_a_body_are_answered_with_400(server):
    async with Connection(server.port) as connection:
        body = json.dumps(completion("Hi")).encode()
        connection.send(request("POST", "/v1/completions", body + b"HELLO", Content_Length=str(len(body))))
        received = await connection.rest()
        assert received.startswith(b"HTTP/1.") and b" 400 Bad Request\r\n" in received


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        bytes.fromhex("16030100") + b"\xff" * 100,  # TLS
        request("POST", "/v1/completions", b"{}", Content_Length="abc"),
        request("POST", "/v1/completions", b"{}", Content_Length="-1"),
        request("POST", "/v1/completions", b"0\r\n\r\n", Transfer_Encoding="chunked"),  # with a Content-Length
        request("POST", "/v1/completions", Transfer_Encoding="chunked") + b"zz\r\n\r\n",
        request("GET", "/health", X_Long="a" * 20_000),
    ],
)
async def test_invalid_http_is_answered_with_400_and_closed(server, data):
    received = await exchange_bytes(server.port, data)  # It returns when the connection is closed.
    assert received.split(b"\r\n")[0].endswith(b" 400 Bad Request")
