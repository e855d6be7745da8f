# /// script
# requires-python = ">=3.12"
# dependencies = ["instructor>=1.17,<2"]
# ///
"""Instructor, in the modes that send different requests."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from scenarios import MODEL, PROMPT, URL, raises, run

MESSAGES = [{"role": "user", "content": PROMPT}]


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]
    strength: Literal[1, 2, 3]


def client(mode):
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


def create(mode, **fields):
    fields = {
        "model": MODEL,
        "messages": MESSAGES,
        "response_model": Mood,
        "max_tokens": 300,
        "max_retries": 0,
    } | fields
    return client(mode).chat.completions.create(**fields)


def tools():
    assert isinstance(create(instructor.Mode.TOOLS), Mood)


def json_schema():
    assert isinstance(create(instructor.Mode.JSON_SCHEMA), Mood)


def partial():
    *_, last = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, messages=MESSAGES, response_model=Mood, max_tokens=300
    )
    assert last.mood in ("happy", "sad")


def errors():
    with raises(Exception, "temperature: must be"):
        create(instructor.Mode.TOOLS, temperature=-1)


run(tools, json_schema, partial, errors)
