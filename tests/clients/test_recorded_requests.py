"""Requests of client packages, with the headers and fields that they sent when they were recorded and short texts.

requests.json has the requests by client and version. `<<say>>...<<done>>` in a text is the scripted server's answer.
"""

import json
import time
from pathlib import Path

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jpaged.serving.tool_parsers.format import FORMATS
from tests.serving import scripted
from tests.serving.client import Client

RECORDED = json.loads(Path(__file__).with_name("requests.json").read_text())
REQUESTS = [
    pytest.param(client["headers"], request, id=f"{name}: {request['name']}")
    for name, client in RECORDED.items()
    for request in client["requests"]
]


@pytest.fixture(scope="module")
def loaded():
    return scripted.load(max_model_len=1024)


@pytest.fixture
async def client(loaded):
    async with Client(*loaded, model_name="demo", tool_format=FORMATS["hermes"]) as client:
        yield client
        await client.idle()


@pytest.mark.parametrize("headers, recorded", REQUESTS)
async def test_recorded_request_gets_the_answer_that_its_client_reads(client, headers, recorded):
    path, body = recorded["path"], recorded["body"]
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
    async with client.session.request(method, path, data=data, headers=headers) as response:
        text = await response.text()
        assert response.status == recorded.get("status", 200), text
    if response.status != 200:
        error = json.loads(text)["error"]
        assert error.pop("details", None) == recorded.get("details")
        assert error.keys() == {"message", "type", "param", "code"}
    elif "keys" in recorded:
        assert set(recorded["keys"]) <= json.loads(text).keys()
    elif path in ITEMS:
        assert response.content_type == ("text/event-stream" if body.get("stream") else "application/json")
        check_items(recorded, *ITEMS[path](text, body.get("stream")))
    elif body.get("stream"):
        assert response.content_type == "text/event-stream"
        check_stream(recorded, text)
    else:
        check_whole(recorded, json.loads(text))


async def test_call_has_one_part_in_each_chunk_of_a_slow_stream(client):
    """Instructor and others read only the first part of a call in a chunk."""
    (request,) = (r for r in RECORDED["instructor"]["requests"] if r["name"] == "partial")
    async with client.session.post(request["path"], json=request["body"]) as response:
        await response.content.readuntil(b"\n\n")
        time.sleep(0.5)  # The engine's thread goes on; the server's loop, which is this one, does not.
        *frames, _, _ = (await response.text()).split("\n\n")
    chunks = [ChatCompletionChunk.model_validate_json(frame.removeprefix("data: ")) for frame in frames]
    parts = [len(choice.delta.tool_calls or ()) for chunk in chunks for choice in chunk.choices]
    assert max(parts) == 1, parts


def items_of_response(text, is_stream):
    """Return the texts and the calls of a response."""
    if is_stream:
        *_, last = [STREAM_EVENT.validate_json(data) for data in data_of(text)]
        assert last.type == "response.completed"
    items = (last.response if is_stream else Response.model_validate_json(text)).output
    texts = [part.text for item in items if item.type == "message" for part in item.content]
    return texts, [[item.name, item.arguments] for item in items if item.type == "function_call"]


