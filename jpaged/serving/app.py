"""The OpenAI-compatible application: its routes, and what each makes of a request."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import HttpVersion11, web

from jpaged.core.params import StructuredOutputsParams
from jpaged.serving import live, static
from jpaged.serving.answer import ChatAnswer, CompletionAnswer, Prompt
from jpaged.serving.generate import respond
from jpaged.serving.middleware import MIDDLEWARES, add_headers
from jpaged.serving.openapi import description
from jpaged.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    GenerationRequest,
    Params,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    parse,
)
from jpaged.serving.service import SERVICE, Service
from jpaged.serving.tools import Tool, ToolFormat
from jpaged.tokenizer import encode, render_chat

BODY_TIMEOUT = 60.0  # seconds that a client has to send the body of its request


def make_app(service: Service) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a client that goes away aborts its request."""
    app = web.Application(client_max_size=service.config.max_body_size, middlewares=MIDDLEWARES)
    app[SERVICE] = service
    app.cleanup_ctx.append(_engine)
    app.on_response_prepare.append(add_headers)
    routes = [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.get("/v1/models", models),
        web.get("/v1/models/{model:.+}", one_model),
        web.post("/tokenize", tokenize),
        web.post("/detokenize", detokenize),
        web.post("/reset_prefix_cache", reset_prefix_cache),
        web.get("/health", health),
        web.get("/ping", health),
        web.post("/ping", health),
        web.get("/version", show_version),
        web.get("/metrics", metrics),
        web.get("/openapi.json", openapi),
        *static.routes(),
        *live.routes(service.engine, service.recorder),
    ]
    for route in routes:
        route.kwargs["expect_handler"] = _expect
    app.add_routes(routes)
    return app


async def _engine(app: web.Application) -> AsyncIterator[None]:
    app[SERVICE].engine.start()
    yield
    await app[SERVICE].engine.stop()


