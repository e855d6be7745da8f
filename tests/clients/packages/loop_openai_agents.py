# /// script
# requires-python = ">=3.12"
# dependencies = ["openai-agents>=0.24,<1"]
# ///
"""The OpenAI Agents SDK in its default mode, the Responses API."""

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from pydantic import BaseModel
from scenarios import ANSWER, MODEL, QUESTION, URL, WEATHER, call, raises, run, say

set_tracing_disabled(True)


class City(BaseModel, extra="forbid"):
    city: str


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return WEATHER[city]


def agent(model=MODEL, **fields):
    set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    return Agent("teller", instructions="Be brief.", model=model, **fields)


async def streamed(*args):
    result = Runner.run_streamed(*args)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    return result


async def loop():
    for runner in (Runner.run, streamed):
        result = await runner(agent(tools=[weather]), QUESTION)
        items = [item.type for item in result.new_items]
        turn = ["tool_call_item", "tool_call_output_item"]
        assert items == ["message_output_item", *turn, *turn, "message_output_item"], items
        calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
        assert [(each.name, each.arguments) for each in calls] == [
            ("weather", '{"city": "Rome"}'), ("weather", '{"city": "Oslo"}'),
        ]  # fmt: skip
        assert result.final_output == ANSWER and len(result.raw_responses) == 3
        assert result.context_wrapper.usage.output_tokens > 0


async def conversation():
    first = await Runner.run(agent(tools=[weather]), QUESTION)
    items = [*first.to_input_list(), {"role": "user", "content": say("Still in Rome.")}]
    assert (await Runner.run(agent(tools=[weather]), items)).final_output == "Still in Rome."


async def handoff():
    other = agent(handoff_description="Tells stories.")
    other.name = "poet"
    result = await Runner.run(agent(handoffs=[other]), say(call("transfer_to_poet")))
    assert result.last_agent is other


async def structured():
    result = await Runner.run(agent(output_type=City), say('{"city": "Rome"}'))
    assert result.final_output == City(city="Rome")


async def settings():
    wishes = ModelSettings(
        max_tokens=20, temperature=0.5, top_p=0.9, tool_choice="auto", parallel_tool_calls=False, store=False,
        reasoning={"effort": "low", "summary": "auto"}, verbosity="low", truncation="auto", metadata={"a": "b"},
        prompt_cache_retention="24h", include_usage=True,
    )  # fmt: skip
    assert (await Runner.run(agent(model_settings=wishes, tools=[weather]), say("Hi."))).final_output == "Hi."


async def errors():
    with raises(NotFoundError, "is not served here"):
        await Runner.run(agent("none"), "Hi")
    with raises(BadRequestError, "temperature: must be"):
        await Runner.run(agent(model_settings=ModelSettings(temperature=-1.0)), "Hi")
    with raises(BadRequestError, "nothing is stored"):
        await Runner.run(agent(), "Hi", previous_response_id="resp_1")


run(loop, conversation, handoff, structured, settings, errors)
