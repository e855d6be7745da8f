"""Errors of invalid requests: status, type, code, field and message."""

import openai
import pytest

from tests.serving.client import MAX_LEN
from tests.support.models import SPECIAL, VOCAB

LONG = "a" * MAX_LEN
ENDLESS = "a" * (MAX_LEN * max(map(len, SPECIAL)) + 1)  # longer than MAX_LEN of the longest tokens


@pytest.mark.parametrize(
    "body, status, param, words",
    [
        ({"prompt": ENDLESS}, 400, "prompt", f"you sent {len(ENDLESS)} characters"),
        ({"prompt": LONG}, 400, "prompt", f"({MAX_LEN} in the prompt, "),
        ({"prompt": [0, VOCAB]}, 400, "prompt", f"token id {VOCAB} is outside the vocabulary [0, {VOCAB})"),
        ({"prompt": [-1]}, 400, "prompt", "-1"),
        ({"prompt": ""}, 400, "prompt", "at least one token"),
        ({"prompt": []}, 400, "prompt", "at least one token"),
        ({"prompt": [[]]}, 400, "prompt", "at least one token"),
        ({"prompt": 5}, 400, "prompt", "a text, token ids, or a list of either"),
        ({"prompt": ["a", 5]}, 400, "prompt", "a text, token ids, or a list of either"),
        ({}, 400, "prompt", "required"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1, not 0"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "at least 1, not -1"),
        ({"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens", f"maximum context length is {MAX_LEN}"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens", "integer"),
        ({"prompt": "a", "temperature": -0.5}, 400, "temperature", "at least 0, not -0.5"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature", "number"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p", "above 0 and at most 1"),
        ({"prompt": "a", "top_p": 1.1}, 400, "top_p", "above 0 and at most 1"),
        ({"prompt": "a", "stop": [""]}, 400, "stop", "1 to 256 characters"),
        ({"prompt": "a", "stop": ""}, 400, "stop", "1 to 256 characters"),
        ({"prompt": "a", "stop": 5}, 400, "stop", "a text or a list of texts"),
        ({"prompt": "a", "stop_token_ids": [VOCAB]}, 400, "stop_token_ids", "vocabulary"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream", "boolean"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", "only allowed with stream"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "must be empty"),
        ({"prompt": "a", "beam": 3}, 400, "beam", "not a known field"),
        ({"prompt": "a", "model": "gpt-5"}, 404, "model", "'gpt-5' is not served here; 'tiny' is"),
        (b'{"prompt": "a"', 400, None, "JSON"),
        (b"[]", 400, None, "object"),
        (b"", 400, None, "JSON"),
        (b"\xff\xfe", 400, None, "JSON"),
    ],
)
async def test_invalid_completion_is_rejected_by_its_field(client, body, status, param, words):
    error = (await client.post("/v1/completions", body, status))["error"]
    assert error["param"] == param and words in error["message"] and isinstance(error["code"], str)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    await client.complete("still", max_tokens=1)


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": [{"role": "", "content": "Hi"}]}, "messages", "0.role: String should have at least 1 character"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, "messages", "0.role: Input should be a valid string"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": LONG}]}, "prompt", "maximum context length"),
        ({"messages": [{"role": "user", "content": ENDLESS}]}, "messages", "characters, more than"),
        ({"tools": [{}]}, "tools", "0.type: Field required"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "0.function.name: String should match",
        ),
        ({"reasoning_effort": "much"}, "reasoning_effort", "'minimal'"),
        ({"verbosity": "none"}, "verbosity", "'medium'"),
        ({"guided_regex": "a"}, "guided_regex", "must be absent (its name today is structured_outputs.regex), not 'a'"),
        ({"guided_json": {"type": "object"}}, "guided_json", "its name today is structured_outputs.json"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "differs from max_tokens"),
    ],
)
async def test_invalid_chat_is_rejected_by_its_field(client, fields, param, words):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    error = (await client.post("/v1/chat/completions", body, 400))["error"]
    assert error["param"] == param and words in error["message"]


async def test_error_has_a_code(client):
    for fields, status, code in (
        ({"max_tokens": MAX_LEN}, 400, "context_length_exceeded"),
        ({"nothing": 1}, 400, "unknown_parameter"),
        ({"temperature": -1}, 400, "invalid_value"),
        ({"model": "gpt-5"}, 404, "model_not_found"),
    ):
        error = (await client.complete("Hello", status, **fields))["error"]
        assert error["code"] == code
    error = (await client.post("/v1/chat/completions", {}, 400))["error"]
    assert error["code"] == "missing_required_parameter"
    message = (await client.chat("Hello", 400, max_tokens=MAX_LEN))["error"]["message"]
    assert f"This model's maximum context length is {MAX_LEN} tokens" in message and "Please reduce" in message


async def test_body_with_many_errors_is_rejected_without_their_names(client):
    error = (await client.complete("a", 400, **{f"x{i}": 1 for i in range(2000)}))["error"]
    assert error["message"] == "the body has 2000 unknown or wrong fields"


@pytest.mark.parametrize(
    "fields, param, code, words",
    [
        ({"temperature": -1}, "temperature", "invalid_value", "temperature: must be a number of at least 0, not -1"),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded", "maximum context length is"),
        ({"extra_body": {"flavour": "mint"}}, "flavour", "unknown_parameter", "is not a known field"),
    ],
)
async def test_openai_client_raises_bad_request_errors_plain_and_streamed(api, fields, param, code, words):
    for call in (api.complete, api.chat):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                await call("Hi", stream=stream, **fields)
            failure = error.value
            assert (failure.status_code, failure.code, failure.type) == (400, code, "BadRequestError")
            assert failure.param == failure.body["param"] == param and words in failure.body["message"]


async def test_rejected_prompt_cancels_the_others_of_its_request(client):
    await client.complete(["fine", LONG], 400, max_tokens=100)
    await client.idle()
