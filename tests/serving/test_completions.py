"""Completions: prompts, defaults, seeds and the fields of a response."""

import json

import pytest

from jpaged.core.params import InvalidParameter
from jpaged.serving.parse import parse
from jpaged.serving.protocol import CompletionRequest
from jpaged.tokenizer import encode
from tests.serving.client import MAX_LEN, Client, counts, joined, texts


async def test_completion_has_its_fields_usage_and_logprobs(client):
    body = await client.complete("Hello", model="tiny", max_tokens=8, logprobs=0)
    (choice,) = body["choices"]
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    assert choice["index"] == 0 and choice["finish_reason"] in ("length", "stop")
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["total_tokens"] == 5 + body["usage"]["completion_tokens"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == body["usage"]["completion_tokens"]
    assert all(p <= 0 for p in logprobs["token_logprobs"]) and logprobs["text_offset"][0] == 0


async def test_completion_without_max_tokens_has_16(client):
    assert (await client.complete("Hello", ignore_eos=True))["usage"]["completion_tokens"] == 16


async def test_every_form_of_a_prompt_gives_the_same_completion(client, loaded):
    ids = encode(loaded[1], "Hello")
    one = texts(await client.complete("Hello", ignore_eos=True))[0]
    two = texts(await client.complete("other", ignore_eos=True))[0]
    assert one != two
    for prompt in (ids, ["Hello"], [ids]):
        assert texts(await client.complete(prompt, ignore_eos=True)) == [one]
    for prompts in ([ids, encode(loaded[1], "other")], ["Hello", "other"]):
        both = await client.complete(prompts, ignore_eos=True)
        assert [(c["index"], c["text"]) for c in both["choices"]] == [(0, one), (1, two)]
        assert counts(both) == (10, 32, 42)


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_empty_prompt_is_rejected_even_if_the_tokenizer_would_add_tokens(prompt):
    request = parse(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    with pytest.raises(InvalidParameter, match="prompt: must hold at least one token"):
        request.prompts()


async def test_prompt_gets_special_tokens_unless_add_special_tokens_is_false(api):
    counted = []
    for extra_body in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        answer = await api.complete("A fox", max_tokens=1, extra_body=extra_body)
        counted.append(answer.usage.prompt_tokens)
    assert counted[0] == counted[1] == counted[2] + 1


async def test_truncated_prompt_is_its_end(client, letters):
    whole = texts(await client.complete("world", **letters))
    body = await client.complete("Hello, world", **letters, truncate_prompt_tokens=5, echo=True)
    assert texts(body) == ["world" + whole[0]] and body["usage"]["prompt_tokens"] == 5
    ids = encode(client.service.tokenizer, "Hello, world")
    assert texts(await client.complete(ids, **letters, truncate_prompt_tokens=5)) == whole
    body = await client.complete("a" * 1000, **letters, truncate_prompt_tokens=-1)
    assert counts(body) == (MAX_LEN - 12, 12, MAX_LEN)
    assert (await client.chat("Hello" * 99, **letters, truncate_prompt_tokens=7))["usage"]["prompt_tokens"] == 7


async def test_seed_repeats_a_completion_plain_and_streamed(client):
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
    completions = [await client.complete("Hello", **fields | {"seed": seed}) for seed in (11, 11, 12)]
    first, again, other = (texts(body)[0] for body in completions)
    assert first == again != other
    chunks = await client.stream("/v1/completions", {"prompt": "Hello"} | fields)
    assert joined(chunks) == [first]


async def test_open_parameters_come_from_the_generation_config(loaded):
    engine, tokenizer, _ = loaded
    async with Client(engine, tokenizer, {"temperature": 0, "top_k": 3}) as client:
        body = {"prompt": "Hello", "max_tokens": 20}
        greedy = [(await client.post("/v1/completions", body | {"seed": i}))["choices"] for i in range(2)]
        assert greedy[0] == greedy[1] == (await client.complete("Hello", max_tokens=20))["choices"]
        hot = await client.post("/v1/completions", body | {"temperature": 1.5, "top_k": 0, "seed": 0})
        assert hot["choices"] != greedy[0]
