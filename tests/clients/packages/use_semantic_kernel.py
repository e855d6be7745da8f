# /// script
# requires-python = ">=3.12"
# dependencies = ["semantic-kernel>=1.45,<2"]
# ///
"""Semantic Kernel's `OpenAIChatCompletion`."""

from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from scenarios import MODEL, PROMPT, URL, raises, run
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


class Clock:
    @kernel_function(description="Return the time of day.")
    def now(self) -> str:
        return "noon"


def service():
    return OpenAIChatCompletion(MODEL, async_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))


async def generate(**fields):
    history = ChatHistory(system_message="Be brief.")
    history.add_user_message(PROMPT)
    settings = OpenAIChatPromptExecutionSettings(**{"max_tokens": 20} | fields)
    return str(await service().get_chat_message_content(history, settings))


async def chat():
    assert await generate()


async def stream():
    history = ChatHistory()
    history.add_user_message(PROMPT)
    settings = OpenAIChatPromptExecutionSettings(max_tokens=20)
    parts = [str(part) async for part in service().get_streaming_chat_message_content(history, settings)]
    assert "".join(parts)


async def tool_call():
    """The kernel does not invoke the function: its schema allows further arguments, which the demo model invents."""
    kernel = Kernel()
    kernel.add_plugin(Clock(), "clock")
    settings = OpenAIChatPromptExecutionSettings(max_tokens=300, parallel_tool_calls=False)
    settings.function_choice_behavior = FunctionChoiceBehavior.Required(auto_invoke=False)
    history = ChatHistory()
    history.add_user_message(PROMPT)
    message = await service().get_chat_message_content(history, settings, kernel=kernel)
    (call,) = message.items
    assert isinstance(call, FunctionCallContent) and call.name == "clock-now"


async def structured():
    assert Mood.model_validate_json(await generate(response_format=Mood, max_tokens=300))


async def reasoning_effort():
    assert await generate(reasoning_effort="low")


async def errors():
    with raises(ServiceResponseException, "maximum context length"):
        await generate(max_tokens=5000)


run(chat, stream, tool_call, structured, reasoning_effort, errors)
