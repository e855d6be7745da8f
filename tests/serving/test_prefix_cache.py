"""The prefix cache: cached tokens in the usage, cache salts, pins and /reset_prefix_cache."""

import pytest


async def test_prefix_is_shared_only_by_requests_with_the_same_salt(client):
    async def hits(**fields):
        before = client.engine.scheduler.prefix_hits
        body = await client.complete("a prefix of some length, shared", max_tokens=1, **fields)
        found = client.engine.scheduler.prefix_hits - before
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": found}
        return found

    await client.reset_prefix_cache()
    assert [await hits(cache_salt=salt) for salt in ("x", "x", "y")] == [0, 30, 0]
    assert [await hits(), await hits(), await hits(cache_salt="x")] == [0, 30, 30]
    await client.reset_prefix_cache()
    assert await hits() == 0


@pytest.mark.parametrize(
    "fields, seconds",
    [
        ({}, 0),
        ({"pin_s": 7}, 7),
        ({"prompt_cache_key": "mine"}, 300),
        ({"prompt_cache_key": "mine", "prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_retention": "24h"}, 86400),
        ({"prompt_cache_key": "mine", "pin_s": 0}, 0),
    ],
)
async def test_a_request_may_pin_its_prefix(client, fields, seconds):
    await client.reset_prefix_cache()
    pins = client.engine.scheduler.memory.pins
    pins.clear()
    await client.complete("a prefix of some length, pinned", max_tokens=1, **fields)
    assert bool(pins.count) == bool(seconds)
    metrics = await (await client.session.get("/metrics")).text()
    assert "prefix_cache_pinned_blocks{" in metrics
    left = [until - pins.now for pinned in pins._until.values() for until in pinned.values()]
    assert left == [pytest.approx(seconds, abs=5)] * len(left)


@pytest.mark.parametrize("fields", [{"pin_s": -1}, {"pin_s": 1e9}, {"prompt_cache_retention": "1h"}])
async def test_an_impossible_pin_is_refused(client, fields):
    response = await client.session.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1} | fields)
    assert response.status == 400 and next(iter(fields)) in (await response.json())["error"]["message"]
