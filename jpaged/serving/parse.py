"""Reading of the bodies of requests: a checked value, or an error that names the field."""

from typing import Any, cast

from pydantic import BaseModel, ValidationError

from jpaged.core.params import shown
from jpaged.serving.errors import ApiError, invalid
from jpaged.serving.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeRequest

MAX_FAULTS = 1000
PROBLEM_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


class _TokenizeFields(BaseModel):
    """The fields that tell which body of `/tokenize` it is."""

    prompt: Any = None
    messages: Any = None


def parse[R: BaseModel](model: type[R], body: bytes, *, ignore_unknown: bool = False) -> R:
    """Return a request from its JSON.

    Args:
        model: type of the request; TokenizeRequest stands for both of its kinds.

    Raises:
        ApiError: 400 with the first invalid field and its allowed values.
    """
    if model is TokenizeRequest:
        model = cast(type[R], _tokenize_model(body))
    try:
        return model.model_validate_json(body, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_FAULTS:  # naming them takes longer than finding them
            raise ApiError(400, f"the body has {count} unknown or wrong fields") from None
        # Of the members of a union, the one that matched furthest.
        problem = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
        if not problem["loc"]:
            raise ApiError(400, problem["msg"]) from error
        name, code = str(problem["loc"][0]), PROBLEM_CODES.get(problem["type"])
        raise invalid(name, _explain(model, name, problem), code=code) from error


def _tokenize_model(body: bytes) -> type[TokenizeRequest]:
    """Return the kind of a body of `/tokenize`: a text or a conversation."""
    names = parse(_TokenizeFields, body).model_fields_set
    if len(names) == 2:
        raise invalid("prompt", "only one of prompt and messages is allowed")
    if not names:
        raise invalid("prompt", "is required, or messages", code="missing_required_parameter")
    return TokenizeChatRequest if "messages" in names else TokenizeCompletionRequest


def _explain(model: type[BaseModel], name: str, problem: Any) -> str:
    field = model.model_fields.get(name)
    if field is None:
        return "is not a known field"
    if problem["type"] == "missing" and len(problem["loc"]) == 1:
        return "is required"
    value = shown(problem["input"])
    place = problem["loc"][-2:]
    if name == "messages" and place[-1] == "type" and place[0] != "cache_control" and "content" in problem["loc"]:
        return f"content parts of type {value} are not supported; text is"
    if field.description:
        return f"must be {field.description}, not {value}"
    where = ".".join(str(part) for part in problem["loc"][1:] if "tagged-union[" not in str(part))
    place = f"{where}: " if where else ""
    if problem["type"] == "union_tag_invalid":
        kinds = problem["msg"].partition("expected tags: ")[2]
        return f"{place}the type {shown(problem['input']['type'])} is not supported; {kinds} are"
    return f"{place}{problem['msg']}, not {value}"
