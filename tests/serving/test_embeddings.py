"""Vectors and scores of prompts over HTTP: the forms of OpenAI, SGLang and vLLM."""

import base64
import math

import numpy as np
import openai
import pytest

EMBEDDINGS, SCORE, VLLM = "/v1/embeddings", "/v1/score", "/generative_scoring"
TEXTS = ["the first text", "another one", "c"]


async def vectors(client, **body):
    response = await client.post(EMBEDDINGS, body)
    data = response["data"]
    assert response["object"] == "list" and [each["index"] for each in data] == [*range(len(data))]
    assert {each["object"] for each in data} == {"embedding"}
    return [each["embedding"] for each in data]


async def test_each_input_has_a_vector_of_length_one(client):
    response = await client.post(EMBEDDINGS, {"input": TEXTS, "model": "tiny"})
    lengths = map(len, TEXTS)  # a token is a character
    assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] == sum(lengths)
    assert response["usage"]["completion_tokens"] == 0 and response["model"] == "tiny" and response["id"][:5] == "embd-"
    found = [each["embedding"] for each in response["data"]]
    assert all(math.isclose(np.linalg.norm(each), 1) for each in found) and len({*map(tuple, found)}) == 3
    assert await vectors(client, input=TEXTS[1]) == [found[1]], "neighbours change nothing"
    tokens = (await client.post("/tokenize", {"prompt": TEXTS[0]}))["tokens"]
    assert await vectors(client, input=tokens) == await vectors(client, input=[tokens]) == [found[0]]


async def test_options_of_vectors_are_applied(client):
    (whole,) = await vectors(client, input=TEXTS[0], use_activation=False)
    (scaled,) = await vectors(client, input=TEXTS[0])
    np.testing.assert_allclose(np.array(whole) / np.linalg.norm(whole), scaled)
    assert await vectors(client, input=TEXTS[0], use_activation=False, dimensions=3) == [whole[:3]]
    (few,) = await vectors(client, input=TEXTS[0], dimensions=3)
    np.testing.assert_allclose(np.array(whole[:3]) / np.linalg.norm(whole[:3]), few)
    (bits,) = await vectors(client, input=TEXTS[0], encoding_format="base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(bits), "<f4"), np.float32(scaled))
    (mean,) = await vectors(client, input=TEXTS[0], pooling="mean")
    assert mean != scaled
    cut = await vectors(client, input=TEXTS[0], truncate_prompt_tokens=3, truncation_side="right")
    assert cut == await vectors(client, input=TEXTS[0][:3])
    assert await vectors(client, input="c", pooling="mean") == await vectors(client, input="c"), "of one token"


async def test_openai_s_client_reads_vectors(client):
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as api:
        for encoding in (openai.NOT_GIVEN, "float"):
            response = await api.embeddings.create(model="tiny", input=TEXTS, encoding_format=encoding)
            expected = await vectors(client, input=TEXTS)
            np.testing.assert_allclose([each.embedding for each in response.data], expected, rtol=1e-6)
        with pytest.raises(openai.BadRequestError) as error:
            await api.embeddings.create(model="tiny", input=[])
        assert error.value.param == "input"


async def test_scores_are_probabilities_of_the_next_token(client, ids):
    labels = [ids[letter] for letter in "zab"]
    query, items = "is it so: ", ["yes", "no"]
    scored = await client.post(SCORE, {"query": query, "items": items, "label_token_ids": labels})
    assert scored["object"] == "scoring" and scored["model"] == "tiny"
    expected = []
    for item in items:
        completion = await client.complete(query + item, max_tokens=1, logprobs=0, logprob_token_ids=labels)
        (by_text,) = completion["choices"][0]["logprobs"]["top_logprobs"]
        expected.append([math.exp(by_text[letter]) for letter in "zab"])
    np.testing.assert_allclose(scored["scores"], expected, rtol=1e-5)
    body = {"query": query, "items": items, "label_token_ids": labels, "apply_softmax": True}
    shares = (await client.post("/score", body))["scores"]
    np.testing.assert_allclose(shares, np.array(expected) / np.sum(expected, axis=1, keepdims=True), rtol=1e-5)
    theirs = await client.post(VLLM, {name: body[name] for name in ("query", "items", "label_token_ids")})
    assert [each["score"] for each in theirs["data"]] == [first for first, *_ in shares]
    assert [(each["index"], each["object"]) for each in theirs["data"]] == [(0, "score"), (1, "score")]


async def test_items_may_be_first_or_tokens(client, ids):
    label, tokens = [ids["a"]], (await client.post("/tokenize", {"prompt": "yes"}))["tokens"]
    scores = lambda **body: client.post(SCORE, {"label_token_ids": label} | body)
    (first,) = (await scores(query="no", items="yes", item_first=True))["scores"]
    assert (await scores(query="yes", items=["no"]))["scores"] == [first]
    plain = [ids[letter] for letter in "no"]
    assert (await scores(query=tokens, items=[plain]))["scores"] == [first]


async def test_special_tokens_come_first_and_may_be_left_out(demo_client):
    num_tokens = lambda body: body["usage"]["prompt_tokens"]
    for path, body in (
        (EMBEDDINGS, {"input": "Hello"}),
        (SCORE, {"query": "Hello", "items": [" you"], "label_token_ids": [3]}),
        (SCORE, {"query": "Hello", "items": [" you"], "label_token_ids": [3], "item_first": True}),
    ):
        with_special = num_tokens(await demo_client.post(path, body))
        assert num_tokens(await demo_client.post(path, body | {"add_special_tokens": False})) == with_special - 1
    labels = {"label_token_ids": [3, 4]}
    first = await demo_client.post(SCORE, {"query": " you", "items": "Hello", "item_first": True} | labels)
    assert first["scores"] == (await demo_client.post(SCORE, {"query": "Hello", "items": " you"} | labels))["scores"]


@pytest.mark.parametrize(
    "path, body, field, words",
    [
        (EMBEDDINGS, {}, "input", "is required"),
        (EMBEDDINGS, {"input": ""}, "input", "must hold at least one token"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input", "must hold at least one token"),
        (EMBEDDINGS, {"input": "a" * 4000}, "input", "you sent 4000 characters"),
        (EMBEDDINGS, {"input": [99999]}, "input", "token id 99999 is outside the vocabulary"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        (EMBEDDINGS, {"input": "a", "pooling": "cls"}, "pooling", "last"),
        (EMBEDDINGS, {"input": "a", "temperature": 1}, "temperature", "not a known field"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        (SCORE, {"query": "a", "items": "b"}, "label_token_ids", "is required"),
        (SCORE, {"query": "a", "items": [], "label_token_ids": [1]}, "items", "must hold at least one token"),
        (SCORE, {"query": "", "items": [""], "label_token_ids": [1]}, "items", "must hold at least one token"),
        (SCORE, {"query": "a", "items": "b", "label_token_ids": [1, 1]}, "label_token_ids", "different token ids"),
        (SCORE, {"query": "a", "items": "b", "label_token_ids": [-1]}, "label_token_ids", "token id"),
        (VLLM, {"query": "a", "items": "b", "label_token_ids": [99999]}, "label_token_ids", "99999"),
    ],
)  # fmt: skip
async def test_a_wrong_body_is_refused_by_field(client, path, body, field, words):
    error = (await client.post(path, body, 400))["error"]
    assert error["param"] == field and words in error["message"], error


async def test_an_unknown_model_is_not_found(client):
    await client.post(EMBEDDINGS, {"input": "a", "model": "other"}, 404)