async def _expect(request: web.Request) -> None:
    """As aiohttp's own handler, which fails on a header that is no text."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is understood")
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = parse(CompletionRequest, await _body(request))
    with body.refusals_in_its_words():
        params, given = body.params(service.sampling_defaults), body.prompts()
        _check(service, body)
        if len(given) > service.config.max_queue:
            raise ApiError(
                400, f"prompt: {len(given)} of them are more than the queue's {service.config.max_queue}", "prompt"
            )
        special = body.add_special_tokens is not False
        prompts = [await asyncio.to_thread(_prompt, service, prompt, params, special) for prompt in given]
        answer = CompletionAnswer(service.model_name, service.vocabulary, body, prompts)
        return await respond(request, answer, params, body)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = parse(ChatRequest, await _body(request))
    with body.refusals_in_its_words():
        params = body.params(service.sampling_defaults)
        _check(service, body)
        offered = [Tool(tool.function.name, tool.function.parameters) for tool in body.offered_tools]
        new_parser = None
        if offered:
            tool_format = _tool_format(service, params)
            params = replace(params, structured_outputs=_call_grammar(body, tool_format, offered))
            names, parallel = {tool.name for tool in offered}, body.parallel_tool_calls is not False
            new_parser = partial(tool_format.parser, names, lambda: f"call_{uuid.uuid4().hex}", parallel)
        token_ids = await asyncio.to_thread(_render, service, body)
        prompt = Prompt(params.truncated(token_ids, service.max_model_len))
        answer = ChatAnswer(service.model_name, service.vocabulary, body, prompt, new_parser)
        return await respond(request, answer, params, body)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model(request.app[SERVICE])]})


async def one_model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    _check_model(service, request.match_info["model"])
    return web.json_response(_model(service))


async def tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    data = await _body(request)
    if b'"messages"' in data:
        chat = parse(TokenizeChatRequest, data)
        _check_model(service, chat.model)
        tokens, strings = await asyncio.to_thread(_render, service, chat), chat.return_token_strs
    else:
        body = parse(TokenizeCompletionRequest, data)
        _check_model(service, body.model)
        tokens = await asyncio.to_thread(
            encode, service.tokenizer, body.prompt, add_special_tokens=body.add_special_tokens
        )
        strings = body.return_token_strs
    texts = [service.vocabulary.tokenizer.id_to_token(token) for token in tokens] if strings else None
    counts = {"count": len(tokens), "max_model_len": service.max_model_len}
    return web.json_response(counts | {"tokens": tokens, "token_strs": texts})


async def detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    body = parse(DetokenizeRequest, await _body(request))
    _check_model(service, body.model)
    size = service.vocabulary.tokenizer.get_vocab_size()
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"tokens: token id {token} is outside the vocabulary [0, {size})", "tokens")
    text = await asyncio.to_thread(service.vocabulary.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return web.json_response({"prompt": text})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await request.app[SERVICE].engine.call(lambda engine: engine.scheduler.pool.reset_prefix_cache())
    return web.Response()


async def health(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[SERVICE].healthy else 503)


async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": version("jpaged")})


async def metrics(request: web.Request) -> web.Response:
    text = await asyncio.to_thread(request.app[SERVICE].metrics.render)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(description())


async def _body(request: web.Request) -> bytes:
    limit = request.app[SERVICE].config.max_body_size
    too_large = ApiError(413, f"the body exceeds {limit} bytes (--max-body-size)")
    if (request.content_length or 0) > limit:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:  # such as a broken Content-Encoding
        raise ApiError(400, "the body can't be decoded") from None
    except TimeoutError:
        raise ApiError(408, f"the body was not complete after {BODY_TIMEOUT:g} seconds") from None


def _check(service: Service, body: GenerationRequest) -> None:
    _check_model(service, body.model)
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options: only allowed with stream", "stream_options")


def _check_model(service: Service, name: str | None) -> None:
    if name not in (None, service.model_name):
        raise ApiError(404, f"model: {name!r} is not served here; {service.model_name!r} is", "model")


def _model(service: Service) -> dict[str, Any]:
    model = {"id": service.model_name, "object": "model", "created": service.created, "owned_by": "jpaged"}
    return model | {"max_model_len": service.max_model_len}


def _prompt(service: Service, given: str | list[int], params: Params, add_special_tokens: bool) -> Prompt:
    if not isinstance(given, str):
        return Prompt(params.truncated(given, service.max_model_len))
    if params.truncate_prompt_tokens is None:
        _check_length(service, len(given), "prompt")
    token_ids = encode(service.tokenizer, given, add_special_tokens=add_special_tokens)
    kept = params.truncated(token_ids, service.max_model_len)
    return Prompt(kept, given if len(kept) == len(token_ids) else None)


def _check_length(service: Service, length: int, param: str) -> None:
    """A text that can't fit, whatever its tokens are, is not worth the time that finding them takes."""
    limit = service.max_model_len * service.vocabulary.longest
    if length > limit:
        raise ApiError(
            400, f"{param}: {length} characters can't be at most {service.max_model_len} tokens (max_model_len)",
            param,
        )  # fmt: skip


def _render(service: Service, body: Conversation) -> list[int]:
    """The tokens of a conversation, by the request's template, the server's or the model's."""
    if body.chat_template is not None and not service.config.trust_request_chat_template:
        raise ApiError(
            400, "chat_template: this server takes none from requests (--trust-request-chat-template)", "chat_template"
        )
    messages, options = [message.for_template() for message in body.messages], body.template_options()
    if isinstance(body, ChatRequest) and body.truncate_prompt_tokens is None:
        _check_length(service, sum(len(message["content"]) for message in messages), "messages")
    try:
        return render_chat(service.tokenizer, messages, body.chat_template or service.config.chat_template, **options)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", "messages") from error


def _tool_format(service: Service, params: Params) -> ToolFormat:
    if service.tool_format is None:
        raise ApiError(400, "tools: it is not known how this model calls tools (--tool-call-parser)", "tools")
    if params.structured_outputs is not None:
        raise ApiError(400, "tools: can't be combined with response_format or structured_outputs", "tools")
    return service.tool_format


def _call_grammar(body: ChatRequest, tool_format: ToolFormat, tools: list[Tool]) -> StructuredOutputsParams | None:
    """What an answer has to be that must call, or whose calls must be strictly what the tools take."""
    parallel = body.parallel_tool_calls is not False and not body.names_tool
    try:
        if body.must_call:
            return StructuredOutputsParams(grammar=tool_format.grammar(tools, parallel))
        if any(tool.function.strict for tool in body.offered_tools):
            return StructuredOutputsParams(grammar=tool_format.lazy_grammar(tools, parallel))
    except ValueError as error:
        raise ApiError(400, str(error), "tools") from error
    return None
