"""Bodies of requests: JSON, encodings and sizes."""

import gzip
import io
import json

import aiohttp
import pytest

from tests.serving.client import MAX_LEN, Client, request
from tests.serving.scripted import completion, say

MAX_BODY = 104_857  # a tenth of a MiB, the limit of the fixture `server`


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "a/b; charset=utf-7"]
)
async def test_body_is_read_as_json_for_any_content_type(exchange, content_type):
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
async def test_invalid_body_is_rejected(exchange, body, param, words):
    answer = await exchange(request("POST", "/v1/completions", body))
    assert answer.status == 400 and answer.error["type"] == "BadRequestError"
    assert answer.error["param"] == param and words in answer.error["message"]
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
        other = await exchange(request("POST", path, body))
        assert other.status == 400 and other.error["message"]


async def test_unusual_but_valid_body_is_accepted(exchange):
    text = say("x")
    for body in (
        b'{"prompt": "b", "prompt": "' + text.encode() + b'"}',  # The last one is used.
        json.dumps({"prompt": text, "max_tokens": None}).encode() + b"\r\n\t ",
        b'{"\\u0070rompt": "%s"}' % text.encode(),
        b'{"prompt": "\\u0000\\uD83E\\uDD8A%s"}' % text.encode(),
    ):
        assert (await exchange(request("POST", "/v1/completions", body))).json["choices"][0]["text"] == "x"


async def test_compressed_body_is_decompressed_within_the_limit(exchange):
    packed = gzip.compress(json.dumps(completion("Hi")).encode())
    answer = await exchange(request("POST", "/v1/completions", packed, Content_Encoding="gzip"))
    assert answer.json["choices"][0]["text"] == "Hi"
    bomb = gzip.compress(b" " * 100 * MAX_BODY)
    assert len(bomb) < MAX_BODY
    answer = await exchange(request("POST", "/v1/completions", bomb, Content_Encoding="gzip"))
    assert answer.status == 413 and answer.error["message"].startswith("the body exceeds")
    for wrong, words in ((b"not gzip", "can't be decoded"), (packed[:20], "Invalid JSON"), (b"", "Invalid JSON")):
        answer = await exchange(request("POST", "/v1/completions", wrong, Content_Encoding="gzip"))
        assert answer.status == 400 and words in answer.error["message"]
    answer = await exchange(request("POST", "/v1/completions", packed))  # without the header
    assert answer.status == 400 and "Invalid JSON" in answer.error["message"]


async def test_content_length_above_the_limit_is_rejected_before_the_body(exchange):
    answer = await exchange(request("POST", "/v1/completions", Content_Length=str(MAX_BODY + 1)))
    assert answer.status == 413 and f"{MAX_BODY} bytes (--max-body-size)" in answer.error["message"]


async def test_body_at_the_limit_is_accepted_and_one_byte_more_rejected(exchange):
    body = json.dumps(completion("Hi")).encode()
    for size in (MAX_BODY, MAX_BODY + 1):
        padded = body.ljust(size)
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (size, padded)
        for data in (
            request("POST", "/v1/completions", padded),
            request("POST", "/v1/completions", Transfer_Encoding="chunked") + chunked,
        ):
            assert (await exchange(data)).status == (200 if size == MAX_BODY else 413)


async def test_default_limit_follows_the_context_length(loaded):
    async with Client(*loaded) as client:
        limit = client.service.max_body_size
        assert limit == 2**20 + 16 * MAX_LEN
        for size in (limit + 1, 100 * 2**20):
            async with client.session.post("/v1/completions", data=io.BytesIO(b" " * size)) as response:
                error = (await response.json())["error"]
                assert response.status == 413 and error["code"] == "request_too_large"
                assert str(limit) in error["message"]


async def test_chunked_body_of_100_mib_is_rejected(client):
    async def body():
        for _ in range(100):
            yield b" " * 2**20

    try:
        async with client.session.post("/v1/completions", data=body()) as response:
            assert response.status == 413
            assert str(2**20 + 16 * MAX_LEN) in (await response.json())["error"]["message"]
    except aiohttp.ClientConnectionError:
        pass  # The server may close the connection while the client still sends.
    await client.complete("still", max_tokens=1)