def items_of_message(text, is_stream):
    """Return the texts and the calls of a message, as Anthropic's client adds them up."""
    if not is_stream:
        blocks = json.loads(text)["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        return texts, [[block["name"], block["input"]] for block in blocks if block["type"] == "tool_use"]
    texts, calls = [], []
    for event in map(json.loads, data_of(text)):
        match event:
            case {"type": "content_block_start", "content_block": {"type": "text"}}:
                texts.append("")
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                calls.append([name, ""])
            case {"delta": {"type": "text_delta", "text": piece}}:
                texts[-1] += piece
            case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                calls[-1][1] += piece
    assert event == {"type": "message_stop"}
    return texts, calls


def data_of(text):
    """Return the data of the events of a stream."""
    *frames, end = text.split("\n\n")
    assert end == ""
    return [frame.partition("data: ")[2] for frame in frames]


STREAM_EVENT = TypeAdapter(ResponseStreamEvent)
# The functions that read the texts and the calls of a response, by the path.
ITEMS = {
    "/v1/responses": items_of_response, "/v1/messages": items_of_message, "/v1/messages?beta=true": items_of_message,
}  # fmt: skip


def check_items(recorded, texts, calls):
    assert texts == ([recorded["answer"]] if "answer" in recorded else [])
    found = [[name, json.loads(arguments) if isinstance(arguments, str) else arguments] for name, arguments in calls]
    assert found == [[name, json.loads(arguments)] for name, arguments in recorded.get("calls", [])]


def parse_completion(fields):
    """Return the completion as the package builds it, without the validation of its types: they lack the finish reason
    of a chunk and the logprob of a prompt's first token, which are null."""
    return Completion.construct(**fields)


def check_whole(recorded, answer):
    body = recorded["body"]
    if "prompt" in body:
        completion = parse_completion(answer)
        assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
        if "scored" in recorded:
            for choice, length in zip(completion.choices, recorded["scored"], strict=True):
                check_scores(choice.logprobs, length)
        else:
            assert completion.choices[0].text == recorded["answer"]
            check_completion_logprobs(completion.choices[0], body.get("logprobs"))
    else:
        completion = ChatCompletion.model_validate(answer)
        (choice,) = completion.choices
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        check_message(recorded, choice.message.content, calls, choice.finish_reason)
        if body.get("logprobs"):
            tokens = choice.logprobs.content
            assert "".join(token.token for token in tokens).startswith(recorded["answer"])
            assert {len(token.top_logprobs) for token in tokens} == {body["top_logprobs"]}
    check_usage(completion.usage)


def check_stream(recorded, text):
    body = recorded["body"]
    *frames, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    parse = parse_completion if "prompt" in body else ChatCompletionChunk.model_validate
    chunks = [parse(json.loads(frame.removeprefix("data: "))) for frame in frames]
    assert {(chunk.id, chunk.model) for chunk in chunks} == {(chunks[0].id, "demo")}
    options = body.get("stream_options", {})
    if options.get("include_usage"):
        usage = chunks[-1].usage
        check_usage(usage)
        assert usage.completion_tokens == recorded.get("length", usage.completion_tokens)
        *chunks, last = chunks
        assert last.choices == []
    assert all((chunk.usage is not None) == bool(options.get("continuous_usage_stats")) for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    *reasons, reason = (choice.finish_reason for choice in choices)
    assert set(reasons) == {None}
    if "prompt" in body:
        text = "".join(choice.text for choice in choices)
        assert reason == "length" if "length" in recorded else text == recorded["answer"]
    else:
        assert choices[0].delta.role == "assistant"
        content = "".join(choice.delta.content or "" for choice in choices)
        if "length" in recorded:
            assert content and reason == "length"
        else:
            check_message(recorded, content or None, joined_calls(choices), reason)


def joined_calls(choices):
    """Return the calls of a stream as [name, arguments]."""
    calls = []
    for choice in choices:
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                assert delta.id and delta.type == "function"
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments or ""
    return calls


def check_message(recorded, content, calls, reason):
    if "calls" in recorded:
        named = isinstance(recorded["body"].get("tool_choice"), dict)
        assert (content, calls, reason) == (None, recorded["calls"], "stop" if named else "tool_calls")
    else:
        assert (content, calls, reason) == (recorded["answer"], [], "stop")


def check_completion_logprobs(choice, count):
    if count is None:
        assert choice.logprobs is None
    else:
        tokens = choice.logprobs.tokens
        assert "".join(tokens).startswith(choice.text) and {len(top) for top in choice.logprobs.top_logprobs} == {count}
        assert len(tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset)


def check_scores(logprobs, length):
    """Check the logprobs of an echoed prompt, as lm-eval sums them: those of one generated token are the last."""
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == length + 1
    first, *scores = logprobs.token_logprobs
    assert first is None and all(score <= 0 for score in scores)
    assert all(score <= max(top.values()) for score, top in zip(scores, logprobs.top_logprobs[1:], strict=True))


def check_usage(usage):
    assert usage.prompt_tokens > 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
