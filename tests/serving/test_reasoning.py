"""Reasoning apart from the text: its parser, and chats, responses and messages plain and streamed."""

import itertools
import random

import pytest

from jpaged.serving.conversation import Function
from jpaged.serving.reasoning_parsers import harmony, marked
from jpaged.serving.reasoning_parsers.forms import FORMS, reasoning_form
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.tokenizer import CALL_TAGS
from tests.serving import scripted
from tests.serving.client import Client
from tests.serving.scripted import say
from tests.serving.test_messages import added_up as message_of
from tests.serving.test_messages import streamed as message_events
from tests.serving.test_messages import without_ids as without_message_ids
from tests.serving.test_responses import added_up as items_of
from tests.serving.test_responses import streamed as response_events
from tests.serving.test_responses import without_ids as without_response_ids
from tests.serving.tool_texts import ROME, hermes
from tests.serving.tool_texts import outcome as parsed_calls

QWEN = FORMS["qwen3"]
THOUGHT = "<think>\nWhich city?\n\nRome.\n</think>\n\nIt is sunny."
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}


def parts_of(form, pieces, is_open=False, calls=()):
    """Return the reasoning and the answer of a text that arrives in pieces."""
    parser = form.new_parser(f"x {form.openings[0]}\n" if is_open else "x", calls)()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.feed("", is_last=True)
    reasoning, answer = ("".join(part.text for part in parts if part.is_reasoning == kind) for kind in (True, False))
    return reasoning, answer


def outcome(pieces, is_open=False):
    return parts_of(QWEN, pieces, is_open)


@pytest.mark.parametrize(
    "text, is_open, expected",
    [
        (THOUGHT, False, ("Which city?\n\nRome.", "It is sunny.")),
        ("Which?</think>Rome", True, ("Which?", "Rome")),
        ("\n\nWhich?\n</think>\n\n Rome \n", True, ("Which?", "Rome \n")),
        ("  <think></think>Rome", False, ("", "Rome")),
        ("  Rome <think>a</think>", False, ("", "  Rome <think>a</think>")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<think>a < b </ c </thin", False, ("a < b </ c </thin", "")),
        ("<think>never ends \n", False, ("never ends", "")),
        ("<thi", False, ("", "<thi")),
        ("", False, ("", "")),
        ("", True, ("", "")),
        (" \n", False, ("", " \n")),
        ("Rome", True, ("Rome", "")),
        ("<think>a</think></think>", True, ("<think>a", "</think>")),
    ],
)
def test_text_is_split_at_its_marks(text, is_open, expected):
    assert outcome([text], is_open) == expected


@pytest.mark.parametrize("opening, thought", [("<|channel>thought\n", "Which?"), ("<|channel>", "thousands?")])
def test_gemma_may_leave_out_the_name_of_its_channel(opening, thought):
    text = f"{opening}{thought}<channel|>Rome"
    assert parts_of(FORMS["gemma4"], [text]) == parts_of(FORMS["gemma4"], text) == (thought, "Rome")


TIME = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    "text, content, num_calls",
    [
        (f"{TIME}{{}}<|call|>", "", 1),
        (" to=functions.time<|channel|>analysis<|message|>{}<|call|>", "", 1),
        ("<|channel|>commentary to=time<|message|>{}<|call|>", "", 1),
        (f"{TIME}<|call|>", "", 1),
        (f"{TIME} <|end|><|start|>assistant<|channel|>final<|message|>Noon<|return|>", "Noon", 1),
        (f"<|channel|>commentary<|message|>So<|end|><|start|>assistant{TIME}{{}}<|call|>", "So", 1),
        ("<|channel|>commentary to=assistant<|message|>So<|end|><|channel|>final<|message|>Noon", "So\nNoon", 0),
        ("<|channel|>final {}<|end|>", "<|channel|>final {}", 0),
        ("<|start|>assistant<|channel|>final {}<|end|>", "<|start|>assistant<|channel|>final {}", 0),
    ],
)
def test_messages_of_harmony_are_calls_and_content(text, content, num_calls):
    for pieces in ([text], text):
        reasoning, answer = parts_of(FORMS["openai_gptoss"], pieces)
        found = parsed_calls(FORMATS["openai"], [answer], functions=[Function(name="time")])
        assert (reasoning, found[0]) == ("", content)
        assert [call[1:] for call in found[1]] == [("time", "{}")] * num_calls


def split(form, text, is_open, calls=()):
    """Return the reasoning and the answer of a whole text between marks, by its definition."""
    if not is_open:
        opening = next((each for each in form.openings if text.lstrip().startswith(each)), None)
        if opening is None:
            return "", text
        text = text.lstrip().removeprefix(opening)
    ending = min((*form.closings, *calls), key=lambda each: text.find(each) % (len(text) + 1))
    reasoning, mark, answer = text.partition(ending)
    return reasoning.strip(), (mark + answer if mark in calls else answer).lstrip()


