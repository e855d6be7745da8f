"""The cost of one request to others: refusal by length, bounds, and preparation beside the event loop."""

import io
import itertools
import json
import threading
import time

import numpy as np
import pytest

from jpaged import template_process
from jpaged.core import params
from jpaged.serving import prepare
from jpaged.serving.codec import dumps_long
from jpaged.tokenizer import backend, encode
from tests.serving.client import MAX_LEN, Client


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer):
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
    during = [start, *(tick for tick in ticks if start < tick < end), end]
    longest = max(later - earlier for earlier, later in itertools.pairwise(during))
    assert longest < (end - start) / 4, "the GIL was held for the whole text"
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
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(client, path, body, param, monkeypatch):
    longest = MAX_LEN * client.service.vocabulary.longest
    tokenized = []
    monkeypatch.setattr(prepare, "encode", lambda _, text, **__: tokenized.append(text) or [1])
    monkeypatch.setattr(prepare, "encode_all", lambda _, texts, **__: tokenized.extend(texts) or [[1]] * len(texts))
    body = json.loads(json.dumps(body).replace("{text}", "a" * (longest + 1)))
    error = (await client.post(path, body, 400))["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"maximum context length is {MAX_LEN} tokens" in error["message"]
    assert not tokenized


async def test_a_rendered_conversation_is_measured_too(loaded):
    template = "{% for m in messages %}{{ m.content * 100 }}{% endfor %}"
    async with Client(*loaded, chat_template=template) as client:
        text = "a" * (MAX_LEN * client.service.vocabulary.longest // 50)
        error = (await client.chat(text, 400))["error"]
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


async def test_the_default_body_limit_follows_the_context(loaded):
    async with Client(*loaded) as client:
        assert client.service.max_body_size == 2**20 + 16 * MAX_LEN
        body = b'{"prompt": "' + b"a" * (client.service.max_body_size) + b'"}'
        async with client.session.post("/v1/completions", data=io.BytesIO(body)) as response:
            assert response.status == 413 and (await response.json())["error"]["code"] == "request_too_large"


async def test_a_request_may_have_its_share_of_prompts(loaded):
    async with Client(*loaded, max_queue=8) as client:
        assert len((await client.complete(["a"] * 5, max_tokens=1))["choices"]) == 5
        error = (await client.complete(["a"] * 6, 400))["error"]
        assert error["param"] == "prompt" and "6 prompts exceed 5" in error["message"]


async def test_a_body_with_many_faults_is_refused_without_naming_them(client):
    error = (await client.complete("a", 400, **{f"x{i}": 1 for i in range(2000)}))["error"]
    assert error["message"] == "the body has 2000 unknown or wrong fields"


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


def test_parts_of_json_make_the_whole():
    entries = [{"token": i, "top": [[j, -0.5] for j in range(3)], "text": "é\n"} for i in range(300)]
    for value in (
        {"choices": [{"logprobs": {"content": entries}, "text": "é"}], "usage": None}, entries, [], {}, [[]], "a", 1.5,
        {"a": {"b": {"c": {"d": {"e": entries}}}}}, [entries[:64], entries[:65]], True, [*range(64)], [*range(65)],
    ):  # fmt: skip
        assert json.loads(dumps_long(value)) == value


# Templates of requests


def bomb(template):
    return {"messages": [{"role": "user", "content": "Hi"}], "chat_template": template, "max_tokens": 1}


async def test_templates_of_requests_are_rendered_within_bounds(loaded, monkeypatch):
    async with Client(*loaded, trust_request_chat_template=True) as client:
        plain = bomb("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ extra }}{% endfor %}")
        body = plain | {"chat_template_kwargs": {"extra": "!"}, "return_token_ids": True}
        answer = await client.post("/v1/chat/completions", body)
        text = loaded[1].decode(answer["prompt_token_ids"], skip_special_tokens=True)
        assert "user: Hi!" in text
        for template, words in (
            ("{{ messages[0].content * 1000000 }}", "2000000 characters exceed"),
            ("{{ messages[0].content * 10000000000 }}", "memory"),
            ("{{ raise_exception('not so') }}", "not so"),
            ("{{ unclosed", "unexpected end of template"),
        ):
            error = (await client.post("/v1/chat/completions", bomb(template), 400))["error"]
            assert error["param"] == "messages" and words in error["message"], error
        for name in ("conversations", "messages", "chat_template", "tools"):
            error = (await client.post("/v1/chat/completions", plain | {"chat_template_kwargs": {name: 1}}, 400))[
                "error"
            ]
            assert f"no variable of its own called '{name}'" in error["message"]
        monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 0.3)
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        error = (await client.post("/v1/chat/completions", bomb(endless), 400))["error"]
        assert "was not rendered within 0.3 seconds" in error["message"]
        monkeypatch.undo()
        assert await client.post("/v1/chat/completions", plain)


# Logits that are not finite


async def test_weights_of_nan_are_an_error_and_never_an_empty_answer(loaded, caplog):
    async with Client(*loaded) as client:
        runner = client.engine.runner
        before, params = await client.complete("Hello", max_tokens=4), runner.params
        await client.reset_prefix_cache()
        runner.params = [leaf * np.float32("nan") for leaf in params]
        try:
            for fields in ({}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 3, "temperature": 1}):
                error = (await client.complete("Hello", 500, **fields))["error"]
                assert "logits are not finite" in error["message"] and error["code"] == "internal_error"
            await client.complete("Hello", 500, use_beam_search=True, n=2)
            *_, last = await client.stream("/v1/completions", {"prompt": "Hello"})
            assert last["error"]["type"] == "InternalServerError"
            await client.idle()
        finally:
            runner.params = params
        assert (await client.complete("Hello", max_tokens=4))["choices"] == before["choices"]
        async with client.session.get("/metrics") as response:
            assert 'vllm:corrupted_requests_total{model_name="tiny"} 6.0' in await response.text()
    assert len([record for record in caplog.records if "not finite" in record.message]) == 1


