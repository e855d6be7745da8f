"""Requests and errors of the OpenAI API, with the fields that vLLM adds: what is accepted.

Here are the names and types; the ranges are those of `jpaged.core.params`. A field that is known but can't be served
yet may only have the value that means nothing; everything else is refused by name, so that nothing is silently ignored.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jpaged.core.params import BeamSearchParams, InvalidParameter, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16

Params = SamplingParams | BeamSearchParams


class ApiError(Exception):
    """An answer that is an error, in the API's form."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "AuthenticationError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
        kind = kinds.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# A field that is known, but not yet served beyond the value that changes nothing.
UNSERVED: Any = Field(default=None, description="not supported yet")


class StreamOptions(_Strict):
    include_usage: bool = False


# What may be said of sampling to a beam search, and of beams without one: that it changes nothing.
NEUTRAL: dict[bool, dict[str, tuple[Any, ...]]] = {
    True: {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "seed": ()},
    False: {"length_penalty": (1,), "early_stopping": (False,)},
}


class GenerationRequest(_Strict):
    """What both endpoints take. None is a field that the request leaves open.

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
    min_tokens: int | None = None
    stop: str | list[str] | None = Field(default=None, description="a text or a list of texts")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(default=None, min_length=1, description="a non-empty text")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # names an end user; by its meaning it changes no answer

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to list beside each token of the answer; None for no logprobs at all."""
        raise NotImplementedError

    def params(self, defaults: Mapping[str, Any]) -> Params:
        """What the request asks for; what it leaves open comes from the model's `defaults`. Raises InvalidParameter."""
        beams = bool(self.use_beam_search)
        for name, neutral in NEUTRAL[beams].items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                allowed = " or ".join(["absent", *map(repr, neutral)])
                raise InvalidParameter(
                    name, f"must be {allowed} with{'' if beams else 'out'} use_beam_search, not {value!r}"
                )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", f"must be absent with stream, not {self.prompt_logprobs}")
        kind: type[Params] = BeamSearchParams if beams else SamplingParams
        known = {field.name for field in fields(kind)}
        values = {name: value for name, value in defaults.items() if name in known}
        for name in known & type(self).model_fields.keys():
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        values |= {"max_tokens": self._max_tokens(), "logprobs": self.num_top_logprobs}
        if beams:
            values |= {"n": self.num_choices, "beam_width": self.num_choices if self.best_of is None else self.best_of}
        return kind(**values)

    @contextmanager
    def refusals_in_its_words(self) -> Iterator[None]:
        """Within it, an InvalidParameter names the field as the request has it."""
        try:
            yield
        except InvalidParameter as error:
            message, names = str(error), self._names()
            for name, own in names.items():
                message = re.sub(rf"\b{name}\b", own, message)
            raise ApiError(400, message, names.get(error.field, error.field)) from error

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _names(self) -> dict[str, str]:
        """What the request calls a parameter, where that is not its name."""
        return {"beam_width": "n" if self.best_of is None else "best_of"}


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="a text, token ids, or a list of either")
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = UNSERVED

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_echo(self) -> bool:
        """Whether nothing is wanted but the prompt. The engine always gives a token, which is then dropped."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, defaults: Mapping[str, Any]) -> Params:
        if self.only_echo and (self.min_tokens or 0) > 0:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} exceeds max_tokens (0)")
        params = super().params(defaults)
        if self.echo and self.logprobs is not None:
            params = replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params

    def _max_tokens(self) -> int | None:
        if self.only_echo:
            return 1
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """One prompt per choice. Raises InvalidParameter if one is empty."""
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts = cast(list[str | list[int]], [self.prompt] if single else list(self.prompt))
        if not prompts or not all(prompts):  # also a text of which a tokenizer would make a lone token of its own
            raise InvalidParameter("prompt", "must hold at least one token")
        return prompts


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = UNSERVED
    tools: list[Any] | None = Field(default=None, max_length=0, description=UNSERVED.description)
    tool_choice: Literal["none", "auto"] | None = UNSERVED

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self, defaults: Mapping[str, Any]) -> Params:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameter("max_completion_tokens", "differs from max_tokens, its older name; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs: {self.top_logprobs} needs logprobs: true", "top_logprobs")
        return super().params(defaults)

    def _max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def _names(self) -> dict[str, str]:
        names = super()._names() | {"logprobs": "top_logprobs"}
        return names if self.max_tokens is not None else names | {"max_tokens": "max_completion_tokens"}


def parse[R: GenerationRequest](model: type[R], body: bytes) -> R:
    """A request from its JSON. Raises ApiError 400 that names the first field that is wrong, and what it may be."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        if not problem["loc"]:
            raise ApiError(400, problem["msg"]) from error
        name = str(problem["loc"][0])
        raise ApiError(400, f"{name}: {_explain(model, name, problem)}", name) from error


def _explain(model: type[BaseModel], name: str, problem: Any) -> str:
    field = model.model_fields.get(name)
    if field is None:
        return "is not a known field"
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return "is required"
    given = f"{problem['input']!r:.60}"
    if field.description == UNSERVED.description:
        return f"{given} is {field.description}"
    if field.description:
        return f"must be {field.description}, not {given}"
    where = ".".join(str(part) for part in problem["loc"][1:])
    return f"{where + ': ' if where else ''}{problem['msg']}, not {given}"
