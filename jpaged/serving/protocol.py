"""Bodies of requests of the OpenAI API, with vLLM's additional fields.

This module has the names and types; the ranges are in `jpaged.core.params`. Any other field of a request is rejected
by name, unless the server ignores unknown fields.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import reduce
from operator import or_
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import Field

from jpaged.core.commands import InFlight
from jpaged.core.params import (
    MAX_LOGIT_BIASES,
    BeamSearchParams,
    GenerationParams,
    InvalidParameter,
    SamplingParams,
    StructuredOutputsParams,
    shown,
)
from jpaged.serving.codec import JsonObject
from jpaged.serving.conversation import Conversation, Function
from jpaged.serving.errors import ApiError, invalid
from jpaged.serving.fields import UNSERVED, UNSERVED_IN_CHATS, UNSERVED_IN_COMPLETIONS, Items, Strict, optional_fields
from jpaged.serving.tool_choice import TOOL_CHOICES, NamedToolChoice, ToolChoice, chosen_functions, must_call

DEFAULT_COMPLETION_TOKENS = 16

Params = SamplingParams | BeamSearchParams

MAX_PROMPTS = 4096  # a longer list would take the event loop's time to check
MAX_METADATA = 16
# Seconds for which a prefix is pinned by `prompt_cache_key`, and by `prompt_cache_retention` "24h".
PIN_S, DAY_S = 300.0, 86400.0


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] = False


class StructuredOutputs(Strict):
    """Constraint of the whole output by one of the first five fields, as in vLLM."""

    json_schema: JsonObject | str | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(default=None, description="in Lark's form or in GBNF")
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class JsonSchema(Strict):
    """JSON schema of a response format."""

    name: str
    description: str | None = None
    json_schema: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Response format without a constraint."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Response format of any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """Response format by a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def _neutral(kind: type[Params]) -> dict[str, tuple[object, ...]]:
    """Return the values without effect of the parameters that only `kind` has; () if only null has none."""
    common = {"n", "best_of", "beam_width", "pooling", *(each.name for each in fields(GenerationParams))}
    neutral: dict[str, tuple[object, ...]] = {
        each.name: () if each.default is None else (each.default,) for each in fields(kind) if each.name not in common
    }
    return neutral | {"temperature": (0,), "top_k": (0, -1)} if kind is SamplingParams else neutral


# Allowed values of the parameters of sampling with beam search (True), and of those of beam search without it (False).
NEUTRAL = {True: _neutral(SamplingParams), False: _neutral(BeamSearchParams)}

# Fields that constrain the whole output.
CONSTRAINTS = ("response_format", "regex", "ebnf", "structured_outputs")


def _in_json(kind: Any) -> Any:
    """Return the type in JSON of the values of a parameter."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(_in_json, get_args(kind)))
    return cast(Any, Items)[get_args(kind)] if get_origin(kind) is Sequence else kind


_PARAMETERS = {
    each.name: (_in_json(each.type), None)
    for kind in (SamplingParams, BeamSearchParams)
    for each in fields(kind)
    if each.name not in ("beam_width", "logprobs", "pooling", "structured_outputs")
}
if TYPE_CHECKING:
    _Common = Strict
    _InCompletions = Strict
    _InChats = Strict
else:
    _Common = optional_fields("_Common", _PARAMETERS | UNSERVED)
    _InCompletions = optional_fields("_InCompletions", UNSERVED_IN_COMPLETIONS)
    _InChats = optional_fields("_InChats", UNSERVED_IN_CHATS)


class GenerationRequest(_Common):
    """Common fields of both endpoints. None is a field that the request does not set.

    There is a field for each parameter of SamplingParams and BeamSearchParams, under the same name. Declared here are
    only those that this package reads, or that JSON has in another form.
    """

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | Literal["never"] | None = Field(default=None, description='true, false or "never"')
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Items[str] | None = Field(default=None, description="a text or a list of texts")
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=MAX_LOGIT_BIASES, description=f"up to {MAX_LOGIT_BIASES} numbers by token id"
    )
    logprob_token_ids: Items[int] | None = None
    kept_tokens: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, description="a non-empty text")
    pin_s: float | None = Field(default=None, ge=0, le=DAY_S, description=f"seconds from 0 to {DAY_S}")
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
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
    safety_identifier: str | None = None
    spaces_between_special_tokens: bool | None = None
    request_id: str | None = None

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
    def pin_seconds(self) -> float:
        """Seconds for which the prefix is pinned after the request's end."""
        if self.pin_s is not None:
            return self.pin_s
        if self.prompt_cache_retention == "24h":
            return DAY_S
        return 0.0 if self.prompt_cache_key is None else PIN_S

    @property
    def constraints(self) -> list[str]:
        """Names of the fields of CONSTRAINTS that the request sets."""
        return [name for name in CONSTRAINTS if not isinstance(getattr(self, name), TextFormat | None)]

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
                allowed = " or ".join(["absent", *(repr(int(x) if type(x) is float else x) for x in neutral)])
                condition = "with use_beam_search" if beams else "without use_beam_search"
                raise InvalidParameter(name, f"must be {allowed} {condition}, not {value!r}")
        if self.logprob_token_ids is not None and self.num_top_logprobs is None:
            raise invalid("logprob_token_ids", "needs logprobs")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", f"must be absent with stream, not {self.prompt_logprobs}")
        kind: type[Params] = BeamSearchParams if beams else SamplingParams
        known = {field.name for field in fields(kind)}
        values = {name: value for name, value in defaults.items() if name in known}
        given = {name: getattr(self, name) for name in known & type(self).model_fields.keys()}
        values |= {name: value for name, value in given.items() if value is not None}
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
            for name, in_request in names.items():
                message = re.sub(rf"\b{name}\b", in_request, message)
            raise ApiError(400, message, names.get(error.field, error.field), code=error.code) from error

    def _max_tokens(self) -> int | None:
        return self.max_new_tokens

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        if not (names := self.constraints):
            return None
        if len(names) > 1:
            raise InvalidParameter(names[0], f"a second constraint beside {names[1]}: send one of them")
        if isinstance(wanted := self.response_format, JsonSchemaFormat):
            return StructuredOutputsParams(json=wanted.json_schema.json_schema)
        if isinstance(wanted, JsonObjectFormat):
            return StructuredOutputsParams(json_object=True)
        if self.structured_outputs is not None:
            return StructuredOutputsParams(**self.structured_outputs.model_dump(by_alias=True))
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