# Requests of other clients


async def test_neutral_values_of_foreign_fields_change_nothing(client):
    message = {"role": "user", "content": "Hi"}
    echoed = {
        "role": "assistant", "content": "Yes", "refusal": None, "reasoning_content": "hm", "reasoning": None,
        "annotations": [], "audio": None, "function_call": None, "provider_specific_fields": {}, "tool_calls": None,
    }  # fmt: skip
    neutral = {
        "modalities": ["text"], "prediction": None, "audio": None, "functions": [], "function_call": "none",
        "reasoning_effort": None, "verbosity": "medium", "web_search_options": None, "guided_json": None,
        "logits_processors": [], "include_reasoning": True, "detokenize": True, "documents": [], "echo": False,
    }  # fmt: skip
    plain = {"messages": [message, {"role": "assistant", "content": "Yes"}, message], "temperature": 0, "max_tokens": 5}
    body = plain | {"messages": [message, echoed, message]} | neutral
    answers = [await client.post("/v1/chat/completions", each) for each in (plain, body)]
    assert answers[0]["choices"] == answers[1]["choices"]
    for name, value in (
        ("modalities", ["audio"]), ("prediction", {"type": "content"}), ("functions", [{"name": "f"}]),
        ("guided_json", {"type": "object"}), ("logits_processors", ["a"]), ("detokenize", False),
    ):  # fmt: skip
        assert (await client.post("/v1/chat/completions", plain | {name: value}, 400))["error"]["param"] == name


async def test_a_developer_is_the_system_where_the_template_knows_none(loaded):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for source, role in ((template, "system"), (template + "{# developer #}", "developer")):
        async with Client(*loaded, chat_template=source) as client:
            ids = (await client.post("/tokenize", {"messages": [{"role": "developer", "content": "Be kind"}]}))[
                "tokens"
            ]
            assert loaded[1].decode(ids) == f"{role}: Be kind\n"


@pytest.mark.parametrize(
    "part, words",
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "content parts of type 'image_url' are not supported"),
        ({"type": "input_audio", "input_audio": {}}, "content parts of type 'input_audio' are not supported"),
        ({"type": "text"}, "content.list[TextPart].1.text: Field required"),
    ],
)
async def test_unknown_parts_of_a_message_are_refused_by_name(client, part, words):
    content = [{"type": "text", "text": "What is this?"}, part]
    error = (await client.chat(content, 400))["error"]
    assert error["param"] == "messages" and words in error["message"]


async def test_errors_have_codes_for_programs(client):
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
