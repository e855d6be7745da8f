"""Work on the body of a request: check, render and tokenize it for the engine, or answer it.

These functions take time in proportion to the body, so they run on worker threads (`Service.run`). They raise ApiError
400 or 404.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from jpaged.chat import Template, template_of
from jpaged.core.params import InvalidParameter, StructuredOutputsParams
from jpaged.serving import protocol
from jpaged.serving.answer import Answer, ChatAnswer, CompletionAnswer, Prompt
from jpaged.serving.codec import JsonObject, dumps, dumps_long
from jpaged.serving.conversation import Conversation, Function
from jpaged.serving.errors import ApiError, invalid, unknown_model
from jpaged.serving.protocol import GenerationRequest, Params
from jpaged.serving.reasoning_parsers.forms import ReasoningForm
from jpaged.serving.service import Service
from jpaged.serving.tool_parsers.format import ToolFormat
from jpaged.serving.tool_parsers.grammar import any_text
from jpaged.serving.transcript import fold
from jpaged.tokenizer import backend, encode, encode_all, tokenize_bad_words

LAST_TOKENS = 16  # of a prompt; they have an opening mark and the white space after it


class Exchange(NamedTuple):
    """Valid request for generation, and the collector of its response.

    Attributes:
        bad_words: token ids of `params.bad_words`.
        shown_tokens: special tokens that are part of the text, because a parser reads them.
    """

    body: GenerationRequest
    params: Params
    bad_words: tuple[tuple[int, ...], ...]
    answer: Answer
    shown_tokens: frozenset[int] = frozenset()


def prepare_completion(
    service: Service, body: protocol.CompletionRequest, new_answer: Callable[..., Answer] = CompletionAnswer
) -> Exchange:
    """Return the request of a body.

    Args:
        new_answer: return the collector of the response, from the arguments of CompletionAnswer.
    """
    with body.rename_error_fields():
        params, sources, most = body.params(service.sampling_defaults), body.prompts(), service.config.max_prompts
        _check(service, body)
        if len(sources) > most:
            share = "one request's share of the queue (--max-queue)"
            raise invalid("prompt", f"{len(sources)} prompts exceed {most}, {share}")
        prompts = _prompts(service, body, sources, params)
        if params.stop or params.structured_outputs:
            _tokenizer(service, "stop" if params.stop else "structured_outputs")
        name = service.adapter_of(body.model) or service.model_name
        answer = new_answer(name, service.vocabulary, body, prompts)
        return Exchange(body, params, _bad_words(service, params), answer)


def prepare_chat(
    service: Service, body: protocol.ChatRequest, new_answer: Callable[..., Answer] = ChatAnswer
) -> Exchange:
    """Return the request of a body.

    Args:
        new_answer: return the collector of the response, from the arguments of ChatAnswer.
    """
    with body.rename_error_fields():
        _tokenizer(service, "messages")
        params = body.params(service.sampling_defaults)
        _check(service, body)
        new_parser = new_reasoning_parser = None
        shown: set[int] = set()
        calls: tuple[str, ...] = ()
        prompt = Prompt(params.truncated(render(service, body), service.max_model_len))
        if offered := body.offered_functions:
            if (form := service.tool_format) is None:
                raise invalid("tools", "no tool-call format detected for this model; set --tool-call-parser")
            if body.constraints not in ([], ["response_format"]):
                raise invalid(body.constraints[0], "can't be combined with tools; use response_format")
            with_answer = params.structured_outputs is not None and not body.must_call
            params = replace(params, structured_outputs=_call_grammar(service, body, params, form, offered))
            parallel = body.parallel_tool_calls is not False
            past = sum(len(message.tool_calls or ()) for message in body.messages)
            new_id = lambda name, index: form.form.ids.new(name, past + index)
            new_parser = partial(form.parser, offered, new_id, parallel, with_answer)
            shown.update(form.tokens.values())
            calls = form.form.start_marks
        if (reasoning := service.reasoning) is not None:
            end = backend(service.tokenizer).decode(prompt.token_ids[-LAST_TOKENS:], skip_special_tokens=False)
            params = _behind_reasoning(reasoning, end, body, params, shown)
            # A constraint allows any text in the reasoning, and begins only behind its closing mark.
            new_reasoning_parser = reasoning.new_parser(end, calls if params.structured_outputs is None else ())
            shown.update(reasoning.tokens.values())
        elif name := body.reasoning_option:
            raise invalid(name, "no form of reasoning is known; set --reasoning-parser")
        name = service.adapter_of(body.model) or service.model_name
        answer = new_answer(name, service.vocabulary, body, prompt, new_parser, new_reasoning_parser)
        return Exchange(body, params, _bad_words(service, params), answer, frozenset(shown))


def _behind_reasoning(
    form: ReasoningForm, end: str, body: protocol.ChatRequest, params: Params, marks: Collection[int]
) -> Params:
    """Return parameters whose constraint begins where the reasoning ends, if the model writes any.

    A budget for the reasoning is a constraint, too; then the answer is any text.

    Args:
        end: end of the prompt.
        marks: special tokens of the answer that a parser reads.
    """
    wanted, budget = params.structured_outputs, body.reasoning_budget
    if wanted is None and budget is None:
        return params
    if wanted is None:
        wanted = StructuredOutputsParams(grammar=any_text(marks, form.openings))
    try:
        prelude = form.prelude(end, budget, with_calls=bool(body.offered_functions))
    except ValueError as error:
        raise invalid("thinking_token_budget", str(error)) from error
    return replace(params, structured_outputs=replace(wanted, prelude=prelude))


def tokenize(service: Service, body: protocol.TokenizeRequest) -> bytes:
    """Return the response to a body of `/tokenize`."""
    check_model(service, body.model)
    if isinstance(body, protocol.TokenizeCompletionRequest):
        tokenizer = _tokenizer(service, "prompt")
        service.check_length(body.text_length, "prompt")
        tokens = encode(tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        tokens = render(service, cast(protocol.TokenizeChatRequest, body))
    id_to_token = backend(service.tokenizer).id_to_token
    texts = [id_to_token(token) for token in tokens] if body.return_token_strs else None
    counts = {"count": len(tokens), "max_model_len": service.max_model_len}
    return dumps_long(counts | {"tokens": tokens, "token_strs": texts})


def detokenize(service: Service, body: protocol.DetokenizeRequest) -> bytes:
    """Return the response to a body of `/detokenize`."""
    check_model(service, body.model)
    tokenizer = backend(_tokenizer(service, "tokens"))
    size = tokenizer.get_vocab_size()
    for token in body.tokens:
        if not 0 <= token < size:
            raise invalid("tokens", f"token id {token} is outside the vocabulary [0, {size})")
    (text,) = tokenizer.decode_batch([body.tokens], skip_special_tokens=False)  # lets other threads run, unlike decode
    return dumps({"prompt": text})


def check_model(service: Service, name: str | None) -> None:
    """Check the name of the model in a request; ApiError 404 for another one."""
    if name is not None and name not in service.model_names:
        raise unknown_model(name, service.model_name)


def _tokenizer(service: Service, field: str) -> Any:
    """Return the tokenizer; InvalidParameter if there is none, but `field` needs one."""
    if service.tokenizer is None:
        raise InvalidParameter(field, "needs a tokenizer, and this server has none: send prompts as token ids")
    return service.tokenizer


def _bad_words(service: Service, params: Params) -> tuple[tuple[int, ...], ...]:
    return tokenize_bad_words(_tokenizer(service, "bad_words"), params.bad_words) if params.bad_words else ()


def _check(service: Service, body: GenerationRequest) -> None:
    check_model(service, body.model)
    if body.stream_options and not body.stream:
        raise invalid("stream_options", "only allowed with stream")


def tokens_of(
    service: Service, sources: Sequence[str | list[int]], field: str, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the tokens of prompts, some of which are texts.

    Raises:
        InvalidParameter: there is no tokenizer for texts.
        ApiError: 400, a text is too long.
    """
    texts = [source for source in sources if isinstance(source, str)]
    tokenized: Iterator[list[int]] = iter(())
    if texts:
        tokenizer = _tokenizer(service, field)
        service.check_length(max(map(len, texts)), field)
        # In one call, because every call wakes the tokenizer's threads.
        tokenized = iter(encode_all(tokenizer, texts, add_special_tokens=add_special_tokens))
    return [next(tokenized) if isinstance(source, str) else source for source in sources]


