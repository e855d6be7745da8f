"""Token ids in responses, and a server without a tokenizer: token ids in, token ids out."""

import json

import pytest

from jpaged.engine.engine import Engine
from jpaged.serving.service import LARGE_BYTES
from tests.serving.client import Client, collect
from tests.serving.scripted import TOKENIZER

IDS = [72, 101, 108, 108]


@pytest.fixture
async def without(loaded):
    """The shared engine without its tokenizer."""
    async with Client(Engine(loaded.engine.scheduler, loaded.engine.runner), None) as client:
        yield client
        await client.idle()


async def test_return_token_ids_adds_those_of_prompt_and_text(api):
    extra = {"return_token_ids": True}
    (choice,) = (await api.complete("Once upon a time", extra_body=extra)).choices
    ids = TOKENIZER.encode("Once upon a time").ids
    assert choice.prompt_token_ids == ids and TOKENIZER.decode(choice.token_ids) == choice.text
    chunks = await collect(await api.complete("Once upon a time", stream=True, extra_body=extra))
    parts = [chunk.choices[0] for chunk in chunks]
    assert parts[0].prompt_token_ids == ids and {part.prompt_token_ids and 1 for part in parts[1:]} <= {None}
    assert [token for part in parts for token in part.token_ids] == choice.token_ids


async def test_server_without_tokenizer_returns_token_ids_and_no_text(without, loaded):
    fields = {"max_tokens": 5, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    (choice,) = (await without.complete(IDS, **fields, echo=True))["choices"]
    assert choice["text"] == "" and len(choice["token_ids"]) == 5 and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in IDS + choice["token_ids"]]
    chunks = await without.stream("/v1/completions", {"prompt": IDS, "temperature": 0} | fields)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]


async def test_server_without_tokenizer_generates_the_same_token_ids(loaded):
    """Two engines share a scheduler, one after the other: the thread of a server that has ended takes no step."""
    fields = {"max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
    async with Client(*loaded) as client:
        ids = (await client.complete(IDS, **fields))["choices"][0]["token_ids"]
        await client.idle()
    async with Client(Engine(loaded.engine.scheduler, loaded.engine.runner), None) as without:
        for size in (0, LARGE_BYTES + 1):
            body = json.dumps({"prompt": IDS, "temperature": 0} | fields).encode().ljust(size)
            assert (await without.post("/v1/completions", body))["choices"][0]["token_ids"] == ids
        await without.idle()


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": "Hello"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}, "bad_words"),
        ("/v1/completions", {"prompt": IDS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ("/tokenize", {"prompt": "Hello"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
    ],
)
async def test_server_without_tokenizer_rejects_texts(without, path, body, param):
    for size in (0, LARGE_BYTES + 1):
        error = (await without.post(path, json.dumps(body).encode().ljust(size), 400))["error"]
        assert error["param"] == param and "needs a tokenizer, and this server has none" in error["message"]
