"""HTTP byte by byte, where clients hide things: frames, chunks, connections, and bodies that no client would send."""

import asyncio
import gzip
import json
import socket
from dataclasses import dataclass

import pytest
import schemathesis.openapi
from jinja2 import Template
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from benchmarks.shared.server_process import ServerProcess
from jpaged.demo import DIRECTORY
from jpaged.serving.app import make_app
from jpaged.serving.live import feed, static
from tests.serving import scripted
from tests.serving.scripted import FAIL, say

MAX_BODY = 104_857  # a tenth of a MiB
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def server():
    flags = ("--step-seconds", "0.001", "--tool-call-parser", "hermes")
    with ServerProcess(*flags, "--max-body-size", "0.1", module="tests.serving.scripted") as server:
        yield server


@dataclass
class Response:
    status: int
    headers: dict[str, str]  # by their names in lower case
    body: bytes
    chunks: list[bytes]  # where the body came in chunks

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """Its error, which must have the API's form."""
        assert self.headers["content-type"].startswith("application/json"), self.body
        assert self.json.keys() == {"error"} and self.json["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(self.json["error"]["code"], str) and self.status >= 400
        return self.json["error"]

    @property
    def events(self):
        """Return the events of a stream except its end, and check their frames."""
        assert self.status == 200 and self.headers["content-type"] == "text/event-stream"
        assert self.headers["cache-control"] == "no-cache" and "content-length" not in self.headers
        assert b"\r" not in self.body and self.body.endswith(b"\n\n")
        events = self.body.removesuffix(b"\n\n").split(b"\n\n")
        assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
        assert events.pop() == b"data: [DONE]"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]


class Connection:
    """A connection that sends given bytes and reads HTTP/1.1 answers."""

    def __init__(self, port):
        self.port = port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_):
        self.writer.close()

    def send(self, data):
        self.writer.write(data)

    async def answer(self, *, has_body=True):
        """The next answer on the connection."""
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii").removesuffix("\r\n\r\n")
            status, *lines = head.split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body, chunks = b"", []
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    chunks.append(await self.reader.readexactly(size))
                    assert await self.reader.readexactly(2) == b"\r\n"
                assert await self.reader.readexactly(2) == b"\r\n"
                body = b"".join(chunks)
            elif "content-length" in headers and has_body:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif status.startswith("HTTP/1.0"):
                body = await self.reader.read()
        return Response(int(status.split()[1]), headers, body, chunks)

    async def closed(self):
        """Whether the server closes it, and sends nothing before."""
        async with asyncio.timeout(30):
            return await self.reader.read() == b""


