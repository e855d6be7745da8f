"""The X-Request-Id header of requests and responses."""

import re

import openai
import pytest

from tests.serving.client import request
from tests.serving.scripted import say

COMPLETION = {"prompt": say("a"), "max_tokens": 100}


@pytest.mark.parametrize("given", ["my-request", "a/b?c=d,{}", "x" * 128])
async def test_request_id_of_the_client_is_returned(exchange, given):
    for data in (
        request("GET", "/health", X_Request_Id=given),
        request("POST", "/v1/completions", COMPLETION | {"stream": True}, X_Request_Id=given),
        request("POST", "/v1/completions", {}, X_Request_Id=given),
        request("GET", "/nowhere", X_Request_Id=given),
    ):
        assert (await exchange(data)).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "é", "tab\there"])
async def test_missing_or_invalid_request_id_is_replaced(exchange, given):
    ids = {(await exchange(request("GET", "/health", X_Request_Id=given))).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(each) == 32 and int(each, 16) for each in ids)


async def test_openai_client_reads_request_ids_of_responses_and_errors(api):
    raw = await api.client.chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=1,
        extra_headers={"X-Request-Id": "my-request"},
    )  # fmt: skip
    assert raw.headers["x-request-id"] == raw.request_id == "my-request"
    completion = raw.parse()
    assert completion._request_id == "my-request" and completion.choices
    assert len((await api.chat("Hi", max_tokens=1))._request_id) == 32
    with pytest.raises(openai.BadRequestError) as error:
        await api.chat("Hi", max_tokens=0)
    assert re.fullmatch("[0-9a-f]{32}", error.value.request_id)