def _prompts(
    service: Service, body: protocol.CompletionRequest, sources: Sequence[str | list[int]], params: Params
) -> list[Prompt]:
    tokens = tokens_of(service, sources, "prompt", add_special_tokens=body.add_special_tokens is not False)
    prompts = []
    for source, token_ids in zip(sources, tokens, strict=True):
        kept = params.truncated(token_ids, service.max_model_len)
        prompts.append(Prompt(kept, source if isinstance(source, str) and len(kept) == len(token_ids) else None))
    return prompts


def render(service: Service, body: Conversation) -> list[int]:
    """Return the tokens of a conversation, by the template of the request, the server or the model."""
    tokenizer, config = _tokenizer(service, "messages"), service.config
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise invalid("chat_template", "this server takes none from requests (--trust-request-chat-template)")
    try:
        template = template_of(tokenizer, body.chat_template or config.chat_template, with_tools=bool(body.tools))
        in_template = service.tool_format.form.ids.in_template if service.tool_format else str
        developers = "developer" in template.source
        messages = [message.for_template(developers, in_template) for message in body.messages]
        options = body.template_options() | {"content_format": config.chat_template_content_format}
        options["variables"] = {**config.default_chat_template_kwargs, **options["variables"]}
        service.check_length(body.text_length, "messages")
        stand_ins: dict[str, str] = {}
        if not config.allow_special_tokens_in_content:
            (messages, options["tools"]), stand_ins = service.encoder.protect((messages, options["tools"]))
        text, length = _render_template(service, body, template, messages, options)
        service.check_length(length, "messages")
        return service.encoder.encode(text, stand_ins)
    except InvalidParameter:
        raise
    except ValueError as error:
        raise invalid("messages", str(error)) from error


