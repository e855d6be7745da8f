"""/v1/responses: translation to chats, answers and their events, loops of agents, and errors by field."""

import json
import logging

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jpaged.core.params import shown
from jpaged.serving.parse import parse
from jpaged.serving.responses import ResponsesRequest
from jpaged.serving.service import LARGE_BYTES
from tests.serving.scripted import FAIL, say
from tests.serving.tool_texts import NOON, ROME, hermes

PATH = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY | {"additionalProperties": False}}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, TIME]


def user(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def call(call_id, name, arguments):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


async def streamed(client, body):
    """Return the events of a stream, after a check of their frames, numbers and types."""
    async with client.session.post(PATH, json=body | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream", await response.text()
        *frames, end = (await response.text()).split("\n\n")
    assert end == ""
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def added_up(events):
    """Return the items that the events of a stream add up to; each event must fit the ones before."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert event["item"] == item | {"status": event["item"]["status"]}
            items[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"] and item["status"] == "in_progress"
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case _:
                raise AssertionError(kind)
    return items


def without_ids(response):
    """Return a response without what differs from one request to the next."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return response | {"id": None, "created_at": None, "output": output, "usage": None}


@pytest.mark.parametrize(
    "script, shown",
    [
        ("Hello there", ["Hello there"]),
        (hermes(ROME, NOON), [["weather", '{"city": "Rome"}'], ["time", "{}"]]),
        (f"So: {hermes(ROME)} and then {hermes(NOON)}",
         ["So:", ["weather", '{"city": "Rome"}'], "and then", ["time", "{}"]]),
        ("", [""]),
    ],
)  # fmt: skip
async def test_stream_adds_up_to_the_whole_response(scripted_client, script, shown):
    body = {"model": "demo", "input": say(script), "tools": TOOLS}
    whole = await scripted_client.post(PATH, body)
    Response.model_validate(whole)
    found = [
        item["content"][0]["text"].strip() if item["type"] == "message" else [item["name"], item["arguments"]]
        for item in whole["output"]
    ]
    assert found == shown and whole["status"] == "completed" and whole["error"] is None
    events = await streamed(scripted_client, body)
    last = events[-1]
    assert last["type"] == "response.completed" and added_up(events) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    assert {event["response"]["id"] for event in (*events[:2], last)} == {last["response"]["id"]}


async def test_usage_counts_cached_tokens(scripted_client):
    body = {"input": say("Hello") + " word" * 40}
    first, second = [(await scripted_client.post(PATH, body))["usage"] for _ in range(2)]
    assert first["output_tokens"] == 2 and first["total_tokens"] == first["input_tokens"] + 2
    cached = second["input_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["input_tokens"] == first["input_tokens"]


async def test_limit_of_tokens_makes_the_response_incomplete(scripted_client):
    body = {"input": say("one two three four"), "max_output_tokens": 2}
    whole = await scripted_client.post(PATH, body)
    events = await streamed(scripted_client, body)
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert response["status"] == response["output"][-1]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_constraint_of_vllm_holds_in_both_apis(scripted_client):
    constraint = {"structured_outputs": {"choice": ["Rome"]}, "model": "demo"}
    whole = await scripted_client.post("/v1/responses", {"input": say("Oslo"), **constraint})
    assert whole["output"][0]["content"][0]["text"] == "Rome"
    messages = [{"role": "user", "content": say("Oslo")}]
    message = await scripted_client.post("/v1/messages", {"messages": messages, "max_tokens": 50, **constraint})
    assert message["content"][0]["text"] == "Rome"
    both = {"input": "Hi", "text": {"format": {"type": "json_object"}}, **constraint}
    assert (await scripted_client.post("/v1/responses", both, 400))["error"]["param"] == "text"


async def test_failure_in_a_stream_is_its_last_event(scripted_client):
    *events, last = await streamed_failure(scripted_client)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "internal_error"
    (item,) = last["response"]["output"]
    assert (item["content"][0]["text"], item["status"]) == ("Once upon", "incomplete")
    assert not any(event["type"] == "response.output_item.done" for event in events)


async def streamed_failure(client):
    """Return the events of a stream that fails; their numbers follow each other."""
    async with client.session.post(PATH, json={"input": say(f"Once upon{FAIL}"), "stream": True}) as response:
        frames = (await response.text()).strip().split("\n\n")
    events = [json.loads(frame.partition("data: ")[2]) for frame in frames]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def chat_of(**fields):
    """Return the chat request of a body, as JSON without unset fields."""
    chat = parse(ResponsesRequest, json.dumps(fields).encode()).chat()
    return chat.model_dump(exclude_none=True, by_alias=True)


def test_items_become_messages():
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}], "id": "x"},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call("c1", "weather", '{"city": "Rome"}'),
        call("c2", "time", "{}"),
        result("c1", "sunny"),
        result("c2", [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]),
        {"type": "reasoning", "encrypted_content": "gAAA", "summary": [{"type": "summary_text", "text": "secret"}]},
        call("c3", "time", "{}"),
        result("c3", "one"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "message", "role": "developer", "content": "Later."},
    ]  # fmt: skip
    function = lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}}
    chat = chat_of(input=items, instructions="Be brief.")
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1"} | function("weather", '{"city": "Rome"}'), {"id": "c2"} | function("time", "{}"),
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "tool_calls": [{"id": "c3"} | function("time", "{}")]},
        {"role": "tool", "tool_call_id": "c3", "content": "one"},
        {"role": "assistant", "content": "No."},
        {"role": "developer", "content": "Later."},
    ]  # fmt: skip


