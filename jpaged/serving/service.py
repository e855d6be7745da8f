"""What the handlers of the server share."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from jpaged.async_engine import AsyncEngine
from jpaged.engine import Engine
from jpaged.serving.metrics import Metrics
from jpaged.serving.recorder import Recorder
from jpaged.serving.tools import ToolFormat
from jpaged.tokenizer import Vocabulary, backend


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server meets its clients.

    Attributes:
        api_keys: any of them opens what is not open to all; none of them, and everything is.
        chat_template: instead of the model's own.
        trust_request_chat_template: take templates from requests too. They are programs, if sandboxed ones.
        max_queue: requests that may wait for the engine; for more there is a 503.
        max_body_size: of a request, in bytes.
        request_timeout: seconds that an answer may take in all; None is no limit.
        drain_timeout: seconds that running requests have to finish once the server is told to stop; None is no limit.
        allowed_origins: of web pages that may use the server from a browser; "*" is all of them.
    """

    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    max_queue: int = 4096
    max_body_size: int = 16 * 2**20
    request_timeout: float | None = None
    drain_timeout: float | None = 300.0
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not all(self.api_keys):
            raise ValueError("api_keys must not hold an empty one")


@dataclass(eq=False)
class Service:
    """A model that is served.

    Attributes:
        tokenizer: the Hugging Face tokenizer, for prompts and chat templates.
        vocabulary: its single tokens.
        recorder, metrics: what the engine's observers have seen.
        sampling_defaults: what a request leaves open, as the model's generation_config.json has it.
        tool_format: how the model calls tools; None if it can't.
        draining: finish what runs, refuse what comes.
        in_flight: generating requests, each by its task.
    """

    engine: AsyncEngine
    tokenizer: Any
    model_name: str
    max_model_len: int
    vocabulary: Vocabulary
    recorder: Recorder
    metrics: Metrics
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_format: ToolFormat | None = None
    config: ServerConfig = field(default_factory=ServerConfig)
    draining: bool = False
    in_flight: set[asyncio.Task] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def healthy(self) -> bool:
        return self.engine.alive and not self.draining


SERVICE = web.AppKey("service", Service)


def make_service(
    engine: Engine,
    tokenizer: Any,
    model_name: str,
    config: ServerConfig,
    *,
    sampling_defaults: Mapping[str, Any] | None = None,
    tool_format: ToolFormat | None = None,
) -> Service:
    """A service around an engine, which from now on belongs to it."""
    recorder, metrics = Recorder(), Metrics(model_name, engine.scheduler)
    return Service(
        AsyncEngine(engine, [recorder, metrics], max_queue=config.max_queue), tokenizer, model_name,
        engine.scheduler.limits.max_model_len, Vocabulary(backend(tokenizer)), recorder, metrics,
        sampling_defaults or {}, tool_format, config,
    )  # fmt: skip
