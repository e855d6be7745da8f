"""Servers within the test's process and their clients: plain JSON requests, the `openai` client, raw HTTP/1.1."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import aiohttp
import openai
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from jpaged.config import EngineConfig
from jpaged.core.block_pool import BlockPool
from jpaged.core.commands import ResetPrefixCache
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine, StepOutput
from jpaged.engine.output import request_output
from jpaged.serving.body_process import BodyProcess
from jpaged.serving.serve import make_app
from jpaged.serving.service import ServerConfig, Service
from jpaged.serving.template_process import TemplateProcess
from jpaged.start.load import load_engine
from tests.support.few_shapes import few_shapes
from tests.support.patience import PATIENCE_S

MAX_LEN = 256
# Of all servers in this process, because each takes seconds to start.
TEMPLATES, BODIES = TemplateProcess(), BodyProcess()


@lru_cache(maxsize=4)
def compiler_of(engine: Engine):
    """The compiler of grammars of all servers of an engine, because each has a process, which takes long to start."""
    return engine.grammar_compiler()


def build(tiny, **config):
    limits = {"max_model_len": MAX_LEN, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with few_shapes():
        return load_engine(EngineConfig(model=str(tiny), **limits | config), progress=False)


@asynccontextmanager
async def smaller(loaded, num_blocks=None, max_num_batched_tokens=None, *, enable_prefix_caching=True):
    """Yield a loaded engine with another scheduler. The runner is shared, so nothing is compiled."""
    old = loaded.engine.scheduler
    block_size, host = old.limits.block_size, old.host_pool
    scheduler = Scheduler(
        BlockPool(num_blocks or old.pool.num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
        replace(old.limits, max_num_batched_tokens=max_num_batched_tokens or old.limits.max_num_batched_tokens),
        vocab_size=old.vocab_size, eos_token_ids=old.eos_token_ids,
        host_pool=host and BlockPool(host.num_blocks, block_size, enable_prefix_caching=False),
        preemption=old.memory.preemption, block_swap_cost=old.memory.swap_costs[0],
    )  # fmt: skip
    engine = Engine(scheduler, loaded.engine.runner, loaded.engine.tokenizer, max_in_flight=2)
    try:
        yield loaded._replace(engine=engine)
    finally:
        loaded.engine.control(ResetPrefixCache())  # The smaller pool has overwritten the blocks.


def do_nothing():
    """Take a step that changes nothing."""
    time.sleep(0.001)
    return StepOutput()


def limit_steps(engine, steps):
    """Let an engine take so many steps, and further ones only while it is told to pause, until `del engine.step`."""
    run, left = engine.step, iter(range(steps))
    engine.step = lambda: run() if engine._paused or next(left, None) is not None else do_nothing()


class Client:
    """A server on a free port within this process, and a session with it."""

    def __init__(
        self, engine, tokenizer, sampling_defaults=None, *, model_name="tiny", tool_format=None, **config,
    ):  # fmt: skip
        engines = engine if isinstance(engine, tuple) else (engine,)
        self.engine = engines[0]
        self.service = Service(
            engines, tokenizer, model_name, ServerConfig(**config), sampling_defaults=sampling_defaults or {},
            tool_format=tool_format, templates=TEMPLATES,
        )  # fmt: skip
        self.service.bodies, self.service.grammars = BODIES, compiler_of(self.engine)
        self.app = make_app(self.service)

    async def __aenter__(self):
        self.server = TestServer(self.app)
        await self.server.start_server()
        self.session = aiohttp.ClientSession(self.server.make_url("/"))
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.server.close()

    @property
    def url(self):
        """Return the server's address, without a slash at the end."""
        return str(self.server.make_url("/")).rstrip("/")

    async def post(self, path, body, status=200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def complete(self, prompt, status=200, **fields):
        return await self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields, status)

    async def chat(self, content, status=200, **fields):
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields, status)

    async def reset_prefix_cache(self):
        async with self.session.post("/reset_prefix_cache") as response:
            assert response.status == 200 and await response.read() == b""

    async def stream(self, path, body):
        """Return the chunks of a streamed response, and check the frames of the protocol."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = (await response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    @asynccontextmanager
    async def held(self):
        """Replace the engine's steps by empty ones within the block, so that no request ends."""
        await self.service.engine.call(lambda e: setattr(e, "step", do_nothing))
        yield
        await self.service.engine.call(lambda e: delattr(e, "step"))

    @asynccontextmanager
    async def limited(self, steps):
        """Limit the engine's steps within the block, so that a request runs until the server is told to pause."""
        await self.service.engine.call(lambda e: limit_steps(e, steps))
        yield
        await self.service.engine.call(lambda e: delattr(e, "step"))

    async def running(self):
        """Wait until a request runs or waits."""
        while not await self.service.engine.call(lambda e: e.has_work):
            await asyncio.sleep(0.005)

    async def until(self, num_running=0, num_waiting=0):
        """Wait until at least so many requests run and so many wait."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stats = self.engine.stats()
                if stats.num_running >= num_running and stats.num_waiting >= num_waiting:
                    return
                await asyncio.sleep(0.005)

    def metric(self, name):
        """Return the sum of a metric's samples, such as vllm:num_requests_running."""
        families = text_string_to_metric_families(self.service.metrics.render().decode())
        found = [sample.value for family in families for sample in family.samples if sample.name == name]
        assert found, f"no metric is called {name}"
        return sum(found)

    async def idle(self):
        """Wait until no request runs, and check that no block is in use."""

        def check(engine):
            engine.scheduler.check_invariants()
            return engine.has_work, engine.scheduler.pool.num_used

        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.service.engine.call(check))[0]:
                await asyncio.sleep(0.02)
        assert found == (False, 0)


