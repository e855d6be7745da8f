"""Tool calls over HTTP: tool_choice, calls of the model plain and streamed, strict tools, and results of tools."""

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.serving.client import collect, request
from tests.serving.scripted import END, TOKENIZER, chat, say
from tests.serving.tool_texts import hermes, llama

HASTE = {"logit_bias": {str(END): 100}}  # It ends each response as soon as the grammar allows.


def tool(name, strict=None, **properties):
    """Return a tool whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "parameters": parameters} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


WEATHER = tool("weather", city={"enum": ["Rome", "Oslo"]}, days={"enum": [1, 2, 3]})
CLOCK = tool("clock", zone={"enum": ["utc", "local"]})
TOOLS = [WEATHER, CLOCK]


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]


def check_calls(calls, tools=TOOLS):
    """Check the ids of calls, and their arguments against the tools' schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    assert len({call.id for call in calls}) == len(calls) and all(call.id.startswith("call_") for call in calls)
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def assembled(chunks):
    """Return the calls of a streamed choice as [name, arguments]; only the first delta of a call may have its id."""
    calls, ids = [], set()
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(calls) and delta.id not in ids and delta.type == "function"
                ids.add(delta.id)
                calls.append([delta.function.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.function.arguments
    return calls


def as_lists(calls):
    return [[call.function.name, call.function.arguments] for call in calls]


async def test_required_tool_choice_gives_calls_plain_and_streamed(api):
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120} | HASTE
    (choice,) = (await api.chat("What is the weather?", **fields)).choices
    check_calls(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    chunks = await collect(await api.chat("What is the weather?", stream=True, **fields))
    assert assembled(chunks) == as_lists(choice.message.tool_calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_parallel_tool_calls_false_gives_one_call(api):
    # With a bias against the end the model adds calls until max_tokens.
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "logit_bias": {str(END): -100}}
    several = (await api.chat("What is the weather?", **fields)).choices[0].message.tool_calls
    assert len(several) > 1
    check_calls(several[:-1])  # The last one may be incomplete.
    one = (await api.chat("What is the weather?", parallel_tool_calls=False, **fields)).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    check_calls(one.message.tool_calls)


async def test_named_tool_choice_gives_a_call_of_this_tool(api):
    named = {"type": "function", "function": {"name": "clock"}}
    (choice,) = (await api.chat("What is the weather?", tools=TOOLS, tool_choice=named, max_tokens=90)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["clock"] and choice.finish_reason == "stop"
    check_calls(choice.message.tool_calls)
    with pytest.raises(openai.BadRequestError, match="'cook' is none of the tools") as error:
        await api.chat("Hi", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "cook"}})
    assert error.value.param == "tool_choice"


async def test_allowed_tools_give_calls_of_these_tools(api):
    allowed = lambda mode, *names: {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]},
    }
    fields = {"tools": TOOLS, "max_tokens": 120} | HASTE
    both = await api.chat("What is the weather?", tool_choice="required", **fields)
    assert both.choices[0].message.tool_calls[0].function.name == "weather"
    one = await api.chat("What is the weather?", tool_choice=allowed("required", "clock"), **fields)
    assert {call.function.name for call in one.choices[0].message.tool_calls} == {"clock"}
    assert one.choices[0].finish_reason == "tool_calls" and one.usage.prompt_tokens == both.usage.prompt_tokens
    free = await api.chat("Who are you?", tools=TOOLS, tool_choice=allowed("auto", "clock", "weather"))
    plain = await api.chat("Who are you?", tools=TOOLS)
    assert free.choices[0].message == plain.choices[0].message
    for choice, words in [(allowed("required", "cook"), "'cook' is none of the tools"), (allowed("auto"), "must be")]:
        with pytest.raises(openai.BadRequestError, match=words) as error:
            await api.chat("Hi", tools=TOOLS, tool_choice=choice)
        assert error.value.param == "tool_choice"


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_model_without_calls_returns_content(api, choice):
    answer = (await api.chat("Who are you?", tools=TOOLS, tool_choice=choice)).choices[0]
    assert answer.message.tool_calls is None and answer.message.content and answer.finish_reason != "tool_calls"


