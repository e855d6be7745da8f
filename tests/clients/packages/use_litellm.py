# /// script
# requires-python = ">=3.12"
# dependencies = ["litellm>=1.108,<2"]
# ///
"""LiteLLM as a library, with its providers `openai`, `hosted_vllm` and `text-completion-openai`."""

from typing import Literal

import litellm
from pydantic import BaseModel
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, raises, run

API = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]
PROVIDERS = ("openai", "hosted_vllm")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]


def complete(provider, **fields):
    return litellm.completion(**{"model": f"{provider}/{MODEL}", "messages": MESSAGES, "max_tokens": 20} | API | fields)


def chat():
    for provider in PROVIDERS:
        answer = complete(provider)
        assert answer.choices[0].message.content and answer.usage.completion_tokens <= 20


def text_completion():
    for provider in ("text-completion-openai", "hosted_vllm"):
        answer = litellm.text_completion(model=f"{provider}/{MODEL}", prompt=PROMPT, max_tokens=20, logprobs=1, **API)
        assert answer.choices[0].text


def stream():
    for provider in PROVIDERS:
        chunks = list(complete(provider, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens <= 20


def tool_loop():
    for provider in PROVIDERS:
        fields = {"tools": [TOOL], "parallel_tool_calls": False}
        message = complete(provider, tool_choice="required", max_tokens=200, **fields).choices[0].message
        (call,) = message.tool_calls
        messages = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
        assert complete(provider, messages=messages, **fields).choices[0].message.content


def structured():
    for provider in PROVIDERS:
        content = complete(provider, response_format=Mood, max_tokens=200).choices[0].message.content
        assert Mood.model_validate_json(content)


def reasoning_effort():
    for provider in PROVIDERS:
        options = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
        assert complete(provider, **options).choices[0].message.content


def thinking():
    assert complete("hosted_vllm", thinking={"type": "enabled", "budget_tokens": 1024}).choices[0].message.content


def logprobs():
    answer = complete("openai", logprobs=True, top_logprobs=2)
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)


def embedding():
    for provider in PROVIDERS:
        (vector,) = litellm.embedding(f"{provider}/{MODEL}", input=[PROMPT], **API).data
        assert len(vector["embedding"]) > 1


def errors():
    for provider in PROVIDERS:
        with raises(litellm.BadRequestError, "temperature: must be"):
            complete(provider, temperature=-1)


def cancel():
    with cancelled():
        chunks = complete("openai", stream=True, **LONG)
        next(chunks), next(chunks)
        chunks.completion_stream.close()


run(
    chat,
    text_completion,
    stream,
    tool_loop,
    structured,
    reasoning_effort,
    thinking,
    logprobs,
    embedding,
    errors,
    cancel,
)
