"""Adapters over HTTP: their names as models, and the routes that load and unload them."""

from functools import partial

import pytest

from jpaged.start.adapter import adapter_command
from tests.models.test_adapters import write_adapter
from tests.serving.client import Api, Client, build, collect

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """A directory with an adapter of all query projections."""
    directory = tmp_path_factory.mktemp("adapter")
    engine = build(tiny, enable_lora=True)
    layers = engine.engine.runner.adapters.form.layers
    shapes = {f"model.{name}": shape for name, shape in layers.items() if name.endswith("q_proj")}
    write_adapter(directory, shapes, rank=4, alpha=64)
    return engine, directory


@pytest.fixture
async def client(adapter):
    loaded, _ = adapter
    async with Client(*loaded, api_keys=("sesame",), enable_weight_updates=True) as client:
        client.service.load_adapter = partial(adapter_command, loaded.engine.runner)
        client.session.headers.update(KEY)
        yield client
        await client.idle()


async def post(client, path, body, status=200):
    async with client.session.post(path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_an_adapter_is_a_model(client, adapter):
    _, directory = adapter
    ask = lambda model: post(client, "/v1/completions", {"model": model, "prompt": "the quick", "max_tokens": 8,
                                                         "temperature": 0})  # fmt: skip
    base = await ask("tiny")
    body = {"lora_name": "poet", "lora_path": str(directory)}
    assert await post(client, "/v1/load_lora_adapter", body) == {"status": "loaded"}
    async with client.session.get("/v1/models") as response:
        cards = {card["id"]: card["parent"] for card in (await response.json())["data"]}
    assert cards == {"tiny": None, "poet": "tiny"}
    answer = await ask("poet")
    assert answer["model"] == "poet"
    assert answer["choices"][0]["text"] != base["choices"][0]["text"]
    assert (await ask("tiny"))["choices"] == base["choices"]
    async with Api(client.url, api_key="sesame") as api:
        assert [model.id async for model in await api.client.models.list()] == ["tiny", "poet"]
        chat = {"model": "poet", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 8}
        whole = await api.client.chat.completions.create(**chat, temperature=0)
        chunks = await collect(await api.client.chat.completions.create(**chat, temperature=0, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.model == chunks[0].model == "poet" and whole.choices[0].message.content == streamed != ""
    assert await post(client, "/v1/unload_lora_adapter", {"lora_name": "poet"}) == {"status": "unloaded"}
    assert (await post(client, "/v1/completions", {"model": "poet", "prompt": "a"}, 404))["error"]["param"] == "model"


@pytest.mark.parametrize(
    "route, body, status, param",
    [
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "lora_path"),
        ("load", {"lora_name": "tiny", "lora_path": "/nowhere"}, 400, "lora_name"),
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("load", {"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        ("unload", {"lora_name": "x"}, 404, "lora_name"),
        ("unload", {}, 400, "lora_name"),
    ],
)
async def test_errors_name_the_field(client, route, body, status, param):
    error = (await post(client, f"/v1/{route}_lora_adapter", body, status))["error"]
    assert error["param"] == param
