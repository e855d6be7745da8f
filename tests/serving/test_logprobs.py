"""Logprobs of generated tokens and of the prompt, and echo."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, processors

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Sample
from jpaged.core.request import OutputDelta
from jpaged.serving.answer import CompletionAnswer, Prompt
from jpaged.serving.protocol import CompletionRequest
from jpaged.tokenizer import TokenDecoder, Vocabulary, encode
from tests.serving import scripted
from tests.serving.client import Client, build, collect, counts, generate, joined, texts
from tests.serving.scripted import END, TOKENIZER, say
from tests.support.models import EOS, VOCAB
from tests.test_tokenizer import sentencepiece_like


def close(logprob):
    """Return a value to compare with: results of another batch or from a cached prefix differ in their last bits."""
    return pytest.approx(logprob, rel=1e-5)


async def test_logprobs_are_those_of_the_best_tokens_and_the_chosen_one(loaded, letters):
    params = SamplingParams(temperature=0, logprobs=3, **letters)
    offline = generate(loaded.engine, encode(loaded.tokenizer, "Hello"), params)[0]
    async with Client(*loaded) as client:
        (choice,) = (await client.complete("Hello", **letters, logprobs=3))["choices"]
        (alone,) = (await client.complete("Hello", **letters, logprobs=0))["choices"]
    expected = []
    for entry in offline.logprobs:  # The chosen token is first; of several with one text the first is kept.
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


async def test_chat_has_exactly_top_logprobs_alternatives(client, letters):
    for count in (0, 4, 20):
        (choice,) = (await client.chat("Hi", **letters, logprobs=True, top_logprobs=count))["choices"]
        content = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in content) == choice["message"]["content"] and len(content) == 12
        for token in content:
            assert token["bytes"] == list(token["token"].encode())
            best = [other["logprob"] for other in token["top_logprobs"]]
            assert len(best) == count and best == sorted(best, reverse=True)
            assert token["logprob"] <= max(best, default=0)


async def test_logprob_token_ids_replace_the_most_likely_tokens(client, letters, ids):
    """They hold for every choice, beside a request with penalties, and after rows have been used by others."""
    wanted = [ids["q"], EOS, *(token for token in ids.values() if token != ids["q"])]
    shown = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    fields = letters | shown | {"n": 3, "seed": 1, "temperature": 1.0}
    others = [client.complete("Hello", **letters, presence_penalty=1.0, n=2, seed=5) for _ in range(3)]
    every, plain, *_ = await asyncio.gather(
        client.complete("Hello", **fields, logprobs=1, logprob_token_ids=wanted),
        client.complete("Hello", **fields, logprobs=20),
        *others,
    )
    known = 0
    for choice, same in zip(every["choices"], plain["choices"]):
        assert choice["token_ids"] == same["token_ids"]
        logprobs = choice["logprobs"]
        for token, own, top, likely in zip(
            choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], same["logprobs"]["top_logprobs"]
        ):
            assert {*top} == {f"token_id:{each}" for each in (token, *wanted)} and top[f"token_id:{token}"] == own
            for name in top.keys() & likely.keys():
                assert top[name] == close(likely[name])
                known += name != f"token_id:{token}"
    assert known > 36
    chat = {"logprobs": True, "logprob_token_ids": wanted} | shown
    chunks = await client.stream(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | letters | chat
    )
    tops = [e["top_logprobs"] for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": ()})["content"]]
    assert [[each["token"] for each in top] for top in tops] == [[f"token_id:{each}" for each in wanted]] * 12
    error = (await client.complete("a", 400, logprobs=0, logprob_token_ids=[VOCAB]))["error"]
    assert error["param"] == "logprob_token_ids" and f"{VOCAB} is outside the vocabulary" in error["message"]


def test_logprob_token_ids_are_listed_in_their_order_without_ranks(loaded):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprob_token_ids=[7, 5])
    (output,) = generate(loaded.engine, [3, 4], params)
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert [*entry] == [token, 7, 5] and [each.rank for each in entry.values()] == [1, None, None]


async def test_number_of_logprobs_is_limited_by_the_engine(client):
    for post, fields, field in (
        (client.complete, {"logprobs": 21}, "logprobs"),
        (client.complete, {"logprobs": -1, "echo": True}, "logprobs"),
        (client.chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ):
        error = (await post("Hi", 400, **fields))["error"]
        assert error["param"] == field and "must be at most 20 (max_logprobs)" in error["message"]


async def test_logprobs_of_the_whole_vocabulary(tiny, client):
    fields = {"max_tokens": 3, "n": 2, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    loaded = build(tiny, max_logprobs=-1, max_num_seqs=4, max_num_batched_tokens=8)
    async with Client(*loaded) as large:
        asked = fields | {"logprobs": -1, "prompt_logprobs": -1, "return_tokens_as_token_ids": True}
        whole = await large.complete("Hello", **asked)
        few = await client.complete("Hello", **asked | {"logprobs": 20, "prompt_logprobs": 20})
        own = await client.complete(
            "Hello", **asked | {"logprobs": 1, "prompt_logprobs": None, "logprob_token_ids": [5, 258, 7]}
        )
        chat = {"logprobs": True, "return_tokens_as_token_ids": True}
        chunks = await large.stream(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": -1} | fields | chat,
        )
    for choice, short in zip(whole["choices"], own["choices"]):
        for entry, listed in zip(choice["logprobs"]["top_logprobs"], short["logprobs"]["top_logprobs"]):
            assert listed.keys() >= {"token_id:5", "token_id:258", "token_id:7"}
            assert listed == {name: close(entry[name]) for name in listed}
    for choice, short in zip(whole["choices"], few["choices"]):
        assert len(choice["logprobs"]["top_logprobs"]) == 3 and len(choice["prompt_logprobs"]) == 5
        for entry, best in zip(choice["logprobs"]["top_logprobs"], short["logprobs"]["top_logprobs"]):
            assert len(entry) == VOCAB and sum(map(math.exp, entry.values())) == pytest.approx(1, abs=1e-4)
            assert {name: entry[name] for name in best} == {name: close(value) for name, value in best.items()}
        for entry, best in zip(choice["prompt_logprobs"][1:], short["prompt_logprobs"][1:]):
            assert len(entry) == VOCAB and 20 <= len(best) <= 21
            assert {other["rank"] for other in entry.values()} == {*range(1, VOCAB + 1)}
            assert all(entry[name]["logprob"] == close(other["logprob"]) for name, other in best.items())
    contents = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    lists = [token["top_logprobs"] for content in contents if content for token in content["content"]]
    assert len(lists) == 6 and {len(each) for each in lists} == {VOCAB}


async def test_logprobs_of_a_stream_equal_the_plain_ones_with_offsets(scripted_api):
    ids = TOKENIZER.encode("the fox ran", add_special_tokens=False).ids
    tokens = [TOKENIZER.decode([token]) for token in ids] + ["<|end|>"]
    plain = (await scripted_api.complete(say("the fox ran"), logprobs=2)).choices[0]
    assert plain.text == "the fox ran" and plain.logprobs.tokens == tokens
    assert plain.logprobs.token_logprobs == [scripted.logprob(token) for token in [*ids, END]]
    assert plain.logprobs.text_offset == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert [max(top.values()) for top in plain.logprobs.top_logprobs] == plain.logprobs.token_logprobs
    chunks = await collect(await scripted_api.complete(say("the fox ran"), logprobs=2, stream=True))
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(chunk.choices[0].logprobs, name) for chunk in chunks]
        assert [entry for part in parts for entry in part] == getattr(plain.logprobs, name)


async def test_tokens_of_logprobs_are_ids_if_requested(client, letters):
    fields = letters | {"logprobs": 3, "echo": True, "return_token_ids": True}
    texts, named = [
        (await client.complete("Hello", **fields, return_tokens_as_token_ids=each))["choices"][0]
        for each in (None, True)
    ]
    ids = [f"token_id:{token}" for token in [*named["prompt_token_ids"], *named["token_ids"]]]
    assert named["logprobs"]["tokens"] == ids and named["text"] == texts["text"]
    assert named["logprobs"]["text_offset"] == texts["logprobs"]["text_offset"]
    for token, top in zip(ids[1:], named["logprobs"]["top_logprobs"][1:]):
        assert token in top and all(name.startswith("token_id:") for name in top)
    chat = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = (await client.chat("Hi", **letters, **chat))["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]


async def test_logprobs_of_parts_of_a_character_have_their_own_bytes(scripted_api):
    text = "w🦊r"
    answer = await scripted_api.chat(say(text), logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert len(content) > 3 and "\ufffd" in [entry.token for entry in content]
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(text)
    answer = await scripted_api.complete(say(text), logprobs=0)
    offsets = answer.choices[0].logprobs.text_offset
    assert offsets[0] == 0 and offsets[1] == offsets[-3] == 1 and offsets[-2] == 2, offsets


async def test_echo_returns_the_prompt_first(client, letters):
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
    for fields, shown in ({}, "Hello"), ({"skip_special_tokens": False}, "Hello<|end|>"):
        (text,) = texts(await client.complete(tokens, **letters, **fields, echo=True))
        assert text[:-12] == shown


async def test_echo_is_once_in_each_choice_of_a_stream(client, letters):
    fields = letters | {"echo": True, "n": 2, "seed": 1, "temperature": 1.0, "logprobs": 1}
    plain = await client.complete("Hello", **fields)
    chunks = [chunk["choices"][0] for chunk in await client.stream("/v1/completions", {"prompt": "Hello"} | fields)]
    for choice in plain["choices"]:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert mine[0]["text"].startswith("Hello") and 1 < len(mine) <= 12
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [x for chunk in mine for x in chunk["logprobs"][name]] == choice["logprobs"][name]


async def test_echo_without_new_tokens_scores_the_prompt(client):
    body = await client.complete("Hello", echo=True, max_tokens=0, logprobs=1, n=2)
    said = [(choice["text"], choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]]
    assert said == [("Hello", "length", None)] * 2
    assert counts(body) == (5, 0, 5)
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    streamed = await client.stream("/v1/completions", {"prompt": "Hello", "echo": True, "max_tokens": 0})
    assert joined(streamed) == ["Hello"] and streamed[-1]["choices"][0]["finish_reason"] == "length"


async def test_offsets_continue_after_an_echo(scripted_api):
    prompt = say("the fox")
    for fields in ({}, {"stream": True}):
        answer = await scripted_api.complete(prompt, logprobs=0, echo=True, **fields)
        parts = [chunk.choices[0] for chunk in await collect(answer)] if fields else answer.choices
        whole = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.logprobs.tokens]
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        assert whole == prompt + "the fox" and tokens[0] == "<|begin|>" and tokens[-1] == "<|end|>"
        # The text lacks the special tokens at both ends; the tokens have them.
        assert all(whole.startswith(token, at) for token, at in list(zip(tokens, offsets))[1:-1])
        assert offsets[:2] == [0, 0] and offsets[-1] == len(whole)


async def test_prompt_logprobs_equal_those_of_the_echo(client):
    tokenizer = client.service.tokenizer
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
            assert next(iter(entry)) == str(encode(tokenizer, letter)[0])
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


def _llama() -> Tokenizer:
    """Adds a special token in front, which has a text, and leaves out the first space of a text."""
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def _completion(tokenizer: Tokenizer, prompt: str | list[int], tokens: list[int], **fields):
    """The choice with these tokens, as the engine gives them one by one."""
    ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    vocabulary, body = Vocabulary(tokenizer), CompletionRequest(prompt=prompt, logprobs=0, echo=True, **fields)
    answer = CompletionAnswer("m", vocabulary, body, [Prompt(ids, prompt if isinstance(prompt, str) else None)])
    decoder = TokenDecoder(vocabulary, ids, skip_special_tokens=body.skip_special_tokens is not False)
    samples = [Sample(token, -1.0, 1) for token in ids[1:]]
    for token in tokens:
        answer.add(0, OutputDelta("0", 0, decoder.step(token), [Sample(token, -1.0, 1)], None, None, samples, 0))
        samples = None
    (choice,) = answer.whole()["choices"]
    return choice["text"], list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]))


WORDS = st.text("ab hé世🦊", min_size=1, max_size=12)
PROMPTS = st.one_of(WORDS, WORDS.map("a</s>".__add__), WORDS.map("<|end|>".__add__)).map(lambda text: text + "a")


@pytest.mark.parametrize("tokenizer", [_llama(), TOKENIZER], ids=["llama", "demo"])
@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
@settings(max_examples=60, deadline=None)
@given(prompt=PROMPTS, said=WORDS, as_ids=st.booleans())
def test_offsets_point_to_the_tokens_in_the_text(tokenizer, fields, prompt, said, as_ids):
    first, *tokens = tokenizer.encode(said).ids
    given_ids = tokenizer.encode(prompt).ids if as_ids else prompt
    text, placed = _completion(tokenizer, given_ids, [*tokens, first, *tokens], **fields)
    special = {"<s>", "</s>", "<|begin|>", "<|end|>"}
    offsets = [offset for _, offset in placed]
    assert offsets == sorted(offsets) and offsets[-1] <= len(text)
    for token, offset in placed:  # of words, the text may lack the space
        if not text.startswith(token, offset) and not (token[0] == " " and text.startswith(token[1:], offset)):
            assert token in special or "\ufffd" in token
            assert not (token in special and fields and as_ids)


@pytest.mark.parametrize("tokenizer", [_llama(), TOKENIZER], ids=["llama", "demo"])
def test_offsets_behind_bytes_that_are_no_text_and_a_changed_prompt(tokenizer):
    text, placed = _completion(tokenizer, "a", [*_bytes_of(tokenizer, b"\xe4\xb8"), *_bytes_of(tokenizer, b"bh")])
    assert text == "a\ufffdbh" and [offset for _, offset in placed[-4:]] == [1, 1, 2, 3]
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), *([tokenizer.normalizer] if tokenizer.normalizer else [])]
    )
    text, placed = _completion(tokenizer, "e\u0301 a b", _bytes_of(tokenizer, b"b"))
    assert text == "e\u0301 a bb" and placed[-1] == ("b", 6)
    assert (" a", 2) in placed or ("a", 3) in placed


def _bytes_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    vocabulary = Vocabulary(tokenizer)
    tokens = {vocabulary.bytes(token): token for token in range(tokenizer.get_vocab_size())}
    return [tokens[data[i : i + 1]] for i in range(len(data))]
