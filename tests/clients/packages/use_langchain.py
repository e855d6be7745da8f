# /// script
# requires-python = ">=3.12"
# dependencies = ["langchain-openai>=1.7,<2", "langchain>=1,<2"]
# ///
"""LangChain's `ChatOpenAI`, its `OpenAI` and an agent of LangChain."""

from typing import Literal

import openai
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, raises, run

API = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}


def model(**fields):
    return ChatOpenAI(model=MODEL, **API, **{"max_tokens": 20} | fields)


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


def chat():
    answer = model().invoke(PROMPT)
    assert answer.content and answer.usage_metadata["output_tokens"] <= 20


def completion():
    assert OpenAI(model=MODEL, max_tokens=20, **API).invoke(PROMPT)


def stream():
    chunks = list(model(stream_usage=True).stream(PROMPT))
    assert "".join(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks)


def tool_loop():
    bound = model(max_tokens=300).bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    messages = [HumanMessage(PROMPT), bound.invoke(PROMPT)]
    (call,) = messages[1].tool_calls
    messages.append(weather.invoke(call))
    assert isinstance(messages[2], ToolMessage)
    assert model().bind_tools([weather]).invoke(messages).content


def agent():
    answer = create_agent(model(), [weather], system_prompt="Be brief.").invoke({"messages": [("user", PROMPT)]})
    assert answer["messages"][-1].content


def structured():
    for method in ("json_schema", "function_calling"):
        assert isinstance(model(max_tokens=300).with_structured_output(Mood, method=method).invoke(PROMPT), Mood)


def reasoning_effort():
    assert model(reasoning_effort="low").invoke(PROMPT).content


def logprobs():
    answer = model(logprobs=True, top_logprobs=2).invoke(PROMPT)
    assert all(len(token["top_logprobs"]) == 2 for token in answer.response_metadata["logprobs"]["content"])


def embedding():
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **API)
    assert len(embeddings.embed_query(PROMPT)) == len(embeddings.embed_documents([PROMPT])[0]) > 1


def errors():
    with raises(openai.BadRequestError, "temperature: must be"):
        model(temperature=-1).invoke(PROMPT)


def cancel():
    with cancelled():
        chunks = model(**LONG).stream(PROMPT)
        next(chunks), next(chunks), next(chunks)
        chunks.close()


run(chat, completion, stream, tool_loop, agent, structured, reasoning_effort, logprobs, embedding, errors, cancel)
