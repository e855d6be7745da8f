"""A server without a tokenizer: token ids in, token ids out. And the names and paths that a server answers to."""

import re

import pytest
from yarl import URL

from jpaged.engine.engine import Engine
from tests.serving.client import Client

IDS = [72, 101, 108, 108]


@pytest.fixture
async def without(loaded):
    """The engine of all tests, without its tokenizer."""
    async with Client(Engine(loaded.engine.scheduler, loaded.engine.runner), None) as client:
        yield client
        await client.idle()


async def test_token_ids_come_back_without_text(without, loaded):
    fields = {"max_tokens": 5, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    (choice,) = (await without.complete(IDS, **fields, echo=True))["choices"]
    assert choice["text"] == "" and len(choice["token_ids"]) == 5 and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in IDS + choice["token_ids"]]
    chunks = await without.stream("/v1/completions", {"prompt": IDS, "temperature": 0} | fields)
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]


async def test_they_are_those_of_a_server_with_a_tokenizer(without, client):
    fields = {"max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
    ids = (await client.complete(IDS, **fields))["choices"][0]["token_ids"]
    assert (await without.complete(IDS, **fields))["choices"][0]["token_ids"] == ids


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
async def test_texts_are_refused(without, path, body, param):
    error = (await without.post(path, body, 400))["error"]
    assert error["param"] == param and "needs a tokenizer, and this server has none" in error["message"]


@pytest.fixture
async def named(loaded):
    async with Client(*loaded, aliases=("b", "org/c"), root_path="/llm", api_keys=("key",)) as client:
        client.session.headers["Authorization"] = "Bearer key"
        yield client
        await client.idle()


async def test_every_served_name_is_listed_and_accepted_and_answers_have_the_first(named):
    async with named.session.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny", "b", "org/c"]
    for name in ("tiny", "b", "org/c"):
        assert (await named.complete(IDS, model=name, max_tokens=1))["model"] == "tiny"
        async with named.session.get(f"/v1/models/{name}") as response:
            assert (await response.json())["id"] == name
    assert "'d' is not served here" in (await named.complete(IDS, 404, model="d"))["error"]["message"]


async def test_routes_are_served_under_the_root_path_too(named):
    body = {"prompt": IDS, "max_tokens": 1}
    assert (await named.post("/llm/v1/completions", body))["object"] == "text_completion"
    async with named.session.get("/llm/openapi.json") as response:
        assert (await response.json())["servers"] == [{"url": "/llm"}]
    del named.session.headers["Authorization"]
    async with named.session.get("/llm/health") as response:
        assert response.status == 200
    async with named.session.get("/llm/") as response:  # the page's files are found from there
        page, base = await response.text(), response.url
    files = re.findall(r'(?:src|href)="([^"#]+)"', page)
    for file in files:
        async with named.session.get(base.join(URL(file))) as response:
            assert response.status == 200 and str(response.url.path).startswith("/llm/page/")
    assert len(files) >= 3
    for path in ("/v1/completions", "/llm/v1/completions"):
        await named.post(path, body, 401)
