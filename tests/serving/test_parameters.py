"""Every parameter over HTTP: its effect on the responses of both endpoints, and errors that name invalid values.

Further effects: test_stop.py, test_choices.py, test_beam_search.py, test_logprobs.py, test_completions.py (seed,
truncate_prompt_tokens), test_prefix_cache.py (cache_salt), test_structured_outputs.py.
"""

import asyncio
import copy
import json
from dataclasses import fields

import pytest

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.serving.errors import ApiError
from jpaged.serving.parse import parse
from jpaged.serving.protocol import ChatRequest, CompletionRequest
from tests.serving.client import Api, Client, texts
from tests.support.models import VOCAB


async def test_logit_bias_of_100_forces_a_token(client, ids):
    assert texts(await client.complete("Hello", logit_bias={str(ids["q"]): 100}, max_tokens=5)) == ["qqqqq"]


async def test_allowed_token_ids_are_the_only_ones_generated(client, ids):
    allowed = {"allowed_token_ids": [ids["x"], ids["y"]], "max_tokens": 20}
    for drawn in ({}, {"temperature": 2.0, "seed": 1}):
        (text,) = texts(await client.complete("Hello", **allowed, **drawn))
        assert set(text) <= {"x", "y"} and len(text) == 20


async def test_bad_words_are_never_generated(client, letters):
    (plain,) = texts(await client.complete("Hello", **letters))
    for word in (plain[2], plain[2:4], plain[3:6]):
        (text,) = texts(await client.complete("Hello", **letters, bad_words=[word]))
        assert word in plain and word not in text
        assert text[: plain.index(word) + len(word) - 1] == plain[: plain.index(word) + len(word) - 1]


async def test_penalties_change_greedy_text(client, letters, ids):
    fields = letters | {"logit_bias": {str(ids["q"]): 6}}
    assert texts(await client.complete("q", **fields)) == ["q" * 12]
    # A token of the output is penalized once; in the end all likely tokens are.
    (present,) = texts(await client.complete("q", **fields, presence_penalty=2))
    assert present[0] == "q" != present[1] and present.endswith("qqqq")
    # The penalty grows with the count.
    (frequent,) = texts(await client.complete("q", **fields, frequency_penalty=2))
    assert frequent[0] == "q" and "qq" not in frequent and len(set(frequent)) > len(set(present))
    # Tokens of the prompt are penalized as well.
    (repeated,) = texts(await client.complete("q", **fields, repetition_penalty=3.0))
    assert repeated[0] != "q" and texts(await client.complete("a", **fields, repetition_penalty=3.0))[0][0] == "q"


async def test_top_k_min_p_and_repetition_penalty_change_sampled_text(api):
    async def sample(**extra_body):
        fields = {
            "temperature": 1.5,
            "seed": 3,
            "max_tokens": 30,
            "extra_body": extra_body | {"return_token_ids": True},
        }
        return (await api.complete("Once upon a time", **fields)).choices[0]

    greedy = (await api.complete("Once upon a time", max_tokens=30)).choices[0].text
    free = await sample()
    assert free.text != greedy
    assert (await sample(top_k=1)).text == (await sample(min_p=1.0)).text == greedy
    unlike = await sample(repetition_penalty=1e4, top_k=1)
    assert len({*unlike.token_ids}) == len(unlike.token_ids)
    stopped = await sample(stop_token_ids=[free.token_ids[7]])
    at = free.token_ids.index(free.token_ids[7])
    assert stopped.token_ids == free.token_ids[: at + 1] and stopped.stop_reason == free.token_ids[7]


async def test_priority_orders_the_queue_only_under_its_policy(client, monkeypatch):
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


async def test_truncation_side_chooses_the_end_of_the_prompt_that_is_kept(client, letters):
    for side, kept in ((None, "lo"), ("left", "lo"), ("right", "He")):
        fields = letters | {"truncate_prompt_tokens": 2, "truncation_side": side, "echo": True}
        (text,) = texts(await client.complete("Hello", **fields))
        assert text[:-12] == kept


async def test_detokenize_false_returns_token_ids_without_text(client, letters):
    fields = letters | {"return_token_ids": True, "n": 2}
    plain, bare = [await client.complete("Hello", **fields, detokenize=each) for each in (True, False)]
    assert texts(bare) == ["", ""] and len(texts(plain)[0]) == 12
    ids = [[choice["token_ids"] for choice in body["choices"]] for body in (plain, bare)]
    assert ids[0] == ids[1]


