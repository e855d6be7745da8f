"""Beam search over HTTP: results, scores, stop strings and logprobs."""

import json
from statistics import fmean

import pytest

from jpaged.core.params import BeamSearchParams
from jpaged.tokenizer import encode
from tests.serving.client import Client, generate, joined, texts
from tests.support.models import EOS

BEAMS = [
    {"best_of": 4, "n": 2},
    {"n": 3, "length_penalty": -3.0},
    {"n": 3, "length_penalty": 5.0, "early_stopping": "never"},
    {"n": 4, "early_stopping": True},
]


@pytest.fixture
def ending(letters):
    """Return fields with which beams end at different lengths."""
    return {"logit_bias": {str(EOS): 0.5}, "allowed_token_ids": [*letters["allowed_token_ids"], EOS], "max_tokens": 8}


async def test_beams_equal_those_of_the_engine(loaded, ending):
    offline = []
    for given in BEAMS:
        named = {"beam_width": given.get("best_of", given["n"])} | {k: v for k, v in given.items() if k != "best_of"}
        found = generate(loaded.engine, encode(loaded.tokenizer, "Hello"), BeamSearchParams(**named, **ending))
        offline.append([(output.text, output.finish_reason) for output in found])
    assert len({json.dumps(found[:2]) for found in offline}) >= 3  # The results differ in more than their number.
    async with Client(*loaded) as client:
        for given, expected in zip(BEAMS, offline):
            fields = {"prompt": "Hello", "use_beam_search": True} | given | ending
            for sampling in ({}, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}):
                body = await client.post("/v1/completions", fields | sampling)
                assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == expected
            assert joined(await client.stream("/v1/completions", fields)) == texts(body)


async def test_beams_of_a_chat_are_sorted_by_mean_logprob(client, ending):
    fields = ending | {"use_beam_search": True, "n": 2, "best_of": 3, "logprobs": True}
    body = await client.chat("Hi", **fields)
    found = [c["message"]["content"] for c in body["choices"]]
    assert len(set(found)) == 2
    scores = [fmean(token["logprob"] for token in c["logprobs"]["content"]) for c in body["choices"]]
    assert scores == sorted(scores, reverse=True)  # The default length penalty of 1 is the mean.
    (greedy,) = (await client.chat("Hi", **ending, logprobs=True))["choices"]
    assert greedy["message"]["content"] not in found  # Beam search found other texts.


async def test_stop_string_ends_beams(client, letters):
    fields = letters | {"use_beam_search": True, "n": 3}
    plain = texts(await client.complete("Hello", **fields))
    stop = plain[0][-2:]
    body = await client.complete("Hello", **fields, stop=stop)
    best = body["choices"][0]
    assert (best["finish_reason"], best["stop_reason"]) == ("stop", stop)
    assert not any(stop in text for text in texts(body))
    kept = await client.complete("Hello", **fields, stop=stop, include_stop_str_in_output=True)
    assert [text.removesuffix(stop) for text in texts(kept)] == texts(body) and texts(kept)[0].endswith(stop)


async def test_forbidden_token_of_a_beam_has_a_finite_logprob(client, ids):
    fields = {"allowed_token_ids": [ids["a"], ids["b"]], "use_beam_search": True, "logprobs": 5, "max_tokens": 2}
    (choice,) = (await client.complete("Hello", **fields))["choices"]
    assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999.0
