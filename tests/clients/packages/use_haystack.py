# /// script
# requires-python = ">=3.12"
# dependencies = ["haystack-ai>=3.4,<4"]
# ///
"""Haystack's `OpenAIChatGenerator`."""

from typing import Annotated, Literal

import openai
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel
from scenarios import MODEL, PROMPT, URL, raises, run


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


@tool
def weather(city: Annotated[Literal["Paris", "Rome"], "a city"]) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


def generator(**fields):
    options = {"max_tokens": 20} | fields
    api = {"api_key": Secret.from_token("none"), "api_base_url": f"{URL}/v1", "max_retries": 0}
    return OpenAIChatGenerator(model=MODEL, **api, generation_kwargs=options)


def generate(messages=None, **fields):
    (reply,) = generator(**fields).run(messages or [ChatMessage.from_user(PROMPT)])["replies"]
    return reply


def chat():
    reply = generate([ChatMessage.from_system("Be brief."), ChatMessage.from_user(PROMPT)])
    assert reply.text and reply.meta["usage"]["completion_tokens"] <= 20


def stream():
    chunks = []
    reply = generator().run([ChatMessage.from_user(PROMPT)], streaming_callback=chunks.append)["replies"][0]
    assert reply.text == "".join(chunk.content for chunk in chunks)


def tool_loop():
    options = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    ask = ChatMessage.from_user(PROMPT)
    (reply,) = generator(**options).run([ask], tools=[weather], tools_strict=True)["replies"]
    (call,) = reply.tool_calls
    result = ChatMessage.from_tool(weather.invoke(**call.arguments), origin=call)
    assert generate([ask, reply, result]).text


def structured():
    assert Mood.model_validate_json(generate(response_format=Mood, max_tokens=300).text)


def reasoning_effort():
    assert generate(reasoning_effort="low").text


def errors():
    with raises(openai.BadRequestError, "temperature: must be"):
        generate(temperature=-1)


run(chat, stream, tool_loop, structured, reasoning_effort, errors)
