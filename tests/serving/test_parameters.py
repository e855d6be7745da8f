"""Every parameter over HTTP: its effect on both endpoints' answers, and errors that name invalid values."""

import asyncio
import json
from dataclasses import fields
from statistics import fmean

import openai
import pytest

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.engine.output import request_output
from jpaged.serving.protocol import ApiError, ChatRequest, CompletionRequest, parse
from jpaged.tokenizer import encode
from tests.models import EOS, VOCAB
from tests.serving.client import MAX_LEN, Client

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="session")
def ids(loaded):
    """The token of each letter."""
    return dict(zip(ALPHABET, encode(loaded.tokenizer, ALPHABET)))


@pytest.fixture
def letters(ids):
    """Fields with which the model says letters alone, so that a token is a character."""
    return {"allowed_token_ids": list(ids.values()), "max_tokens": 12}


def texts(body):
    return [choice["text"] for choice in body["choices"]]


def counts(body):
    return tuple(body["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total"))


def joined(chunks):
    """The texts of the choices of a streamed completion, by index."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


def generate(engine, prompt, params):
    """The result of the engine itself, offline."""
    request = engine.add("offline", prompt, params)
    while engine.has_work:
        engine.step()
    return request_output(request, engine.tokenizer).outputs


def close(logprob):
    """Results computed beside others, or from a cached prefix, may differ in their last bits."""
    return pytest.approx(logprob, rel=1e-5)


# Allowed tokens


async def test_a_bias_forces_a_token(client, ids):
    assert texts(await client.complete("Hello", logit_bias={str(ids["q"]): 100}, max_tokens=5)) == ["qqqqq"]


async def test_only_allowed_tokens_are_chosen(client, ids):
    allowed = {"allowed_token_ids": [ids["x"], ids["y"]], "max_tokens": 20}
    for drawn in ({}, {"temperature": 2.0, "seed": 1}):
        (text,) = texts(await client.complete("Hello", **allowed, **drawn))
        assert set(text) <= {"x", "y"} and len(text) == 20


async def test_bad_words_never_appear(client, letters):
    (plain,) = texts(await client.complete("Hello", **letters))
    for word in (plain[2], plain[2:4], plain[3:6]):
        (text,) = texts(await client.complete("Hello", **letters, bad_words=[word]))
        assert word in plain and word not in text
        assert text[: plain.index(word) + len(word) - 1] == plain[: plain.index(word) + len(word) - 1]


async def test_penalties_change_greedy_text(client, letters, ids):
    fields = letters | {"logit_bias": {str(ids["q"]): 6}}
    assert texts(await client.complete("q", **fields)) == ["q" * 12]
    # Once the output has it, another comes; in the end all that are likely have been.
    (present,) = texts(await client.complete("q", **fields, presence_penalty=2))
    assert present[0] == "q" != present[1] and present.endswith("qqqq")
    # The more the output has, the less.
    (frequent,) = texts(await client.complete("q", **fields, frequency_penalty=2))
    assert frequent[0] == "q" and "qq" not in frequent and len(set(frequent)) > len(set(present))
    # The prompt's count too.
    (repeated,) = texts(await client.complete("q", **fields, repetition_penalty=3.0))
    assert repeated[0] != "q" and texts(await client.complete("a", **fields, repetition_penalty=3.0))[0][0] == "q"


async def test_min_tokens_delays_the_end(client):
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 10}
    for least, length in ((0, 1), (5, 6)):
        body = await client.complete("Hello", **fields, min_tokens=least)
        assert body["usage"]["completion_tokens"] == length and body["choices"][0]["finish_reason"] == "stop"


async def test_special_tokens_in_the_text(client):
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 3, "ignore_eos": True}
    assert texts(await client.complete("Hello", **fields)) == [""]
    assert texts(await client.complete("Hello", **fields, skip_special_tokens=False)) == ["<|end|>" * 3]


async def test_stop_tokens(client, letters, ids):
    (plain,) = texts(await client.complete("Hello", **letters))
    (choice,) = (await client.complete("Hello", **letters, stop_token_ids=[ids[plain[4]]]))["choices"]
    assert (choice["text"], choice["stop_reason"]) == (plain[: plain.index(plain[4])], ids[plain[4]])


# Several outputs


async def test_choice_i_of_a_seed_is_what_seed_plus_i_gives(client, letters):
    fields = letters | {"temperature": 1.0}
    alone = [texts(await client.complete("Hello", **fields, seed=7 + i))[0] for i in range(3)]
    body = await client.complete("Hello", **fields, seed=7, n=3)
    assert texts(body) == alone and len(set(alone)) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert counts(body) == (5, 36, 41)
    chat = await client.chat("Hi", **fields, seed=7, n=2)
    ones = [await client.chat("Hi", **fields, seed=7 + i) for i in range(2)]
    assert [c["message"] for c in chat["choices"]] == [one["choices"][0]["message"] for one in ones]


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client, letters):
    fields = letters | {"temperature": 1.0, "seed": 7, "n": 2}
    both = await client.complete(["Hello", "other one"], **fields)
    alone = [texts(await client.complete(prompt, **fields)) for prompt in ("Hello", "other one")]
    assert texts(both) == alone[0] + alone[1] and [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 14 and both["usage"]["completion_tokens"] == 48
    chunks = await client.stream("/v1/completions", {"prompt": ["Hello", "other one"]} | fields)
    assert joined(chunks) == texts(both)


async def test_best_of_returns_those_with_the_highest_logprob_per_token(client, letters):
    fields = letters | {"temperature": 1.5, "seed": 3, "logprobs": 0, "logit_bias": {str(EOS): 2}}
    fields["allowed_token_ids"] = [*letters["allowed_token_ids"], EOS]
    all_of_them = (await client.complete("Hello", **fields, n=5))["choices"]
    ranked = sorted(all_of_them, key=lambda choice: -fmean(choice["logprobs"]["token_logprobs"]))
    assert len({len(choice["text"]) for choice in ranked}) > 1 and ranked != all_of_them
    best = await client.complete("Hello", **fields, n=2, best_of=5)
    assert texts(best) == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in ranked[:2])
    chunks = await client.stream("/v1/completions", {"prompt": "Hello", "best_of": 5, "n": 2} | fields)
    assert joined(chunks) == texts(best)


async def test_chunks_of_several_chat_choices(client, letters):
    fields = letters | {"temperature": 1.0, "seed": 7, "n": 2}
    plain = await client.chat("Hi", **fields)
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    parts = [chunk["choices"][0] for chunk in await client.stream("/v1/chat/completions", body)]
    assert [(part["index"], part["delta"].get("role")) for part in parts[:2]] == [(0, "assistant"), (1, "assistant")]
    for index in range(2):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["delta"]["content"] for part in mine) == plain["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"] and len(mine) > 2


# Beam search

BEAMS = [
    {"best_of": 4, "n": 2},
    {"n": 3, "length_penalty": -3.0},
    {"n": 3, "length_penalty": 5.0, "early_stopping": "never"},
    {"n": 4, "early_stopping": True},
]


@pytest.fixture
def ending(letters):
    """Fields with which beams end at different lengths."""
    return {"logit_bias": {str(EOS): 0.5}, "allowed_token_ids": [*letters["allowed_token_ids"], EOS], "max_tokens": 8}


async def test_beams_are_the_engines_own(loaded, ending):
    offline = []
    for given in BEAMS:
        named = {"beam_width": given.get("best_of", given["n"])} | {k: v for k, v in given.items() if k != "best_of"}
        found = generate(loaded.engine, encode(loaded.tokenizer, "Hello"), BeamSearchParams(**named, **ending))
        offline.append([(output.text, output.finish_reason) for output in found])
    assert len({json.dumps(found[:2]) for found in offline}) >= 3  # they differ by more than how many come back
    async with Client(*loaded) as client:
        for given, expected in zip(BEAMS, offline):
            fields = {"prompt": "Hello", "use_beam_search": True} | given | ending
            for sampling in ({}, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}):
                body = await client.post("/v1/completions", fields | sampling)
                assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == expected
            assert joined(await client.stream("/v1/completions", fields)) == texts(body)


async def test_beams_in_a_chat(client, ending):
    fields = ending | {"use_beam_search": True, "n": 2, "best_of": 3, "logprobs": True}
    body = await client.chat("Hi", **fields)
    found = [c["message"]["content"] for c in body["choices"]]
    assert len(set(found)) == 2
    scores = [fmean(token["logprob"] for token in c["logprobs"]["content"]) for c in body["choices"]]
    assert scores == sorted(scores, reverse=True)  # a length penalty of 1 is the mean
    (greedy,) = (await client.chat("Hi", **ending, logprobs=True))["choices"]
    assert greedy["message"]["content"] not in found  # there was something to find


async def test_stop_strings_end_beams(client, letters):
    fields = letters | {"use_beam_search": True, "n": 3}
    plain = texts(await client.complete("Hello", **fields))
    stop = plain[0][-2:]
    body = await client.complete("Hello", **fields, stop=stop)
    best = body["choices"][0]
    assert (best["finish_reason"], best["stop_reason"]) == ("stop", stop)
    assert not any(stop in text for text in texts(body))
    kept = await client.complete("Hello", **fields, stop=stop, include_stop_str_in_output=True)
    assert [text.removesuffix(stop) for text in texts(kept)] == texts(body) and texts(kept)[0].endswith(stop)


async def test_what_a_beam_may_not_say_has_a_logprob_that_json_can_hold(client, ids):
    fields = {"allowed_token_ids": [ids["a"], ids["b"]], "use_beam_search": True, "logprobs": 5, "max_tokens": 2}
    (choice,) = (await client.complete("Hello", **fields))["choices"]
    assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999.0


# Logprobs and the prompt


async def test_logprobs_are_of_the_best_tokens_and_the_chosen(loaded, letters):
    params = SamplingParams(temperature=0, logprobs=3, **letters)
    offline = generate(loaded.engine, encode(loaded.tokenizer, "Hello"), params)[0]
    async with Client(*loaded) as client:
        (choice,) = (await client.complete("Hello", **letters, logprobs=3))["choices"]
        (alone,) = (await client.complete("Hello", **letters, logprobs=0))["choices"]
    expected = []
    for entry in offline.logprobs:  # each token's own first; of several with one text, the first
        logprobs = {}
        for logprob in entry.values():
            logprobs.setdefault(logprob.decoded_token, close(logprob.logprob))
        expected.append(logprobs)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list(offline.text) and logprobs["text_offset"] == list(range(12))
    assert logprobs["top_logprobs"] == expected
    chosen = [{token: close(own)} for token, own in zip(logprobs["tokens"], logprobs["token_logprobs"])]
    assert alone["logprobs"]["top_logprobs"] == chosen
    assert all(best | own == best for own, best in zip(chosen, logprobs["top_logprobs"]))


async def test_chat_lists_exactly_as_many_as_were_asked_for(client, letters):
    for count in (0, 4, 20):
        (choice,) = (await client.chat("Hi", **letters, logprobs=True, top_logprobs=count))["choices"]
        content = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == choice["message"]["content"] and len(content) == 12
        for token in content:
            assert token["bytes"] == list(token["token"].encode())
            best = [other["logprob"] for other in token["top_logprobs"]]
            assert len(best) == count and best == sorted(best, reverse=True)
            assert token["logprob"] <= max(best, default=0)


async def test_echo_puts_the_prompt_first(client, letters):
    (plain,) = (await client.complete("Hello", **letters, logprobs=2))["choices"]
    (choice,) = (await client.complete("Hello", **letters, logprobs=2, echo=True))["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hello" + plain["text"] == "".join(logprobs["tokens"])
    assert logprobs["text_offset"] == list(range(17))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][5:] == [close(logprob) for logprob in plain["logprobs"]["token_logprobs"]]
    scored = await client.complete(choice["text"], logprobs=2, echo=True, max_tokens=0)
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == list(map(close, logprobs["token_logprobs"][1:]))
    assert (await client.complete("Hello", **letters, echo=True))["choices"][0]["logprobs"] is None
    tokens = [*encode(client.service.tokenizer, "Hello"), EOS]
    for given, shown in ({}, "Hello"), ({"skip_special_tokens": False}, "Hello<|end|>"):
        (text,) = texts(await client.complete(tokens, **letters, **given, echo=True))
        assert text[:-12] == shown


async def test_echo_comes_once_in_each_choice_of_a_stream(client, letters):
    fields = letters | {"echo": True, "n": 2, "seed": 1, "temperature": 1.0, "logprobs": 1}
    plain = await client.complete("Hello", **fields)
    chunks = [chunk["choices"][0] for chunk in await client.stream("/v1/completions", {"prompt": "Hello"} | fields)]
    for choice in plain["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert mine[0]["text"].startswith("Hello") and 1 < len(mine) <= 12
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [x for chunk in mine for x in chunk["logprobs"][name]] == choice["logprobs"][name]


async def test_an_echo_and_nothing_else(client):
    body = await client.complete("Hello", echo=True, max_tokens=0, logprobs=1, n=2)
    said = [(choice["text"], choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]]
    assert said == [("Hello", "length", None)] * 2
    assert counts(body) == (5, 0, 5)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    streamed = await client.stream("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 0})
    assert joined(streamed) == ["Hello"] and streamed[-1]["choices"][0]["finish_reason"] == "length"


async def test_prompt_logprobs_are_those_of_the_echo(client):
    prompts = ["Hello", "and another"]
    echoed = await client.complete(prompts, echo=True, max_tokens=0, logprobs=4, prompt_logprobs=2)
    listed = await client.complete(prompts, prompt_logprobs=4, max_tokens=1)
    for prompt, echo, choice in zip(prompts, echoed["choices"], listed["choices"]):
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(prompt) - 1
        logprobs = echo["logprobs"]
        echoes = list(zip(prompt, logprobs["token_logprobs"], logprobs["top_logprobs"], echo["prompt_logprobs"]))
        for (letter, logprob, best, short), entry in zip(echoes[1:], rest):
            own, *others = entry.values()
            assert own == {"logprob": close(logprob), "rank": own["rank"], "decoded_token": letter}
            assert {other["decoded_token"] for other in entry.values()} == best.keys()
            assert [other["rank"] for other in others] == [rank for rank in (1, 2, 3, 4) if rank != own["rank"]]
            assert all((other["logprob"] > own["logprob"]) == (other["rank"] < own["rank"]) for other in others)
            assert list(short) == list(entry)[: 2 if own["rank"] <= 2 else 3]
    (few,) = (await client.complete("Hello", echo=True, max_tokens=0, logprobs=1, prompt_logprobs=4))["choices"]
    assert list(map(list, few["prompt_logprobs"][1:])) == list(map(list, listed["choices"][0]["prompt_logprobs"][1:]))
    assert max(len(best) for best in few["logprobs"]["top_logprobs"][1:]) == 2
    chat = await client.chat("Hi", prompt_logprobs=0, max_tokens=1)
    assert chat["prompt_logprobs"][0] is None and "prompt_logprobs" not in chat["choices"][0]
    said = [next(iter(entry.values()))["decoded_token"] for entry in chat["prompt_logprobs"][1:]]
    assert "".join(said) == "Hi<|end|><|assistant|>" and {len(entry) for entry in chat["prompt_logprobs"][1:]} == {1}


async def test_a_truncated_prompt_is_its_end(client, letters):
    whole = texts(await client.complete("world", **letters))
    body = await client.complete("Hello, world", **letters, truncate_prompt_tokens=5, echo=True)
    assert texts(body) == ["world" + whole[0]] and body["usage"]["prompt_tokens"] == 5
    body = await client.complete("a" * 1000, **letters, truncate_prompt_tokens=-1)
    assert counts(body) == (MAX_LEN - 12, 12, MAX_LEN)
    assert (await client.chat("Hello" * 99, **letters, truncate_prompt_tokens=7))["usage"]["prompt_tokens"] == 7


# Identity: the cache and the queue


async def test_only_a_salts_own_requests_share_its_prefix(client):
    async def hits(**fields):
        before = client.engine.scheduler.prefix_hits
        await client.complete("a prefix of some length, shared", max_tokens=1, **fields)
        return client.engine.scheduler.prefix_hits - before

    await client.reset_prefix_cache()
    assert [await hits(cache_salt=salt) for salt in ("x", "x", "y")] == [0, 24, 0]
    assert [await hits(), await hits(), await hits(cache_salt="x")] == [0, 24, 24]
    await client.reset_prefix_cache()
    assert await hits() == 0


async def test_a_key_guards_the_cache(loaded):
    async with Client(*loaded, api_keys=("secret",)) as client:
        async with client.session.post("/reset_prefix_cache") as response:
            assert response.status == 401
        client.session.headers["Authorization"] = "Bearer secret"
        await client.reset_prefix_cache()


async def test_priority_decides_under_its_policy(client, monkeypatch):
    error = (await client.complete("a", 400, priority=1))["error"]
    assert error["param"] == "priority" and "'fcfs'" in error["message"]
    await client.complete("a", priority=0, max_tokens=1)
    monkeypatch.setattr(client.engine.scheduler, "policy", "priority")
    async with client.held():
        tasks = [asyncio.create_task(client.complete("a", priority=p, max_tokens=1)) for p in (3, -2)]
        while len(client.engine.scheduler.requests) < 2:
            await asyncio.sleep(0.005)
        assert [request.rank[0] for request in client.engine.scheduler.waiting] == [-2, 3]
    await asyncio.gather(*tasks)


# Clients, and refusals


async def test_the_openai_client_sends_them_all(client, letters, ids):
    url = str(client.server.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        completion = await api.completions.create(
            model="tiny", prompt=["Hello", "other"], n=2, best_of=3, logprobs=5, echo=True, seed=1, max_tokens=6,
            presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={str(ids["q"]): 1}, stop=["zzz"],
            extra_body={"allowed_token_ids": letters["allowed_token_ids"], "min_tokens": 2, "repetition_penalty": 1.1},
        )  # fmt: skip
        assert [choice.text[:5] for choice in completion.choices] == ["Hello", "Hello", "other", "other"]
        assert completion.choices[3].logprobs.top_logprobs[0] is None and completion.usage.completion_tokens == 24
        messages = [{"role": "user", "content": "Hi"}]
        beams = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True} | letters
        chat = await api.chat.completions.create(
            model="tiny", messages=messages, n=3, logprobs=True, top_logprobs=2, extra_body=beams
        )
        assert len({choice.message.content for choice in chat.choices}) == 3
        assert {len(token.top_logprobs) for token in chat.choices[0].logprobs.content} == {2}
        extra = {"prompt_logprobs": 1}
        chat = await api.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=extra)
        assert chat.prompt_logprobs[0] is None
        with pytest.raises(openai.BadRequestError, match="n: 17 sequences exceed the 16 of a step") as error:
            await api.chat.completions.create(model="tiny", messages=messages, n=17)
        assert error.value.param == "n"


BEAM = {"use_beam_search": True}
REFUSED = [
    ({"n": 0}, "n", "at least 1, not 0"),
    ({"n": 1.5}, "n", "valid integer"),
    ({"n": 17}, "n", "17 sequences exceed the 16 of a step"),
    ({"best_of": 0}, "best_of", "at least 1"),
    ({"n": 3, "best_of": 2}, "best_of", "2 is below n (3)"),
    ({"best_of": 17}, "best_of", "17 sequences exceed the 16 of a step"),
    ({"n": 8, "max_tokens": 10**6}, "max_tokens", "maximum context length"),
    ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2, not 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty", "between -2 and 2, not -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0, not 0"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "numbers by token id"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", f"{VOCAB} is outside the vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"{VOCAB} is outside the vocabulary"),
    ({"bad_words": [""]}, "bad_words", "1 to 256 characters"),
    ({"min_tokens": -1}, "min_tokens", "at least 0, not -1"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"min_p": 2}, "min_p", "between 0 and 1, not 2"),
    ({"top_k": -2}, "top_k", "not -2"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "absent with stream, not 1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1, not 0"),
    ({"cache_salt": ""}, "cache_salt", "a non-empty text, not ''"),
    ({"priority": "high"}, "priority", "valid integer"),
    ({"length_penalty": 0.5}, "length_penalty", "must be absent or 1 without use_beam_search, not 0.5"),
    ({"early_stopping": True}, "early_stopping", "must be absent or False without use_beam_search, not True"),
    ({"early_stopping": "soon"} | BEAM, "early_stopping", 'true, false or "never"'),
    ({"temperature": 0.7} | BEAM, "temperature", "must be absent or 0 with use_beam_search, not 0.7"),
    ({"top_p": 0.9} | BEAM, "top_p", "must be absent or 1 with use_beam_search, not 0.9"),
    ({"top_k": 4} | BEAM, "top_k", "must be absent or 0 or -1 with use_beam_search, not 4"),
    ({"min_p": 0.1} | BEAM, "min_p", "must be absent or 0 with use_beam_search, not 0.1"),
    ({"seed": 0} | BEAM, "seed", "must be absent with use_beam_search, not 0"),
    ({"best_of": 65} | BEAM, "best_of", "between 1 and 64, not 65"),
    ({"n": 65} | BEAM, "n", "between 1 and 64, not 65"),
    ({"n": 17} | BEAM, "n", "17 sequences exceed"),
    ({"n": 4, "best_of": 3} | BEAM, "n", "4 exceeds best_of (3)"),
]  # fmt: skip


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_what_cannot_be_is_refused_by_name(client, path):
    one = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    for given, param, words in REFUSED:
        error = (await client.post(f"/v1/{path}", one | given, 400))["error"]
        assert error["param"] == param and error["message"].startswith(f"{param}: "), (given, error)
        assert words in error["message"], (given, error)


@pytest.mark.parametrize(
    "kind, given, param, words",
    [
        (CompletionRequest, {"logprobs": 21}, "logprobs", "between 0 and 20"),
        (CompletionRequest, {"logprobs": True}, "logprobs", "valid integer"),
        (CompletionRequest, {"logprobs": 2, "echo": True, "prompt_logprobs": -1}, "prompt_logprobs", "not -1"),
        (CompletionRequest, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CompletionRequest, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "1 exceeds max_tokens (0)"),
        (CompletionRequest, {"top_logprobs": 1}, "top_logprobs", "not a known field"),
        (CompletionRequest, {"min_tokens": 17}, "min_tokens", "17 exceeds max_tokens (16)"),
        (ChatRequest, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        (ChatRequest, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "between 0 and 20"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs", "2 needs logprobs: true"),
        (ChatRequest, {"logprobs": 3}, "logprobs", "valid boolean"),
        (ChatRequest, {"echo": True}, "echo", "Input should be False"),
        (ChatRequest, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (ChatRequest, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "3 exceeds max_completion_tokens"),
    ],
)  # fmt: skip
def test_each_endpoint_has_its_own_names(kind, given, param, words):
    with pytest.raises(ApiError, match=f"^{param}: ") as error:
        request = parse(kind, json.dumps(MINIMAL[kind] | given).encode())
        with request.rename_error_fields():
            request.params({})
    assert error.value.param == param and words in str(error.value)


MINIMAL = {CompletionRequest: {"prompt": "a"}, ChatRequest: {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize("kind", MINIMAL)
def test_every_parameter_of_the_engine_is_a_field(kind):
    known = {field.name for params in (SamplingParams, BeamSearchParams) for field in fields(params)}
    assert known - {"beam_width"} <= kind.model_fields.keys()


@pytest.mark.parametrize("kind", MINIMAL)
def test_null_leaves_a_field_open(kind):
    request = parse(kind, json.dumps(dict.fromkeys(kind.model_fields) | MINIMAL[kind]).encode())
    limit = 16 if kind is CompletionRequest else None
    assert request.params({"temperature": 0.5}) == SamplingParams(temperature=0.5, max_tokens=limit)
    beams = request.model_copy(update={"use_beam_search": True})
    assert beams.params({"temperature": 0.5}) == BeamSearchParams(beam_width=1, n=1, max_tokens=limit)