def test_output_of_a_tool_without_a_call_becomes_a_message_of_the_user():
    """Codex adds the goal that the model has set."""
    goal = {"type": "function_call_output", "id": "fco_1", "name": "goal", "namespace": "agent", "output": "Win."}
    chat = chat_of(input=[call("c1", "time", "{}"), result("c1", "noon"), goal])
    assert chat["messages"][1:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "noon"}, {"role": "user", "content": "goal: Win."},
    ]  # fmt: skip
    assert chat_of(input=[goal | {"call_id": "c1"}])["messages"][0]["role"] == "tool"


def test_options_become_those_of_a_chat():
    fields = {
        "model": "demo", "tools": [WEATHER | {"strict": True, "description": "of a city"}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "max_output_tokens": 5,
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "cache_salt": "mine", "stream": True,
        "reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"a": 1},
        "text": {"format": {"type": "json_schema", "name": "mood", "schema": CITY, "strict": True}, "verbosity": "low"},
    }  # fmt: skip
    function = {"name": "weather", "description": "of a city", "strict": True, "parameters": WEATHER["parameters"]}
    assert chat_of(input="Hi", **fields) == {
        "messages": [{"role": "user", "content": "Hi"}], "model": "demo",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False,
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "cache_salt": "mine", "stream": True,
        "reasoning_effort": "low", "verbosity": "low", "chat_template_kwargs": {"a": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "mood", "schema": CITY, "strict": True}},
    }  # fmt: skip
    for form in ("text", "json_object"):
        assert chat_of(input="Hi", text={"format": {"type": form}})["response_format"] == {"type": form}
    names = [{"type": "function", "name": "weather"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": names}
    assert chat_of(input="Hi", tools=[WEATHER], tool_choice=choice)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
    }
    # A client offers only tools that are ignored.
    assert "tool_choice" not in chat_of(input="Hi", tools=[{"type": "web_search"}], tool_choice="auto")


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({}, "input", "is required"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "web_search_call"}]}, "input", "0: the type 'web_search_call' is not supported"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "send store: false"),
        ({"input": [user("a"), {"type": "function_call", "name": "f"}]}, "input", "1.function_call.call_id"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", "0.function_call_output.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "the type 'input_image'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", "0.message.role"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"input": "a", "background": True}, "background", "nothing is stored"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"input": "a", "top_logprobs": -2}, "top_logprobs", "-2"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: must be a whole number"),
        ({"input": "a", "max_output_tokens": 9999}, "max_output_tokens", "maximum context length is 512"),
        ({"input": "a " * 600}, "input", "maximum context length is 512"),
        ({"input": "a", "temperature": -1}, "temperature", "at least 0, not -1"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text", "the type 'xml' is not supported"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "text", "text"),
        ({"input": "a", "reasoning": {"effort": "much"}}, "reasoning", "'minimal'"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools", "should match pattern"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f' is"),
        ({"input": "a", "tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be"),
        ({"input": "a" * (LARGE_BYTES + 1)}, "input", "characters, more than"),
    ],
)  # fmt: skip
async def test_invalid_request_is_rejected_by_its_field(scripted_client, fields, param, words):
    error = (await scripted_client.post(PATH, fields, 400))["error"]
    assert error["param"] == param and words in error["message"] and error["type"] == "BadRequestError"


