"""OpenAPI document, generated from the endpoints and from the models that check requests."""

import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version

from aiohttp import web
from pydantic.json_schema import models_json_schema

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.serving.codec import JsonObject
from jpaged.serving.endpoint import SERVED, Endpoint
from jpaged.serving.service import SERVICE

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
STRING: JsonObject = {"type": "string"}
PARAM = {"type": ["string", "null"], "description": "the field that is wrong"}
ERROR = {
    "type": "object",
    "properties": {"message": STRING, "type": STRING, "param": PARAM, "code": STRING},
    "required": ["message", "type", "param", "code"],
}
ERRORS = {
    "Error": {"type": "object", "properties": {"error": ERROR}, "required": ["error"]},
    "AnthropicError": {
        "type": "object",
        "properties": {"type": {"const": "error"}, "error": ERROR},
        "required": ["type", "error"],
    },
}


async def show_openapi(request: web.Request) -> web.Response:
    """Return the OpenAPI document."""
    root = request.app[SERVICE].config.root_path
    servers = {"servers": [{"url": root}]} if root else {}
    return web.json_response(description(request.app[SERVED]) | servers)


@cache
def description(endpoints: Sequence[Endpoint]) -> JsonObject:
    """Return an OpenAPI 3.1 document."""
    described = [endpoint for endpoint in endpoints if endpoint.is_described]
    models = dict.fromkeys(body for endpoint in described for body in endpoint.bodies)
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas = definitions["$defs"]
    for schema in schemas.values():  # only the engine knows the allowed values of its parameters
        for each in (*fields(BeamSearchParams), *fields(SamplingParams)):
            if each.name in schema.get("properties", {}) and "allowed" in each.metadata:
                schema["properties"][each.name].setdefault("description", each.metadata["allowed"])
    schemas |= ERRORS
    return {
        "openapi": "3.1.0",
        "info": {"title": "jpaged", "version": version("jpaged"), "description": "An OpenAI-compatible server."},
        "paths": {path: _item(endpoint, path) for endpoint in described for path in endpoint.paths},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "where keys are set"}},
        },
    }


def _item(endpoint: Endpoint, path: str) -> JsonObject:
    """Return the description of all methods of a path."""
    operation: JsonObject = {"summary": endpoint.summary if path == endpoint.path else f"the same as {endpoint.path}"}
    if endpoint.bodies:
        refs = [{"$ref": REF.format(model=model.__name__)} for model in endpoint.bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    refusals = {"401": REFUSALS["401"], **endpoint.refusals}
    if "GET" not in endpoint.methods:
        operation["security"], refusals = [{"key": []}, {}], REFUSALS
    if names := re.findall("{(.+?)}", path):
        text = STRING | {"minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    content: JsonObject = {name: {} for name in endpoint.contents}
    error = {"application/json": {"schema": {"$ref": REF.format(model=endpoint.dialect.error_schema)}}}
    done = {"200": {"description": "done"} | ({"content": content} if content else {})}
    failed = {status: {"description": text, "content": error} for status, text in refusals.items()}
    operation["responses"] = done | failed
    return {method.lower(): operation for method in endpoint.methods}
