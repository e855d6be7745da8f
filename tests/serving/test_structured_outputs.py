"""Structured outputs over HTTP: schemas, expressions, choices, grammars and response formats."""

import asyncio
import json
import random
import re

import jsonschema
import pytest

from tests.serving.client import joined
from tests.serving.scripted import TOKENIZER
from tests.support import schemas

NUM_SCHEMAS, NUM_REGEXES = 30, 30


MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["happy", "sad"]}, "strength": {"enum": [1, 2, 3]}},
    "required": ["mood", "strength"],
    "additionalProperties": False,
}


def check(text, schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    validator.validate(json.loads(text))


async def answers(demo_client, wanted, max_tokens):
    """Send all requests at once; return the text and the finish reason of each."""

    async def one(seed, fields):
        body = {"prompt": "Once upon a time", "temperature": 1.0, "seed": seed, "max_tokens": max_tokens} | fields
        (choice,) = (await demo_client.post("/v1/completions", body))["choices"]
        return choice["text"], choice["finish_reason"]

    return await asyncio.gather(*(one(seed, fields) for seed, fields in enumerate(wanted)))


async def test_complete_text_fits_its_schema(demo_client):
    made = [schemas.schema(random.Random(i)) for i in range(NUM_SCHEMAS)]
    ways = (
        lambda schema: {"structured_outputs": {"json": schema}},
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
    )
    found = await answers(demo_client, [ways[i % 2](schema) for i, schema in enumerate(made)], 250)
    complete = [(text, schema) for (text, reason), schema in zip(found, made) if reason == "stop"]
    assert len(complete) > 0.8 * NUM_SCHEMAS
    for text, schema in complete:
        check(text, schema)
    assert len({text for text, _ in complete}) > 0.4 * NUM_SCHEMAS, "the model chooses among the allowed texts"


async def test_complete_text_matches_its_expression(demo_client):
    made = [schemas.regex(random.Random(i)) for i in range(NUM_REGEXES)]
    found = await answers(demo_client, [{"structured_outputs": {"regex": regex}} for regex in made], 120)
    complete = [(text, regex) for (text, reason), regex in zip(found, made) if reason == "stop"]
    assert len(complete) > 0.9 * NUM_REGEXES
    for text, regex in complete:
        assert re.fullmatch(regex, text), (text, regex)


GRAMMAR = 'start: greeting " " name\ngreeting: "hello" | "good day"\nname: "Ann" | "Bob"'
EBNF = """root ::= greeting " " name "!"{1,2}  # as SGLang has it
greeting ::= "hello" | "good day"
name ::= "Ann" | "Bob"
"""
STRUCTURED = [
    (
        {"structured_outputs": {"json": MOOD, "disable_any_whitespace": True}},
        r'\{"mood":"(happy|sad)","strength":[123]\}',
    ),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
    ({"structured_outputs": {"choice": ["a yes", "a no"]}}, "a yes|a no"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, "(hello|good day) (Ann|Bob)"),
    ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    ({"ebnf": EBNF}, "(hello|good day) (Ann|Bob)!{1,2}"),
]


@pytest.mark.parametrize(
    "wanted, pattern", STRUCTURED, ids=["json", "regex", "choice", "grammar", "regex alone", "ebnf"]
)
async def test_constraint_holds_for_every_choice_of_a_completion_and_a_chat(demo_client, wanted, pattern):
    fields = {"max_tokens": 60, "temperature": 1.0, "n": 2, "seed": 4, **wanted}
    completion = await demo_client.complete("Once upon a time", **fields)
    chat = await demo_client.chat("Who are you?", **fields)
    found = [(choice["text"], choice["finish_reason"]) for choice in completion["choices"]]
    found += [(choice["message"]["content"], choice["finish_reason"]) for choice in chat["choices"]]
    assert len(found) == 4
    for text, reason in found:
        assert re.fullmatch(pattern, text) and reason == "stop"


async def test_constraint_holds_in_a_stream(demo_client):
    body = {"prompt": "A", "structured_outputs": {"regex": "[a-c]{3}(yes|no)"}, "max_tokens": 30}
    (text,) = joined(await demo_client.stream("/v1/completions", body))
    assert re.fullmatch("[a-c]{3}(yes|no)", text)


async def test_response_formats_of_a_chat(demo_client):
    async def content(response_format, **fields):
        body = await demo_client.chat("Who are you?", response_format=response_format, **fields)
        (choice,) = body["choices"]
        return choice["message"]["content"], choice["finish_reason"]

    haste = {"logit_bias": {str(TOKENIZER.token_to_id("}")): 100}}
    text, reason = await content({"type": "json_object"}, **haste, max_tokens=40)
    assert json.loads(text) == {} and reason == "stop"
    text, _ = await content({"type": "json_object"}, max_tokens=200, temperature=1.0, seed=3)
    assert text.lstrip().startswith("{")
    schema = {"name": "mood", "strict": True, "schema": MOOD}
    text, _ = await content({"type": "json_schema", "json_schema": schema}, max_tokens=90)
    check(text, MOOD)
    text, _ = await content({"type": "text"}, max_tokens=40)
    assert text.startswith("I am")


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "Invalid type: nothing"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"ebnf": 'root ::= "a" (= "b")'}, "ebnf", "GBNF"),
        ({"ebnf": 'main ::= "a"'}, "ebnf", "No 'root' rule"),
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
async def test_invalid_constraint_is_rejected_by_its_field(demo_client, fields, param, words):
    for stream in (False, True):
        error = (await demo_client.complete("a", 400, **fields, stream=stream))["error"]
        assert error["param"] == param and words in error["message"], error


async def test_grammar_that_fails_during_generation_is_an_error(demo_client):
    """Use a schema with 1,200 optional properties: it compiles, and exceeds a limit when the object begins."""
    properties = {f"property {i}": {"type": "integer"} for i in range(1200)}
    body = {"structured_outputs": {"json": {"type": "object", "properties": properties}}, "max_tokens": 20}
    error = (await demo_client.complete("a", 400, **body))["error"]
    assert error["param"] == "structured_outputs" and "items" in error["message"]
    *_, last = await demo_client.stream("/v1/completions", {"prompt": "a"} | body)
    assert last["error"]["code"] == "invalid_value"
