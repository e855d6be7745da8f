"""The server over HTTP: answers, streams, errors, concurrency, clients that go away."""

import asyncio
import io
import json
import random

import aiohttp
import openai
import pytest

from jpaged.core.params import InvalidParameter
from jpaged.serving.protocol import CompletionRequest, parse
from jpaged.serving.service import SERVICE
from jpaged.tokenizer import encode
from tests.models import SPECIAL, VOCAB
from tests.serving.client import MAX_LEN, Client, build


async def test_a_completion(client):
    body = await client.complete("Hello", model="tiny", max_tokens=8, logprobs=0)
    (choice,) = body["choices"]
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    assert choice["index"] == 0 and choice["finish_reason"] in ("length", "stop")
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["total_tokens"] == 5 + body["usage"]["completion_tokens"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == body["usage"]["completion_tokens"]
    assert all(p <= 0 for p in logprobs["token_logprobs"]) and logprobs["text_offset"][0] == 0


async def test_completions_default_to_16_tokens(client):
    assert (await client.complete("Hello", ignore_eos=True))["usage"]["completion_tokens"] == 16


async def test_every_form_of_prompt(client, loaded):
    ids = encode(loaded[1], "Hello")
    one = (await client.complete("Hello"))["choices"][0]["text"]
    two = (await client.complete("other"))["choices"][0]["text"]
    for prompt in (ids, ["Hello"], [ids]):
        assert [c["text"] for c in (await client.complete(prompt))["choices"]] == [one]
    both = await client.complete([ids, encode(loaded[1], "other")])
    assert [(c["index"], c["text"]) for c in both["choices"]] == [(0, one), (1, two)]
    assert both["usage"]["prompt_tokens"] == 10


async def test_a_chat_plain_and_streamed(client):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0, "logprobs": True}
    await client.reset_prefix_cache()
    plain = await client.post("/v1/chat/completions", body)
    message = plain["choices"][0]["message"]
    assert plain["object"] == "chat.completion" and message["role"] == "assistant"
    await client.reset_prefix_cache()  # results from a cached prefix may differ in their last bits
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


async def test_parts_of_text_are_one_message(client):
    whole = {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 6, "temperature": 0}
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    split = whole | {"messages": [{"role": "user", "content": parts}]}
    answers = [(await client.post("/v1/chat/completions", body))["choices"] for body in (whole, split)]
    assert answers[0] == answers[1]


async def test_a_streamed_completion_of_two_prompts(client):
    body = {"prompt": ["Hello", "other"], "max_tokens": 20, "temperature": 0}
    plain = await client.post("/v1/completions", body)
    chunks = await client.stream("/v1/completions", body)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [c["text"] for c in plain["choices"]]


async def test_stop_strings_plain_and_streamed(client):
    text = (await client.complete("Hello", max_tokens=40, ignore_eos=True))["choices"][0]["text"]
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    expected = text[: text.find(stop)]
    fields = {"max_tokens": 40, "ignore_eos": True, "stop": [stop, "never in it"]}
    (choice,) = (await client.complete("Hello", **fields))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    chunks = await client.stream("/v1/completions", {"prompt": "Hello", "temperature": 0} | fields)
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected
    kept = await client.complete("Hello", **fields, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == expected + stop


async def test_a_seed_repeats(client):
    fields = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
    texts = [(await client.complete("Hello", **fields))["choices"][0]["text"] for _ in range(2)]
    other = (await client.complete("Hello", **fields | {"seed": 12}))["choices"][0]["text"]
    assert texts[0] == texts[1] != other


async def test_what_a_request_leaves_open_comes_from_the_models_generation_config(loaded):
    engine, tokenizer, _ = loaded
    async with Client(engine, tokenizer, {"temperature": 0, "top_k": 3}) as client:
        body = {"prompt": "Hello", "max_tokens": 20}
        greedy = [(await client.post("/v1/completions", body | {"seed": i}))["choices"] for i in range(2)]
        assert greedy[0] == greedy[1] == (await client.complete("Hello", max_tokens=20))["choices"]
        hot = await client.post("/v1/completions", body | {"temperature": 1.5, "top_k": 0, "seed": 0})
        assert hot["choices"] != greedy[0]


async def test_the_openai_client(client):
    async with openai.AsyncOpenAI(base_url=str(client.server.make_url("/v1")), api_key="none", max_retries=0) as api:
        completion = await api.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0)
        assert completion.choices[0].finish_reason in ("length", "stop") and completion.usage.prompt_tokens == 5
        messages = [{"role": "user", "content": "Hi"}]
        stream = await api.chat.completions.create(model="tiny", messages=messages, max_tokens=8, seed=1, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        whole = await api.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, seed=1)
        assert "".join(pieces) == whole.choices[0].message.content
        assert [m.id for m in (await api.models.list()).data] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
            await api.completions.create(model="gpt-5", prompt="Hello")
        with pytest.raises(openai.BadRequestError, match="temperature") as error:
            await api.completions.create(model="tiny", prompt="Hello", temperature=-1)
        assert error.value.param == "temperature"


