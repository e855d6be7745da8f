# /// script
# requires-python = ">=3.12"
# dependencies = ["openai-agents>=0.24,<1"]
# ///
"""The OpenAI Agents SDK with `OpenAIChatCompletionsModel`."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from pydantic import BaseModel
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, raises, run

set_tracing_disabled(True)
CITIES = Literal["Paris", "Rome"]


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


@function_tool
def weather(city: CITIES) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


def agent(name=MODEL, settings=None, **fields):
    model = OpenAIChatCompletionsModel(name, AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    return Agent(
        "teller",
        instructions="Be brief.",
        model=model,
        model_settings=settings or ModelSettings(max_tokens=20),
        **fields,
    )


async def chat():
    assert (await Runner.run(agent(), PROMPT)).final_output


async def stream():
    result = Runner.run_streamed(agent(settings=ModelSettings(max_tokens=20, include_usage=True)), PROMPT)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds and result.final_output
    assert result.context_wrapper.usage.output_tokens <= 20


async def tool_loop():
    settings = ModelSettings(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    for runner in (Runner.run, streamed):
        result = await runner(agent(tools=[weather], settings=settings), PROMPT)
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        assert "sunny" in result.new_items[1].output


async def streamed(*args):
    result = Runner.run_streamed(*args)
    async for _ in result.stream_events():
        pass
    return result


async def handoff():
    other = agent(handoff_description="Tells stories.")
    settings = ModelSettings(max_tokens=300, tool_choice="required", parallel_tool_calls=False)
    result = await Runner.run(agent(handoffs=[other], settings=settings), PROMPT)
    assert result.last_agent is other and result.final_output


async def structured():
    result = await Runner.run(agent(output_type=Mood, settings=ModelSettings(max_tokens=300)), PROMPT)
    assert isinstance(result.final_output, Mood)


async def reasoning_effort():
    settings = ModelSettings(max_tokens=20, reasoning={"effort": "low"}, verbosity="low")
    assert (await Runner.run(agent(settings=settings), PROMPT)).final_output


async def errors():
    with raises(NotFoundError, "is not served here"):
        await Runner.run(agent("none"), PROMPT)
    with raises(BadRequestError, "temperature: must be"):
        await Runner.run(agent(settings=ModelSettings(temperature=-1.0)), PROMPT)


async def cancel():
    with cancelled():
        task = asyncio.create_task(
            streamed(
                agent(settings=ModelSettings(max_tokens=LONG["max_tokens"], extra_body=LONG["extra_body"])), PROMPT
            )
        )
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


run(chat, stream, tool_loop, handoff, structured, reasoning_effort, errors, cancel)
