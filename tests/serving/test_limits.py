"""Limits on the cost of one request to others: lengths, numbers of prompts, the queue, time, and the event loop."""

import asyncio
import json
import threading
import time

import openai
import pytest

from jpaged.core import params
from jpaged.serving import prepare
from jpaged.serving.codec import dumps_long
from jpaged.tokenizer import backend, encode
from tests.serving.client import MAX_LEN, Api, Client, collect
from tests.serving.scripted import say

LONG = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}  # 24 seconds on the slow server


def test_tokenizing_a_long_text_lets_other_threads_run(loaded):
    tokenizer = loaded.tokenizer
    text, ticks, done = "Once upon a time there was a fox. " * 20_000, [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    ids = encode(tokenizer, text)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(start < tick < end for tick in ticks) > 3, "the GIL was held for the whole text"
    assert ids[:500] == backend(tokenizer).encode(text[:2000]).ids[:500]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {"prompt": "{text}"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "{text}"}]}, "messages"),
        ("/v1/completions", {"prompt": "{text}", "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "{text}"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{text}"}]}, "messages"),
    ],
)
async def test_text_that_exceeds_the_context_is_rejected_before_it_is_tokenized(client, path, body, param, monkeypatch):
    longest = MAX_LEN * client.service.vocabulary.longest
    tokenized = []
    monkeypatch.setattr(prepare, "encode", lambda _, text, **__: tokenized.append(text) or [1])
    monkeypatch.setattr(prepare, "encode_all", lambda _, texts, **__: tokenized.extend(texts) or [[1]] * len(texts))
    body = json.loads(json.dumps(body).replace("{text}", "a" * (longest + 1)))
    error = (await client.post(path, body, 400))["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"maximum context length is {MAX_LEN} tokens" in error["message"]
    assert not tokenized


async def test_rendered_chat_that_exceeds_the_context_is_rejected(loaded):
    template = "{% for m in messages %}{{ m.content * 100 }}{% endfor %}"
    async with Client(*loaded, chat_template=template) as client:
        text = "a" * (MAX_LEN * client.service.vocabulary.longest // 50)
        error = (await client.chat(text, 400))["error"]
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_number_of_prompts_is_limited_by_the_queue(loaded):
    async with Client(*loaded, max_queue=8) as client:
        assert len((await client.complete(["a"] * 5, max_tokens=1))["choices"]) == 5
        error = (await client.complete(["a"] * 6, 400))["error"]
        assert error["param"] == "prompt" and "6 prompts exceed 5" in error["message"]


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"stop": ["a" * (params.MAX_WORD_LENGTH + 1)]}, "stop", "1 to 256 characters"),
        ({"stop": ["a"] * (params.MAX_STOPS + 1)}, "stop", "up to 64"),
        ({"stop_token_ids": [1] * (params.MAX_STOP_TOKENS + 1)}, "stop_token_ids", "up to 128"),
        ({"bad_words": ["a" * (params.MAX_WORD_LENGTH + 1)]}, "bad_words", "1 to 256 characters"),
        ({"bad_words": ["a"] * (params.MAX_BAD_WORDS + 1)}, "bad_words", "up to 1024"),
        ({"logit_bias": dict.fromkeys(map(str, range(params.MAX_LOGIT_BIASES + 1)), 1)}, "logit_bias", "up to 4096"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "up to 16"),
    ],
)
async def test_parameters_that_cost_every_step_have_limits(client, fields, param, words):
    error = (await client.complete("a", 400, **fields))["error"]
    assert error["param"] == param and words in error["message"]


def test_long_json_in_parts_equals_the_whole():
    entries = [{"token": i, "top": [[j, -0.5] for j in range(3)], "text": "é\n"} for i in range(300)]
    for value in (
        {"choices": [{"logprobs": {"content": entries}, "text": "é"}], "usage": None}, entries, [], {}, [[]], "a", 1.5,
        {"a": {"b": {"c": {"d": {"e": entries}}}}}, [entries[:64], entries[:65]], True, [*range(64)], [*range(65)],
    ):  # fmt: skip
        assert json.loads(dumps_long(value)) == value


async def test_full_queue_is_an_error_503_that_clients_retry(slow_client, slow_api):
    """Let one request run and two wait: the next is rejected, and a client that retries gets its response."""
    async with Api(slow_client.url, max_retries=5) as retrying:
        async with slow_client.limited(1):
            first = await slow_api.complete("Hi", stream=True, **LONG | {"max_tokens": 20})
            await slow_client.until(num_running=1)
            others = asyncio.create_task(slow_api.complete(["Hi", "Hi"], max_tokens=1))
            await slow_client.until(num_waiting=2)
            with pytest.raises(openai.InternalServerError, match=r"queue full \(2 requests waiting") as error:
                await slow_api.complete("Hi", max_tokens=1)
            assert error.value.status_code == 503 and error.value.type == "ServiceUnavailableError"
            assert error.value.response.headers["retry-after"] == "1"
            later = asyncio.create_task(retrying.complete(say("ok"), max_tokens=5))
            await asyncio.sleep(0)
        assert (await later).choices[0].text == "ok"
    assert len(await collect(first)) > 0 and len((await others).choices) == 2


async def test_request_timeout_ends_running_and_waiting_requests(slow_loaded):
    async with Client(*slow_loaded, model_name="demo", request_timeout=0.5) as client, Api(client.url) as api:
        async with client.limited(3):  # One of them runs, and the other one waits and gets no token.
            plain = asyncio.create_task(api.complete("Hi", **LONG))
            stream = await api.complete("Hi", stream=True, **LONG)
            with pytest.raises(
                openai.InternalServerError, match=r"the answer was not complete after 0\.5 seconds"
            ) as error:
                await plain
            assert error.value.status_code == 504 and error.value.type == "TimeoutError"
            with pytest.raises(openai.APIError, match=r"the answer was not complete after 0\.5 seconds") as error:
                await collect(stream)
            assert error.value.code == "timeout"
        await client.idle()
