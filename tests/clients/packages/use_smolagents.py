# /// script
# requires-python = ">=3.12"
# dependencies = ["smolagents[openai]>=1.26,<2"]
# ///
"""smolagents' `OpenAIServerModel`. The prompt of its agents is longer than the demo model's context."""

from typing import Literal

import openai
from pydantic import BaseModel
from scenarios import MODEL, PROMPT, URL, raises, run
from smolagents import OpenAIServerModel, tool

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


@tool
def clock() -> str:
    """Return the time of day."""
    return "noon"


def model(**fields):
    return OpenAIServerModel(
        MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        client_kwargs={"max_retries": 0},
        retry=False,
        **{"max_tokens": 20} | fields,
    )


def chat():
    answer = model()(MESSAGES, stop_sequences=["Observation:"])
    assert answer.content and answer.token_usage.output_tokens <= 20


def stream():
    assert "".join(delta.content or "" for delta in model().generate_stream(MESSAGES))


def tool_call():
    answer = model(max_tokens=300, parallel_tool_calls=False)(MESSAGES, tools_to_call_from=[clock])
    assert answer.tool_calls[0].function.name == "clock"


def structured():
    form = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": Mood.model_json_schema()}}
    assert Mood.model_validate_json(model(max_tokens=300)(MESSAGES, response_format=form).content)


def errors():
    with raises(openai.BadRequestError, "temperature: must be"):
        model(temperature=-1)(MESSAGES)


run(chat, stream, tool_call, structured, errors)
