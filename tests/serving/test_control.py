"""Routes of a trainer in another process: pause, new parameters, sleep."""

import asyncio

import jax
import pytest
from flax import nnx

from jpaged.cli.main import load, parser
from jpaged.cli.serve import server_config
from jpaged.config import EngineConfig
from jpaged.core.commands import ResetPrefixCache, WakeUp
from jpaged.models.checkpoint import save_safetensors
from jpaged.models.orbax_checkpoint import save_orbax
from jpaged.parallel.leader import Followers
from jpaged.start.load import load_params
from jpaged.start.setup import prepare
from tests.serving.client import MAX_LEN, Client

ROUTES = (
    ("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("POST", "/update_weights"), ("POST", "/sleep"),
    ("POST", "/wake_up"), ("GET", "/is_sleeping"),
)  # fmt: skip
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture
async def trained(loaded, tiny):
    """A server that a trainer may use, and the parameters that it has at first."""
    before = loaded.engine.runner.params
    async with Client(*loaded, api_keys=("sesame",), enable_weight_updates=True) as client:
        setup = prepare(EngineConfig(model=str(tiny), max_model_len=MAX_LEN, block_size=8))
        client.service.load_params = lambda directory: load_params(setup, directory)
        client.session.headers.update(KEY)
        yield client
        await client.idle()
    loaded.engine.control(WakeUp())
    loaded.engine.runner.params = before
    loaded.engine.control(ResetPrefixCache())


async def send(client, method, path, body=None, status=200):
    async with client.session.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_the_routes_exist_only_if_they_are_enabled_and_need_a_key(client, trained):
    for method, path in ROUTES:
        await send(client, method, path, status=404)
        async with client.session.request(method, trained.url + path) as response:
            assert response.status == 401


def test_the_flag_needs_a_key():
    parse = parser("serve", load("serve"), "jpaged serve").parse_args
    with pytest.raises(ValueError, match=r"^enable_weight_updates: needs an API key"):
        server_config(parse(["--enable-weight-updates"]))
    assert server_config(parse(["--enable-weight-updates", "--api-key", "sesame"])).enable_weight_updates


@pytest.mark.parametrize("save", [save_safetensors, save_orbax])
async def test_parameters_of_a_directory_are_served(trained, tiny, tmp_path, save):
    service, engine = trained.service, trained.engine
    before = await trained.complete("the quick", max_tokens=8)
    model = service.load_params(tiny)
    nnx.update(model, jax.tree.map(lambda x: -x, nnx.state(model)))
    (tmp_path / "new").mkdir()
    save(model, tmp_path / "new")
    for in_flight in ("recompute", "keep", "wait"):
        body = {"path": str(tmp_path / "new"), "in_flight": in_flight}
        assert await send(trained, "POST", "/update_weights", body) == {"status": "updated"}
    after = await trained.complete("the quick", max_tokens=8)
    assert after["choices"][0]["text"] != before["choices"][0]["text"] and engine.runner.params_version >= 3
    await send(trained, "POST", "/update_weights", {"path": str(tiny)})
    assert (await trained.complete("the quick", max_tokens=8))["choices"] == before["choices"]


@pytest.mark.parametrize(
    "body, field",
    [
        ({}, "path"), ({"path": ""}, "path"), ({"path": "/nowhere"}, "path"), ({"path": "{empty}"}, "path"),
        ({"path": "{empty}", "in_flight": "later"}, "in_flight"), ({"path": "{empty}", "more": 1}, "more"),
    ],
)  # fmt: skip
async def test_a_body_without_parameters_is_refused_and_named(trained, tmp_path, body, field):
    if "path" in body:
        body["path"] = body["path"].format(empty=tmp_path)
    error = (await send(trained, "POST", "/update_weights", body, status=400))["error"]
    assert error["param"] == field and field in error["message"]
    assert await trained.complete("the quick", max_tokens=2)


async def test_requests_wait_during_a_pause_or_end_before_it(trained):
    assert await send(trained, "POST", "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert await send(trained, "GET", "/is_paused") == {"is_paused": True}
    waiting = asyncio.create_task(trained.complete("the quick", max_tokens=4))
    await trained.until(num_waiting=1)
    assert not waiting.done()
    await send(trained, "POST", "/resume")
    assert (await waiting)["usage"]["completion_tokens"] == 4
    async with trained.limited(5):
        running = asyncio.create_task(trained.complete("the lazy", max_tokens=60, ignore_eos=True))
        await trained.until(num_running=1)
        await send(trained, "POST", "/pause?mode=wait")
        assert (await running)["usage"]["completion_tokens"] == 60
    await send(trained, "POST", "/resume")
    async with trained.limited(5):
        running = asyncio.create_task(trained.complete("the dog", max_tokens=200, ignore_eos=True))
        await trained.until(num_running=1)
        await send(trained, "POST", "/pause")
        answer = await running
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["usage"]["completion_tokens"] < 200
    await send(trained, "POST", "/resume")
    assert await send(trained, "GET", "/is_paused") == {"is_paused": False}


async def test_a_sleeping_server_wakes_up_to_the_same_tokens(trained, tiny):
    before = await trained.complete("the quick", max_tokens=8)
    for level in (1, 2):
        await send(trained, "POST", f"/sleep?level={level}")
        assert await send(trained, "GET", "/is_sleeping") == {"is_sleeping": True}
        waiting = asyncio.create_task(trained.complete("the quick", max_tokens=8))
        if level == 2:
            error = (await send(trained, "POST", "/wake_up", status=400))["error"]
            assert "level 2" in error["message"]
            await send(trained, "POST", "/update_weights", {"path": str(tiny)})
        await send(trained, "POST", "/wake_up?tags=weights")
        assert (await send(trained, "POST", "/wake_up?tags=kv_cache")) == {"status": "awake"}
        assert (await waiting)["choices"] == before["choices"]


async def test_several_hosts_neither_sleep_nor_exchange_parameters_nor_certify(trained, tiny, monkeypatch):
    followers = Followers({})
    monkeypatch.setattr(trained.engine, "runner", followers.lead(trained.engine.runner))
    monkeypatch.setattr(trained.engine.scheduler, "recover", lambda: pytest.fail("the steps in flight were dropped"))
    trained.service.load_params = followers.refuse_params
    async with trained.limited(5):
        running = asyncio.create_task(trained.complete("the fox", max_tokens=60, ignore_eos=True))
        await trained.until(num_running=1)
        for path, body, message in (
            ("/sleep", None, "sleep: not possible while several hosts share the model"),
            ("/sleep?level=2", None, "sleep: not possible while several hosts share the model"),
            ("/update_weights", {"path": str(tiny)}, "path: parameters can't be exchanged while several hosts"),
        ):  # fmt: skip
            error = (await send(trained, "POST", path, body, status=400))["error"]
            assert error["message"].startswith(message)
        assert await send(trained, "POST", "/wake_up") == {"status": "awake"}
    error = (await trained.complete("the fox", 400, certificate=True))["error"]
    assert error["message"] == "certificate: not possible while several hosts share the model"
    assert await send(trained, "GET", "/is_sleeping") == {"is_sleeping": False}
    assert (await running)["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize(
    "path, message",
    [
        ("/pause?mode=stop", "mode: must be one of keep, wait, abort, not stop"),
        ("/pause?clear_cache=perhaps", "clear_cache: must be one of true, 1, false, 0, not perhaps"),
        ("/pause?mode=keep&mode=wait", "mode: must be one of keep, wait, abort, not keep, wait"),
        ("/sleep?level=3", "level: must be one of 1, 2, not 3"),
        ("/sleep?depth=1", "depth: is not a parameter of /sleep"),
        ("/wake_up?tags=params", "tags: must be one of kv_cache, weights, not params"),
        ("/resume?now=1", "now: is not a parameter of /resume"),
    ],
)
async def test_wrong_parameters_are_named(trained, path, message):
    error = (await send(trained, "POST", path, status=400))["error"]
    assert error["message"] == message and error["param"] == message.partition(":")[0]
    assert not trained.engine.is_paused and not trained.engine.asleep
