"""Engines and servers that the tests share. Each starts once for a worker; a test that may disturb one starts its own.

| fixture | model | server |
|---|---|---|
| `client` | `tiny`, random: a token is a character | in this process |
| `demo_client`, `api` | the demo model, with Hermes tool calls | in this process |
| `scripted_client`, `scripted_api`, `scripted_llama_api` | none: the prompt has the response | in this process |
| `slow_client`, `slow_api` | the same, one slow sequence at a time | in this process |
| `server`, `exchange` | the same, fast | a process of its own |
"""

import pytest

from benchmarks.shared.server_process import ServerProcess
from jpaged.serving.tool_parsers.format import FORMATS
from jpaged.tokenizer import encode
from tests.serving import scripted
from tests.serving.client import Api, Client, Connection

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
# The demo model's template, extended by tools and their results in the form of Hermes.
TEMPLATE = """
{{- bos_token }}
{%- if style %}{{ '<|system|>Answer in ' + style + '.<|end|>' }}{% endif %}
{%- if tools %}{{ '<|system|>Tools:' }}
  {%- for tool in tools %}{{ ' ' + (tool.function | tojson) }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|user|><tool_response>' + message.content + '</tool_response>' }}
  {%- else %}
    {{- '<|' + message.role + '|>' + message.content }}
    {%- for call in message.tool_calls or () %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
  {%- endif %}
  {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
STEP_S = 0.001  # A stream then has more than one chunk.


def pytest_itemcollected(item):
    """Mark all tests of this folder: `make test-fast` leaves them out."""
    item.add_marker("slow")


@pytest.fixture
async def client(loaded):
    async with Client(*loaded) as client:
        yield client
        await client.idle()


@pytest.fixture(scope="session")
def ids(loaded):
    """Return the token of each letter, for the tiny model."""
    return dict(zip(ALPHABET, encode(loaded.tokenizer, ALPHABET)))


@pytest.fixture
def letters(ids):
    """Return fields with which the tiny model generates only letters, so that a token is a character."""
    return {"allowed_token_ids": list(ids.values()), "max_tokens": 12}


@pytest.fixture
async def demo_client(demo):
    options = {"tool_format": FORMATS["hermes"], "chat_template": TEMPLATE}
    async with Client(demo.engine, demo.tokenizer, model_name="demo", **options) as client:
        yield client
        await client.idle()


@pytest.fixture
async def api(demo_client):
    async with Api(demo_client.url) as api:
        yield api


@pytest.fixture(scope="session")
def scripted_loaded():
    return scripted.load(STEP_S)


@pytest.fixture(scope="session")
def scripted_llama_loaded():
    return scripted.load(STEP_S)


@pytest.fixture
async def scripted_client(scripted_loaded):
    async with Client(*scripted_loaded, model_name="demo", tool_format=FORMATS["hermes"]) as client:
        yield client
        await client.idle()


@pytest.fixture
async def scripted_api(scripted_client):
    async with Api(scripted_client.url) as api:
        yield api


@pytest.fixture
async def scripted_llama_api(scripted_llama_loaded):
    async with Client(*scripted_llama_loaded, model_name="demo", tool_format=FORMATS["llama3_json"]) as client:
        async with Api(client.url) as api:
            yield api
        await client.idle()


@pytest.fixture(scope="session")
def slow_loaded():
    """A scripted engine of one running sequence, with steps of 0.05 seconds."""
    return scripted.load(0.05, max_num_seqs=1)


@pytest.fixture
async def slow_client(slow_loaded):
    async with Client(*slow_loaded, model_name="demo", max_queue=2) as client:
        yield client
        await client.idle()


@pytest.fixture
async def slow_api(slow_client):
    async with Api(slow_client.url) as api:
        yield api


@pytest.fixture(scope="session")
def server():
    """A scripted server in a process of its own. No test may stop it or make its engine fail."""
    flags = ("--step-seconds", str(STEP_S), "--tool-call-parser", "hermes", "--max-body-size", "0.1")
    with ServerProcess(*flags, module="tests.serving.scripted") as server:
        yield server


@pytest.fixture
def exchange(server):
    """A function that sends bytes to the server on a new connection and returns the response."""

    async def exchange(data, **options):
        async with Connection(server.port) as connection:
            connection.send(data)
            return await connection.answer(**options)

    return exchange
