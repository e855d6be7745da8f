"""Failures of docs/operation.md: a killed process, a step that raises, logits that are not finite."""

import signal

import numpy as np
import openai
import pytest

from benchmarks.shared.server_process import ServerProcess
from tests.serving.client import Api, Client, Connection, collect, request
from tests.serving.scripted import FAIL, chat, say
from tests.support.patience import PATIENCE_S

SCRIPTED = "tests.serving.scripted"
SLOW = ("--step-seconds", "0.02")


def sync_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_killed_process_breaks_streams_and_its_port_is_free():
    """Check that streams end without [DONE], and that the server can be started again at once on the same port."""
    with ServerProcess(*SLOW, module=SCRIPTED, clean=False) as server:
        with sync_client(server.url) as api:
            stream = api.completions.create(model="demo", prompt=say("word " * 100), max_tokens=200, stream=True)
            pieces = [next(stream).choices[0].text for _ in range(3)]
            assert "".join(pieces).startswith("w")
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(openai.APIConnectionError):
                list(stream)
            with pytest.raises(openai.APIConnectionError):
                api.completions.create(model="demo", prompt="a")
        assert server.process.wait(PATIENCE_S) == -signal.SIGKILL
        with ServerProcess("--port", str(server.port), module=SCRIPTED) as again, sync_client(again.url) as api:
            assert again.url == server.url
            assert api.completions.create(model="demo", prompt=say("back")).choices[0].text == "back"


async def test_step_that_raises_for_one_request_ends_this_request_alone():
    error = {"message": "internal error; the server's log has more", "type": "InternalServerError"}
    error |= {"param": None, "code": "internal_error"}
    with ServerProcess(*SLOW, module=SCRIPTED, clean=False) as server:
        async with Api(server.url) as api, Connection(server.port) as connection:
            other = await api.complete(say("word " * 20), max_tokens=200, stream=True)
            await anext(other)
            connection.send(request("POST", "/v1/chat/completions", chat(f"Once upon a time{FAIL}", stream=True)))
            *events, last = (await connection.answer()).events
            assert last == {"error": error}
            assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "Once upon a time"
            assert all(event["choices"][0]["finish_reason"] is None for event in events)
            connection.send(request("POST", "/v1/chat/completions", chat(f"Once{FAIL}")))  # The connection is open.
            answer = await connection.answer()
            assert answer.status == 500 and answer.error == error
            rest = "".join(chunk.choices[0].text for chunk in await collect(other))
            assert rest.endswith("word word ")
            assert (await api.complete(say("fine"))).choices[0].text == "fine"
            for path in ("/health", "/ping", "/metrics", "/version"):
                connection.send(request("GET", path))
                assert (await connection.answer()).status == 200
        log = server.wait_for_log("RuntimeError: the script fails here")
        assert "ended by a fault of its own\nTraceback" in log.string
        assert server.stop() == 0
        assert all("the script fails here" in traceback for traceback in server.tracebacks())


async def test_step_that_raises_for_any_request_ends_streams_and_later_requests_with_503(loaded, monkeypatch):
    """Check that the server stays up for its metrics and its log."""
    async with Client(*loaded) as client:
        with monkeypatch.context() as patched:
            patched.setattr(client.engine.runner.step, "forward", lambda *args: 1 / 0)
            *_, last = await client.stream("/v1/completions", {"prompt": "Hello"})
            assert last["error"]["code"] == "service_unavailable"
            assert last["error"]["message"] == "the engine has failed: division by zero"
            for path, status in {"/health": 503, "/ping": 503, "/metrics": 200, "/version": 200}.items():
                async with client.session.get(path) as response:
                    assert response.status == status
            assert (await client.complete("a", 503))["error"]["message"] == last["error"]["message"]


async def test_weights_of_nan_are_an_error_500(loaded, caplog):
    async with Client(*loaded) as client:
        runner = client.engine.runner
        before, params = await client.complete("Hello", max_tokens=4), runner.params
        await client.reset_prefix_cache()
        runner.params = [leaf * np.float32("nan") for leaf in params]
        try:
            for fields in ({}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 3, "temperature": 1}):
                error = (await client.complete("Hello", 500, **fields))["error"]
                assert "logits are not finite" in error["message"] and error["code"] == "internal_error"
            await client.complete("Hello", 500, use_beam_search=True, n=2)
            *_, last = await client.stream("/v1/completions", {"prompt": "Hello"})
            assert last["error"]["type"] == "InternalServerError"
            await client.idle()
        finally:
            runner.params = params
        assert (await client.complete("Hello", max_tokens=4))["choices"] == before["choices"]
        async with client.session.get("/metrics") as response:
            assert 'vllm:corrupted_requests_total{engine="0",model_name="tiny"} 6.0' in await response.text()
    assert len([record for record in caplog.records if "not finite" in record.message]) == 1
