# /// script
# requires-python = ">=3.12"
# dependencies = ["litellm[proxy]>=1.108,<2"]
# ///
"""LiteLLM's proxy in front of the server, driven by the openai client, Anthropic's messages and OpenAI's responses."""

import tempfile
from pathlib import Path

import openai
from scenarios import LONG, MODEL, PROMPT, URL, cancelled, program, raises, run

KEY = "sk-fox"
CONFIG = f"""
model_list:
  - model_name: fox
    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: "{URL}/v1"}}
  - model_name: plain
    litellm_params: {{model: openai/{MODEL}, api_base: "{URL}/v1", api_key: none}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
general_settings: {{master_key: {KEY}}}
"""
MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def chat():
    for model in ("fox", "plain"):
        answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20)
        assert answer.choices[0].message.content


def stream():
    chunks = list(client.chat.completions.create(model="fox", messages=MESSAGES, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tool_call():
    answer = client.chat.completions.create(
        model="fox", messages=MESSAGES, max_tokens=200, tools=[TOOL], tool_choice="required"
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def responses():
    assert client.responses.create(model="fox", input=PROMPT, max_output_tokens=20).output_text


def messages():
    body = {"model": "fox", "messages": MESSAGES, "max_tokens": 20, "system": "Be brief."}
    answer = client.with_options(base_url=base).post("/v1/messages", body=body, cast_to=dict)
    assert answer["content"][0]["text"]


def errors():
    with raises(openai.BadRequestError, "temperature: must be"):
        client.chat.completions.create(model="fox", messages=MESSAGES, temperature=-1)


def cancel():
    with cancelled():
        stream = client.chat.completions.create(model="fox", messages=MESSAGES, stream=True, **LONG)
        next(stream), next(stream)
        stream.close()


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder, "config.yaml")
    config.write_text(CONFIG)
    with program("litellm", "--config", config, path="/health/liveliness") as base:
        client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
        run(chat, stream, tool_call, responses, messages, errors, cancel)
