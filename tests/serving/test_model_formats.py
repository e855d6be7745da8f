"""Formats of models over HTTP: reasoning, content and calls in chats, responses and messages, plain and streamed."""

import json
import re
from functools import cache

import pytest

from jpaged.serving.reasoning_parsers.forms import FORMS
from jpaged.serving.tool_parsers.format import FORMATS
from tests.serving import scripted
from tests.serving.client import Client
from tests.serving.scripted import say
from tests.serving.test_messages import added_up as message_of
from tests.serving.test_messages import streamed as message_events
from tests.serving.test_responses import added_up as items_of
from tests.serving.test_responses import streamed as response_events
from tests.serving.tool_templates import rendered

MARK = re.compile(r"<\|[^<> =]+>|\[/?[A-Z_]+\]")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}}, "required": ["city"]}
ARGUMENTS = {"city": "Rome", "days": 2}
CALLS = [("weather", ARGUMENTS), ("weather", {"city": "Oslo"})]
FINAL = "<|channel|>final<|message|>"
BETWEEN = "<|end|><|start|>assistant"
HARMONY = ("openai", "openai_gptoss", f"<|channel|>analysis<|message|>Which?{BETWEEN}{FINAL}", BETWEEN)
# Tool parser, reasoning parser, text of the reasoning up to the content, and text between content and calls.
CASES = [
    ("qwen3_coder", "qwen3", "<think>\nWhich?\n</think>\n\n", "\n"),
    ("mistral", "mistral", "[THINK]Which?[/THINK]", ""),
    HARMONY,
    ("glm45", "glm45", "<think>Which?</think>\n", "\n"),
    ("granite", "granite", "Here is my thought process: Which?\n\nHere is my response: ", ""),
]


def usual(*numbers):
    """All cases, of which these are in the usual tier."""
    return [
        pytest.param(*case, id=case[0], marks=[] if number in numbers else pytest.mark.deep)
        for number, case in enumerate(CASES)
    ]


def function(**fields):
    return {"type": "function", "function": {"name": "weather", "parameters": SCHEMA} | fields}


@cache
def loaded(marks, template):
    engine, tokenizer = scripted.load(0.001, marks=marks, end="<|return|>")
    tokenizer.chat_template += template
    return engine, tokenizer


class Server(Client):
    """A scripted server of a model with a format, whose marks are special tokens."""

    def __init__(self, tool_parser, form_of_reasoning, **options):
        form, reasoning = FORMATS[tool_parser].form, FORMS[form_of_reasoning]
        marks = {mark for text in (*form.texts, *reasoning.openings) for mark in MARK.findall(text)}
        marks |= {"[/THINK]"} if form_of_reasoning == "mistral" else set()
        marks |= {"[ARGS]"} if tool_parser == "mistral" else set()
        marks |= {*options.pop("marks", ())}
        # The demo model's own end is a mark of harmony.
        marks, template = (*sorted(marks | {"<|return|>"}),), options.pop("template", "")
        engine, tokenizer = loaded(marks, template)
        options = {"tool_format": FORMATS[tool_parser], "reasoning_parser": form_of_reasoning} | options
        super().__init__(engine, tokenizer, model_name="demo", **options)

    async def __aexit__(self, *exception):
        await self.idle()
        await super().__aexit__(*exception)

    async def message(self, script, **fields):
        return (await self.chat(say(script), max_tokens=300, **fields))["choices"][0]["message"]


