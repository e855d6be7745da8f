"""State that the handlers of the server share."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from jpaged.chat import ContentFormat, Encoder, sources_of
from jpaged.core.commands import LoadAdapter
from jpaged.core.params import ContextLengthExceeded
from jpaged.engine.async_engine import AsyncEngine
from jpaged.engine.engine import Engine
from jpaged.engine.router import EngineClient, Router
from jpaged.serving.body_process import BodyProcess
from jpaged.serving.live.feed import Feed
from jpaged.serving.live.recorder import Recorder
from jpaged.serving.live.snapshot import snapshot
from jpaged.serving.metrics import Metrics
from jpaged.serving.notices import Notices
from jpaged.serving.reasoning_parsers.forms import FORMS, reasoning_form
from jpaged.serving.template_process import TemplateProcess
from jpaged.serving.tool_parsers.format import ToolFormat
from jpaged.serving.turns import ClientTurns
from jpaged.structured.compiler import NUM_THREADS
from jpaged.tokenizer import Vocabulary, backend

API_KEY_VARIABLE = "JPAGED_API_KEY"  # environment variable with a further key
LARGE_BYTES = 64 * 2**10
# Much of this work holds the GIL, so that the steps of other keys wait. After these rests, few steps do.
REST_OF_KEYS = 4  # multiple of the processor time of the work
REST_OF_BODIES = 12  # multiple of the time that the check of a large body took; the body is then parsed


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Configuration of the server.

    Attributes:
        api_keys: keys of the protected routes; without keys, all routes are open.
        chat_template: replaces the model's own.
        chat_template_content_format: the form of messages' content for the template, as for `chat.render`.
        default_chat_template_kwargs: variables of the template for requests that do not set them.
        trust_request_chat_template: accept templates in requests too. They are programs, although sandboxed.
        allow_special_tokens_in_content: encode the text of a special token in a message as that token.
        reasoning_parser: form of the model's reasoning, which answers then have apart from their text: one of
            `reasoning_parsers.forms.FORMS`, "auto": detected from the chat template, or "none".
        ignore_unknown_fields: ignore unknown fields of requests instead of rejecting them.
        max_queue: maximum requests that wait for the engine; further ones get HTTP 503.
        max_body_size: maximum bytes of a request; None: 1 MiB, plus 16 bytes for each token of max_model_len.
        request_timeout: maximum seconds of a response; None: no limit.
        drain_timeout: seconds that running requests have to finish during shutdown; None: no limit.
        allowed_origins: origins of web pages that may use the server from a browser; "*": all.
        allowed_hosts: host names of the server in requests, in addition to those of the loopback interface; None: all.
        root_path: path of a proxy in front, such as "/llm": every route is served under it, too.
        aliases: further names of the model in requests.
        enable_weight_updates: serve the routes with which a trainer pauses the engine and exchanges its parameters.
    """

    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    allow_special_tokens_in_content: bool = False
    reasoning_parser: str = "none"
    ignore_unknown_fields: bool = False
    max_queue: int = 4096
    max_body_size: int | None = None
    request_timeout: float | None = None
    drain_timeout: float | None = 300.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    root_path: str = ""
    aliases: tuple[str, ...] = ()
    enable_weight_updates: bool = False

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_body_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        for name in ("request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: must be above 0, not {value}")
        if self.enable_weight_updates and not self.api_keys:
            raise ValueError("enable_weight_updates: needs an API key, because a client could exchange the model")
        if not all(self.api_keys):
            raise ValueError("api_keys: must not hold an empty one")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"root_path: must begin with / and not end with it, as /llm does, not {self.root_path!r}")

    @property
    def max_prompts(self) -> int:
        """Maximum prompts of one request: its share of the queue."""
        return self.max_queue // 2 + 1