def _render_template(
    service: Service, body: Conversation, template: Template, messages: list[JsonObject], options: JsonObject
) -> tuple[str, int]:
    """Return the text of a conversation, and its length. If the template rejects an agent's conversation, fold it."""
    most = service.max_prompt_characters
    try:
        return service.templates.render(template, messages, most, **options)
    except ValueError:
        folded = fold(messages)
        if not body.may_be_folded or folded == messages:
            raise
    return service.templates.render(template, folded, most, **options)


def _call_grammar(
    service: Service, body: protocol.ChatRequest, params: Params, tool_format: ToolFormat, functions: list[Function]
) -> StructuredOutputsParams | None:
    """Return the grammar of an answer that must call a tool, or whose calls must fit the tools' schemas.

    With a response format, the answer consists of calls, or fits the format.
    """
    parallel = body.parallel_tool_calls is not False and not body.names_tool
    try:
        if body.must_call:
            return StructuredOutputsParams(grammar=tool_format.grammar(functions, parallel))
        if (wanted := params.structured_outputs) is not None:
            if not tool_format.tells_json_from_calls:
                message = f"can't be combined with tools in the form {tool_format.name}, whose calls are JSON too"
                raise invalid("response_format", message)
            schema = {"type": "object"} if wanted.json is None else wanted.json
            return StructuredOutputsParams(grammar=tool_format.grammar_with_answer(functions, parallel, schema))
        if any(function.strict for function in functions):
            but = service.reasoning.openings if service.reasoning else ()
            return StructuredOutputsParams(grammar=tool_format.lazy_grammar(functions, parallel, but))
    except ValueError as error:
        raise ApiError(400, str(error), "tools") from error
    return None