async def test_another_model_is_an_error_404(scripted_client):
    error = (await scripted_client.post(PATH, {"model": "gpt-5", "input": "a"}, 404))["error"]
    assert error["code"] == "model_not_found"


async def test_ignored_parts_are_told_once_in_the_log(scripted_client, caplog):
    caplog.set_level(logging.WARNING, "jpaged.serving.notices")
    body = {"input": say("Hi"), "store": True, "client_metadata": {"a": "b"}, "prompt_cache_key": "k"}
    tools = [
        {"type": "web_search"}, {"type": "custom", "name": "c"},
        {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "d"}, TIME | {"name": "x" * 64}]},
    ]  # fmt: skip
    for _ in range(2):
        response = await scripted_client.post(PATH, body | {"tools": tools, "tool_choice": "auto"})
        assert response["store"] is False and [tool["tools"] for tool in response["tools"]] == [[]]
    names = ["client_metadata", "tools of type web_search", "tools of type custom", f"tool n__{'x' * 64}", "store"]
    assert [each.message for each in caplog.records] == [f"{PATH}: {shown(name)} is ignored" for name in names]


async def test_functions_of_a_namespace_are_called_by_both_names(scripted_client):
    """Codex sends the tools of an MCP server in a namespace."""
    space = {"type": "namespace", "name": "mcp__sky", "description": "Sky.", "tools": [WEATHER]}
    noon = call("c1", "noon", "{}") | {"namespace": "mcp__sky"}
    items = [noon, result("c1", "noon"), user(say(hermes(ROME.replace("weather", "mcp__sky__weather"), NOON)))]
    body = {"model": "demo", "input": items, "tools": [space, TIME]}
    whole = await scripted_client.post(PATH, body)
    Response.model_validate(whole)
    calls = [(item.get("namespace"), item["name"], item["arguments"]) for item in whole["output"]]
    assert calls == [("mcp__sky", "weather", '{"city": "Rome"}'), (None, "time", "{}")]
    assert [tool["name"] for tool in whole["tools"]] == ["mcp__sky", "time"]
    events = await streamed(scripted_client, body)
    assert added_up(events) == events[-1]["response"]["output"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    choice = {"type": "function", "name": "weather", "namespace": "mcp__sky"}
    chat = chat_of(input=items, tools=[space, TIME], tool_choice=choice)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["mcp__sky__weather", "time"]
    assert chat["tool_choice"]["function"]["name"] == "mcp__sky__weather"
    assert chat["messages"][0]["tool_calls"][0]["function"]["name"] == "mcp__sky__noon"


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_texts_have_the_logprobs_of_their_tokens(scripted_client, fields):
    text = f"I look at \U0001f98a. {hermes(ROME)}"
    body = {"input": say(text), "tools": TOOLS} | fields
    message, _ = (await scripted_client.post(PATH, body))["output"]
    (content,) = message["content"]
    entries = content["logprobs"]
    assert b"".join(bytes(each["bytes"]) for each in entries).decode().rstrip() == content["text"].rstrip()
    assert {len(each["top_logprobs"]) for each in entries} == {fields.get("top_logprobs", 0)}
    chat = {"messages": [{"role": "user", "content": say(text)}], "logprobs": True}
    expected = (await scripted_client.post("/v1/chat/completions", chat))["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in entries] == [each["logprob"] for each in expected[: len(entries)]]
    events = await streamed(scripted_client, body)
    sent = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert sent == done["logprobs"] == entries
    (without,) = (await scripted_client.post(PATH, {"input": say("No.")}))["output"]
    assert without["content"][0]["logprobs"] == []


# Loops of three turns with two calls, in the shapes of clients.


async def codex(client, say_next, outputs):
    """Codex streams, stores nothing, and replays its items."""
    body = {
        "model": "demo", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "instructions": "You are an agent.", "reasoning": {"summary": "auto"}, "prompt_cache_key": "0198-key",
        "include": ["reasoning.encrypted_content"], "client_metadata": {"x-installation": "1"},
        "tools": [
            WEATHER | {"strict": False}, TIME | {"strict": False},
            {"type": "namespace", "name": "n", "tools": [TIME]}, {"type": "web_search", "external_web_access": False},
        ],
    }  # fmt: skip
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}]},
        user(say_next()),
    ]
    while True:
        events = await streamed(
            client, {name: value for name, value in body.items() if name != "stream"} | {"input": items}
        )
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        calls = [item for item in done if item["type"] == "function_call"]
        items += [{name: item[name] for name in item if name not in ("id", "status")} for item in done]
        if not calls:
            return calls_of(items), done[-1]["content"][0]["text"]
        items += [result(each["call_id"], outputs()) for each in calls]


