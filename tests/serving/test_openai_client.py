"""Compatibility with the `openai` client. The tests of features use its async client; the sync client differs only in
the library's code, so a few of its calls represent all."""

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.serving.client import collect
from tests.serving.scripted import TOKENIZER
from tests.support.patience import PATIENCE_S

MESSAGES = [{"role": "user", "content": "Who are you?"}]


class Mood(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mood: Literal["happy", "sad"]
    strength: Literal[1, 2, 3]


def sync_client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


async def test_sync_client_gets_responses_and_streams(demo_client):
    def calls():
        with sync_client(demo_client) as client:
            assert [model.id for model in client.models.list()] == ["demo"]
            fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
            plain = client.chat.completions.create(**fields)
            chunks = list(client.chat.completions.create(**fields, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == plain.choices[0].message.content and len(chunks) > 2

    await asyncio.to_thread(calls)


async def test_sync_client_raises_errors(demo_client):
    def calls():
        with sync_client(demo_client) as client:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="temperature: must be") as error:
                    client.completions.create(model="demo", prompt="Hi", temperature=-1, stream=stream)
                assert error.value.status_code == 400 and error.value.param == "temperature"

    await asyncio.to_thread(calls)


async def test_sync_client_that_closes_a_stream_aborts_the_request(slow_client):
    def calls():
        with sync_client(slow_client) as client:
            stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            next(stream)
            stream.close()

    async with slow_client.held():
        await asyncio.to_thread(calls)
        await slow_client.idle()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # The client's own models, when it sends them.
async def test_parse_returns_a_pydantic_model_and_its_message_is_accepted(api):
    fields = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 90}
    parsed = await api.client.chat.completions.parse(**fields, response_format=Mood)
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Mood) and Mood.model_validate_json(message.content) == message.parsed
    extra = {"return_token_ids": True}
    after = await api.chat([*MESSAGES, message, *MESSAGES], max_tokens=3, extra_body=extra)
    prompt = TOKENIZER.decode(after.prompt_token_ids, skip_special_tokens=False)
    assert f"<|assistant|>{message.content}<|end|>" in prompt


async def test_stream_helper_parses_the_stream(api):
    fields = {"model": "demo", "messages": MESSAGES, "max_tokens": 90, "seed": 1}
    async with api.client.chat.completions.stream(**fields, response_format=Mood) as stream:
        events, final = await collect(stream), await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Mood)
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.choices[0].message.parsed
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == done.content and len(deltas) > 1


async def test_streaming_response_has_the_lines_of_the_stream(api):
    fields = {"model": "demo", "prompt": "The little fox", "max_tokens": 3, "stream": True}
    async with api.client.completions.with_streaming_response.create(**fields) as response:
        lines = await collect(response.iter_lines())
    assert response.headers["content-type"] == "text/event-stream"
    events = [line for line in lines if line]
    assert 2 <= len(events) <= 4  # Tokens that are ready at the same time share an event.
    assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"