HARMONY = [
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|start|>assistant", "<|call|>", "analysis", "final",
    "commentary", " to=functions.time ", "<|constrain|>json", "<|channel|>analysis<|message|>", "<|channel|>final",
    "<|channel|>final<|message|>", "<|channel|>commentary to=functions.time <|constrain|>json<|message|>", "<|", " ",
    "{}",
]  # fmt: skip


def random_text(form, rng, words=0, calls=()):
    """Return marks and parts of marks in random order, with some words between them."""
    marks = [*form.openings, *getattr(form, "closings", ()), *calls] or HARMONY
    parts = rng.choices([*marks, *(mark[: len(mark) // 2] for mark in marks), "\n", " ", "a", "<"], k=rng.randrange(10))
    for word in range(words):
        parts.insert(rng.randrange(len(parts) + 1), f"w{word}w")
    return "".join(parts)


def check_pieces(name, num_texts):
    rng, form = random.Random(5), FORMS[name]
    for _ in range(num_texts):
        is_open = bool(form.openings) and rng.random() < 0.5
        calls = CALL_TAGS[:1] if form.openings and rng.random() < 0.5 else ()
        text = random_text(form, rng, calls=calls)
        expected = split(form, text, is_open, calls) if form.openings else parts_of(form, [text])
        assert parts_of(form, text, is_open, calls) == expected, text
        for at in range(len(text) + 1):
            assert parts_of(form, [text[:at], text[at:]], is_open, calls) == expected, (at, text)
        places = [0, *sorted(rng.choices(range(len(text) + 1), k=4)), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(places)]
        assert parts_of(form, pieces, is_open, calls) == expected, pieces


@pytest.mark.parametrize("name", sorted(FORMS))
def test_result_is_that_of_the_whole_text_for_any_pieces(name):
    check_pieces(name, 200)


def check_words(num_texts, names=tuple(sorted(FORMS))):  # noqa: B008 - a constant
    rng = random.Random(num_texts)
    for number in range(num_texts):
        form = FORMS[names[number % len(names)]]
        text = random_text(form, rng, words=3)
        left = "\0".join(parts_of(form, [text], bool(form.openings) and rng.random() < 0.5))
        assert all(left.count(f"w{word}w") == 1 for word in range(3)), text


@pytest.mark.parametrize("num_texts", [3_000, pytest.param(50_000, marks=pytest.mark.deep)])
def test_random_texts_lose_no_word(num_texts):
    check_words(num_texts)


def test_checks_find_planted_faults(monkeypatch):
    for module, name in ((marked, "qwen3"), (marked, "granite"), (harmony, "openai_gptoss")):
        with monkeypatch.context() as patch:  # an incomplete mark is taken for text
            patch.setattr(module, "overlap", lambda text, mark: 0)
            with pytest.raises(AssertionError):
                check_pieces(name, 100)
    monkeypatch.setattr(harmony, "ENDS", ("<|end|>", "<|call|>", "<|return|>", "w1w"))  # a word is taken for a mark
    with pytest.raises(AssertionError):
        check_words(500, ("openai_gptoss",))


CALL = "<|channel|>commentary to=functions.time <|constrain|>json<|message|>"
START = "<|start|>assistant"


@pytest.mark.parametrize(
    "text, reasoning, answer",
    [
        (f"<|channel|>analysis<|message|>Hm.<|end|>{START}<|channel|>final<|message|>Hi<|return|>", "Hm.", "Hi"),
        ("<|channel|>final<|message|>Hi", "", "Hi"),
        (f"<|channel|>analysis<|message|>A<|end|>{START}<|channel|>analysis<|message|>B<|end|>{START}{CALL}{{}}<|call|>",
         "A\nB", CALL + "{}"),
        (f"<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}{{}}", "", f"I look.{CALL}{{}}"),
        (" to=functions.time<|channel|>commentary json<|message|>{}", "", CALL + "{}"),
        ("<|channel|>analysis to=functions.time <|constrain|>json<|message|>{}", "", CALL + "{}"),
        ("<|channel|>analysis<|message|>A<|channel|>final<|message|>B", "A", "B"),  # without an end
        ("Hello <|end|>", "", "Hello "),
        ("<|channel|>other<|message|>A", "", "<|channel|>other<|message|>A"),
        ("<|channel|>fin", "", ""),
        ("<|start|>assistant<|channel|>", "", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_messages_are_told_apart_by_their_channels(text, reasoning, answer):
    form = FORMS["openai_gptoss"]
    assert parts_of(form, [text]) == parts_of(form, text) == (reasoning, answer)


def test_marks_are_named_or_detected_from_a_template():
    assert reasoning_form("none", ["<think></think>"]) is None and reasoning_form("deepseek_r1", []) == QWEN
    assert reasoning_form("auto", ["{{ '<think>\\n\\n</think>' }}"]) == QWEN
    assert reasoning_form("auto", ["{{ messages }}"]) is None
    for name, template in (
        ("mistral", "[THINK]{{ x }}[/THINK]"), ("granite", "Here is my response: <think></think>"),
        ("openai_gptoss", "<|channel|>analysis<|message|>"), ("seed_oss", "<seed:think>{{ x }}</seed:think>"),
    ):  # fmt: skip
        assert reasoning_form("auto", [template]) is FORMS[name]


@pytest.fixture
async def client():
    options = {"model_name": "demo", "tool_format": FORMATS["hermes"], "reasoning_parser": "qwen3"}
    async with Client(*scripted.load(0.001), **options) as client:
        yield client
        await client.idle()


async def test_chat_has_reasoning_apart_from_content_plain_and_streamed(client):
    message = (await client.chat(say(THOUGHT)))["choices"][0]["message"]
    assert message["content"] == "It is sunny."
    assert message["reasoning_content"] == message["reasoning"] == "Which city?\n\nRome."
    body = {"messages": [{"role": "user", "content": say(THOUGHT)}], "stream_options": {"include_usage": True}}
    *chunks, last = await client.stream("/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]
    first_content = next(i for i, delta in enumerate(deltas) if delta.get("content"))
    assert not any("reasoning" in delta for delta in deltas[first_content:])
    usage = last["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


async def test_text_without_reasoning_and_other_servers_keep_the_whole_text(client, scripted_client):
    message = (await client.chat(say("It is sunny.")))["choices"][0]["message"]
    assert message["content"] == "It is sunny." and message["reasoning"] is None and "reasoning_content" not in message
    assert (await scripted_client.chat(say(THOUGHT)))["choices"][0]["message"]["content"] == THOUGHT


async def test_reasoning_that_the_prompt_begins_is_found_with_and_without_a_grammar():
    engine, tokenizer = scripted.load()
    options = {"chat_template": tokenizer.chat_template + "{{ '<think>\n' }}", "reasoning_parser": "deepseek_r1"}
    async with Client(engine, tokenizer, model_name="demo", **options) as client:
        message = (await client.chat(say("Which?</think>Rome")))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Which?", "Rome")
        form = {"type": "json_object"}
        message = (await client.chat(say('Which?</think>{"a": 1}'), response_format=form))["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Which?", '{"a": 1}')
        await client.idle()


async def test_response_has_an_item_of_reasoning(client):
    script = f"<think>Which?</think>I look. {hermes(ROME)}"
    body = {"input": say(script), "tools": [{"type": "function", "name": "weather", "parameters": TOOL}]}
    whole = await client.post("/v1/responses", body)
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Which?"}] and reasoning["summary"] == []
    assert (message["content"][0]["text"], call["name"]) == ("I look.", "weather")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = await response_events(client, body)
    assert items_of(events) == events[-1]["response"]["output"]
    assert without_response_ids(events[-1]["response"]) == without_response_ids(whole)


async def test_call_ends_the_reasoning_unless_a_constraint_begins_behind_it(client):
    body = {
        "messages": [{"role": "user", "content": say(f"<think>Which?\n{hermes(ROME)}")}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}],
    }
    (choice,) = (await client.post("/v1/chat/completions", body))["choices"]
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Which?", "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    deltas = [chunk["choices"][0]["delta"] for chunk in await client.stream("/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Which?"
    for unread in ({"tool_choice": "none"}, {"tool_choice": "required", "max_tokens": 40}):
        (choice,) = (await client.post("/v1/chat/completions", body | unread))["choices"]
        assert "<tool_call>" in choice["message"]["reasoning"] and not choice["message"].get("tool_calls")


async def test_response_of_reasoning_alone_ends_with_a_message(client):
    whole = await client.post("/v1/responses", {"input": say("<think>Which?"), "max_output_tokens": 100})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]


async def test_message_has_a_block_of_thinking(client):
    script = f"<think>Which?</think>I look. {hermes(ROME)}"
    messages = [{"role": "user", "content": say(script)}]
    body = {
        "model": "demo",
        "max_tokens": 300,
        "messages": messages,
        "tools": [{"name": "weather", "input_schema": TOOL}],
    }
    whole = await client.post("/v1/messages", body)
    thinking, text, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Which?", "signature": ""}
    assert (text["text"], call["name"], whole["stop_reason"]) == ("I look.", "weather", "tool_use")
    assert without_message_ids(message_of(await message_events(client, body))) == without_message_ids(whole)