def request(method, path, body=None, *, version="1.1", **headers):
    """The bytes of a request. Names of headers have _ for -; a header that is None is left out."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {"Host": "localhost", "Content_Length": None if body is None else str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/{version}", *lines, "", ""]).encode() + (body or b"")


@pytest.fixture
def exchange(server):
    """Sends bytes on a connection of their own; the answer."""

    async def exchange(data, **options):
        async with Connection(server.port) as connection:
            connection.send(data)
            return await connection.answer(**options)

    return exchange


def chat(*texts, **fields):
    return {"messages": [{"role": "user", "content": say(*texts)}], "n": len(texts)} | fields


def completion(*texts, **fields):
    return {"prompt": say(*texts), "n": len(texts), "max_tokens": 100} | fields


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXTS = ("Once upon a time", "wörld 🦊 日本\u2028\x85 \x00 end\r\n\r\ndata: [DONE]\n\n")


# Streams


def check_choices(events, count):
    """Every choice ends once, with its last event, and all events are of one answer; the texts."""
    texts, reasons = [""] * count, [None] * count
    for event in events:
        assert (event["id"], event["model"], event["created"]) == (events[0]["id"], "demo", events[0]["created"])
        (choice,) = event["choices"]
        assert reasons[choice["index"]] is None, "a choice goes on after its end"
        reasons[choice["index"]] = choice["finish_reason"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert reasons == ["stop"] * count
    return texts


async def test_the_frames_of_a_chat(exchange):
    answer = await exchange(request("POST", "/v1/chat/completions", chat(*TEXTS, **STREAM)))
    *events, usage = answer.events
    for index in range(2):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""} and all("role" not in delta for delta in deltas[1:])
    assert {event["object"] for event in events} == {"chat.completion.chunk"} == {usage["object"]}
    assert check_choices(events, 2) == [*TEXTS] and not any("usage" in event for event in events)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 20
    plain = (await exchange(request("POST", "/v1/chat/completions", chat(*TEXTS)))).json
    assert [choice["message"]["content"] for choice in plain["choices"]] == [*TEXTS]
    assert plain["usage"]["total_tokens"] == usage["usage"]["total_tokens"]


async def test_the_frames_of_a_completion(exchange):
    answer = await exchange(request("POST", "/v1/completions", completion(*TEXTS, stream=True)))
    assert answer.headers["transfer-encoding"] == "chunked" and len(answer.chunks) > 2
    events = answer.events
    assert {event["object"] for event in events} == {"text_completion"} and not any("usage" in e for e in events)
    assert check_choices(events, 2) == [*TEXTS]
    # Each chunk has whole events.
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in answer.chunks)


async def test_the_frames_of_a_tool_call(exchange):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    told = 'So: <tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
    events = (await exchange(request("POST", "/v1/chat/completions", chat(told, tools=tools, stream=True)))).events
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert {*deltas[0]} == {"index", "id", "type", "function"} and deltas[0]["function"]["name"] == "clock"
    assert all({*delta} == {"index", "function"} and {*delta["function"]} == {"arguments"} for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"zone": "utc"}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def read_by_bytes(port, data):
    """All of an answer until the server closes, through reads of one byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1), b""))


async def test_reading_byte_by_byte(server):
    data = request("POST", "/v1/completions", completion(*TEXTS, **STREAM), Connection="close")
    received = await asyncio.to_thread(read_by_bytes, server.port, data)
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head + b"\r\n"
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) :]
        assert rest.startswith(b"\r\n")
        rest = rest.removeprefix(b"\r\n")
        if int(size, 16) == 0:
            break
    assert rest == b""
    headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
    assert check_choices(Response(200, headers, body, []).events[:-1], 2) == [*TEXTS]


@pytest.mark.parametrize("size", [1, 7])
async def test_a_request_that_comes_in_pieces(server, size):
    data = request("POST", "/v1/completions", completion("wörld 🦊"))
    async with Connection(server.port) as connection:
        connection.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.send(data[start : start + size])
            await asyncio.sleep(0)
        assert (await connection.answer()).json["choices"][0]["text"] == "wörld 🦊"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_request_in_chunks(exchange, size):
    body = json.dumps(completion("wörld 🦊"), ensure_ascii=False).encode()
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunked = b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = request("POST", "/v1/completions", Transfer_Encoding="chunked")
    assert (await exchange(head + chunked)).json["choices"][0]["text"] == "wörld 🦊"


async def test_an_error_in_the_middle_of_a_stream():
    with ServerProcess("--step-seconds", "0.01", module="tests.serving.scripted", clean=False) as server:
        async with Connection(server.port) as connection:
            body = chat(f"Once upon a time{FAIL}", **STREAM)
            connection.send(request("POST", "/v1/chat/completions", body))
            *events, last = (await connection.answer()).events
            assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "Once upon a time"
            assert all(event["choices"][0]["finish_reason"] is None for event in events)
            error = {"message": "the engine has failed: the script fails here", "type": "ServiceUnavailableError"}
            assert last == {"error": error | {"param": None, "code": "service_unavailable"}}
            # The connection itself is sound.
            connection.send(request("POST", "/v1/chat/completions", body))
            answer = await connection.answer()
            assert answer.status == 503 and answer.error["message"] == error["message"]
            for path in ("/health", "/ping"):
                connection.send(request("GET", path))
                answer = await connection.answer()
                assert (answer.status, answer.body) == (503, b"")


