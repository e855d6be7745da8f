"""All endpoints. Routes, keys, the OpenAPI document, Ray's ingress and the table in docs/server.md follow from them."""

from importlib.metadata import version

from pydantic import BaseModel

from jpaged.serving import dialect, handlers, info, protocol
from jpaged.serving.dialect import CHATS, Dialect
from jpaged.serving.embeddings import EmbeddingsRequest, GenerativeScoringRequest, ScoreRequest
from jpaged.serving.endpoint import EVENTS, JSON, TEXT, Endpoint, Handler
from jpaged.serving.generate import Work, in_turns
from jpaged.serving.handlers import answering, showing
from jpaged.serving.live import static
from jpaged.serving.messages import CountTokensRequest, MessagesRequest
from jpaged.serving.openapi import REFUSALS, show_openapi
from jpaged.serving.prepare import detokenize, prepare_chat, prepare_completion, tokenize
from jpaged.serving.responses import ResponsesRequest
from jpaged.serving.service import ServerConfig
from jpaged.serving.translate import (
    count_tokens,
    prepare_embeddings,
    prepare_messages,
    prepare_responses,
    prepare_scores,
)


def _operation[B: BaseModel](
    path: str, summary: str, kind: type[B], work: Work[B], *, bodies: tuple[type[B], ...] = (), renders: bool = True,
    dialect: Dialect = CHATS, aliases: tuple[str, ...] = (),
) -> Endpoint:  # fmt: skip
    """Return the endpoint of some work on a body of a kind, which is one of `bodies` if there are several."""
    operation = in_turns(kind, work, renders=renders)
    contents = (JSON, EVENTS) if "stream" in kind.model_fields else (JSON,)
    return Endpoint(
        path, summary, answering(operation), operation, ("POST",), aliases, bodies=bodies or (kind,),
        contents=contents, dialect=dialect,
    )  # fmt: skip


def _health(path: str, summary: str, *methods: str) -> Endpoint:
    refusals = {"503": "it does not, or is shutting down"}
    return Endpoint(path, summary, handlers.health, methods=methods, contents=(), refusals=refusals, is_open=True)


def _page(path: str, summary: str, handler: Handler, *, is_open: bool = False) -> Endpoint:
    return Endpoint(path, summary, handler, is_open=is_open, is_described=False)


def _control(path: str, summary: str, handler: Handler, method: str = "POST") -> Endpoint:
    return Endpoint(path, summary, handler, methods=(method,), is_described=False, setting="enable_weight_updates")


ENDPOINTS = (
    _operation(
        "/v1/completions", "complete a prompt: a text, token ids, or a list of either",
        protocol.CompletionRequest, prepare_completion, renders=False,
    ),
    _operation(
        "/v1/chat/completions", "answer text messages of any role that the chat template renders",
        protocol.ChatRequest, prepare_chat,
    ),
    _operation(
        "/v1/responses", "answer a conversation in the form of OpenAI's Responses API; nothing is stored",
        ResponsesRequest, prepare_responses, dialect=dialect.RESPONSES,
    ),
    _operation(
        "/v1/messages", "answer a conversation in the form of Anthropic's API",
        MessagesRequest, prepare_messages, dialect=dialect.MESSAGES,
    ),
    _operation(
        "/v1/messages/count_tokens", "count the tokens of the prompt of `/v1/messages`",
        CountTokensRequest, count_tokens, dialect=dialect.MESSAGES,
    ),
    _operation(
        "/v1/embeddings", "return a vector of each prompt: the last hidden state of its last token, or their mean",
        EmbeddingsRequest, prepare_embeddings, renders=False,
    ),
    _operation(
        "/v1/score", "return the probabilities of some tokens behind a query and each item, as SGLang does",
        ScoreRequest, prepare_scores, renders=False, aliases=("/score",),
    ),
    _operation(
        "/generative_scoring", "return the probability of the first label behind a query and each item, as vLLM does",
        GenerativeScoringRequest, prepare_scores, renders=False,
    ),
    Endpoint("/v1/models", "every served name of the model, with `max_model_len` and `root`", showing(info.model_list)),
    Endpoint("/v1/models/{model}", "the entry of one name", handlers.one_model, refusals={"404": REFUSALS["404"]}),
    _operation(
        "/tokenize", "convert `prompt` or `messages` to tokens", protocol.TokenizeRequest, tokenize,
        bodies=(protocol.TokenizeCompletionRequest, protocol.TokenizeChatRequest),
    ),
    _operation("/detokenize", "convert tokens to text", protocol.DetokenizeRequest, detokenize),
    Endpoint(
        "/reset_prefix_cache", "drop all cached prefixes", handlers.reset_prefix_cache, methods=("POST",), contents=()
    ),
    _health("/health", "200, or 503 after the engine has failed and during shutdown", "GET"),
    _health("/ping", "the same as `/health`", "GET", "POST"),
    Endpoint("/version", "the version of the server", showing(lambda _: {"version": version("jpaged")}), is_open=True),
    Endpoint("/load", "the number of requests in progress", showing(lambda each: {"server_load": len(each.in_flight)})),
    Endpoint(
        "/tokenizer_info", "the tokenizer's configuration with its chat template", showing(info.tokenizer_config),
        refusals={"404": "the server has no tokenizer"},
    ),
    Endpoint(
        "/model_info", "facts about the model under SGLang's names, for routers", showing(info.model_info),
        aliases=("/get_model_info",),
    ),
    Endpoint(
        "/server_info", "facts about the model and the server under SGLang's names, for routers",
        showing(info.server_info), aliases=("/get_server_info",),
    ),
    Endpoint("/metrics", "metrics for Prometheus", handlers.metrics, contents=(TEXT,), is_open=True),
    _page("/openapi.json", "the schema, generated from the models that validate requests", show_openapi, is_open=True),
    *(_page(path, "the page", static.sender(name), is_open=True) for path, name in static.PAGE_FILES.items()),
    _page("/live", "the page's event stream", handlers.live),
    _page("/live/requests/{request_id}", "the number of a request on the map", handlers.live_number),
    _control("/pause", "begin no step", handlers.pause),
    _control("/resume", "end a pause", handlers.resume),
    _control("/is_paused", "whether steps wait for `/resume`", handlers.is_paused, "GET"),
    _control("/update_weights", "serve other parameters", handlers.update_weights),
    _control("/v1/load_lora_adapter", "serve an adapter", handlers.load_lora_adapter),
    _control("/v1/unload_lora_adapter", "serve an adapter no more", handlers.unload_lora_adapter),
    _control("/sleep", "free the device's memory", handlers.sleep),
    _control("/wake_up", "take the memory back", handlers.wake_up),
    _control("/is_sleeping", "whether steps wait for `/wake_up`", handlers.is_sleeping, "GET"),
)  # fmt: skip


def served(config: ServerConfig) -> tuple[Endpoint, ...]:
    """Return the endpoints of a server."""
    return tuple(each for each in ENDPOINTS if each.setting is None or getattr(config, each.setting))