LONG = "a" * MAX_LEN
ENDLESS = "a" * (MAX_LEN * max(map(len, SPECIAL)) + 1)  # too long even if it were made of the longest tokens


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
async def test_bad_completions_are_refused_by_name(client, body, status, param, words):
    error = (await client.post("/v1/completions", body, status))["error"]
    assert error["param"] == param and words in error["message"] and isinstance(error["code"], str)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    await client.complete("still", max_tokens=1)


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
def test_an_empty_prompt_is_refused_even_if_a_tokenizer_would_add_to_it(prompt):
    request = parse(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    with pytest.raises(InvalidParameter, match="prompt: must hold at least one token"):
        request.prompts()


def called(arguments):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages", "role"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": LONG}]}, "prompt", "maximum context length"),
        ({"messages": [{"role": "user", "content": ENDLESS}]}, "messages", "characters, more than"),
        ({"tools": [{}]}, "tools", "0.type: Field required"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "0.function.name: String should match",
        ),
        (called('{"city": "Rome"'), "messages", "arguments of tool call 'a': Invalid JSON"),
        (called(r'{"city": "\ud83e"}'), "messages", "arguments of tool call 'a': Invalid JSON"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", "only allowed with tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "differs from max_tokens"),
    ],
)
async def test_bad_chats_are_refused_by_name(client, fields, param, words):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    error = (await client.post("/v1/chat/completions", body, 400))["error"]
    assert error["param"] == param and words in error["message"]


async def test_a_refused_prompt_takes_its_siblings_with_it(client):
    await client.complete(["fine", LONG], 400, max_tokens=100)
    await client.idle()


async def test_a_body_of_100_mb(client):
    async def body():
        for _ in range(100):
            yield b" " * 2**20

    try:
        async with client.session.post("/v1/completions", data=body()) as response:
            assert response.status == 413
            assert str(2**20 + 16 * MAX_LEN) in (await response.json())["error"]["message"]
    except (
        aiohttp.ClientConnectionError
    ):  # it may hang up on a sender that goes on; the sized body below gets an answer
        pass
    async with client.session.post("/v1/completions", data=io.BytesIO(b" " * (100 * 2**20))) as response:
        assert response.status == 413
    await client.complete("still", max_tokens=1)


async def test_health_models_and_unknown_paths(client):
    async with client.session.get("/health") as response:
        assert response.status == 200
    async with client.session.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == MAX_LEN
    async with client.session.get("/v1/nothing") as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"
    async with client.session.get("/v1/completions") as response:
        assert response.status == 405


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(client, stream):
    body = {"prompt": "Hello", "max_tokens": 250, "ignore_eos": True, "stream": stream}
    async with client.held():
        task = asyncio.create_task(client.session.post("/v1/completions", json=body))
        await client.running()
        if stream:
            (await task).close()
        else:
            task.cancel()
        await client.idle()


async def test_a_key_guards_v1_but_not_health(loaded):
    async with Client(*loaded, api_keys=("secret",)) as client:
        assert (await client.complete("a", 401))["error"]["type"] == "AuthenticationError"
        async with client.session.get("/health") as response:
            assert response.status == 200
        client.session.headers["Authorization"] = "Bearer secret"
        await client.complete("a", max_tokens=1)


async def test_draining_refuses_what_comes_and_finishes_what_runs(client):
    async with client.held():
        task = asyncio.create_task(client.complete("Hello", max_tokens=200, ignore_eos=True))
        await client.running()
        client.service.draining = True
        assert "shutting down" in (await client.complete("late", 503))["error"]["message"]
        async with client.session.get("/health") as response:
            assert response.status == 503
    assert (await task)["usage"]["completion_tokens"] == 200
    client.service.draining = False


async def test_an_engine_that_fails_says_so_to_everybody(tiny):
    engine, *rest = build(tiny, max_num_seqs=2, max_num_batched_tokens=16)
    async with Client(engine, *rest) as client:
        dispatch, calls = engine.runner.dispatch, []

        def failing(plan, make_masks):
            calls.append(plan)
            if len(calls) > 3:
                raise RuntimeError("out of luck")
            return dispatch(plan, make_masks)

        engine.runner.dispatch = failing
        chunks = await client.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 50, "ignore_eos": True})
        assert chunks[-1]["error"]["code"] == "service_unavailable" and "out of luck" in chunks[-1]["error"]["message"]
        await client.complete("a", 503)
        async with client.session.get("/health") as response:
            assert response.status == 503


TRAFFIC = [
    pytest.param({}, id="plenty", marks=pytest.mark.deep),
    pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16", marks=pytest.mark.deep),
    pytest.param({"enable_prefix_caching": False}, id="no prefix cache", marks=pytest.mark.deep),
    pytest.param({"num_gpu_blocks_override": 40}, id="preemption"),
    pytest.param(
        {"num_gpu_blocks_override": 40, "enable_prefix_caching": False}, id="preemption, no prefix cache",
        marks=pytest.mark.deep,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def traffic():
    """64 requests of mixed lengths, some with a common beginning, and the result of each alone."""
    rng = random.Random(5)
    common = "The quick brown fox jumps over the lazy dog. "
    prompts = [
        (common if rng.random() < 0.4 else "") + "".join(rng.choices("abc xyz", k=rng.randint(1, 120)))
        for _ in range(64)
    ]  # fmt: skip
    lengths = [rng.randint(1, 80) for _ in prompts]
    return prompts, lengths


@pytest.fixture(scope="module")
def alone(loaded, traffic):
    async def one_by_one():
        async with Client(*loaded) as client:
            return [answer(await client.complete(p, max_tokens=n, logprobs=0)) for p, n in zip(*traffic)]

    return asyncio.run(one_by_one())


def answer(body):
    (choice,) = body["choices"]
    return choice["text"], choice["logprobs"]["tokens"]


@pytest.mark.parametrize("config", TRAFFIC)
async def test_64_requests_at_once_give_what_each_gives_alone(tiny, traffic, alone, config):
    engine, *rest = build(tiny, **config)
    async with Client(engine, *rest) as client:
        bodies = await asyncio.gather(
            *(client.complete(prompt, max_tokens=length, logprobs=0) for prompt, length in zip(*traffic))
        )
        await client.idle()
    assert [answer(body) for body in bodies] == alone
    if "num_gpu_blocks_override" in config:
        assert engine.scheduler.num_preemptions > 10
    assert client.app[SERVICE].in_flight == set()
