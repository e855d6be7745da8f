"""Requests and errors of the OpenAI API, with vLLM's additional fields.

This module has the names and types; the ranges are in `jpaged.core.params`. Any other field of a request is rejected
by name, unless the server ignores unknown fields. Unknown fields of messages and tools are ignored, because clients add
their own.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from jpaged.core.commands import InFlight
from jpaged.core.params import (
    MAX_LOGIT_BIASES,
    BeamSearchParams,
    InvalidParameter,
    SamplingParams,
    StructuredOutputsParams,
    shown,
)
from jpaged.serving.codec import loads

DEFAULT_COMPLETION_TOKENS = 16

Params = SamplingParams | BeamSearchParams

# Longer lists would take the event loop's time to check.
MAX_PROMPTS = MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128
MAX_METADATA = 16
MAX_FAULTS = 1000

CODES = {
    400: "invalid_value", 401: "invalid_api_key", 403: "forbidden", 404: "not_found", 408: "request_timeout",
    413: "request_too_large", 503: "service_unavailable", 504: "timeout",
}  # fmt: skip


class ApiError(Exception):
    """Error in the API's form.

    Args:
        code: error code for programs; None: that of the status.
        retry_after: seconds.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None,
        retry_after: int | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.code = code or CODES.get(status, "invalid_request_error" if status < 500 else "internal_error")

    @property
    def body(self) -> dict[str, Any]:
        """JSON body of the response."""
        kinds = {
            401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 408: "TimeoutError",
            503: "ServiceUnavailableError", 504: "TimeoutError",
        }  # fmt: skip
        kind = kinds.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _AtOnce(FailFast):
    """Validator that rejects a list for its first wrong item: naming millions takes minutes and gigabytes."""

    __hash__ = object.__hash__  # which FailFast lacks, and a union of types needs


T = TypeVar("T")
Items = Annotated[list[T], _AtOnce()]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Open(_Strict):
    """Part of a conversation, in which unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


# The neutral value of a field whose feature is not served: null, or an empty list or object.
Nothing = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] = False


class StructuredOutputs(_Strict):
    """Constraint of the whole output by one of the first five fields, as in vLLM."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(default=None, description="in Lark's form or in GBNF")
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        """Return the engine's parameters."""
        return StructuredOutputsParams(**self.model_dump(by_alias=True))