# Connections


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0(server, stream):
    async with Connection(server.port) as connection:
        data = request("POST", "/v1/completions", completion("Hello", stream=stream), version="1.0")
        connection.send(data)
        answer = await connection.answer()
        assert "transfer-encoding" not in answer.headers and await connection.closed()
    choice = answer.events[-1]["choices"][0] if stream else answer.json["choices"][0]
    assert choice["finish_reason"] == "stop"


async def test_one_connection_for_many_requests(server):
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


async def test_requests_that_do_not_wait_for_answers(server):
    async with Connection(server.port) as connection:
        bodies = [completion(f"number {i} " + "and so on " * (5 - i), stream=bool(i % 2)) for i in range(6)]
        connection.send(b"".join(request("POST", "/v1/completions", body) for body in bodies))
        for i in range(6):
            answer = await connection.answer()
            text = check_choices(answer.events, 1)[0] if i % 2 else answer.json["choices"][0]["text"]
            assert text.startswith(f"number {i} ")


async def test_a_client_that_waits_until_it_may_send(server):
    async with Connection(server.port) as connection:
        head, _, body = request("POST", "/v1/completions", completion("Hi"), Expect="100-continue").partition(
            b"\r\n\r\n"
        )
        connection.send(head + b"\r\n\r\n")
        async with asyncio.timeout(30):
            assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(body)
        assert (await connection.answer()).json["choices"][0]["text"] == "Hi"


async def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(exchange):
    answer = await exchange(request("POST", "/v1/completions", Content_Length=str(MAX_BODY + 1)))
    assert answer.status == 413 and f"{MAX_BODY} bytes (--max-body-size)" in answer.error["message"]


async def test_bodies_at_the_limit(exchange):
    body = json.dumps(completion("Hi")).encode()
    for size in (MAX_BODY, MAX_BODY + 1):
        padded = body.ljust(size)
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (size, padded)
        for data in (
            request("POST", "/v1/completions", padded),
            request("POST", "/v1/completions", Transfer_Encoding="chunked") + chunked,
        ):
            assert (await exchange(data)).status == (200 if size == MAX_BODY else 413)


async def test_a_body_that_is_shorter_than_announced(server):
    """Half a request is never answered as a whole one, and holds nobody up."""
    body = json.dumps(completion("Hi")).encode()
    async with Connection(server.port) as connection:
        connection.send(request("POST", "/v1/completions", body, Content_Length=str(len(body) + 1)))
        connection.writer.write_eof()
        assert await connection.closed()


async def test_a_body_that_is_longer_than_announced(server):
    async with Connection(server.port) as connection:
        body = json.dumps(completion("Hi")).encode()
        connection.send(request("POST", "/v1/completions", body + b"HELLO", Content_Length=str(len(body))))
        async with asyncio.timeout(30):
            received = await connection.reader.read()
        assert received.startswith(b"HTTP/1.") and b" 400 Bad Request\r\n" in received


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        bytes.fromhex("16030100") + b"\xff" * 100,  # TLS
        request("POST", "/v1/completions", b"{}", Content_Length="abc"),
        request("POST", "/v1/completions", b"{}", Content_Length="-1"),
        request("POST", "/v1/completions", b"0\r\n\r\n", Transfer_Encoding="chunked"),  # and a length
        request("POST", "/v1/completions", Transfer_Encoding="chunked") + b"zz\r\n\r\n",
        request("GET", "/health", X_Long="a" * 20_000),
    ],
)
async def test_what_is_not_http(server, data):
    async with Connection(server.port) as connection:
        connection.send(data)
        async with asyncio.timeout(30):
            received = await connection.reader.read()  # to its end: the connection is closed
    assert received.split(b"\r\n")[0].endswith(b" 400 Bad Request")


# Methods and paths