class CompletionRequest(GenerationRequest, _InCompletions):
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
            message = "can't be combined with echo, which lists the most likely tokens"
            raise InvalidParameter("logprob_token_ids", message)
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
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each set of choices; InvalidParameter if one is empty."""
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts = cast(list[str | list[int]], [self.prompt] if single else list(self.prompt))
        if not prompts or not all(prompts):  # also for an empty text, which some tokenizers turn into one special token
            raise InvalidParameter("prompt", "must hold at least one token")
        return prompts


class ChatRequest(GenerationRequest, Conversation, _InChats):
    """Body of `/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = Field(default=None, description=TOOL_CHOICES)
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, description="a number of tokens, at least 0, or -1 for no limit"
    )
    echo: bool | None = None

    @property
    def offered_functions(self) -> list[Function]:
        """Functions that the model may call. ApiError 400 if the choice is impossible."""
        functions = [tool.function for tool in self.tools or ()]
        names = [each.name for each in functions]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise invalid("tools", f"{min(repeated)!r} is there more than once")
        return chosen_functions(self.tool_choice, functions)

    @property
    def names_tool(self) -> bool:
        """Whether a tool is chosen by name."""
        return isinstance(self.tool_choice, NamedToolChoice)

    @property
    def must_call(self) -> bool:
        """Whether the model must call a tool."""
        return must_call(self.tool_choice)

    @property
    def reasoning_budget(self) -> int | None:
        """Maximum tokens of reasoning; None: no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def reasoning_option(self) -> str | None:
        """Name of a field that needs reasoning apart from the content; None: there is none."""
        if self.reasoning_budget is not None:
            return "thinking_token_budget"
        return "include_reasoning" if self.include_reasoning is False else None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of most likely tokens to list with each output token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: Mapping[str, Any]) -> Params:
        """Return the request's parameters; top_logprobs without logprobs is an ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", f"{self.top_logprobs} needs logprobs: true")
        return super().params(defaults)

    def _names(self) -> dict[str, str]:
        names = super()._names() | {"logprobs": "top_logprobs"}
        if self.tools and self.tool_choice != "none":
            names["structured_outputs"] = "tools"
        return names if self.max_tokens is not None else names | {"max_tokens": "max_completion_tokens"}


class TokenizeRequest(Strict):
    """Common fields of the two bodies of `/tokenize`."""

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeCompletionRequest(TokenizeRequest):
    """Body of `/tokenize` with a text."""

    prompt: str
    add_special_tokens: bool = True

    @property
    def text_length(self) -> int:
        """Number of characters of the text."""
        return len(self.prompt)


class TokenizeChatRequest(TokenizeRequest, Conversation):
    """Body of `/tokenize` with a conversation."""

    add_special_tokens: Literal[False] = False  # the template brings them


class DetokenizeRequest(Strict):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Items[int]


class LoadAdapterRequest(Strict):
    """Body of `/v1/load_lora_adapter`.

    Attributes:
        lora_name: name of the adapter, which requests then give as their model.
        lora_path: directory on the server's machine with the adapter, as PEFT saves it.
    """

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)


class UnloadAdapterRequest(Strict):
    """Body of `/v1/unload_lora_adapter`.

    Attributes:
        lora_name: name of the adapter.
        lora_int_id: vLLM's number of it, which is not used.
    """

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


class UpdateWeightsRequest(Strict):
    """Body of `/update_weights`.

    Attributes:
        path: directory on the server's machine with the parameters, as safetensors or in Orbax's format.
        in_flight: treatment of started requests, as in `jpaged.core.commands.UpdateParams`.
    """

    path: str = Field(min_length=1)
    in_flight: InFlight = "recompute"
