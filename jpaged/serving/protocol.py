"""Requests and errors of the OpenAI API: what is accepted, and in which range.

A field that is known but can't be served yet may only have the value that means nothing; everything else is refused
by name, so that nothing is silently ignored.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jpaged.core.request import InvalidParameter, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16


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


class _Generation(_Strict):
    """What both endpoints take."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = Field(default=None, description="a text or a list of texts")
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # names an end user; by its meaning it changes no answer

    n: Literal[1] | None = UNSERVED
    presence_penalty: float | None = Field(default=None, ge=0, le=0, description=UNSERVED.description)
    frequency_penalty: float | None = Field(default=None, ge=0, le=0, description=UNSERVED.description)
    repetition_penalty: float | None = Field(default=None, ge=1, le=1, description=UNSERVED.description)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0, description=UNSERVED.description)

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """What the request leaves open comes from the model's `defaults`. Raises InvalidParameter for a value out of
        range."""
        names = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="a text, token ids, or a list of either")
    logprobs: Literal[0] | None = UNSERVED
    echo: Literal[False] | None = UNSERVED
    suffix: Literal[""] | None = UNSERVED
    best_of: Literal[1] | None = UNSERVED

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)

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


class ChatRequest(_Generation):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = UNSERVED
    response_format: dict[Literal["type"], Literal["text"]] | None = UNSERVED
    tools: list[Any] | None = Field(default=None, max_length=0, description=UNSERVED.description)
    tool_choice: Literal["none", "auto"] | None = UNSERVED

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidParameter("max_completion_tokens", "differs from max_tokens, its older name; send one of them")
        max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling_params(defaults, max_tokens=max_tokens, logprobs=0 if self.logprobs else None)


def parse[R: _Generation](model: type[R], body: bytes) -> R:
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
