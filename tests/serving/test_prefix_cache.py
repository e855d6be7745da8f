"""The prefix cache: cached tokens in the usage, cache salts and /reset_prefix_cache."""


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
