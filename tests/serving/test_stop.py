"""The end of a choice: stop strings, stop tokens, min_tokens and ignore_eos."""

import pytest

from tests.serving.client import collect, texts
from tests.serving.scripted import say
from tests.support.models import EOS


async def test_stop_string_ends_a_completion_plain_and_streamed(client):
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


STOPS = [
    ("one two three", "wo th", "one t"),
    ("one two three", "three", "one two "),
    ("one two three", ["three", "two"], "one "),
    ("a STO STOP b", "STOP", "a STO "),
    ("one two", "two three", "one two"),  # only its beginning is in the text
    ("fox 🦊 and more", "🦊", "fox "),
    ("x", "x", ""),
]


@pytest.mark.parametrize("text, stop, expected", STOPS)
async def test_stop_string_of_several_tokens_ends_the_text(scripted_api, text, stop, expected):
    for chat in (False, True):
        call = scripted_api.chat if chat else scripted_api.complete
        (choice,) = (await call(say(text), stop=stop)).choices
        assert (choice.message.content if chat else choice.text) == expected
        stopped = len(expected) < len(text)
        assert choice.finish_reason == "stop" and (choice.stop_reason is not None) == stopped
        chunks = await collect(await call(say(text), stop=stop, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        pieces = [(each.delta.content if chat else each.text) or "" for each in choices]
        assert "".join(pieces) == expected and choices[-1].stop_reason == choice.stop_reason


async def test_stop_token_ends_a_completion(client, letters, ids):
    (plain,) = texts(await client.complete("Hello", **letters))
    (choice,) = (await client.complete("Hello", **letters, stop_token_ids=[ids[plain[4]]]))["choices"]
    assert (choice["text"], choice["stop_reason"]) == (plain[: plain.index(plain[4])], ids[plain[4]])


async def test_min_tokens_delays_the_end(client):
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 10}
    for call in (client.complete, client.chat):
        for least, length in ((0, 1), (5, 6)):
            body = await call("Hello", **fields, min_tokens=least)
            assert body["usage"]["completion_tokens"] == length and body["choices"][0]["finish_reason"] == "stop"
        body = await call("Hello", **fields, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 10 and body["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_delays_a_stop_token(client, letters, ids):
    (plain,) = texts(await client.complete("Hello", **letters))
    stopped = letters | {"stop_token_ids": [ids[plain[4]]]}
    least = plain.index(plain[4]) + 3
    assert len(texts(await client.complete("Hello", **stopped))[0]) == plain.index(plain[4])
    assert (await client.complete("Hello", **stopped, min_tokens=least))["usage"]["completion_tokens"] >= least


async def test_special_tokens_are_in_the_text_only_if_not_skipped(client):
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 3, "ignore_eos": True}
    assert texts(await client.complete("Hello", **fields)) == [""]
    assert texts(await client.complete("Hello", **fields, skip_special_tokens=False)) == ["<|end|>" * 3]