class Api:
    """The async `openai` client, with the model and a small limit of tokens filled in."""

    def __init__(self, url, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE_S} | options
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def complete(self, prompt, **fields):
        fields = {"model": "demo", "temperature": 0, "max_tokens": 12} | fields
        return await self.client.completions.create(prompt=prompt, **fields)

    async def chat(self, content, **fields):
        """Send the user's message, or a list of messages."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        fields = {"model": "demo", "temperature": 0, "max_tokens": 40} | fields
        return await self.client.chat.completions.create(messages=messages, **fields)


async def collect(stream):
    """Return all chunks of a stream."""
    return [chunk async for chunk in stream]


@dataclass
class Response:
    """A response as it arrived.

    Attributes:
        headers: by their names in lower case.
        chunks: of the body, where the transfer encoding is chunked.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes]

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """Return the error, and check that it has the API's form."""
        assert self.headers["content-type"].startswith("application/json"), self.body
        assert self.json.keys() == {"error"} and self.json["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(self.json["error"]["code"], str) and self.status >= 400
        return self.json["error"]

    @property
    def events(self):
        """Return the events of a stream except its end, and check their frames."""
        assert self.status == 200 and self.headers["content-type"] == "text/event-stream"
        assert self.headers["cache-control"] == "no-cache" and "content-length" not in self.headers
        assert b"\r" not in self.body and self.body.endswith(b"\n\n")
        events = self.body.removesuffix(b"\n\n").split(b"\n\n")
        assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
        assert events.pop() == b"data: [DONE]"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]


class Connection:
    """A connection that sends given bytes and reads HTTP/1.1 responses."""

    def __init__(self, port):
        self.port = port

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_):
        self.writer.close()

    def send(self, data):
        self.writer.write(data)

    async def answer(self, *, has_body=True):
        """Return the next response on the connection."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii").removesuffix("\r\n\r\n")
            status, *lines = head.split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body, chunks = b"", []
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    chunks.append(await self.reader.readexactly(size))
                    assert await self.reader.readexactly(2) == b"\r\n"
                assert await self.reader.readexactly(2) == b"\r\n"
                body = b"".join(chunks)
            elif "content-length" in headers and has_body:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif status.startswith("HTTP/1.0"):
                body = await self.reader.read()
        return Response(int(status.split()[1]), headers, body, chunks)

    async def rest(self):
        """Return all bytes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def closed(self):
        """Return whether the server closes the connection and sends nothing before."""
        return await self.rest() == b""


async def exchange_bytes(port, data):
    """Send bytes on a new connection and return all bytes until the server closes it."""
    async with Connection(port) as connection:
        connection.send(data)
        return await connection.rest()


def request(method, path, body=None, *, version="1.1", **headers):
    """Return the bytes of a request. Names of headers have _ for -; a header that is None is left out."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    headers = {"Host": "localhost", "Content_Length": None if body is None else str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/{version}", *lines, "", ""]).encode() + (body or b"")


def texts(completion):
    """Return the texts of a completion's choices, as JSON or as the `openai` client's object."""
    if isinstance(completion, dict):
        return [choice["text"] for choice in completion["choices"]]
    return [choice.text for choice in completion.choices]


def joined(chunks):
    """Return the texts of the choices of a streamed completion, by index."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


def counts(body):
    """Return the usage of a response as (prompt, completion, total) tokens."""
    return tuple(body["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total"))


def check_choices(events, count):
    """Check that the events are of one response and that each choice ends once; return the texts of the choices."""
    texts, reasons = [""] * count, [None] * count
    for event in events:
        assert (event["id"], event["model"], event["created"]) == (events[0]["id"], "demo", events[0]["created"])
        (choice,) = event["choices"]
        assert reasons[choice["index"]] is None, "a choice continues after its end"
        reasons[choice["index"]] = choice["finish_reason"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert reasons == ["stop"] * count
    return texts


def generate(engine, prompt, params):
    """Return the outputs of the engine itself, without a server."""
    request = engine.add("offline", prompt, params)
    while engine.has_work:
        engine.step()
    return request_output(request, engine.vocabulary).outputs