async def test_head(exchange):
    for path in ("/health", "/v1/models", "/version", "/openapi.json"):
        head = await exchange(request("HEAD", path, Connection="close"), has_body=False)
        get = await exchange(request("GET", path, Connection="close"))
        assert (head.status, head.body) == (get.status, b"") == (200, b"")
        assert head.headers.get("content-length", "0") == str(len(get.body))


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/v1/completions", {"POST"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/tokenize", {"POST"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),  # not a browser's question: it names no method
        ("PATCH", "/ping", {"GET", "HEAD", "POST"}),
        ("TRACE", "/health", {"GET", "HEAD"}),
    ],
)
async def test_a_method_that_is_not_allowed(exchange, method, path, allowed):
    answer = await exchange(request(method, path), has_body=method != "HEAD")
    assert answer.status == 405 and {*answer.headers["allow"].split(",")} == allowed
    if method != "HEAD":
        assert answer.error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v1", "/v2/models", "/v1/completions/", "//health", "/v1/models/x%2Fy"]
)
async def test_a_path_that_is_not_there(exchange, path):
    answer = await exchange(request("GET", path))
    assert answer.status == 404 and answer.error["type"] == "NotFoundError"


@pytest.mark.parametrize("given", ["my-request", "a/b?c=d,{}", "x" * 128])
async def test_a_requests_id_comes_back(exchange, given):
    for data in (
        request("GET", "/health", X_Request_Id=given),
        request("POST", "/v1/completions", completion("a", stream=True), X_Request_Id=given),
        request("POST", "/v1/completions", {}, X_Request_Id=given),
        request("GET", "/nowhere", X_Request_Id=given),
    ):
        assert (await exchange(data)).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "é", "tab\there"])
async def test_a_request_without_a_good_id_gets_one(exchange, given):
    ids = {(await exchange(request("GET", "/health", X_Request_Id=given))).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(each) == 32 and int(each, 16) for each in ids)


async def test_the_access_log_is_json(server, exchange):
    await exchange(request("POST", "/v1/completions", completion("Hi", stream=True), X_Request_Id="look-for-me"))
    line = json.loads(server.wait_for_log('.*"look-for-me".*')[0])
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["finish_reasons"] == ["stop"] and line["completion_tokens"] == 2


# Bodies


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "a/b; charset=utf-7"]
)
async def test_a_body_is_json_whatever_the_header_says(exchange, content_type):
    answer = await exchange(request("POST", "/v1/completions", completion("wörld"), Content_Type=content_type))
    assert answer.json["choices"][0]["text"] == "wörld"


def with_prompt(fields):
    return b'{"prompt": "a", ' + fields + b"}"


BAD = {
    "empty": (b"", None, "Invalid JSON: EOF"),
    "white space": (b" \n", None, "Invalid JSON: EOF"),
    "no object": (b'["prompt"]', None, "Input should be an object"),
    "null": (b"null", None, "Input should be an object"),
    "half": (b'{"prompt": tru', None, "Invalid JSON"),
    "more behind": (b'{"prompt": "a"} x', None, "trailing characters"),
    "single quotes": (b"{'prompt': 'a'}", None, "Invalid JSON"),
    "a comma too much": (b'{"prompt": "a",}', None, "trailing comma"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), None, "Invalid JSON"),
    "no UTF-8": (b'{"prompt": "a\xe9"}', None, "invalid unicode"),
    "no UTF-8 in a name": (b'{"\xe9": 1}', None, "invalid unicode"),
    "half a surrogate pair": (b'{"prompt": "\\ud83e"}', None, "Invalid JSON"),
    "a line break in a text": (b'{"prompt": "a\nb"}', None, "control character"),
    "deep": (b"[" * 100_000, None, "recursion limit"),
    "deep in a field": (b'{"prompt": ' + b"[" * 90_000, None, "recursion limit"),
    "deep in a schema": (with_prompt(b'"structured_outputs": {"json": ' + b'{"a":' * 9_000), None, "recursion limit"),
    "NaN": (with_prompt(b'"temperature": NaN'), "temperature", "at least 0, not nan"),
    "infinity": (with_prompt(b'"top_p": Infinity'), "top_p", "above 0 and at most 1, not inf"),
    "a number beyond floats": (with_prompt(b'"temperature": 1e999'), "temperature", "at least 0, not inf"),
    "a number of 400 digits": (with_prompt(b'"max_tokens": ' + b"9" * 400), "max_tokens", "max_tokens: "),
    "a number of 9000 digits": (with_prompt(b'"seed": ' + b"9" * 9_000), None, "number out of range"),
    "a token of 30 digits": (b'{"prompt": [%s]}' % (b"9" * 30), "prompt", "outside the vocabulary"),
    "a float for a count": (with_prompt(b'"max_tokens": 1e3'), "max_tokens", "valid integer"),
    "a text for a number": (with_prompt(b'"temperature": "0.5"'), "temperature", "valid number"),
    "the last of two": (with_prompt(b'"n": 1, "n": 0'), "n", "at least 1, not 0"),
    "a name of nothing": (with_prompt(b'"": 1'), "", "is not a known field"),
    "a name of 50,000 letters": (with_prompt(b'"' + b"n" * 50_000 + b'": 1'), "n" * 50_000, "is not a known field"),
}  # fmt: skip


