"""Structured outputs over HTTP: random schemas and expressions, at temperature 1, on a model that knows of neither."""

import asyncio
import json
import random
import re

import jsonschema
import pytest

from tests import schemas
from tests.serving.client import Client

NUM_SCHEMAS, NUM_REGEXES = 30, 30


@pytest.fixture
async def client(demo):
    async with Client(demo.engine, demo.tokenizer) as client:
        yield client
        await client.idle()


def check(text, schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    validator.validate(json.loads(text))


async def answers(client, wanted, max_tokens):
    """Each with its finish reason, all at once."""

    async def one(seed, fields):
        body = {"prompt": "Once upon a time", "temperature": 1.0, "seed": seed, "max_tokens": max_tokens} | fields
        (choice,) = (await client.post("/v1/completions", body))["choices"]
        return choice["text"], choice["finish_reason"]

    return await asyncio.gather(*(one(seed, fields) for seed, fields in enumerate(wanted)))


async def test_every_complete_answer_fits_its_schema(client):
    made = [schemas.schema(random.Random(i)) for i in range(NUM_SCHEMAS)]
    ways = (
        lambda schema: {"structured_outputs": {"json": schema}},
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    )
    found = await answers(client, [ways[i % 2](schema) for i, schema in enumerate(made)], 250)
    complete = [(text, schema) for (text, reason), schema in zip(found, made) if reason == "stop"]
    assert len(complete) > 0.8 * NUM_SCHEMAS
    for text, schema in complete:
        check(text, schema)
    assert len({text for text, _ in complete}) > 0.4 * NUM_SCHEMAS, "the model had a say"


async def test_every_complete_answer_fits_its_expression(client):
    made = [schemas.regex(random.Random(i)) for i in range(NUM_REGEXES)]
    found = await answers(client, [{"structured_outputs": {"regex": regex}} for regex in made], 120)
    complete = [(text, regex) for (text, reason), regex in zip(found, made) if reason == "stop"]
    assert len(complete) > 0.9 * NUM_REGEXES
    for text, regex in complete:
        assert re.fullmatch(regex, text), (text, regex)


async def test_it_is_the_same_in_a_stream_in_a_chat_and_for_every_choice(client):
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    said = await client.chat("Who are you?", n=3, temperature=1.0, structured_outputs={"json": schema}, max_tokens=60)
    for choice in said["choices"]:
        assert choice["finish_reason"] == "length" or check(choice["message"]["content"], schema) is None
    body = {"prompt": "A", "structured_outputs": {"regex": "[a-c]{3}(yes|no)"}, "max_tokens": 30}
    chunks = await client.stream("/v1/completions", body)
    assert re.fullmatch("[a-c]{3}(yes|no)", "".join(chunk["choices"][0]["text"] for chunk in chunks))
    said = await client.chat("Hi", response_format={"type": "json_object"}, max_tokens=200, temperature=1.0, seed=3)
    assert said["choices"][0]["message"]["content"].lstrip().startswith("{")
    said = await client.chat("Hi", response_format={"type": "text"}, max_tokens=5)
    assert said["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "Invalid type: nothing"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
         "response_format", "type must be a string"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
         "response_format", "send one of them"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["b"]}, "bad_words", "can't be combined"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_name(client, fields, param, words):
    for stream in (False, True):
        error = (await client.complete("a", 400, **fields, stream=stream))["error"]
        assert error["param"] == param and words in error["message"], error


async def test_a_grammar_that_fails_midway_is_an_error_not_an_answer(client):
    """Very many optional properties: it compiles, and is given up once the object has begun."""
    properties = {f"property {i}": {"type": "integer"} for i in range(1200)}
    body = {"structured_outputs": {"json": {"type": "object", "properties": properties}}, "max_tokens": 20}
    error = (await client.complete("a", 400, **body))["error"]
    assert error["param"] == "structured_outputs" and "items" in error["message"]
    *_, last = await client.stream("/v1/completions", {"prompt": "a"} | body)
    assert last["error"]["code"] == "invalid_value"