class JsonSchema(_Strict):
    """JSON schema of a response format."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(_Strict):
    """Response format without a constraint."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """Response format of any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Strict):
    """Response format by a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


# Values of sampling parameters without effect, which a beam search accepts, and of beam parameters without a search.
NEUTRAL: dict[bool, dict[str, tuple[Any, ...]]] = {
    True: {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "seed": (), "logprob_token_ids": ()},
    False: {"length_penalty": (1,), "early_stopping": (False,)},
}


# Fields that constrain the whole output.
CONSTRAINTS = ("response_format", "regex", "ebnf", "structured_outputs")


def _renamed(name: str) -> Any:
    """Return an older field that must be absent, because the feature has another name today."""
    return Field(default=None, description=f"absent (its name today is structured_outputs.{name})")


class GenerationRequest(_Strict):
    """Common fields of both endpoints. None is a field that the request does not set.

    A field that is named as one of SamplingParams or BeamSearchParams has the same meaning.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = Field(default=None, description='true, false or "never"')
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Items[str] | None = Field(default=None, description="a text or a list of texts")
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=MAX_LOGIT_BIASES, description=f"up to {MAX_LOGIT_BIASES} numbers by token id"
    )
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    logprob_token_ids: Items[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, description="a non-empty text")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = Field(default=None, description='a grammar in EBNF or GBNF, whose first rule is "root ::= ..."')
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # These change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = Field(
        default=None, max_length=MAX_METADATA, description=f"up to {MAX_METADATA} texts by name"
    )
    store: Literal[False] | None = Field(default=None, description="false: nothing is stored")
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    spaces_between_special_tokens: bool | None = None
    request_id: str | None = None
    # Features that are not served, at the values that ask for nothing.
    include_reasoning: Literal[True] | None = Field(default=None, description="true: reasoning is part of the text")
    separate_reasoning: Literal[True] | None = Field(default=None, description="true; reasoning is part of the text")
    stream_reasoning: Literal[True] | None = Field(
        default=None, description="true: reasoning is streamed like all text"
    )
    no_stop_trim: Literal[False] | None = Field(default=None, description="false; see include_stop_str_in_output")
    return_hidden_states: Literal[False] | None = None
    logits_processors: Nothing = None
    guided_json: Nothing = _renamed("json")
    guided_regex: Nothing = _renamed("regex")
    guided_choice: Nothing = _renamed("choice")
    guided_grammar: Nothing = _renamed("grammar")
    guided_json_object: Literal[False] | None = _renamed("json_object")
    guided_whitespace_pattern: Nothing = _renamed("whitespace_pattern")
    guided_decoding_backend: None = Field(default=None, description="absent: llguidance compiles every constraint")
    kv_transfer_params: Nothing = None
    vllm_xargs: Nothing = None

    @property
    def num_choices(self) -> int:
        """Number of choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to list with each output token; None: no logprobs."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum output tokens, by either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def constraints(self) -> list[str]:
        """Names of the given fields of CONSTRAINTS."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        return [name for name in given if not isinstance(getattr(self, name), TextFormat)]

    def params(self, defaults: Mapping[str, Any]) -> Params:
        """Return the request's parameters; unset fields come from the model's `defaults`.

        Raises:
            InvalidParameter: a value is not allowed.
            ApiError: logprob_token_ids without logprobs.
        """
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameter("max_completion_tokens", "differs from max_tokens, its older name; send one of them")
        beams = bool(self.use_beam_search)
        for name, neutral in NEUTRAL[beams].items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                allowed = " or ".join(["absent", *map(repr, neutral)])
                raise InvalidParameter(
                    name, f"must be {allowed} with{'' if beams else 'out'} use_beam_search, not {value!r}"
                )
        if self.logprob_token_ids is not None and self.num_top_logprobs is None:
            raise ApiError(400, "logprob_token_ids: needs logprobs", "logprob_token_ids")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", f"must be absent with stream, not {self.prompt_logprobs}")
        kind: type[Params] = BeamSearchParams if beams else SamplingParams
        known = {field.name for field in fields(kind)}
        values = {name: value for name, value in defaults.items() if name in known}
        for name in known & type(self).model_fields.keys():
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        values |= {"max_tokens": self._max_tokens(), "logprobs": self.num_top_logprobs}
        values["structured_outputs"] = self._structured_outputs()
        if beams:
            values |= {"n": self.num_choices, "beam_width": self.num_choices if self.best_of is None else self.best_of}
        return kind(**values)

    @contextmanager
    def rename_error_fields(self) -> Iterator[None]:
        """Rename the field of an InvalidParameter raised in the context to the request's name for it."""
        try:
            yield
        except InvalidParameter as error:
            message, names = str(error), self._names()
            for name, own in names.items():
                message = re.sub(rf"\b{name}\b", own, message)
            raise ApiError(400, message, names.get(error.field, error.field), code=error.code) from error

    def _max_tokens(self) -> int | None:
        return self.max_new_tokens

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if not (given := self.constraints):
            return None
        if len(given) > 1:
            raise InvalidParameter(given[0], f"a second constraint beside {given[1]}: send one of them")
        if isinstance(wanted := self.response_format, JsonSchemaFormat):
            return StructuredOutputsParams(json=wanted.json_schema.json_schema)
        if isinstance(wanted, JsonObjectFormat):
            return StructuredOutputsParams(json_object=True)
        if self.structured_outputs is not None:
            return self.structured_outputs.params()
        if self.ebnf is not None and "::=" not in self.ebnf:
            raise InvalidParameter("ebnf", f'must have rules such as "root ::= ...", not {shown(self.ebnf)}')
        return StructuredOutputsParams(regex=self.regex, grammar=self.ebnf)

    def _names(self) -> dict[str, str]:
        """Return the request's names of parameters, where they differ."""
        names = {"beam_width": "n" if self.best_of is None else "best_of"}
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.constraints:
            names["structured_outputs"] = self.constraints[0]
        return names


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[Items[str], Field(max_length=MAX_PROMPTS)]
        | Items[int]
        | Annotated[Items[Items[int]], Field(max_length=MAX_PROMPTS)]
    ) = Field(description="a text, token ids, or a list of either")
    add_special_tokens: bool | None = Field(default=None, description="true or false; true for prompts that are texts")
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = Field(default=None, description="empty: nothing is inserted before it")

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to list with each output token; None: no logprobs."""
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt is wanted. The engine always generates a token, which is then dropped."""
        return bool(self.echo) and self.max_new_tokens == 0

    def params(self, defaults: Mapping[str, Any]) -> Params:
        """Return the request's parameters, with prompt logprobs if the prompt is echoed with logprobs."""
        if self.only_echo and (self.min_tokens or 0) > 0:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} exceeds max_tokens (0)")
        if self.echo and self.logprob_token_ids is not None:
            raise InvalidParameter(
                "logprob_token_ids", "can't be combined with echo, which lists the most likely tokens"
            )
        params = super().params(defaults)
        if self.echo and self.logprobs is not None:
            counts = self.logprobs, self.prompt_logprobs or 0
            params = replace(params, prompt_logprobs=-1 if -1 in counts else max(counts))
        return params

    def _max_tokens(self) -> int | None:
        if self.only_echo:
            return 1
        return DEFAULT_COMPLETION_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def text_length(self) -> int:
        """Number of characters of the longest prompt that is a text."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return max((len(prompt) for prompt in given if isinstance(prompt, str)), default=0)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each set of choices.

        Raises:
            InvalidParameter: a prompt is empty.
        """
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts = cast(list[str | list[int]], [self.prompt] if single else list(self.prompt))
        if not prompts or not all(prompts):  # also a text of which a tokenizer would make a lone token of its own
            raise InvalidParameter("prompt", "must hold at least one token")
        return prompts


