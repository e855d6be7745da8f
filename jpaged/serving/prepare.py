"""Conversion of a request's body to the engine's input: parse, check, render and tokenize.

These functions take time in proportion to the body, so they run on worker threads (`Service.run`).
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.chat import template_of
from jpaged.core.commands import UpdateParams
from jpaged.core.params import InvalidParameter, StructuredOutputsParams
from jpaged.serving.answer import Prompt
from jpaged.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    GenerationRequest,
    Params,
    TokenizeChatRequest,
    UpdateWeightsRequest,
    parse,
    parse_tokenize,
)
from jpaged.serving.service import Service
from jpaged.serving.template_process import TooLong
from jpaged.serving.tools import Tool, ToolFormat, ToolParser
from jpaged.tokenizer import backend, encode, encode_all, tokenize_bad_words


class Prepared[Body: GenerationRequest](NamedTuple):
    """Request for generation, ready for the engine.

    Attributes:
        bad_words: token ids of `params.bad_words`.
        new_parser: creates a parser of tool calls for each choice; None without tools.
    """

    body: Body
    params: Params
    prompts: list[Prompt]
    bad_words: tuple[tuple[int, ...], ...]
    new_parser: Callable[[], ToolParser] | None = None


def prepare_completion(service: Service, data: bytes) -> Prepared[CompletionRequest]:
    """Return the request of a body.

    Raises:
        ApiError: 400 or 404.
    """
    body = parse(CompletionRequest, data, ignore_unknown=service.config.ignore_unknown_fields)
    with body.rename_error_fields():
        params, given = body.params(service.sampling_defaults), body.prompts()
        _check(service, body)
        if len(given) > service.config.max_prompts:
            raise ApiError(
                400, f"prompt: {len(given)} prompts exceed {service.config.max_prompts}, one request's share of the "
                "queue (--max-queue)", "prompt",
            )  # fmt: skip
        prompts = _prompts(service, body, given, params)
        if params.stop or params.structured_outputs:
            _tokenizer(service, "stop" if params.stop else "structured_outputs")
        return Prepared(body, params, prompts, _bad_words(service, params))


def prepare_chat(service: Service, data: bytes) -> Prepared[ChatRequest]:
    """Return the request of a body.

    Raises:
        ApiError: 400 or 404.
    """
    body = parse(ChatRequest, data, ignore_unknown=service.config.ignore_unknown_fields)
    with body.rename_error_fields():
        _tokenizer(service, "messages")
        params = body.params(service.sampling_defaults)
        _check(service, body)
        offered = [Tool(tool.function.name, tool.function.parameters) for tool in body.offered_tools]
        new_parser = None
        if offered:
            tool_format = _tool_format(service, body)
            with_answer = params.structured_outputs is not None and not body.must_call
            params = replace(params, structured_outputs=_call_grammar(body, params, tool_format, offered))
            names, parallel = {tool.name for tool in offered}, body.parallel_tool_calls is not False
            parser = tool_format.parser_with_answer if with_answer else tool_format.parser
            new_parser = partial(parser, names, lambda: f"call_{uuid.uuid4().hex}", parallel)
        prompt = Prompt(params.truncated(_render(service, body), service.max_model_len))
        return Prepared(body, params, [prompt], _bad_words(service, params), new_parser)


def tokenize(service: Service, data: bytes) -> dict[str, Any]:
    """Return the response to a body of `/tokenize`.

    Raises:
        ApiError: 400 or 404.
    """
    body = parse_tokenize(data, ignore_unknown=service.config.ignore_unknown_fields)
    check_model(service, body.model)
    if isinstance(body, TokenizeChatRequest):
        tokens = _render(service, body)
    else:
        tokenizer = _tokenizer(service, "prompt")
        service.check_length(body.text_length, "prompt")
        tokens = encode(tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
    id_to_token = backend(service.tokenizer).id_to_token
    texts = [id_to_token(token) for token in tokens] if body.return_token_strs else None
    counts = {"count": len(tokens), "max_model_len": service.max_model_len}
    return counts | {"tokens": tokens, "token_strs": texts}


def load_weights(service: Service, data: bytes) -> UpdateParams:
    """Return the update that a body of `/update_weights` describes, with its parameters.

    Raises:
        ApiError: 400 if the directory holds no parameters of this model.
    """
    body = parse(UpdateWeightsRequest, data)
    assert service.load_params is not None
    try:
        return UpdateParams(service.load_params(Path(body.path)), body.in_flight)
    except (OSError, ValueError) as error:
        raise ApiError(400, f"path: {error}", "path") from error


def detokenize(service: Service, data: bytes) -> dict[str, Any]:
    """Return the response to a body of `/detokenize`.

    Raises:
        ApiError: 400 or 404.
    """
    body = parse(DetokenizeRequest, data, ignore_unknown=service.config.ignore_unknown_fields)
    check_model(service, body.model)
    tokenizer = backend(_tokenizer(service, "tokens"))
    size = tokenizer.get_vocab_size()
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"tokens: token id {token} is outside the vocabulary [0, {size})", "tokens")
    (text,) = tokenizer.decode_batch([body.tokens], skip_special_tokens=False)  # lets other threads run, unlike decode
    return {"prompt": text}


def check_model(service: Service, name: str | None) -> None:
    """Check the name of the model in a request.

    Raises:
        ApiError: 404 for the name of another model.
    """
    if name is not None and name not in service.model_names:
        raise ApiError(
            404, f"model: {name!r} is not served here; {service.model_name!r} is", "model", code="model_not_found"
        )


def _tokenizer(service: Service, field: str) -> Any:
    """Return the tokenizer.

    Raises:
        InvalidParameter: there is none, but `field` needs one.
    """
    if service.tokenizer is None:
        raise InvalidParameter(field, "needs a tokenizer, and this server has none: send prompts as token ids")
    return service.tokenizer


def _bad_words(service: Service, params: Params) -> tuple[tuple[int, ...], ...]:
    return tokenize_bad_words(_tokenizer(service, "bad_words"), params.bad_words) if params.bad_words else ()


def _check(service: Service, body: GenerationRequest) -> None:
    check_model(service, body.model)
    if body.stream_options and not body.stream:
        raise ApiError(400, "stream_options: only allowed with stream", "stream_options")


def _prompts(
    service: Service, body: CompletionRequest, given: Sequence[str | list[int]], params: Params
) -> list[Prompt]:
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    tokenized: Iterator[list[int]] = iter(())
    if texts:
        tokenizer = _tokenizer(service, "prompt")
        service.check_length(body.text_length, "prompt")
        # In one call, for each call wakes the tokenizer's threads.
        tokenized = iter(encode_all(tokenizer, texts, add_special_tokens=body.add_special_tokens is not False))
    prompts = []
    for prompt in given:
        token_ids = next(tokenized) if isinstance(prompt, str) else prompt
        kept = params.truncated(token_ids, service.max_model_len)
        shown = prompt if isinstance(prompt, str) and len(kept) == len(token_ids) else None
        prompts.append(Prompt(kept, shown))
    return prompts


def _render(service: Service, body: Conversation) -> list[int]:
    """Return the tokens of a conversation, by the template of the request, the server or the model."""
    tokenizer, config = _tokenizer(service, "messages"), service.config
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise ApiError(
            400, "chat_template: this server takes none from requests (--trust-request-chat-template)", "chat_template"
        )
    try:
        template = template_of(tokenizer, body.chat_template or config.chat_template, with_tools=bool(body.tools))
        messages = [message.for_template("developer" in template.source) for message in body.messages]
        options = body.template_options() | {"content_format": config.chat_template_content_format}
        options["variables"] = {**config.default_chat_template_kwargs, **options["variables"]}
        service.check_length(body.text_length, "messages")
        stand_ins: dict[str, str] = {}
        if not config.allow_special_tokens_in_content:
            (messages, options["tools"]), stand_ins = service.encoder.protect((messages, options["tools"]))
        text = service.templates.render(template, messages, service.max_prompt_characters, **options)
        return service.encoder.encode(text, stand_ins)
    except TooLong as error:
        service.check_length(error.length, "messages")
        raise
    except InvalidParameter:
        raise
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", "messages") from error


def _tool_format(service: Service, body: ChatRequest) -> ToolFormat:
    if service.tool_format is None:
        raise ApiError(400, "tools: no tool-call format detected for this model; set --tool-call-parser", "tools")
    if body.constraints not in ([], ["response_format"]):
        raise ApiError(
            400, f"{body.constraints[0]}: can't be combined with tools; use response_format", body.constraints[0]
        )
    return service.tool_format


def _call_grammar(
    body: ChatRequest, params: Params, tool_format: ToolFormat, tools: list[Tool]
) -> StructuredOutputsParams | None:
    """Return the grammar of an answer that must call a tool, or whose calls must fit the tools' schemas.

    With a response format, the answer consists of calls, or fits the format.
    """
    parallel = body.parallel_tool_calls is not False and not body.names_tool
    try:
        if body.must_call:
            return StructuredOutputsParams(grammar=tool_format.grammar(tools, parallel))
        if (wanted := params.structured_outputs) is not None:
            if not tool_format.tells_json_from_calls:
                message = f"can't be combined with tools in the form {tool_format.name}, whose calls are JSON too"
                raise ApiError(400, f"response_format: {message}", "response_format")
            schema = {"type": "object"} if wanted.json is None else wanted.json
            return StructuredOutputsParams(grammar=tool_format.grammar_with_answer(tools, parallel, schema))
        if any(tool.function.strict for tool in body.offered_tools):
            return StructuredOutputsParams(grammar=tool_format.lazy_grammar(tools, parallel))
    except ValueError as error:
        raise ApiError(400, str(error), "tools") from error
    return None