def calls_of(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def script(tool_parser, reasoning, between):
    template = "mistral named" if tool_parser == "mistral" else tool_parser
    calls = CALLS[:1] if tool_parser == "openai" else CALLS
    return f"{reasoning}I look.{between}" + rendered(template, calls).removesuffix("<|call|>"), calls


@pytest.mark.parametrize("tool_parser, reasoning_parser, reasoning, between", usual(0, 1, 2))
async def test_all_endpoints_have_the_same_parts(tool_parser, reasoning_parser, reasoning, between):
    text, calls = script(tool_parser, reasoning, between)
    async with Server(tool_parser, reasoning_parser) as client:
        message = await client.message(text, tools=[function()])
        assert (message["reasoning"], message["content"]) == ("Which?", "I look.")
        assert calls_of(message) == calls
        messages = [{"role": "user", "content": say(text)}]
        body = {"messages": messages, "tools": [function()], "max_tokens": 300}
        deltas = [chunk["choices"][0]["delta"] for chunk in await client.stream("/v1/chat/completions", body)]
        for name in ("reasoning", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
        given = ["".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())
                         if call["index"] == index) for index in range(len(calls))]  # fmt: skip
        assert given == [call["function"]["arguments"] for call in message["tool_calls"]]

        body = {"input": say(text), "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
        items = (await client.post("/v1/responses", body))["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * len(calls)]
        assert items[1]["content"][0]["text"] == "I look."
        assert [(item["name"], json.loads(item["arguments"])) for item in items[2:]] == calls
        streamed = items_of(await response_events(client, body))
        assert [item.get("arguments") for item in streamed] == [item.get("arguments") for item in items]

        body = {"model": "demo", "max_tokens": 300, "messages": messages}
        body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
        thinking, said, *blocks = (await client.post("/v1/messages", body))["content"]
        assert (thinking["thinking"], said["text"]) == ("Which?", "I look.")
        assert [(block["name"], block["input"]) for block in blocks] == calls
        again = message_of(await message_events(client, body))["content"]
        assert [block.get("input") for block in again] == [None, None, *(arguments for _, arguments in calls)]


@pytest.mark.parametrize("tool_parser, reasoning_parser, reasoning, between", usual(2, 3, 4))
async def test_constraints_begin_behind_the_reasoning(tool_parser, reasoning_parser, reasoning, between):
    # In the reasoning, text that begins a call must be free.
    thought = {"qwen3_coder": "<tool_call>{", "glm45": "<tool_call>{"}.get(tool_parser, "Well.")
    reasoning = reasoning.replace("Which?", thought)
    final = FINAL if tool_parser == "openai" else ""
    head = reasoning.removesuffix(final) if final else reasoning
    template = "mistral named" if tool_parser == "mistral" else tool_parser
    call = rendered(template, CALLS[:1]).removesuffix("<|call|>")
    async with Server(tool_parser, reasoning_parser) as client:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        message = await client.message(reasoning + '{"city": "Rome"}', response_format=form)
        assert (message["reasoning"], message["content"]) == (thought, '{"city": "Rome"}')
        message = await client.message(reasoning + "Hello", response_format=form)
        assert message["reasoning"] == thought and not message["content"].startswith("Hello")
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            fields = {"tools": [function()], "tool_choice": choice, "parallel_tool_calls": False}
            message = await client.message(head + call, **fields)
            assert (message["reasoning"], calls_of(message)) == (thought, CALLS[:1])
        strict = [function(strict=True)]
        preamble = reasoning.replace(FINAL, "<|channel|>commentary<|message|>")
        message = await client.message(f"{preamble}I look.{between}{call}", tools=strict, parallel_tool_calls=False)
        assert (message["reasoning"], message["content"], calls_of(message)) == (thought, "I look.", CALLS[:1])
        wrong = call.replace("2", "7")
        assert wrong != call
        fields = {"tools": strict, "parallel_tool_calls": False}
        message = await client.message(f"{preamble}I look.{between}{wrong}", **fields)
        (found,) = message["tool_calls"]
        assert '"days": 7' not in found["function"]["arguments"]
        loose = await client.message(f"{preamble}I look.{between}{wrong}", tools=[function()])
        assert calls_of(loose) == [("weather", ARGUMENTS | {"days": 7})]


async def test_marks_are_text_only_for_the_parser_that_reads_them():
    async with Server("mistral", "mistral") as client:
        text = 'So: [TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
        message = await client.message(text, tools=[function()])
        assert message["content"] == "So:" and re.fullmatch("[a-z0-9]{9}", message["tool_calls"][0]["id"])
        assert (await client.message(text))["content"] == 'So: weather{"city": "Rome"}'
        shown = (await client.message(text, skip_special_tokens=False))["content"]
        assert shown == text


async def test_calls_of_harmony_bring_their_reasoning_parser():
    async with Server("openai", "openai_gptoss", reasoning_parser="none") as client:
        message = await client.message(f"<|channel|>analysis<|message|>Which?{BETWEEN}{FINAL}Rome")
        assert (message["reasoning"], message["content"]) == ("Which?", "Rome")


async def test_reasoning_is_left_out_on_request():
    async with Server("qwen3_coder", "qwen3") as client:
        text = "<think>Which?</think>Rome"
        for shows in (True, None):
            assert (await client.message(text, include_reasoning=shows))["reasoning"] == "Which?"
        answer = await client.chat(say(text), include_reasoning=False, max_tokens=99)
        assert (answer["choices"][0]["message"]["reasoning"], answer["choices"][0]["message"]["content"]) == (
            None, "Rome",
        )  # fmt: skip
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        body = {"messages": [{"role": "user", "content": say(text)}], "include_reasoning": False}
        chunks = await client.stream("/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert not any("reasoning" in delta for delta in deltas)
        assert "".join(delta.get("content", "") for delta in deltas) == "Rome"


@pytest.mark.parametrize(
    "tool_parser, reasoning_parser, opening, closing",
    [
        ("qwen3_coder", "qwen3", "<think>", "</think>"),
        ("mistral", "mistral", "[THINK]", "[/THINK]"),
        ("openai", "openai_gptoss", "<|channel|>analysis<|message|>", BETWEEN + FINAL),
    ],
)
async def test_budget_ends_the_reasoning(tool_parser, reasoning_parser, opening, closing):
    async with Server(tool_parser, reasoning_parser, marks=["</think>"]) as client:
        text = f"{opening}One two three four five six seven eight nine ten.{closing}Rome"
        tokens = client.service.tokenizer.backend_tokenizer.encode
        whole = await client.message(text, thinking_token_budget=100)
        assert (whole["content"], whole["reasoning"].count(" ")) == ("Rome", 9)
        for budget in (0, 1, 5):
            message = await client.message(text, thinking_token_budget=budget)
            reasoning = message["reasoning"] or ""
            assert len(tokens(reasoning, add_special_tokens=False).ids) <= budget + 1  # a first space may be added
            assert whole["reasoning"].startswith(reasoning) and (budget == 0) == (reasoning == "")
        form = {"type": "json_object"}
        text = f'{opening}One two three{closing}{{"a": 1}}'
        message = await client.message(text, thinking_token_budget=2, response_format=form)
        json.loads(message["content"])


async def test_budget_needs_reasoning_that_ends_with_one_token(scripted_client):
    async with Server("qwen3_coder", "qwen3") as client:
        error = await client.chat(say("Rome"), 400, thinking_token_budget=5)
        assert "no token for '</think>'" in error["error"]["message"]
        assert error["error"]["param"] == "thinking_token_budget"
        await client.chat(say("Rome"), 400, thinking_token_budget=-2)
        await client.chat(say("Rome"), thinking_token_budget=-1)
    for field in ({"thinking_token_budget": 5}, {"include_reasoning": False}):
        error = (await scripted_client.chat(say("Rome"), 400, **field))["error"]
        assert "set --reasoning-parser" in error["message"] and error["param"] in field


async def test_template_may_demand_arguments_as_text():
    template = "{% for call in messages[1].tool_calls %}{{ 'CALLED ' + call.function.arguments }}{% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        {"role": "user", "content": "Is it warm?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": say("Yes.")},
    ]  # fmt: skip
    async with Server("qwen3_coder", "qwen3", template=template) as client:
        body = {"messages": messages, "max_tokens": 20, "return_token_ids": True}
        answer = await client.post("/v1/chat/completions", body)
        prompt = client.service.tokenizer.backend_tokenizer.decode(answer["prompt_token_ids"])
        assert prompt.endswith('CALLED {"city": "Rome"}')


async def test_effort_switches_reasoning_on_and_off_in_the_template():
    template = "{{ 'default' if enable_thinking is not defined else 'on' if enable_thinking else 'off' }}"
    async with Server("qwen3_coder", "qwen3", template=template) as client:
        for fields, end in (
            ({}, "default"), ({"reasoning_effort": "low"}, "on"), ({"reasoning_effort": "none"}, "off"),
            ({"chat_template_kwargs": {"enable_thinking": False}}, "off"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "on"),
        ):  # fmt: skip
            answer = await client.chat(say("Hi"), return_token_ids=True, max_tokens=1, **fields)
            prompt = client.service.tokenizer.backend_tokenizer.decode(answer["prompt_token_ids"])
            assert prompt.endswith(end), fields