class TextPart(TypedDict):  # a request may have thousands, and dictionaries are made in half the time of models
    """Text in the content of a message."""

    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)  # type: ignore[misc]

    type: Literal["text"]
    text: str


class FunctionCall(_Open):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class ToolCall(_Open):
    """Tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as an object, as templates print them.

        Arguments that are not JSON stay as they are: a model may have been cut off while it wrote them.
        """
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = loads(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(_Open):
    """Message of a conversation."""

    role: str = Field(min_length=1)
    content: str | Annotated[Items[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = Field(default=None, description="calls that the assistant has made")
    tool_call_id: str | None = Field(default=None, description="the call that this message answers")
    # A message with one of these says more than its text.
    audio: Nothing = None
    function_call: Nothing = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return "".join(part["text"] for part in self.content) if isinstance(self.content, list) else self.content or ""

    def for_template(self, knows_developers: bool = True) -> dict[str, Any]:
        """Return the message in the form of chat templates.

        Args:
            knows_developers: whether the template has a role "developer"; otherwise it becomes the system's.

        Raises:
            ApiError: the role does not allow a field.
        """
        if self.content is None and not self.tool_calls:
            raise ApiError(400, f"messages: content is required in a message of the {self.role}", "messages")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(400, f"messages: tool_calls are the assistant's, not the {self.role}'s", "messages")
        if self.tool_call_id is None and self.role == "tool":
            raise ApiError(400, "messages: tool_call_id is required in a message of a tool", "messages")
        role = "system" if self.role == "developer" and not knows_developers else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Function(_Open):
    """Function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="1 to 64 letters, digits, _, . and -")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


class Tool(_Open):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Open):
    """Name of a function."""

    name: str


class NamedToolChoice(_Open):
    """Choice of a tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class Conversation(_Strict):
    """Arguments of a chat template."""

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Items[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @property
    def text_length(self) -> int:
        """Number of characters of all messages."""
        return sum(len(message.text) for message in self.messages)

    @property
    def answer_role(self) -> str:
        """Role of the answer: that of the last message if no generation prompt follows it."""
        return "assistant" if self._prompting else self.messages[-1].role

    @property
    def _prompting(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def template_options(self) -> dict[str, Any]:
        """Return the options of `chat.render`.

        Raises:
            ApiError: the options contradict each other.
        """
        going_on = bool(self.continue_final_message)
        if going_on and self.add_generation_prompt:
            raise ApiError(
                400, "continue_final_message: contradicts add_generation_prompt: true", "continue_final_message"
            )
        levels = {name: level for name in ("reasoning_effort", "verbosity") if (level := getattr(self, name))}
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None
        return {
            "tools": tools, "add_generation_prompt": self._prompting, "continue_final_message": going_on,
            "variables": (self.chat_template_kwargs or {}) | levels,
        }  # fmt: skip


class ChatRequest(GenerationRequest, Conversation):
    """Body of `/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        default=None, description='"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
    )
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    # Features that are not served, at the values that ask for nothing.
    modalities: list[Literal["text"]] | None = None
    add_special_tokens: Literal[False] | None = Field(default=None, description="false: the template brings them")
    function_call: Literal["none"] | None = None
    functions: Nothing = None
    audio: Nothing = None
    prediction: Nothing = None
    documents: Nothing = None
    mm_processor_kwargs: Nothing = None
    web_search_options: None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that the model may call; only one if it is chosen by name.

        Raises:
            ApiError: the choice is not possible.
        """
        tools = self.tools or []
        names = [tool.function.name for tool in tools]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ApiError(400, f"tools: {min(repeated)!r} is there more than once", "tools")
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise ApiError(400, f"tool_choice: {wanted!r} is none of the tools", "tool_choice")
            return [tool for tool in tools if tool.function.name == wanted]
        if self.tool_choice is not None and not tools:
            raise ApiError(400, f"tool_choice: {self.tool_choice!r} needs tools", "tool_choice")
        return tools

    @property
    def names_tool(self) -> bool:
        """Whether a tool is chosen by name."""
        return isinstance(self.tool_choice, NamedToolChoice)

    @property
    def must_call(self) -> bool:
        """Whether the model must call a tool."""
        return self.tool_choice == "required" or self.names_tool

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to list with each output token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: Mapping[str, Any]) -> Params:
        """Return the request's parameters.

        Raises:
            InvalidParameter: a value is not allowed.
            ApiError: top_logprobs without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs: {self.top_logprobs} needs logprobs: true", "top_logprobs")
        return super().params(defaults)

    def _names(self) -> dict[str, str]:
        names = super()._names() | {"logprobs": "top_logprobs"}
        if self.tools and self.tool_choice != "none":
            names["structured_outputs"] = "tools"
        return names if self.max_tokens is not None else names | {"max_tokens": "max_completion_tokens"}


class TokenizeRequest(BaseModel):
    """The fields that tell which body of `/tokenize` it is."""

    prompt: Any = None
    messages: Any = None


class TokenizeCompletionRequest(_Strict):
    """Body of `/tokenize` with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @property
    def text_length(self) -> int:
        """Number of characters of the text."""
        return len(self.prompt)


class TokenizeChatRequest(Conversation):
    """Body of `/tokenize` with a conversation."""

    model: str | None = None
    add_special_tokens: Literal[False] = False  # the template brings them
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Items[int]


class UpdateWeightsRequest(_Strict):
    """Body of `/update_weights`.

    Attributes:
        path: directory on the server's machine with the parameters, as safetensors or in Orbax's format.
        in_flight: treatment of started requests, as in `jpaged.core.commands.UpdateParams`.
    """

    path: str = Field(min_length=1)
    in_flight: InFlight = "recompute"


PROBLEM_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


def parse[R: BaseModel](model: type[R], body: bytes, *, ignore_unknown: bool = False) -> R:
    """Return a request from its JSON.

    Args:
        ignore_unknown: ignore unknown fields.

    Raises:
        ApiError: 400 with the first invalid field and its allowed values.
    """
    try:
        return model.model_validate_json(body, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_FAULTS:  # naming them takes longer than finding them
            raise ApiError(400, f"the body has {count} unknown or wrong fields") from None
        # Of the members of a union, the one that matched furthest.
        problem = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
        if not problem["loc"]:
            raise ApiError(400, problem["msg"]) from error
        name = str(problem["loc"][0])
        raise ApiError(
            400, f"{name}: {_explain(model, name, problem)}", name, code=PROBLEM_CODES.get(problem["type"])
        ) from error


def parse_tokenize(body: bytes, *, ignore_unknown: bool = False) -> TokenizeChatRequest | TokenizeCompletionRequest:
    """Return a request of `/tokenize` from its JSON: with a text, or with a conversation.

    Raises:
        ApiError: 400, as `parse`.
    """
    given = parse(TokenizeRequest, body).model_fields_set
    if len(given) == 2:
        raise ApiError(400, "prompt: only one of prompt and messages is allowed", "prompt")
    if not given:
        raise ApiError(400, "prompt: is required, or messages", "prompt", code="missing_required_parameter")
    if "messages" in given:
        return parse(TokenizeChatRequest, body, ignore_unknown=ignore_unknown)
    return parse(TokenizeCompletionRequest, body, ignore_unknown=ignore_unknown)


# Parsers of the bodies that may be large, by path.
PARSERS: Mapping[str, Callable[..., BaseModel]] = {
    "/v1/completions": partial(parse, CompletionRequest), "/v1/chat/completions": partial(parse, ChatRequest),
    "/tokenize": parse_tokenize, "/detokenize": partial(parse, DetokenizeRequest),
}  # fmt: skip


def _explain(model: type[BaseModel], name: str, problem: Any) -> str:
    field = model.model_fields.get(name)
    if field is None:
        return "is not a known field"
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return "is required"
    given = shown(problem["input"])
    if name == "messages" and problem["loc"][-1:] == ("type",) and "content" in problem["loc"]:
        return f"content parts of type {given} are not supported; text is"
    if field.description:
        return f"must be {field.description}, not {given}"
    where = ".".join(str(part) for part in problem["loc"][1:])
    return f"{where + ': ' if where else ''}{problem['msg']}, not {given}"
