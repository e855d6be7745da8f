"""Description of the API, generated from the models that check requests."""

from dataclasses import fields
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

REQUESTS: tuple[type[BaseModel], ...] = (
    CompletionRequest, ChatRequest, TokenizeCompletionRequest, TokenizeChatRequest, DetokenizeRequest,
)  # fmt: skip
REF = "#/components/schemas/{model}"

REFUSALS = {
    "400": "a field is invalid; the message names it, its value and the allowed values",
    "401": "a valid API key is needed",
    "404": "another model is served here",
    "408": "the request's body did not arrive in time",
    "413": "the request's body is too large",
    "503": "the queue is full (come again after Retry-After seconds), or the server is shutting down or broken",
    "504": "the answer was not complete in time",
}


@cache
def description() -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    _, definitions = models_json_schema([(model, "validation") for model in REQUESTS], ref_template=REF)
    schemas = definitions["$defs"]
    for model in (CompletionRequest, ChatRequest):
        _tell_ranges(schemas[model.__name__]["properties"])
    schemas["Error"] = _error_schema()
    ping = _get("The same as /health", {"503": "it does not, or is shutting down"}, content=None)
    tokenize: list[type[BaseModel]] = [TokenizeCompletionRequest, TokenizeChatRequest]
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": version("jpaged"), "description": "An OpenAI-compatible server."},
        "paths": {
            "/v1/completions": _generation("Continue a text", CompletionRequest),
            "/v1/chat/completions": _generation("Answer in a conversation", ChatRequest),
            "/v1/models": _get("The model that is served", {}),
            "/v1/models/{model}": _get("The same, by its name", {"404": REFUSALS["404"]}, "model"),
            "/tokenize": _post("The tokens of a text or a conversation", tokenize, "application/json"),
            "/detokenize": _post("The text of tokens", [DetokenizeRequest], "application/json"),
            "/reset_prefix_cache": _post("Forget all cached prefixes", [], None),
            "/health": _get("200 while the engine runs", {"503": "it does not, or is shutting down"}, content=None),
            "/ping": ping | {"post": ping["get"]},
            "/version": _get("The server's version", {}),
            "/load": _get("The number of requests that are being answered", {}),
            "/tokenizer_info": _get("The tokenizer's configuration", {"404": "the server has no tokenizer"}),
            "/model_info": _get("Facts about the model, under SGLang's names", {}),
            "/get_model_info": _get("The same as /model_info", {}),
            "/server_info": _get("Facts about the model and the server, under SGLang's names", {}),
            "/get_server_info": _get("The same as /server_info", {}),
            "/metrics": _get("Metrics for Prometheus", {}, content="text/plain"),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "where keys are set"}},
        },
    }


def _generation(summary: str, model: type[BaseModel]) -> dict[str, Any]:
    return _post(summary, [model], "application/json", "text/event-stream")


def _post(summary: str, models: list[type[BaseModel]], *contents: str | None) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "security": [{"key": []}, {}]}
    if models:
        refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": operation | {"responses": _responses(REFUSALS, *contents)}}


def _get(
    summary: str, refusals: dict[str, str], parameter: str | None = None, content: str | None = "application/json"
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": _responses({"401": REFUSALS["401"]} | refusals, content),
    }
    if parameter is not None:
        string = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": string}]
    return {"get": operation}


def _responses(refusals: dict[str, str], *contents: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {name: {} for name in contents if name is not None}
    error = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    answers: dict[str, Any] = {"200": {"description": "done"} | ({"content": content} if content else {})}
    return answers | {status: {"description": told, "content": error} for status, told in refusals.items()}


def _tell_ranges(properties: dict[str, Any]) -> None:
    """Add the allowed values of the engine's parameters, which only the engine knows."""
    for kind in (BeamSearchParams, SamplingParams):
        for each in fields(kind):
            if each.name in properties and "allowed" in each.metadata:
                properties[each.name].setdefault("description", each.metadata["allowed"])


def _error_schema() -> dict[str, Any]:
    content = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "the field that is wrong"},
        "code": {"type": "string"},
    }
    error = {"type": "object", "properties": content, "required": list(content)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