async def openai_agents(client, say_next, outputs):
    """The Agents SDK replays its items with their ids, and asks for strict tools."""
    tools = [
        each | {"strict": True, "parameters": each["parameters"] | {"additionalProperties": False}} for each in TOOLS
    ]
    items = [{"role": "user", "content": say_next()}]
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0) as api:
        while True:
            response = await api.responses.create(
                model="demo", input=items, tools=tools, include=[], instructions="Be brief.", parallel_tool_calls=False,
            )  # fmt: skip
            output = [item.model_dump(exclude_unset=True) for item in response.output]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                return calls_of(items), response.output_text
            items += [result(each["call_id"], outputs()) for each in calls]


async def ai_sdk(client, say_next, outputs):
    """The AI SDK with `store: false` sends whole items, whose messages have an id and no type."""
    tools = [each | {"strict": False} for each in TOOLS]
    items = [{"role": "user", "content": [{"type": "input_text", "text": say_next()}]}]
    while True:
        body = {"model": "demo", "input": items, "tools": tools, "tool_choice": "auto", "store": False}
        response = await client.post(PATH, body)
        for item in response["output"]:
            if item["type"] == "message":
                text = [{"type": "output_text", "text": item["content"][0]["text"]}]
                items.append({"role": "assistant", "content": text, "id": item["id"]})
            else:
                items.append({name: item[name] for name in ("type", "call_id", "name", "arguments", "id")})
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls:
            return calls_of(items), response["output"][-1]["content"][0]["text"]
        items += [result(each["call_id"], outputs()) for each in calls]


def calls_of(items):
    return [[item["name"], item["arguments"]] for item in items if item.get("type") == "function_call"]


@pytest.mark.parametrize("agent", [codex, openai_agents, ai_sdk])
async def test_loop_of_an_agent_ends_after_its_calls(scripted_client, agent):
    scripts = [f"I look. {hermes(ROME)}", hermes(NOON), "It is sunny."]
    said, results = iter(scripts), iter(scripts[1:])
    calls, text = await agent(scripted_client, lambda: say(next(said)), lambda: f"Result: {say(next(results))}")
    assert calls == [["weather", '{"city": "Rome"}'], ["time", "{}"]] and text == "It is sunny."


async def test_openai_client_streams_and_parses(scripted_client):
    async with openai.AsyncOpenAI(base_url=f"{scripted_client.url}/v1", api_key="none", max_retries=0) as api:
        text = {"format": {"type": "json_schema", "name": "city", "schema": CITY | {"additionalProperties": False}}}
        async with api.responses.stream(model="demo", input=say('{"city": "Rome"}'), text=text) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert json.loads(final.output_text) == {"city": "Rome"} and kinds[-1] == "response.completed"
        forced = await api.responses.create(model="demo", input=say("No."), tools=TOOLS, tool_choice="required")
        assert forced.output[0].type == "function_call" and forced.output[0].name in ("weather", "time")
        with pytest.raises(openai.BadRequestError) as error:
            await api.responses.create(model="demo", input="a", previous_response_id="resp_1")
        assert error.value.param == "previous_response_id"