@pytest.mark.parametrize("how", ["create", "parse", "stream"])
async def test_result_of_a_tool_is_accepted_after_its_call(api, how):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    messages = [{"role": "user", "content": "Is it warm?"}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    completions = api.client.chat.completions
    if how == "stream":
        async with completions.stream(model="demo", messages=messages, **fields) as stream:
            completion = await stream.get_final_completion()
    else:
        completion = await getattr(completions, how)(model="demo", messages=messages, **fields)
    message = completion.choices[0].message
    (call,) = message.tool_calls
    city = Weather.model_validate_json(call.function.arguments).city
    if how != "create":
        assert call.function.parsed_arguments == Weather(city=city)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
    after = await api.chat(messages, tools=tools, max_tokens=5, extra_body={"return_token_ids": True})
    called = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    result = "<|user|><tool_response>18 degrees</tool_response><|end|>"
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith(f"<|assistant|>{called}<|end|>{result}<|assistant|>")
    assert prompt.startswith("<|begin|><|system|>Tools: {") and '"name": "weather"' in prompt


CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
FITS = '{"place": "<tool_call>{}"}'
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "additionalProperties": False}
FORMATS = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}]


@pytest.mark.parametrize("response_format", FORMATS, ids=lambda each: each["type"])
@pytest.mark.parametrize(
    "said, choice, content, calls",
    [
        (CALLED, "auto", "", ["weather"]),
        (FITS, "auto", FITS, []),
        (FITS, "none", FITS, []),
        (CALLED, "required", "", ["weather"]),
    ],
)
async def test_answer_with_tools_and_a_format_is_a_call_or_fits_it(
    scripted_api, response_format, said, choice, content, calls
):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    fields = {"tools": tools, "tool_choice": choice, "response_format": response_format, "max_tokens": 80}
    message = (await scripted_api.chat(say(said), **fields)).choices[0].message
    chunks = await collect(await scripted_api.chat(say(said), **fields, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    text = "".join(delta.content or "" for delta in deltas)
    assert text == (message.content or "") == content
    for parts in ([message], deltas):
        found = [call.function.name for part in parts for call in part.tool_calls or ()]
        assert [name for name in found if name] == calls
    unfit = (await scripted_api.chat(say("Hello"), **fields)).choices[0].message
    assert unfit.content != "Hello"


async def test_tools_with_another_constraint_are_refused(api, scripted_llama_api):
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    for call, constraint, words in (
        (api.chat, {"regex": "a"}, "can't be combined with tools; use response_format"),
        (api.chat, {"structured_outputs": {"regex": "a"}}, "can't be combined with tools; use response_format"),
        (scripted_llama_api.chat, {"response_format": {"type": "json_object"}}, "in the form llama3_json"),
    ):
        (field,) = constraint
        with pytest.raises(openai.BadRequestError, match=f"{field}: .*{words}") as error:
            await call("Hi", tools=tools, extra_body=constraint)
        assert error.value.param == field


NESTED = "[" * 201
WRONG_ARGUMENTS = ('{"city": "Rome"', r'{"city": "\ud83e"}', '{"city": "a\nb"}', "{,}", NESTED, "")


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS, ids=lambda text: text[:9])
async def test_arguments_in_the_history_may_be_cut_off_or_wrong(api, arguments):
    """The server accepts its own answers again: the template gets the text as it is."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Is it warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "wrong arguments"},
    ]  # fmt: skip
    after = await api.chat(messages, max_tokens=1, extra_body={"return_token_ids": True})
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special_tokens=False)
    assert json.dumps(arguments, ensure_ascii=False) in prompt if arguments else '"arguments": {}' in prompt


ROME = '{"name": "weather", "arguments": {"city": "Rome", "days": 1}}'
NOON = '{"name": "clock", "arguments": {"zone": "utc"}}'
ROME_CALL, NOON_CALL = ["weather", '{"city": "Rome", "days": 1}'], ["clock", '{"zone": "utc"}']


AUTO = {
    "a call": (hermes(ROME), llama(ROME), None, [ROME_CALL]),
    "two calls": (hermes(ROME, NOON), llama(ROME, NOON), None, [ROME_CALL, NOON_CALL]),
    "no call": ("Sunny.", "Sunny.", "Sunny.", []),
    "a call without its name": ('<tool_call>\n{"nam', '{"nam', ..., []),
    "an unknown tool": (hermes(ROME).replace("weather", "cook"), llama(ROME).replace("weather", "cook"), ..., []),
    "no object": ('<tool_call>\n["weather"]\n</tool_call>', '["weather"]', ..., []),
    "arguments that are a list": ('<tool_call>\n{"name": "clock", "arguments": [1]}\n</tool_call>',
                                  '{"name": "clock", "parameters": [1]}', ..., []),
}  # fmt: skip


async def check_auto(api, script, content, calls, **fields):
    """Script a message, and check the response plain and streamed; return the chunks."""
    fields = {"tools": TOOLS, "max_tokens": 150} | fields
    (choice,) = (await api.chat(say(script), **fields)).choices
    assert (choice.message.content, as_lists(choice.message.tool_calls or ())) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    if calls:
        check_calls(choice.message.tool_calls)
    chunks = await collect(await api.chat(say(script), stream=True, **fields))
    assert assembled(chunks) == calls and chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (content or "")
    return chunks


@pytest.mark.parametrize("script, _, content, calls", AUTO.values(), ids=AUTO)
async def test_hermes_text_with_tool_choice_auto_gives_content_and_calls(scripted_api, script, _, content, calls):
    await check_auto(scripted_api, script, script if content is ... else content, calls)


@pytest.mark.parametrize("_, script, content, calls", AUTO.values(), ids=AUTO)
async def test_llama_text_with_tool_choice_auto_gives_content_and_calls(scripted_llama_api, _, script, content, calls):
    await check_auto(scripted_llama_api, script, script if content is ... else content, calls)


async def test_call_of_a_tool_that_is_not_allowed_is_content(scripted_api):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    await check_auto(scripted_api, hermes(ROME), None, [ROME_CALL], tool_choice=choice)
    await check_auto(scripted_api, hermes(NOON), hermes(NOON), [], tool_choice=choice)


async def test_stream_has_arguments_in_pieces_and_no_tags(scripted_api):
    chunks = await check_auto(scripted_api, f"Let me see: {hermes(ROME, NOON)}", "Let me see:", [ROME_CALL, NOON_CALL])
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    pieces = [delta.function.arguments for delta in deltas if delta.index == 0]
    assert len(pieces) > 1
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len([*filter(None, contents)]) > 1 and not any("<" in content for content in contents)


async def test_only_the_first_call_is_returned_without_parallel_calls(scripted_api, scripted_llama_api):
    await check_auto(scripted_api, hermes(ROME, NOON), None, [ROME_CALL], parallel_tool_calls=False)
    await check_auto(scripted_llama_api, llama(ROME, NOON), None, [ROME_CALL], parallel_tool_calls=False)


async def test_choices_have_their_own_calls(scripted_api):
    script = say(hermes(ROME), "No.", hermes(NOON))
    choices = (await scripted_api.chat(script, tools=TOOLS, n=3, max_tokens=100)).choices
    assert [as_lists(choice.message.tool_calls or ()) for choice in choices] == [[ROME_CALL], [], [NOON_CALL]]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    chunks = await collect(await scripted_api.chat(script, tools=TOOLS, n=3, max_tokens=100, stream=True))
    by_choice = [[chunk for chunk in chunks if chunk.choices[0].index == i] for i in range(3)]
    assert [assembled(each) for each in by_choice] == [[ROME_CALL], [], [NOON_CALL]]


async def test_call_that_max_tokens_ends_has_finish_reason_length(scripted_api):
    length = len(TOKENIZER.encode(hermes(ROME).partition("Rome")[0], add_special_tokens=False).ids)
    (choice,) = (await scripted_api.chat(say(hermes(ROME)), tools=TOOLS, max_tokens=length)).choices
    assert as_lists(choice.message.tool_calls) == [["weather", '{"city": "']] and choice.finish_reason == "length"


async def test_strict_tool_gets_arguments_of_its_schema(scripted_api, scripted_llama_api):
    strict = [tool("weather", True, city={"type": "string"})]
    loose = [tool("weather", city={"type": "string"})]
    wrong = '{"name": "weather", "arguments": {"city": 5}}'
    cases = (scripted_api, f"So: {hermes(wrong)}", "So:"), (scripted_llama_api, llama(wrong), None)
    for api, script, content in cases:
        for tools in (strict, loose):
            (choice,) = (await api.chat(say(script), tools=tools, max_tokens=150)).choices
            (call,) = choice.message.tool_calls
            assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
            if tools is strict:
                check_calls([call], strict)
            else:
                assert json.loads(call.function.arguments) == {"city": 5}
        assert (await api.chat(say("Just text."), tools=strict)).choices[0].message.content == "Just text."


async def test_strict_tool_without_an_object_is_rejected(scripted_api):
    with pytest.raises(openai.BadRequestError, match='must have the type "object"') as error:
        wrong = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}}
        await scripted_api.chat("Hi", tools=[wrong])
    assert error.value.param == "tools"


async def test_tool_call_stream_has_frames_with_all_fields(exchange):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    script = 'So: <tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
    events = (await exchange(request("POST", "/v1/chat/completions", chat(script, tools=tools, stream=True)))).events
    deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert {*deltas[0]} == {"index", "id", "type", "function"} and deltas[0]["function"]["name"] == "clock"
    assert all({*delta} == {"index", "function"} and {*delta["function"]} == {"arguments"} for delta in deltas[1:])
    assert "".join(delta["function"]["arguments"] for delta in deltas) == '{"zone": "utc"}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
