"""Several choices for a prompt: n, best_of and their seeds."""

from statistics import fmean

import pytest

from tests.serving.client import counts, joined, texts
from tests.support.models import EOS


async def test_choice_i_equals_a_request_with_seed_plus_i(client, letters):
    fields = letters | {"temperature": 1.0}
    alone = [texts(await client.complete("Hello", **fields, seed=7 + i))[0] for i in range(3)]
    body = await client.complete("Hello", **fields, seed=7, n=3)
    assert texts(body) == alone and len(set(alone)) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert counts(body) == (5, 36, 41)
    chat = await client.chat("Hi", **fields, seed=7, n=2)
    ones = [await client.chat("Hi", **fields, seed=7 + i) for i in range(2)]
    assert [c["message"] for c in chat["choices"]] == [one["choices"][0]["message"] for one in ones]


async def test_choices_of_several_prompts_are_numbered_by_prompt_plain_and_streamed(client, letters):
    fields = letters | {"temperature": 1.0, "seed": 7, "n": 2}
    both = await client.complete(["Hello", "other one"], **fields)
    alone = [texts(await client.complete(prompt, **fields)) for prompt in ("Hello", "other one")]
    assert texts(both) == alone[0] + alone[1] and [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 14 and both["usage"]["completion_tokens"] == 48
    chunks = await client.stream("/v1/completions", {"prompt": ["Hello", "other one"]} | fields)
    assert joined(chunks) == texts(both)


async def test_best_of_returns_the_choices_with_the_highest_mean_logprob(client, letters):
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


async def test_chat_stream_of_two_choices_has_role_text_logprobs_and_end_of_each(client, letters):
    fields = letters | {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}
    await client.reset_prefix_cache()
    plain = await client.chat("Hi", **fields)
    await client.reset_prefix_cache()  # Results from a cached prefix may differ in their last bits.
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    parts = [chunk["choices"][0] for chunk in await client.stream("/v1/chat/completions", body)]
    assert [(part["index"], part["delta"].get("role")) for part in parts[:2]] == [(0, "assistant"), (1, "assistant")]
    for index in range(2):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["delta"]["content"] for part in mine) == plain["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"] and len(mine) > 2
        tokens = [token for part in mine if part["logprobs"] for token in part["logprobs"]["content"]]
        expected = plain["choices"][index]["logprobs"]["content"]
        assert [token["token"] for token in tokens] == [token["token"] for token in expected] and len(tokens) == 12
        for token, same in zip(tokens, expected):
            best = [top["logprob"] for top in same["top_logprobs"]]
            assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(best, rel=1e-5)
