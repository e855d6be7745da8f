"""Routes: methods, unknown paths, health, version, a root path, and their description in openapi.json."""

import asyncio
import re

import pytest
import schemathesis.openapi
from yarl import URL

from jpaged.serving.endpoints import served
from jpaged.serving.serve import make_app
from jpaged.serving.service import ServerConfig
from tests.serving import scripted
from tests.serving.client import Client, Connection, request


async def test_head_has_the_headers_of_get_and_no_body(exchange):
    for path in ("/health", "/v1/models", "/version", "/openapi.json"):
        head = await exchange(request("HEAD", path, Connection="close"), has_body=False)
        get = await exchange(request("GET", path, Connection="close"))
        assert (head.status, head.body) == (get.status, b"") == (200, b"")
        assert head.headers.get("content-length", "0") == str(len(get.body))


GET_PATHS = sorted(
    route.resource.canonical.format(request_id="r-1", model="demo")
    for route in make_app(scripted.make([])[1]).router.routes()
    if route.method == "HEAD"
)


@pytest.mark.parametrize("path", GET_PATHS)
async def test_head_of_every_get_route_ends_at_once_and_leaves_the_connection_usable(server, path):
    async with Connection(server.port) as connection:
        connection.send(request("HEAD", path) + request("GET", "/version", Connection="close"))
        head = await connection.answer(has_body=False)
        assert head.status == (404 if path.startswith("/live/requests/") else 200)
        assert [*(await connection.answer()).json] == ["version"] and await connection.closed()
    if path == "/live":
        assert head.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/v1/completions", {"POST"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/tokenize", {"POST"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),  # no preflight, because it names no method
        ("PATCH", "/ping", {"GET", "HEAD", "POST"}),
        ("TRACE", "/health", {"GET", "HEAD"}),
    ],
)
async def test_method_that_is_not_allowed_is_an_error_405(exchange, method, path, allowed):
    answer = await exchange(request(method, path), has_body=method != "HEAD")
    assert answer.status == 405 and {*answer.headers["allow"].split(",")} == allowed
    if method != "HEAD":
        assert answer.error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v1", "/v2/models", "/v1/completions/", "//health", "/v1/models/x%2Fy"]
)
async def test_unknown_path_is_an_error_404(exchange, path):
    answer = await exchange(request("GET", path))
    assert answer.status == 404 and answer.error["type"] == "NotFoundError"
    assert answer.error["code"] == ("model_not_found" if "models/" in path else "not_found")
    assert "served here" in answer.error["message"]


async def test_version_and_health_answer_without_a_body_for_health(exchange):
    version = (await exchange(request("GET", "/version"))).json
    assert [*version] == ["version"] and version["version"][0].isdigit()
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await exchange(request(method, path, Connection="close"))
        assert (answer.status, answer.body) == (200, b"")


async def test_load_counts_the_requests_that_are_being_answered(client):
    async def load():
        async with client.session.get("/load") as response:
            return (await response.json())["server_load"]

    assert await load() == 0
    async with client.held():
        task = asyncio.create_task(client.complete("a", max_tokens=1))
        await client.until(num_waiting=1)
        assert await load() == 1
    await task


async def test_tokenizer_info_has_the_template_that_is_used(loaded):
    for given in (None, "{{ messages }}"):
        async with Client(*loaded, chat_template=given) as client, client.session.get("/tokenizer_info") as response:
            info = await response.json()
        assert info["tokenizer_class"] == type(loaded.tokenizer).__name__ and info["eos_token"] == "<|end|>"
        assert info["chat_template"] == (given or loaded.tokenizer.chat_template)
    async with Client(loaded.engine, None) as client, client.session.get("/tokenizer_info") as response:
        assert response.status == 404


@pytest.fixture
async def proxied(loaded):
    async with Client(*loaded, root_path="/llm", api_keys=("key",)) as client:
        client.session.headers["Authorization"] = "Bearer key"
        yield client
        await client.idle()


async def test_routes_are_also_served_under_the_root_path(proxied):
    body = {"prompt": "a", "max_tokens": 1}
    assert (await proxied.post("/llm/v1/completions", body))["object"] == "text_completion"
    async with proxied.session.get("/llm/openapi.json") as response:
        assert (await response.json())["servers"] == [{"url": "/llm"}]
    del proxied.session.headers["Authorization"]
    async with proxied.session.get("/llm/health") as response:
        assert response.status == 200
    async with proxied.session.get("/llm/") as response:  # the links of the page are relative to it
        page, base = await response.text(), response.url
    files = re.findall(r'(?:src|href)="([^"#]+)"', page)
    for file in files:
        async with proxied.session.get(base.join(URL(file))) as response:
            assert response.status == 200 and str(response.url.path).startswith("/llm/page/")
    assert len(files) >= 3
    for path in ("/v1/completions", "/llm/v1/completions"):
        await proxied.post(path, body, 401)


async def test_openapi_is_valid_and_lists_every_route(exchange):
    answer = await exchange(request("GET", "/openapi.json"))
    assert answer.headers["content-type"].startswith("application/json")
    document = answer.json
    schemathesis.openapi.from_dict(document).validate()
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert described == {
        (method, path)
        for endpoint in served(ServerConfig())
        for path in endpoint.paths
        for method in endpoint.methods
        if not path.startswith(("/page/", "/live")) and path not in ("/", "/openapi.json")
    }


def test_control_is_served_only_if_enabled():
    enabled = served(ServerConfig(enable_weight_updates=True, api_keys=("key",)))
    names = {"/pause", "/resume", "/is_paused", "/update_weights", "/sleep", "/wake_up", "/is_sleeping"}
    names |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert {each.path for each in enabled} - {each.path for each in served(ServerConfig())} == names


async def test_openapi_has_the_fields_that_the_server_validates(exchange):
    document = (await exchange(request("GET", "/openapi.json"))).json
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
    for name in schema["properties"]:
        answer = await exchange(request("POST", "/v1/completions", {"prompt": "a", name: [[{}]]}))
        assert answer.status == 400 and answer.error["param"] == name
    answer = await exchange(request("POST", "/v1/completions", {"prompt": "a", "nowhere": 1}))
    assert answer.error["param"] == "nowhere" and "nowhere" not in schema["properties"]
