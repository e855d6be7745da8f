"""Origins and hosts: web pages that may use the server."""

import pytest

from jpaged.cli.main import load, parser
from jpaged.cli.serve import server_config
from jpaged.serving.origins import is_loopback
from tests.serving.client import Client

PAGE = "https://chat.example.org"
COMPLETION = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def start(loaded):
    return lambda **config: Client(*loaded, **config)


async def answer(client, method, path, body=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.session.request(method, path, json=body, headers=headers) as response:
        return response.status, response.headers, await response.read()


async def test_request_of_another_origin_is_rejected_before_it_has_an_effect(start):
    async with start() as client:
        pool = client.engine.scheduler.pool
        await client.complete("a prompt that stays in the prefix cache", max_tokens=20)
        cached = sum(pool.is_cached(block) for block in range(pool.num_blocks))
        assert cached
        for origin in (PAGE, "null", "http://127.0.0.1:1", "http://localhost.example.org"):
            # A "simple" request: the browser sends it without asking first.
            simple = {"Origin": origin, "Content_Type": "text/plain"}
            for method, path, body in (
                ("POST", "/v1/completions", COMPLETION), ("POST", "/reset_prefix_cache", None),
                ("GET", "/metrics", None), ("POST", "/nowhere", None),
            ):  # fmt: skip
                status, headers, content = await answer(client, method, path, body, **simple)
                assert status == 403 and b"Origin" in content and "Access-Control-Allow-Origin" not in headers
        assert cached == sum(pool.is_cached(block) for block in range(pool.num_blocks))


@pytest.mark.parametrize(
    "headers, status, word",
    [({"Host": "[]"}, 400, b"Host"), ({"Host": "[::1"}, 400, b"Host"), ({"Origin": "http://["}, 403, b"Origin")],
)
async def test_invalid_host_or_origin_is_rejected(start, headers, status, word):
    async with start() as client:
        given, _, content = await answer(client, "GET", "/v1/models", **headers)
        assert (given, word in content) == (status, True), content


async def test_own_page_is_allowed(start):
    async with start() as client:
        own = str(client.server.make_url("/")).rstrip("/")
        assert (await answer(client, "POST", "/v1/completions", COMPLETION, Origin=own))[0] == 200
        # Behind a proxy that changes Host, Sec-Fetch-Site tells the origin.
        proxied = {"Origin": PAGE, "Sec_Fetch_Site": "same-origin"}
        assert (await answer(client, "POST", "/v1/completions", COMPLETION, **proxied))[0] == 200
        status, _, _ = await answer(
            client, "POST", "/v1/completions", COMPLETION, Origin=PAGE, Sec_Fetch_Site="same-site"
        )
        assert status == 403


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_allowed_origin_may_read_responses_and_errors(start, allowed):
    async with start(allowed_origins=(allowed,), api_keys=("key",)) as client:
        key = {"Authorization": "Bearer key"}
        for path, body, expected in (("/v1/completions", COMPLETION, 200), ("/v1/completions", {}, 400)):
            status, headers, _ = await answer(client, "POST", path, body, Origin=PAGE, **key)
            assert status == expected and headers["Access-Control-Allow-Origin"] == PAGE
            assert headers["Vary"] == "Origin" and "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        assert (await answer(client, "POST", "/v1/completions", COMPLETION, Origin=PAGE))[0] == 401


async def test_preflight_allows_the_headers_of_client_libraries(start):
    """Use the x-stainless-* headers of openai-js."""
    asked = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"
    preflight = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": asked}
    async with start(allowed_origins=(PAGE,), api_keys=("key",)) as client:
        for path in ("/v1/chat/completions", "/reset_prefix_cache"):
            status, headers, body = await answer(client, "OPTIONS", path, Origin=PAGE, **preflight)
            assert (status, body) == (204, b"") and headers["Access-Control-Allow-Origin"] == PAGE
            assert headers["Access-Control-Allow-Headers"] == asked
            assert "POST" in headers["Access-Control-Allow-Methods"]
            status, headers, _ = await answer(client, "OPTIONS", path, Origin="https://evil.example.org", **preflight)
            assert status == 403 and "Access-Control-Allow-Origin" not in headers


async def test_unknown_host_name_is_rejected_on_the_loopback_interface(start):
    async with start(allowed_hosts=("proxy.example.org",)) as client:
        for host in ("evil.example.org:8000", "127.0.0.1.example.org", "[::2]:80"):
            status, _, content = await answer(client, "POST", "/v1/completions", COMPLETION, Host=host)
            assert status == 403 and b"--allowed-hosts" in content
        for host in ("localhost:8000", "LOCALHOST.", "a.localhost", "127.1.2.3", "[::1]:80", "proxy.example.org:443"):
            assert (await answer(client, "GET", "/v1/models", Host=host))[0] == 200
    async with start() as client:
        assert (await answer(client, "GET", "/v1/models", Host="example.org"))[0] == 200


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "a.localhost", "127.0.0.1", "127.255.0.3", "::1", "[::1]"])
def test_loopback_names_and_addresses(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil-localhost", "evillocalhost", "localhost.evil.com", "a.localhost.evil.com", "127.0.0.1.evil.com",
        "evil.127.0.0.1", "evil.com-127.0.0.1", "1127.0.0.1", "127.0.0.1.localhost.com", "::10", "",
    ],
)  # fmt: skip
def test_names_that_only_look_like_loopback(host):
    assert not is_loopback(host)


def test_hosts_are_checked_only_on_the_loopback_interface_without_keys(monkeypatch):
    monkeypatch.delenv("JPAGED_API_KEY", raising=False)
    parse = parser("serve", load("serve"), "jpaged serve").parse_args

    def allowed(*flags):
        return server_config(parse(flags)).allowed_hosts

    assert allowed() == () and allowed("--host", "::1") == () and allowed("--host", "localhost") == ()
    assert allowed("--host", "0.0.0.0") is None and allowed("--api-key", "key") is None
    assert allowed("--allowed-hosts", "a.example.org", "--host", "0.0.0.0") == ("a.example.org",)
    assert not is_loopback("example.org") and not is_loopback("0.0.0.0")


@pytest.mark.parametrize(
    "allowed, origin, expected",
    [
        ((), "https://chat.example.org", None),
        (("https://chat.example.org",), "https://chat.example.org", "https://chat.example.org"),
        (("https://chat.example.org",), "https://chat.example.org.evil.com", None),
        (("https://chat.example.org",), "https://CHAT.example.org", None),
        (("https://chat.example.org",), "http://chat.example.org", None),
        (("https://chat.example.org",), "null", None),
        (("https://chat.example.org",), None, None),
        (("*",), "https://anywhere.example", "https://anywhere.example"),
    ],
)
async def test_cors_headers_are_sent_only_to_allowed_origins(loaded, allowed, origin, expected):
    async with Client(*loaded, allowed_origins=allowed, api_keys=("k",)) as client:
        headers = {} if origin is None else {"Origin": origin}
        for method, path, more in [
            ("GET", "/health", {}),
            ("GET", "/v1/models", {}),  # a rejection, which an allowed page may read too
            ("POST", "/v1/completions", {"Authorization": "Bearer k"}),
            ("OPTIONS", "/v1/completions", {"Access-Control-Request-Method": "POST"}),
        ]:
            async with client.session.request(method, path, headers=headers | more) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == expected, (method, path)
                assert "Access-Control-Allow-Credentials" not in response.headers
                assert response.headers.get("Vary") == ("Origin" if allowed else None)
