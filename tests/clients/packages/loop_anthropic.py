# /// script
# requires-python = ">=3.12"
# dependencies = ["anthropic>=1,<3"]
# ///
"""Anthropic's client with messages: whole and streamed, loops of tools, counts of tokens and errors."""

import anthropic
from pydantic import BaseModel
from scenarios import ANSWER, MODEL, QUESTION, URL, WEATHER, raises, run, say

CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "Return the weather of a city.", "input_schema": SCHEMA}
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


def ask(content, **fields):
    """Return the arguments of a request with one message."""
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": content}]} | fields


def message():
    answer = client.messages.create(**ask(say("Once upon a time."), system="Be brief.", stop_sequences=["END"]))
    assert answer.content[0].text == "Once upon a time." and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > 0 and answer._request_id


def stream():
    with client.messages.stream(**ask(say("Once upon a time."))) as events:
        assert "".join(events.text_stream) == "Once upon a time."
        assert events.get_final_message().usage.output_tokens > 0


def loop(send):
    """Answer calls until a text comes, and return the cities and the text."""
    messages, cities = ask(QUESTION)["messages"], []
    while True:
        answer = send(ask(QUESTION, messages=messages, tools=[TOOL]))
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if uses else "end_turn")
        if not uses:
            return cities, answer.content[0].text
        cities += [use.input["city"] for use in uses]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER[use.input["city"]]} for use in uses
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def streamed(fields):
    with client.messages.stream(**fields) as events:
        return events.get_final_message()


def tool_loop():
    for send in (lambda fields: client.messages.create(**fields), streamed):
        assert loop(send) == (["Rome", "Oslo"], ANSWER)


def tool_runner():
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return WEATHER[city]

    for streams in (False, True):
        turns = list(client.beta.messages.tool_runner(**ask(QUESTION, tools=[weather], stream=streams)))
        answers = [turn.get_final_message() for turn in turns] if streams else turns
        assert len(answers) == 3 and answers[-1].content[0].text == ANSWER


def forced_call():
    answer = client.messages.create(**ask(say("No."), tools=[TOOL], tool_choice={"type": "any"}))
    assert answer.content[0].name == "weather" and answer.content[0].input["city"] in CITY["enum"]


class City(BaseModel, extra="forbid"):
    city: str


def structured():
    answer = client.messages.parse(**ask(say('{"city": "Rome"}'), output_format=City))
    assert answer.parsed_output == City(city="Rome")


def thinking():
    wish = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    assert client.messages.create(**ask(say("Hm."), **wish)).content[-1].text == "Hm."


def count_tokens():
    fields = {"model": MODEL, "messages": ask(QUESTION)["messages"]}
    count = client.messages.count_tokens(**fields, tools=[TOOL], system="Be brief.").input_tokens
    assert count > client.messages.count_tokens(**fields).input_tokens > 0
    usage = client.messages.create(**ask(QUESTION, tools=[TOOL], system="Be brief.")).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count


def models():
    assert MODEL in [model.id for model in client.models.list()]


def errors():
    with raises(anthropic.NotFoundError, "is not served here"):
        client.messages.create(**ask("Hi", model="none"))
    with raises(anthropic.BadRequestError, "stop_sequences: must be"):
        client.messages.create(**ask("Hi", stop_sequences=[""]))
    with raises(anthropic.BadRequestError, "prompt is too long"):
        client.messages.create(**ask("word " * 200_000))


run(message, stream, tool_loop, tool_runner, forced_call, structured, thinking, count_tokens, models, errors)