@pytest.mark.parametrize("body, param, words", BAD.values(), ids=BAD)
async def test_bad_bodies(exchange, body, param, words):
    answer = await exchange(request("POST", "/v1/completions", body))
    assert answer.status == 400 and answer.error["type"] == "BadRequestError"
    assert answer.error["param"] == param and words in answer.error["message"]
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
        other = await exchange(request("POST", path, body))
        assert other.status == 400 and other.error["message"]


async def test_strange_bodies_that_are_right(exchange):
    told = say("x")
    for body in (
        b'{"prompt": "b", "prompt": "' + told.encode() + b'"}',  # the last one counts
        json.dumps({"prompt": told, "max_tokens": None}).encode() + b"\r\n\t ",
        b'{"\\u0070rompt": "%s"}' % told.encode(),
        b'{"prompt": "\\u0000\\uD83E\\uDD8A%s"}' % told.encode(),
    ):
        assert (await exchange(request("POST", "/v1/completions", body))).json["choices"][0]["text"] == "x"


async def test_compressed_bodies(exchange):
    packed = gzip.compress(json.dumps(completion("Hi")).encode())
    answer = await exchange(request("POST", "/v1/completions", packed, Content_Encoding="gzip"))
    assert answer.json["choices"][0]["text"] == "Hi"
    bomb = gzip.compress(b" " * 100 * MAX_BODY)
    assert len(bomb) < MAX_BODY
    answer = await exchange(request("POST", "/v1/completions", bomb, Content_Encoding="gzip"))
    assert answer.status == 413 and answer.error["message"].startswith("the body exceeds")
    for wrong in (b"not gzip", packed[:20], b""):
        answer = await exchange(request("POST", "/v1/completions", wrong, Content_Encoding="gzip"))
        assert answer.status == 400 and answer.error["message"]
    answer = await exchange(request("POST", "/v1/completions", packed))  # which nobody said was compressed
    assert answer.status == 400 and "Invalid JSON" in answer.error["message"]


# The other endpoints


@pytest.mark.parametrize("text", ["Once upon a time", "wörld 🦊", "<|end|> and <|user|>", " \n\t", "a\x00b"])
async def test_tokenize_and_back(exchange, text):
    for special in (True, False, None):
        body = {"model": "demo", "prompt": text, "return_token_strs": True}
        body |= {} if special is None else {"add_special_tokens": special}
        told = (await exchange(request("POST", "/tokenize", body))).json
        expected = TOKENIZER.encode(text, add_special_tokens=special is not False)
        assert told["tokens"] == expected.ids and told["token_strs"] == expected.tokens
        assert (told["count"], told["max_model_len"]) == (len(expected.ids), 512)
        back = (await exchange(request("POST", "/detokenize", {"model": "demo", "tokens": told["tokens"]}))).json
        assert back == {"prompt": text if special is False else "<|begin|>" + text}


