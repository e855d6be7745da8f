"""Streams: frames, chunks, usage, and characters of several tokens."""

import asyncio
import socket

import pytest

from tests.serving.client import Response, check_choices, collect, request
from tests.serving.scripted import TOKENIZER, chat, completion, say
from tests.support.patience import PATIENCE_S

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXTS = ("Once upon a time", "wörld 🦊 日本\u2028\x85 \x00 end\r\n\r\ndata: [DONE]\n\n")


async def test_chat_stream_has_frames_with_all_fields(exchange):
    answer = await exchange(request("POST", "/v1/chat/completions", chat(*TEXTS, **STREAM)))
    *events, usage = answer.events
    for index in range(2):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""} and all("role" not in delta for delta in deltas[1:])
    assert {event["object"] for event in events} == {"chat.completion.chunk"} == {usage["object"]}
    assert check_choices(events, 2) == [*TEXTS] and all(event["usage"] is None for event in events)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 20
    plain = (await exchange(request("POST", "/v1/chat/completions", chat(*TEXTS)))).json
    assert [choice["message"]["content"] for choice in plain["choices"]] == [*TEXTS]
    assert plain["usage"]["total_tokens"] == usage["usage"]["total_tokens"]


async def test_completion_stream_has_frames_with_all_fields(exchange):
    answer = await exchange(request("POST", "/v1/completions", completion(*TEXTS, stream=True)))
    assert answer.headers["transfer-encoding"] == "chunked" and len(answer.chunks) > 2
    events = answer.events
    assert {event["object"] for event in events} == {"text_completion"} and not any("usage" in e for e in events)
    assert check_choices(events, 2) == [*TEXTS]
    # Each chunk has whole events.
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in answer.chunks)


async def test_chat_stream_joins_to_the_plain_response(client):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2}
    await client.reset_prefix_cache()
    plain = await client.post("/v1/chat/completions", body)
    message = plain["choices"][0]["message"]
    assert plain["object"] == "chat.completion" and message["role"] == "assistant" and plain["model"] == "tiny"
    await client.reset_prefix_cache()  # Results from a cached prefix may differ in their last bits.
    chunks = await client.stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
    parts = [c["choices"][0] for c in chunks[1:-1]]
    assert "".join(p["delta"].get("content", "") for p in parts) == message["content"]
    assert [p["finish_reason"] for p in parts][:-1] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == plain["choices"][0]["finish_reason"]
    streamed = [token for p in parts for token in p["logprobs"]["content"]]
    assert streamed == plain["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_usage_of_a_stream_is_sent_only_if_requested(api, chat):
    call, content = (api.chat, "Who are you?") if chat else (api.complete, "Once upon a time")
    plain = await call(content, max_tokens=8, n=2)
    for asked in (True, False):
        options = {"stream_options": {"include_usage": asked}}
        chunks = await collect(await call(content, max_tokens=8, n=2, stream=True, **options))
        *before, last = chunks
        assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in before)
        assert {chunk.id for chunk in chunks} == {last.id}
        if asked:
            assert last.choices == []
            assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == plain.usage.model_dump(
                exclude={"prompt_tokens_details"}
            )
        else:
            assert last.usage is None and last.choices[0].finish_reason


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
async def test_continuous_usage_counts_the_tokens_so_far_in_every_chunk(api, chat):
    call, content = (api.chat, "Who are you?") if chat else (api.complete, "Once upon a time")
    for total in (True, False):
        options = {"include_usage": total, "continuous_usage_stats": True}
        chunks = await collect(await call(content, max_tokens=8, n=2, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 16 and (not chat or counts[0] == 0)
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
        assert all(chunk.usage.total_tokens == chunk.usage.prompt_tokens + n for chunk, n in zip(chunks, counts))
        assert bool(chunks[-1].choices) != total


async def test_characters_of_several_tokens_are_sent_whole(scripted_api):
    text = "wörld 🦊 日本語 é\u0301 \u2028\x85\r\n👩‍👩‍👧 end"
    chunks = await collect(await scripted_api.complete(say(text), max_tokens=80, stream=True))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    (choice,) = (await scripted_api.complete(say(text), max_tokens=80)).choices
    assert choice.text == text


async def test_incomplete_character_at_the_end_is_omitted(scripted_api):
    length = len(TOKENIZER.encode("Hi 🦊", add_special_tokens=False).ids) - 1
    (choice,) = (await scripted_api.complete(say("Hi 🦊"), max_tokens=length)).choices
    assert (choice.text, choice.finish_reason) == ("Hi ", "length")


def read_by_bytes(port, data):
    """Return the bytes until the server closes the connection, read one by one."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(1), b""))


async def test_stream_to_a_client_that_reads_single_bytes_is_complete(server):
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