@dataclass(eq=False)
class Service:
    """Served model, on engines of the same model, which belong to the service.

    Attributes:
        engines: the engines. The page shows the pool of the first one.
        tokenizer: the Hugging Face tokenizer, for prompts and chat templates; None: token ids only.
        sampling_defaults: values of unset fields of requests, from the model's generation_config.json.
        tool_format: the model's format of tool calls; None if it has none.
        model_facts: further facts for `/model_info`.
        load_params: return the parameters of a directory; set if `config.enable_weight_updates`.
        load_adapter: (name, directory) -> the command that serves an adapter; likewise.
        draining: finish running requests and reject new ones.
        in_flight: tasks of the POST requests that are being answered.
        engine: client of all engines.
        vocabulary: texts and bytes of single tokens.
        grammars: compiler of structured outputs; None without a tokenizer.
        feed: sender of the page's map.
        reasoning: form of the model's reasoning; None: it is part of the text.
        notices: log of the ignored parts of requests.
    """

    engines: InitVar[Sequence[Engine]]
    tokenizer: Any
    model_name: str
    config: ServerConfig
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_format: ToolFormat | None = None
    model_facts: Mapping[str, Any] = field(default_factory=dict)
    load_params: Callable[[Path], Any] | None = None
    load_adapter: Callable[[str, Path], LoadAdapter] | None = None
    templates: TemplateProcess = field(default_factory=TemplateProcess)
    bodies: BodyProcess = field(default_factory=BodyProcess)
    draining: bool = False
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    notices: Notices = field(default_factory=Notices)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self, engines: Sequence[Engine]) -> None:
        first, recorder, share = engines[0], Recorder(), -(-self.config.max_queue // len(engines))
        self.metrics = Metrics(self.model_name, [engine.stats for engine in engines])
        clients = [
            AsyncEngine(engine, [observer, *([recorder] if engine is first else [])], max_queue=share)
            for engine, observer in zip(engines, self.metrics.engines)
        ]
        self.engine: EngineClient = clients[0] if len(clients) == 1 else Router(clients)
        self.feed = Feed(
            self.engine, lambda: clients[0].call(lambda engine: snapshot(engine.scheduler, recorder)), recorder
        )
        self._adapters = first.adapters
        self.max_model_len, self.grammars = first.limits.max_model_len, first.grammar_compiler()
        self.vocabulary = Vocabulary(backend(self.tokenizer) if self.tokenizer else None)
        sources = [self.config.chat_template] if self.config.chat_template else sources_of(self.tokenizer).values()
        self.reasoning = reasoning_form(self.config.reasoning_parser, sources)
        if self.tool_format is not None and self.reasoning is None:
            self.reasoning = FORMS.get(self.tool_format.form.reasoning)
        if self.tokenizer is not None:
            self.tool_format = self.tool_format and self.tool_format.for_tokenizer(backend(self.tokenizer))
            self.reasoning = self.reasoning and self.reasoning.for_tokenizer(backend(self.tokenizer))
        sizes = {"max_running_requests": first.limits.max_num_seqs, "dp_size": len(engines), "tp_size": 1}
        self.model_facts = sizes | dict(self.model_facts)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests; responses have the first, or that of an adapter."""
        return self.model_name, *self.config.aliases, *self._adapters

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request's name of the model stands for; None: the model alone."""
        return name if name in self._adapters and name not in (self.model_name, *self.config.aliases) else None

    @property
    def healthy(self) -> bool:
        """Whether the server accepts requests."""
        return self.engine.alive and not self.draining

    @property
    def max_body_size(self) -> int:
        """Maximum bytes of a request."""
        return self.config.max_body_size or 2**20 + 16 * self.max_model_len

    @property
    def max_prompt_characters(self) -> int:
        """Maximum characters of a prompt of `max_model_len` tokens."""
        return self.max_model_len * self.vocabulary.longest

    def check_length(self, length: int, param: str) -> None:
        """Check the number of characters of a text, before time is spent on its tokens.

        Raises:
            ContextLengthExceeded: no `max_model_len` tokens have so many.
        """
        if length > self.max_prompt_characters:
            most = f"more than {self.max_prompt_characters}, the most that so many tokens can have"
            limit = f"This model's maximum context length is {self.max_model_len} tokens (max_model_len)"
            raise ContextLengthExceeded(param, f"{limit}. However, you sent {length} characters, {most}.")

    async def check_body(self, kind: type[BaseModel], data: bytes, client: str) -> None:
        """Check a large body in another process: its JSON, as `parse`, and its texts, as `check_length`."""
        if len(data) > LARGE_BYTES:
            work = partial(self.bodies.text_length, kind, data, self.config.ignore_unknown_fields)
            length, param = await self._body_turns.run(client, work)
            if self.tokenizer is not None:
                self.check_length(length, param)

    async def run[T](self, work: Callable[[], T], size: int, client: str = "") -> T:
        """Return the result of some work that takes time in proportion to `size`, in bytes.

        Large pieces of work run one after the other, in the turns of clients, so that they take one core. Small ones
        need not wait for them.
        """
        if size > LARGE_BYTES:
            return await self._large_turns.run(client, work)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    @cached_property
    def encoder(self) -> Encoder:
        """Encoder of conversations."""
        return Encoder(self.tokenizer)

    @cached_property
    def chat_turns(self) -> ClientTurns:
        """Turns at the preparation of conversations, which waits for their templates."""
        return self._turns("chat templates")

    @cached_property
    def grammar_turns(self) -> ClientTurns:
        """Turns at the compilation of grammars."""
        assert self.grammars is not None, "there are grammars only with a tokenizer"
        return self._turns("grammars", threads=self.grammars.threads)

    @cached_property
    def _body_turns(self) -> ClientTurns:
        return self._turns("large bodies", rest=REST_OF_BODIES, counts_waits=True)

    @cached_property
    def _large_turns(self) -> ClientTurns:
        return self._turns("large requests", 1)

    def _turns(
        self, name: str, num_threads: int = NUM_THREADS, *, threads: ThreadPoolExecutor | None = None,
        rest: float = REST_OF_KEYS, counts_waits: bool = False,
    ) -> ClientTurns:  # fmt: skip
        """Return turns at some work. Clients rest only where keys tell them apart."""
        submit = (threads or ThreadPoolExecutor(num_threads, name)).submit
        rest = rest if len(self.config.api_keys) > 1 else 0
        return ClientTurns(name, submit, num_threads, self.config.max_prompts, rest, counts_waits)


SERVICE = web.AppKey("service", Service)
