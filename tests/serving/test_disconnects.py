"""Clients that disconnect: their requests are aborted and their blocks are freed."""

import asyncio
import json
import logging

import openai
import pytest

from tests.support.patience import PATIENCE_S

LONG = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}  # 24 seconds on the slow server


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_the_request(client, stream):
    body = {"prompt": "Hello", "max_tokens": 250, "ignore_eos": True, "stream": stream}
    async with client.held():
        task = asyncio.create_task(client.session.post("/v1/completions", json=body))
        await client.running()
        if stream:
            (await task).close()
        else:
            task.cancel()
        await client.idle()


async def test_stream_closed_early_frees_its_blocks_and_is_logged_with_status_499(slow_client, slow_api, caplog):
    caplog.set_level(logging.INFO, "jpaged.access")
    stream = await slow_api.chat("Tell me.", stream=True, **LONG)
    await anext(stream)
    await slow_client.until(num_running=1)  # The first chunk is sent before the first step.
    async with asyncio.timeout(PATIENCE_S):
        while not slow_client.metric("vllm:kv_cache_usage_perc"):
            await asyncio.sleep(0.01)
    async with slow_client.held(), asyncio.timeout(PATIENCE_S):
        generated = slow_client.metric("vllm:generation_tokens_total")
        await stream.close()
        await slow_client.idle()
        while not any(record.name == "jpaged.access" for record in caplog.records):
            await asyncio.sleep(0.01)
    assert slow_client.metric("vllm:generation_tokens_total") == generated < LONG["max_tokens"]
    assert slow_client.metric("vllm:request_success_total") == 1
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "jpaged.access"]
    assert (line["path"], line["status"]) == ("/v1/chat/completions", 499) and line["completion_tokens"] <= generated


@pytest.mark.parametrize("stream", [False, True])
async def test_timeout_of_the_client_aborts_the_request(slow_client, slow_api, stream):
    async with slow_client.held():
        with pytest.raises(openai.APITimeoutError):
            async for _ in await slow_api.complete("Hello", stream=stream, timeout=0.2):
                pass
        await slow_client.idle()
