# /// script
# requires-python = ">=3.12"
# dependencies = ["openai>=3.57,<4"]
# ///
from typing import Literal

import openai
from pydantic import BaseModel
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, raises, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": PROMPT}]


class Mood(BaseModel, extra="forbid"):
    mood: Literal["happy", "sad"]
    strength: Literal[1, 2, 3]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]


def chat():
    completion = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20)
    assert completion.choices[0].message.content and completion.usage.completion_tokens <= 20


def stream():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens <= 20


def tool_loop():
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    messages = [*MESSAGES]
    completion = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    message = completion.choices[0].message
    (call,) = message.tool_calls
    messages += [
        message,
        {"role": "tool", "tool_call_id": call.id, "content": call.function.parsed_arguments.city},
    ]
    after = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=20)
    assert after.choices[0].message.content


def structured():
    completion = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Mood, max_tokens=300)
    assert isinstance(completion.choices[0].message.parsed, Mood)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Mood, max_tokens=300) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Mood)


def reasoning_effort():
    completion = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, reasoning_effort="low", verbosity="low"
    )
    assert completion.choices[0].message.content


def logprobs():
    completion = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = completion.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    completion = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, logprobs=3, echo=True)
    assert completion.choices[0].logprobs.token_logprobs[0] is None


def embedding():
    vectors = client.embeddings.create(model=MODEL, input=["fox", "sun"]).data
    assert all(abs(sum(x * x for x in each.embedding) - 1) < 1e-3 for each in vectors) and len(vectors) == 2


def errors():
    with raises(openai.BadRequestError, "temperature: must be"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    with raises(openai.NotFoundError, "is not served here"):
        client.chat.completions.create(model="none", messages=MESSAGES)


def cancel():
    with cancelled():
        stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **LONG)
        for chunk, _ in zip(stream, range(5)):
            assert chunk
        stream.close()


run(chat, stream, tool_loop, structured, reasoning_effort, logprobs, embedding, errors, cancel)
