"""/v1/messages and /v1/messages/count_tokens: translation, answers and their events, an agent's loop, and errors."""

import json
import logging
import re

import pytest

from jpaged.serving.messages import MessagesRequest
from jpaged.serving.parse import parse
from jpaged.serving.service import LARGE_BYTES
from tests.serving import scripted
from tests.serving.client import Client
from tests.serving.conftest import TEMPLATE
from tests.serving.scripted import FAIL, TOKENIZER, say
from tests.serving.tool_texts import NOON, ROME, hermes

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
WEATHER = {"name": "weather", "description": "of a city", "input_schema": CITY | {"additionalProperties": False}}
TIME = {"name": "time", "input_schema": {"$schema": SCHEMA, "type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]


def body(script, **fields):
    return {"model": "demo", "max_tokens": 32000, "messages": [{"role": "user", "content": say(script)}]} | fields


async def streamed(client, request):
    """Return the events of a stream, after a check of their frames."""
    async with client.session.post(f"{PATH}?beta=true", json=request | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream", await response.text()
        *frames, end = (await response.text()).split("\n\n")
    assert end == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events):
    """Return the message that the events of a stream add up to, as Anthropic's client does it."""
    first, *blocks, delta, stop = events
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, is_open, json_texts = first["message"], False, {}
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open = True
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        assert event["type"] == "content_block_delta"
        block, change = message["content"][-1], event["delta"]
        if change["type"] == "text_delta":
            block["text"] += change["text"]
        elif change["type"] == "thinking_delta":
            block["thinking"] += change["thinking"]
        else:
            assert change["type"] == "input_json_delta"
            json_texts[event["index"]] = json_texts.get(event["index"], "") + change["partial_json"]
    assert not is_open
    for index, text in json_texts.items():
        message["content"][index]["input"] = json.loads(text)
    message["usage"] |= delta["usage"]
    return message | delta["delta"]


def without_ids(message):
    """Return a message without what differs from one request to the next."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {"input": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]}
    return message | {"id": None, "content": content, "usage": usage | {"output": message["usage"]["output_tokens"]}}


def text(content):
    return {"type": "text", "text": content}


def use(name, **arguments):
    return {"type": "tool_use", "name": name, "input": arguments}


@pytest.mark.parametrize(
    "script, blocks, reason",
    [
        ("Hello there", [text("Hello there")], "end_turn"),
        (hermes(ROME, NOON), [use("weather", city="Rome"), use("time")], "tool_use"),
        (f"So:{hermes(ROME)}then {hermes(NOON)}", [text("So:"), use("weather", city="Rome"), text("then"), use("time")],
         "tool_use"),
        ("", [], "end_turn"),
        ("one END two", [text("one ")], "stop_sequence"),
    ],
)  # fmt: skip
async def test_stream_adds_up_to_the_whole_message(scripted_client, script, blocks, reason):
    request = body(script, tools=TOOLS, stop_sequences=["END", "FIN"])
    whole = await scripted_client.post(PATH, request)
    assert without_ids(whole)["content"] == blocks
    assert (whole["type"], whole["role"], whole["model"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "demo",
        reason,
    )
    assert whole["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    ids = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    assert whole["id"].startswith("msg_") and all(each.startswith("toolu_") for each in ids)
    assert without_ids(added_up(await streamed(scripted_client, request))) == without_ids(whole)


async def test_call_that_max_tokens_ends_has_its_beginning(scripted_client):
    script = hermes('{"name": "weather", "arguments": {"days": 3, "city": "Rome"}}')
    length = len(TOKENIZER.encode(script.partition('me"}')[0], add_special_tokens=False).ids)
    request = body(script, tools=TOOLS, max_tokens=length)
    whole = await scripted_client.post(PATH, request)
    (block,) = without_ids(whole)["content"]
    assert block == use("weather", days=3) and whole["stop_reason"] == "max_tokens"
    changes = [event["delta"] for event in await streamed(scripted_client, request) if "delta" in event]
    arguments = "".join(change.get("partial_json", "") for change in changes)
    assert arguments.startswith('{"days": 3, "city": "Ro') and '"}' not in arguments


async def test_usage_tells_cached_tokens_from_others(scripted_client):
    request = body("Hello", system="word " * 40)
    first, second = [(await scripted_client.post(PATH, request))["usage"] for _ in range(2)]
    (count,) = (await scripted_client.post(COUNT, request)).values()
    for usage in (first, second):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count and usage["output_tokens"] == 2
    assert second["cache_read_input_tokens"] > first["cache_read_input_tokens"] and second["input_tokens"] > 0


async def test_max_tokens_are_clamped_to_the_context(scripted_client):
    count = (await scripted_client.post(COUNT, body("a " * 100)))["input_tokens"]
    endless = body("a " * 100, max_tokens=10**9, ignore_eos=True)
    answer = await scripted_client.post(PATH, endless)
    assert answer["usage"]["output_tokens"] == 512 - count and answer["stop_reason"] == "max_tokens"
    exact = await scripted_client.post(PATH, endless | {"max_tokens": 512 - count - 1})
    assert exact["usage"]["output_tokens"] == 512 - count - 1


async def test_failure_in_a_stream_is_its_last_event(scripted_client):
    *events, last = await streamed(scripted_client, body(f"Once upon{FAIL}"))
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "Once upon"


def chat_of(**fields):
    """Return the chat request of a body, as JSON without unset fields."""
    fields = {"model": "demo", "max_tokens": 5} | fields
    chat = parse(MessagesRequest, json.dumps(fields).encode()).chat().model_dump(exclude_none=True, by_alias=True)
    assert chat.pop("model") == "demo" and chat.pop("max_tokens") == 5
    return chat


def test_blocks_become_messages():
    cached = {"cache_control": {"type": "ephemeral"}}
    chat = chat_of(
        system=[text("x-anthropic-billing-header: cch=1;"), text("You are an agent."), text("Be brief.") | cached],
        messages=[
            {"role": "system", "content": "A note."},
            {"role": "user", "content": [text("<note/>"), text("Hi") | cached]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"}, text("I look."),
                {"type": "redacted_thinking", "data": "x"}, {"id": "t1"} | use("weather", city="Rome"),
                {"id": "t2"} | use("time"),
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("no"), text("on")], "is_error": False},
                text("And now?"),
            ]},
            {"role": "system", "content": "x-anthropic-billing-header: cch=2;"},
            {"role": "system", "content": [text("x-anthropic-billing-header: cch=3;"), text("Later.")]},
        ],
    )  # fmt: skip
    function = lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}}
    assert chat == {"messages": [
        {"role": "system", "content": "You are an agent.\n\nBe brief.\n\nA note."},
        {"role": "user", "content": "<note/>\nHi"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1"} | function("weather", '{"city":"Rome"}'), {"id": "t2"} | function("time", "{}"),
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "no\non"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Later."},
    ], "pin_s": 300.0}  # fmt: skip


@pytest.mark.parametrize(
    "fields, seconds",
    [
        ({}, None),
        ({"pin_s": 20.0}, 20.0),
        ({"cache_control": {"type": "ephemeral"}}, 300.0),
        ({"system": [text("Be brief.") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 3600.0),
        ({"tools": [WEATHER | {"cache_control": {"type": "ephemeral", "ttl": "5m"}}, TIME]}, 300.0),
        ({"tools": [WEATHER | {"cache_control": None}]}, None),
    ],
)
def test_cache_control_pins_the_prefix_for_the_longest_lifetime(fields, seconds):
    part = text("Hi") | ({"cache_control": {"type": "ephemeral"}} if "system" in fields else {})
    assert chat_of(messages=[{"role": "user", "content": [part]}], **fields).get("pin_s") == seconds


@pytest.mark.parametrize("control", [{"type": "persistent"}, {"type": "ephemeral", "ttl": "2h"}, {}])
async def test_an_unknown_lifetime_is_refused(scripted_client, control):
    content = [text("Hi") | {"cache_control": control}]
    request = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    response = await scripted_client.session.post(PATH, json=request)
    assert response.status == 400 and "cache_control" in (await response.json())["error"]["message"]


def test_options_become_those_of_a_chat():
    messages = [{"role": "user", "content": "Hi"}]
    chat = chat_of(
        messages=messages,
        tools=[WEATHER | {"strict": True, "type": "custom"}, {"type": "web_search_20250305", "name": "w"}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, stop_sequences=["END"],
        temperature=0.5, top_p=0.9, top_k=4, stream=True, thinking={"type": "disabled"}, cache_salt="mine",
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": CITY}},
    )  # fmt: skip
    function = {"name": "weather", "description": "of a city", "strict": True, "parameters": WEATHER["input_schema"]}
    assert chat == {
        "messages": messages, "tools": [{"type": "function", "function": function}], "stop": ["END"], "stream": True,
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False,
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "cache_salt": "mine",
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY}},
    }  # fmt: skip
    for choice, wanted in (("any", "required"), ("auto", "auto"), ("none", "none")):
        assert chat_of(messages=messages, tools=TOOLS, tool_choice={"type": choice})["tool_choice"] == wanted
    begun = chat_of(messages=[*messages, {"role": "assistant", "content": "I am"}])
    assert begun["continue_final_message"] is True
    on = chat_of(messages=messages, thinking={"type": "enabled", "budget_tokens": 9})
    assert on["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert chat_of(messages=messages, thinking={"type": "adaptive"}, tool_choice={"type": "auto"}) == {
        "messages": messages
    }
    effort = chat_of(messages=messages, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert effort == {"messages": messages, "reasoning_effort": "low"}


async def test_count_is_that_of_the_equal_chat(scripted_loaded):
    tools = [{"type": "function", "function": {"name": "time", "parameters": TIME["input_schema"]}}]
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "tools": tools}
    count = {"model": "demo", "system": "Be brief.", "messages": chat["messages"][1:], "tools": [TIME]}
    async with Client(*scripted_loaded, model_name="demo", chat_template=TEMPLATE) as client:
        expected = (await client.post("/tokenize", chat))["count"]
        assert await client.post(COUNT, count) == {"input_tokens": expected}
        without = {name: value for name, value in count.items() if name != "tools"}
        assert (await client.post(COUNT, without))["input_tokens"] < expected


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_forced_choice_gives_a_call(scripted_client, choice):
    answer = await scripted_client.post(PATH, body("No.", tools=TOOLS, tool_choice=choice))
    assert answer["content"][0]["type"] == "tool_use" and answer["stop_reason"] == "tool_use"
    if "name" in choice:
        assert answer["content"][0]["name"] == "weather" and answer["content"][0]["input"]["city"] in ("Rome", "Oslo")


# Qwen 3.5 allows instructions only in front, Mistral and Gemma only turns of the user and the assistant.
STRICT = """
{%- for m in messages %}
  {%- if not loop.first %}
    {%- if m.role == 'system' %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {%- if m.role == loop.previtem.role %}{{ raise_exception('Roles must alternate.') }}{% endif %}
  {%- endif %}
  {{- m.role + ': ' + m.content + '; ' }}
{%- endfor %}
"""


@pytest.mark.parametrize("route", ["messages", "responses"])
async def test_late_instructions_become_the_users_if_the_template_rejects_them(scripted_loaded, route):
    """Claude Code's second message is of the system, and Codex begins with two messages of the user."""
    late = [("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("system", say("Late."))]
    turns = [{"role": role, "content": content} for role, content in late]
    async with Client(*scripted_loaded, model_name="demo", chat_template=STRICT) as client:
        if route == "messages":
            fields = {"model": "demo", "max_tokens": 50, "system": "s", "messages": turns}
            answer = await client.post(PATH, fields)
            assert answer["content"] == [text("Late.")]
            (count,) = (await client.post(COUNT, fields)).values()
        else:
            answer = await client.post("/v1/responses", {"instructions": "s", "input": turns})
            assert answer["output"][0]["content"][0]["text"] == "Late."
            count = answer["usage"]["input_tokens"]
        folded = [("system", "s"), ("user", "a\n\nb\n\nc"), ("assistant", "d"), ("user", say("Late."))]
        chat = {"messages": [{"role": role, "content": content} for role, content in folded]}
        assert (await client.post("/tokenize", chat))["count"] == count
        error = (await client.post("/v1/chat/completions", {"messages": turns}, 400))["error"]
        assert "must be at the beginning" in error["message"]
        broken = [*turns, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]
        failed = await client.post(PATH, {"model": "demo", "max_tokens": 5, "messages": broken}, 400)
        assert "Roles must alternate" in failed["error"]["message"]
        await client.idle()


def test_definition_of_a_deferred_tool_stands_where_a_search_has_found_it():
    """Claude Code's ToolSearch returns references. The tools in front stay the same, and so does the cached prefix."""
    tools = [
        {"name": "search", "input_schema": {"type": "object", "properties": {}}},
        TIME | {"defer_loading": True}, WEATHER | {"defer_loading": True},
    ]  # fmt: skip
    references = [{"type": "tool_reference", "tool_name": name} for name in ("time", "search")]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"id": "t1"} | use("search")]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": references}]},
    ]

    def chat(messages, tools=tools):
        fields = {
            "model": "demo",
            "max_tokens": 5,
            "messages": messages,
            "tools": tools,
            "tool_choice": {"type": "auto"},
        }
        return parse(MessagesRequest, json.dumps(fields).encode()).chat()

    def in_front(chat):
        return [tool["function"]["name"] for tool in chat.template_options()["tools"] or ()]

    before, after = chat(messages[:1]), chat(messages)
    assert [tool.function.name for tool in before.tools] == in_front(before) == in_front(after) == ["search"]
    assert [tool.function.name for tool in after.tools] == ["search", "time"]
    found = re.fullmatch(r"<functions>\n<function>(.*)</function>\n</functions>\nsearch", after.messages[-1].text)
    assert json.loads(found[1]) == {"name": "time", "description": None, "parameters": TIME["input_schema"]}
    assert chat(messages[:1], tools[1:]).tools is None and in_front(chat(messages, tools[1:])) == []


async def test_deferred_tool_can_be_called_after_it_is_found(scripted_client):
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [reference, text(say(hermes(ROME)))]}
    messages = [
        {"role": "assistant", "content": [{"id": "t1"} | use("search")]}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    tools = [TIME, WEATHER | {"defer_loading": True}]
    answer = await scripted_client.post(PATH, body("a", messages=messages, tools=tools))
    assert without_ids(answer)["content"] == [use("weather", city="Rome")]
    result["content"].pop(0)
    answer = await scripted_client.post(PATH, body("a", messages=messages, tools=tools))
    assert [block["type"] for block in answer["content"]] == ["text"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "the type 'image'"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}
        ]}]}, "messages", "content.0: the type 'image'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "0.role"),
        ({"messages": [{"role": "user", "content": "a " * 600}]}, "messages", "prompt is too long"),
        ({"system": "a" * (LARGE_BYTES + 1)}, "messages", "characters, more than"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences: must be"),
        ({"temperature": -1}, "temperature", "at least 0, not -1"),
        ({"tools": [{"name": "a"}]}, "tools", "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f' is none"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config",
         "output_config"),
    ],
)  # fmt: skip
async def test_invalid_request_is_rejected_in_the_form_of_anthropic(scripted_client, fields, param, words):
    answer = await scripted_client.post(PATH, body("a") | fields, 400)
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    error = answer["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param) and words in error["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_thread_is_refused_with_the_code_after_which_clients_send_all_messages(scripted_client, thread):
    """Anthropic's tool runner begins with a thread, and goes on without one only after this code."""
    error = (await scripted_client.post(PATH, body("a", thread=thread), 400))["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"} and error["param"] == "thread"
    assert "whole conversation" in error["message"]


async def test_error_about_the_context_has_the_numbers_that_claude_code_reads(scripted_client):
    request = body("a " * 600)
    (count,) = (await scripted_client.post(COUNT, request)).values()
    message = (await scripted_client.post(PATH, request, 400))["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum: messages: This model's", message)
    assert found and [int(number) for number in found.groups()] == [count + 1, 512], message
    long = await scripted_client.post(PATH, body("a" * 200_000), 400)
    assert long["error"]["message"].startswith("prompt is too long: messages: This model's")


async def test_another_model_and_another_method_are_errors_in_the_form_of_anthropic(scripted_client):
    answer = await scripted_client.post(COUNT, body("a", model="claude"), 404)
    assert (answer["error"]["type"], answer["error"]["code"]) == ("not_found_error", "model_not_found")
    async with scripted_client.session.get(PATH) as response:
        answer = await response.json()
    assert response.status == 405 and (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")


async def test_key_may_be_in_the_header_of_anthropic():
    async with Client(*scripted.load(), model_name="demo", api_keys=("sesame", "other")) as client:
        for headers, status in (
            ({"x-api-key": "sesame", "anthropic-version": "2023-06-01"}, 200),
            ({"Authorization": "Bearer other"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "sesame", "Authorization": "Bearer wrong"}, 401),
            ({}, 401),
        ):
            async with client.session.post(PATH, json=body("Hi"), headers=headers) as response:
                answer = await response.json()
                assert response.status == status and response.headers["request-id"] == response.headers["X-Request-Id"]
            assert answer["type"] == ("message" if status == 200 else "error")
            assert status == 200 or answer["error"]["type"] == "authentication_error"
        await client.idle()


async def test_ignored_parts_are_told_once_in_the_log(scripted_client, caplog):
    caplog.set_level(logging.WARNING, "jpaged.serving.notices")
    request = body("Hi", tools=[{"type": "bash_20250124", "name": "bash"}], metadata={"user_id": "me"})
    for _ in range(2):
        await scripted_client.post(PATH, request | {"context_management": {"edits": []}})
    names = ["metadata", "context_management", "tools of type bash_20250124"]
    assert [each.message for each in caplog.records] == [f"{PATH}: {name!r} is ignored" for name in names]


async def test_loop_of_claude_code_ends_after_its_calls(scripted_client):
    """Claude Code streams with many fields, and replays its blocks with marks of its cache."""
    scripts = [f"I look. {hermes(ROME)}", hermes(NOON), "It is sunny."]
    mark = {"cache_control": {"type": "ephemeral"}}
    request = {
        "model": "demo", "max_tokens": 32000, "tools": TOOLS, "metadata": {"user_id": "{}"},
        "system": [text("x-anthropic-billing-header: cch=5f;"), text("You are an agent.") | mark],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    messages, calls = [{"role": "user", "content": [text("<system-reminder/>"), text(say(scripts[0])) | mark]}], []
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "none"}
    scripted_client.session.headers.update(headers)
    for script in scripts[1:]:
        count = await scripted_client.post(f"{COUNT}?beta=true", request | {"messages": messages})
        message = added_up(await streamed(scripted_client, request | {"messages": messages}))
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
        assert message["stop_reason"] == "tool_use"
        used = [block for block in message["content"] if block["type"] == "tool_use"]
        calls += [[block["name"], block["input"]] for block in used]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [text(f"Result: {say(script)}")]} | mark
            for block in used
        ]
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        messages += [
            {"role": "assistant", "content": [thinking, *message["content"]]},
            {"role": "user", "content": results},
        ]
    assert calls == [["weather", {"city": "Rome"}], ["time", {}]]
    last = added_up(await streamed(scripted_client, request | {"messages": messages}))
    assert last["content"] == [text("It is sunny.")] and last["stop_reason"] == "end_turn"
