# /// script
# requires-python = ">=3.12"
# dependencies = ["litellm[proxy]>=1.108,<2", "anthropic>=1,<3"]
# ///
"""LiteLLM's proxy in front of the server: loops of responses and of messages, whole and streamed.

The proxy has the server as three providers: `hosted_vllm` and `openai`, which have responses and chats, and
`anthropic`, which has messages.
"""

import json
import tempfile
from pathlib import Path

import anthropic
import openai
from scenarios import ANSWER, MODEL, QUESTION, URL, WEATHER, program, run

KEY = "sk-fox"
CONFIG = f"""
model_list:
  - model_name: vllm
    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: "{URL}/v1"}}
  - model_name: openai
    litellm_params: {{model: openai/{MODEL}, api_base: "{URL}/v1", api_key: none}}
  - model_name: anthropic
    litellm_params: {{model: anthropic/{MODEL}, api_base: "{URL}", api_key: none}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
general_settings: {{master_key: {KEY}}}
"""
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}


def loop_of_responses(model, stream):
    """Answer calls until a text comes, and return the cities and the text."""
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    items, cities = [{"role": "user", "content": QUESTION}], []
    while True:
        fields = {"model": model, "input": items, "tools": [tool], "store": False}
        if stream:
            (answer,) = (e.response for e in responses.create(**fields, stream=True) if e.type == "response.completed")
        else:
            answer = responses.create(**fields)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return cities, answer.output_text
        found = [json.loads(call.arguments)["city"] for call in calls]
        cities += found
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER[city]}
            for call, city in zip(calls, found)
        ]


def loop_of_messages(model, stream):
    """Answer calls until a text comes, and return the cities and the text."""
    turns, cities = [{"role": "user", "content": QUESTION}], []
    while True:
        tool = {"name": "weather", "input_schema": SCHEMA}
        fields = {"model": model, "max_tokens": 300, "messages": turns, "tools": [tool]}
        if stream:
            with messages.stream(**fields) as events:
                answer = events.get_final_message()
        else:
            answer = messages.create(**fields)
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return cities, answer.content[-1].text
        cities += [use.input["city"] for use in uses]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER[use.input["city"]]} for use in uses
        ]
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def scenario(loop, model):
    """Return a scenario that runs a loop with a model, whole and streamed."""

    def check():
        for stream in (False, True):
            found = loop(model, stream)
            assert found == (["Rome", "Oslo"], ANSWER), (stream, found)

    check.__name__ = f"{loop.__name__}_by_{model}"
    return check


def count_tokens():
    turns = [{"role": "user", "content": QUESTION}]
    assert messages.count_tokens(model="anthropic", messages=turns).input_tokens > 0


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder, "config.yaml")
    config.write_text(CONFIG)
    with program("litellm", "--config", config, path="/health/liveliness") as base:
        responses = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0).responses
        messages = anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0).messages
        loops = [scenario(loop, model) for loop in (loop_of_responses, loop_of_messages)
                 for model in ("vllm", "openai", "anthropic")]  # fmt: skip
        run(*loops, count_tokens)
