# /// script
# requires-python = ">=3.12"
# dependencies = ["pydantic-ai-slim[openai]>=2.66,<3"]
# ///
"""Pydantic AI's `OpenAIChatModel`."""

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, raises, run


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


def agent(name=MODEL, *, settings=None, **fields):
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    return Agent(model, model_settings=settings or {"max_tokens": 20}, **fields)


async def chat():
    result = await agent(instructions="Be brief.").run(PROMPT)
    assert result.output and result.usage.output_tokens <= 20
    assert (await agent().run(PROMPT, message_history=result.all_messages())).output


async def stream():
    async with agent().run_stream(PROMPT) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(texts) and result.usage.output_tokens <= 20


async def tool_loop():
    """The only tool is required in the first step and absent from the second."""
    called = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"It is sunny in {city}."

    first = lambda context, definition: None if called else definition
    settings = lambda context: (
        {"max_tokens": 300} if called else {"max_tokens": 300, "tool_choice": ["weather"], "parallel_tool_calls": False}
    )
    made = agent(tools=[Tool(weather, prepare=first)], settings=settings)
    result = await made.run(PROMPT)
    assert len(called) == 1 and result.output


async def structured():
    for output in (Mood, NativeOutput(Mood)):
        assert isinstance((await agent(settings={"max_tokens": 300}, output_type=output).run(PROMPT)).output, Mood)
    async with agent(settings={"max_tokens": 300}, output_type=NativeOutput(Mood)).run_stream(PROMPT) as result:
        assert isinstance(await result.get_output(), Mood)


async def reasoning_effort():
    assert (await agent(settings={"openai_reasoning_effort": "low"}).run(PROMPT)).output


async def logprobs():
    result = await agent(settings={"openai_logprobs": True, "openai_top_logprobs": 2}).run(PROMPT)
    assert result.all_messages()[-1].provider_details["logprobs"]


async def errors():
    with raises(ModelHTTPError, "is not served here"):
        await agent("none").run(PROMPT)
    with raises(ModelHTTPError, "temperature: must be"):
        await agent(settings={"temperature": -1}).run(PROMPT)


async def cancel():
    with cancelled():
        async with agent(settings=LONG).run_stream(PROMPT) as result:
            async for _ in result.stream_text(delta=True):
                break
            await asyncio.sleep(0.2)


run(chat, stream, tool_loop, structured, reasoning_effort, logprobs, errors, cancel)
