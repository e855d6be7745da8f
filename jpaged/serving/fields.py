"""Types of the fields of requests, and the fields of features that are not served."""

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, create_model


class Strict(BaseModel):
    """Object that rejects unknown fields and converts no values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Open(Strict):
    """Part of a conversation, in which unknown fields are ignored, because clients add their own."""

    model_config = ConfigDict(extra="ignore")


class _AtOnce(FailFast):
    """Validator that rejects a list for its first wrong item: naming millions takes minutes and gigabytes."""

    __hash__ = object.__hash__  # FailFast has none, and a union of types needs one


T = TypeVar("T")
Items = Annotated[list[T], _AtOnce()]

# The neutral value of a field whose feature is not served: null, or an empty list or object.
Nothing = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None
TODAY = "its name today is structured_outputs"

# Fields of features that are not served: the values that ask for nothing, and their description in an error.
UNSERVED: dict[str, tuple[Any, str | None]] = {
    "separate_reasoning": (Literal[True], "true: see --reasoning-parser"),
    "stream_reasoning": (Literal[True], "true: reasoning is streamed like all text"),
    "no_stop_trim": (Literal[False], "false; see include_stop_str_in_output"),
    "return_hidden_states": (Literal[False], None),
    **{
        f"guided_{name}": (Literal[False] if name == "json_object" else Nothing, f"absent ({TODAY}.{name})")
        for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
    },
    "guided_decoding_backend": (NoneType, "absent: llguidance compiles every constraint"),
    "store": (Literal[False], "false: nothing is stored"),
    "service_tier": (Literal["auto", "default"], None),
    **dict.fromkeys(("logits_processors", "kv_transfer_params", "vllm_xargs"), (Nothing, None)),
}
UNSERVED_IN_COMPLETIONS = {
    "suffix": (Literal[""], "empty: nothing is inserted before it"),
    "include_reasoning": (Literal[True], "true: the text has all reasoning"),
}
UNSERVED_IN_CHATS = {
    "modalities": (list[Literal["text"]], None),
    "add_special_tokens": (Literal[False], "false: the template brings them"),
    "function_call": (Literal["none"], None),
    "web_search_options": (NoneType, None),
    **dict.fromkeys(("functions", "audio", "prediction", "documents", "mm_processor_kwargs"), (Nothing, None)),
}


def optional_fields(name: str, types: Mapping[str, tuple[Any, str | None]]) -> type[Strict]:
    """Return a base class with fields that a request may omit or set to null, from their types and descriptions."""
    fields: dict[str, Any] = {
        field: (kind | None, Field(default=None, description=text)) for field, (kind, text) in types.items()
    }
    return create_model(name, __base__=Strict, **fields)