async def test_tokenize_a_chat(exchange):
    template = Template(json.loads((DIRECTORY / "tokenizer_config.json").read_text())["chat_template"])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello wörld"}]
    for prompting in (True, False):
        body = {"messages": messages, "add_generation_prompt": prompting}
        told = (await exchange(request("POST", "/tokenize", body))).json
        rendered = template.render(messages=messages, add_generation_prompt=prompting, bos_token="<|begin|>")
        assert told["tokens"] == TOKENIZER.encode(rendered, add_special_tokens=False).ids
        assert told["token_strs"] is None
        back = (await exchange(request("POST", "/detokenize", {"tokens": told["tokens"]}))).json
        assert back["prompt"] == rendered
    open_end = {"messages": messages, "continue_final_message": True}
    told = (await exchange(request("POST", "/tokenize", open_end))).json
    assert TOKENIZER.decode(told["tokens"], skip_special_tokens=False).endswith("<|assistant|>Hello wörld")


@pytest.mark.parametrize(
    "path, body, status, param, words",
    [
        ("/tokenize", {}, 400, "prompt", "is required"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "valid string"),
        ("/tokenize", {"prompt": "a", "model": "gpt-5"}, 404, "model", "'gpt-5' is not served here"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least 1"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, 400, "messages", "role"),
        ("/detokenize", {"tokens": [1280]}, 400, "tokens", "1280 is outside the vocabulary [0, 1280)"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "-1 is outside"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "valid array"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "outside the vocabulary"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens", "valid integer"),
    ],
)
async def test_what_cannot_be_tokenized(exchange, path, body, status, param, words):
    answer = await exchange(request("POST", path, body))
    assert answer.status == status and answer.error["param"] == param and words in answer.error["message"]


async def test_detokenize_nothing(exchange):
    assert (await exchange(request("POST", "/detokenize", {"tokens": []}))).json == {"prompt": ""}


async def test_version_and_health(exchange):
    version = (await exchange(request("GET", "/version"))).json
    assert [*version] == ["version"] and version["version"][0].isdigit()
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await exchange(request(method, path, Connection="close"))
        assert (answer.status, answer.body) == (200, b"")


async def test_metrics(exchange):
    answer = await exchange(request("GET", "/metrics"))
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    for name, kind in (
        ("vllm:num_requests_running", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:generation_tokens", "counter"),
        ("vllm:time_to_first_token_seconds", "histogram"),
    ):
        assert families[name].type == kind and families[name].documentation
    samples = families["vllm:num_requests_running"].samples
    assert [(sample.labels, sample.value) for sample in samples] == [({"model_name": "demo"}, 0.0)]


async def test_the_description_is_valid_and_tells_of_every_route(exchange):
    answer = await exchange(request("GET", "/openapi.json"))
    assert answer.headers["content-type"].startswith("application/json")
    document = answer.json
    schemathesis.openapi.from_dict(document).validate()
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    _, service = scripted.make([])
    live = feed.routes(service.engine, service.sample_pool, service.recorder)
    page = {route.path for route in [*static.routes(), *live]}
    routes = {(route.method, route.resource.canonical) for route in make_app(service).router.routes()}
    served = {(method, path) for method, path in routes if method != "HEAD" and path not in page}
    assert described == served - {("GET", "/openapi.json")}


async def test_what_the_description_says_of_a_request_is_what_is_checked(exchange):
    document = (await exchange(request("GET", "/openapi.json"))).json
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    for name in schema["properties"]:
        answer = await exchange(request("POST", "/v1/completions", {"prompt": "a", name: [[{}]]}))
        assert answer.status == 400 and answer.error["param"] == name
    answer = await exchange(request("POST", "/v1/completions", {"prompt": "a", "nowhere": 1}))
    assert answer.error["param"] == "nowhere" and "nowhere" not in schema["properties"]
