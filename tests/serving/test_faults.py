"""An exception in any function between the socket and the scheduler ends one request, with an error to its client."""

import asyncio
import itertools
import json

import pytest

from jpaged import chat
from jpaged import tokenizer as tokenizers
from jpaged.core.params import SamplingParams, StructuredOutputsParams
from jpaged.engine import async_engine, engine, output
from jpaged.serving import (
    answer,
    body_process,
    codec,
    conversation,
    errors,
    fields,
    generate,
    handlers,
    middleware,
    parse,
    prepare,
    protocol,
    serve,
    service,
    template_process,
    tool_choice,
    turns,
)  # fmt: skip
from jpaged.serving.tool_parsers import calls, ids, json_call, parser, pieces, reader, schema
from jpaged.serving.tool_parsers import format as call_format
from jpaged.serving.tool_parsers import grammar as call_grammar
from jpaged.structured import compiler, grammar, grammar_check
from tests.serving.client import Client
from tests.support.injection import Injected, functions_of, wrapped

MODULES = [
    answer, async_engine, body_process, chat, codec, compiler, conversation, engine, errors, generate, grammar,
    handlers, middleware, output, parse, prepare, protocol, serve, service, template_process, tokenizers,
    grammar_check, tool_choice, turns,
    call_format, call_grammar, calls, ids, json_call, parser, pieces, reader, schema,
]  # fmt: skip
MARK = "victim"  # in the texts of one request
# Functions that handle the requests of all clients, and none in particular.
SHARED = {"jpaged.serving.middleware.add_request_id"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def bodies(victim: str) -> dict[str, tuple[str, dict]]:
    """Eight requests by name. The victim's texts, and no others, have the mark."""
    made = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say {mark}"}], "logprobs": True}),
        "streamed chat": ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<|end|> {mark}"}]}], "stream": True,
            "stop": ["{mark}"],
        }),
        "calling chat": ("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "{mark}?"}], "tools": [WEATHER], "tool_choice": "auto",
        }),
        "completion": ("/v1/completions", {"prompt": "Once {mark}", "logprobs": 1, "echo": True}),
        "streamed completion": ("/v1/completions", {"prompt": "Once {mark}", "stream": True, "n": 2, "seed": 1}),
        "constrained": ("/v1/completions", {"prompt": "{mark}", "structured_outputs": {"choice": ["{mark}", "no"]}}),
        "banned": ("/v1/completions", {
            "prompt": ["{mark}", "{mark} two"], "bad_words": ["{mark}"], "user": "u" * service.LARGE_BYTES,
        }),
        "beams": ("/v1/completions", {"prompt": "{mark}", "use_beam_search": True, "n": 2}),
    }  # fmt: skip
    common = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    return {
        name: (path, filled(body | common, MARK if name == victim else "other")) for name, (path, body) in made.items()
    }


def filled(value, mark):
    if isinstance(value, str):
        return value.replace("{mark}", mark)
    if isinstance(value, list):
        return [filled(each, mark) for each in value]
    return {name: filled(each, mark) for name, each in value.items()} if isinstance(value, dict) else value


async def outcomes(client, victim):
    """The tokens of all requests at once, by name, without those of the requests that failed."""

    async def one(path, body):
        async with client.session.post(path, json=body) as response:
            text = await response.text()
            return None if response.status != 200 or '"error"' in text else tokens_of(text, body)

    asked = bodies(victim)
    found = await asyncio.gather(*(one(path, body) for path, body in asked.values()))
    await client.idle()
    return {name: tokens for name, tokens in zip(asked, found) if tokens is not None}


def tokens_of(text, body):
    """The token ids of each choice."""
    events = [text] if "stream" not in body else [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    found = {}
    for choice in itertools.chain.from_iterable(json.loads(event)["choices"] for event in events):
        found[choice["index"]] = found.get(choice["index"], []) + (choice.get("token_ids") or [])
    return found


def marked(value, depth=3) -> bool:
    """Whether a value holds the victim's text."""
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, bytes):
        return MARK.encode() in value
    if depth and isinstance(value, list | tuple) and len(value) < 20:
        return any(marked(each, depth - 1) for each in value)
    if depth and isinstance(value, dict) and len(value) < 50:
        return any(marked(each, depth - 1) for each in (*value, *value.values()))
    if isinstance(value, fields.Strict | answer.Answer | SamplingParams | StructuredOutputsParams):
        return marked(vars(value) if hasattr(value, "__dict__") else {}, depth - 1) if depth else False
    return False


USUAL = ("completion", "streamed chat", "constrained", "calling chat")
VICTIMS = [pytest.param(name, marks=() if name in USUAL else pytest.mark.deep) for name in bodies("")]


@pytest.mark.parametrize("victim", VICTIMS)
async def test_exception_in_any_function_ends_one_request_of_eight(loaded, victim):
    functions = {name: each for name, each in functions_of(MODULES).items() if name not in SHARED}
    async with Client(*loaded, tool_format=call_format.FORMATS["hermes"]) as client:
        expected = await outcomes(client, victim)
        assert len(expected) == 8
        called: dict[str, None] = {}
        with wrapped(functions, lambda name, args: called.update({name: None}) if any(map(marked, args)) else None):
            await outcomes(client, victim)
        assert len(called) > 5, called
        for name in called:

            def fail(_, args, name=name):
                if any(map(marked, args)):
                    raise Injected(name)

            with wrapped({name: functions[name]}, fail):
                found = await outcomes(client, victim)
            assert expected.keys() - found.keys() <= {victim}, name
            assert found == {other: expected[other] for other in found}, name
            assert client.service.healthy
        assert await outcomes(client, victim) == expected