async def test_openai_client_combines_many_parameters(client, letters, ids):
    async with Api(client.url) as openai_api:
        api = openai_api.client
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
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20 (max_logprobs), not 21"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "at least 0, -1 for the whole vocabulary, or none, not -2"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "absent with stream, not 1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1, not 0"),
    ({"logprob_token_ids": [0], "use_beam_search": True}, "logprob_token_ids", "must be absent with use_beam_search"),
    ({"truncation_side": "middle"}, "truncation_side", "\"left\" or \"right\", not 'middle'"),
    ({"detokenize": False, "stop": "a"}, "stop", "needs detokenize"),
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
async def test_invalid_value_is_rejected_by_its_field(client, path):
    one = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    for given, param, words in REFUSED:
        error = (await client.post(f"/v1/{path}", one | given, 400))["error"]
        assert error["param"] == param and error["message"].startswith(f"{param}: "), (given, error)
        assert words in error["message"], (given, error)


@pytest.mark.parametrize(
    "kind, given, param, words",
    [
        (CompletionRequest, {"logprobs": -2}, "logprobs", "at least 0"),
        (CompletionRequest, {"logprobs": True}, "logprobs", "valid integer"),
        (CompletionRequest, {"logprobs": 2, "echo": True, "prompt_logprobs": -2}, "prompt_logprobs", "not -2"),
        (CompletionRequest, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CompletionRequest, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "1 exceeds max_tokens (0)"),
        (CompletionRequest, {"top_logprobs": 1}, "top_logprobs", "not a known field"),
        (CompletionRequest, {"min_tokens": 17}, "min_tokens", "17 exceeds max_tokens (16)"),
        (CompletionRequest, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (CompletionRequest, {"logprobs": 0, "logprob_token_ids": []}, "logprob_token_ids", "1 to 128 different token"),
        (CompletionRequest, {"logprobs": 0, "logprob_token_ids": [0], "echo": True}, "logprob_token_ids", "with echo"),
        (CompletionRequest, {"regex": "a", "ebnf": "root ::= a"}, "regex", "a second constraint beside ebnf"),
        (CompletionRequest, {"ebnf": "start: A"}, "ebnf", "must have rules such as"),
        (CompletionRequest, {"regex": "a", "bad_words": ["a"]}, "bad_words", "can't be combined with regex"),
        (ChatRequest, {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "at least 0"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs", "2 needs logprobs: true"),
        (ChatRequest, {"logprobs": 3}, "logprobs", "valid boolean"),
        (ChatRequest, {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (ChatRequest, {"max_completion_tokens": 2, "min_tokens": 3}, "min_tokens", "3 exceeds max_completion_tokens"),
    ],
)  # fmt: skip
def test_error_has_the_field_name_of_its_endpoint(kind, given, param, words):
    with pytest.raises(ApiError, match=f"^{param}: ") as error:
        request = parse(kind, json.dumps(MINIMAL[kind] | given).encode())
        with request.rename_error_fields():
            request.params({})
    assert error.value.param == param and words in str(error.value)


MINIMAL = {CompletionRequest: {"prompt": "a"}, ChatRequest: {"messages": [{"role": "user", "content": "a"}]}}


@pytest.mark.parametrize("kind", MINIMAL)
def test_every_parameter_of_the_engine_is_a_field(kind):
    known = {field.name for params in (SamplingParams, BeamSearchParams) for field in fields(params)}
    assert known - {"beam_width", "pooling"} <= kind.model_fields.keys(), "vectors have a route of their own"


@pytest.mark.parametrize("kind", MINIMAL)
def test_null_is_the_same_as_an_absent_field(kind):
    request = parse(kind, json.dumps(dict.fromkeys(kind.model_fields) | MINIMAL[kind]).encode())
    limit = 16 if kind is CompletionRequest else None
    assert request.params({"temperature": 0.5}) == SamplingParams(temperature=0.5, max_tokens=limit)
    beams = request.model_copy(update={"use_beam_search": True})
    assert beams.params({"temperature": 0.5}) == BeamSearchParams(beam_width=1, n=1, max_tokens=limit)


async def test_bad_words_with_tokens_that_the_model_lacks_change_nothing(loaded):
    """Some tokenizers have a token more than their models."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.convert_tokens_to_ids("[PAD]") == loaded.engine.scheduler.vocab_size
    async with Client(loaded.engine, tokenizer) as client:
        words = ["[PAD]", "a[PAD]", "[PAD]a"]
        free, banned = [await client.complete("Hi", max_tokens=5, bad_words=each) for each in ([], words)]
        assert banned["choices"] == free["choices"]
        assert (await client.complete("[PAD]", 400))["error"]["param"] == "prompt"
