"""Requests that stand for requests of another API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field

from jpaged.serving.codec import JsonObject, dumps
from jpaged.serving.errors import ApiError
from jpaged.serving.fields import Items, Strict
from jpaged.serving.parse import parse
from jpaged.serving.protocol import ChatRequest, GenerationRequest


class Translated(GenerationRequest):
    """Request whose errors have the names of the original request.

    Attributes:
        original_names: the original names of fields that have another one there.
    """

    may_be_folded: ClassVar = True
    original_names: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, fields: JsonObject) -> Self:
        """Return the request of some fields; ApiError 400 with the original name of an invalid one."""
        with cls._original_names():
            return parse(cls, dumps({name: value for name, value in fields.items() if value is not None}))

    @contextmanager
    def rename_error_fields(self) -> Iterator[None]:
        """Rename the field of an error raised in the context to its original name."""
        with self._original_names(), super().rename_error_fields():
            yield

    @classmethod
    @contextmanager
    def _original_names(cls) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            message, names = error.message, cls.original_names
            for name, original in names.items():
                message = re.sub(rf"\b{name}\b", original, message)
            param = names.get(error.param or "", error.param)
            renamed = ApiError(error.status, message, param, code=error.code, retry_after=error.retry_after)
            raise renamed from error


class TranslatedChat(Translated, ChatRequest):
    """Chat that stands for a request of another API."""


class Tolerant(Strict):
    """Body of a request whose unknown fields are ignored, because agents add their own."""

    model_config = ConfigDict(extra="allow")

    # Parameters of vLLM's API, which have the same names in chats.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Items[int] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, description="a non-empty text")
    pin_s: float | None = None
    priority: int | None = None
    chat_template_kwargs: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    # Those of both APIs.
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    @property
    def unknown_fields(self) -> list[str]:
        """Names of the fields that are ignored."""
        return [*(self.model_extra or ())]

    def common(self) -> dict[str, Any]:
        """Return the fields that have the same names in chats."""
        return {name: getattr(self, name) for name in Tolerant.model_fields}
