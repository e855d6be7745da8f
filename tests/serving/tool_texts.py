"""Tool calls as models write them, and their parsing in pieces."""

import itertools

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.format import FORMATS

NAMES = ["weather", "time"]
FUNCTIONS = [Function(name=name) for name in NAMES]
HERMES, LLAMA = FORMATS["hermes"], FORMATS["llama3_json"]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOON = '{"name": "time", "arguments": {}}'
ROME_CALL, NOON_CALL = ("weather", '{"city": "Rome"}'), ("time", "{}")


def hermes(*calls):
    """Return JSON calls in the form of Hermes."""
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def llama(*calls):
    """Return JSON calls in the form of Llama 3."""
    return "; ".join(call.replace('"arguments"', '"parameters"') for call in calls)


def written(kind, *calls):
    """Return JSON calls in the form of a format."""
    return hermes(*calls) if kind is HERMES else llama(*calls)


def outcome(new_parser, pieces, parallel=True, functions=FUNCTIONS):
    """Return the content and the calls as (id, name, arguments) of a text that arrives in pieces.

    Args:
        new_parser: a format, or one of its functions that return a parser.
        functions: the tools.
    """
    ids = (f"call-{i}" for i in itertools.count())
    parser = getattr(new_parser, "parser", new_parser)(functions, lambda name, index: next(ids), parallel)
    content, calls = "", []
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.index == len(calls):
                assert delta.id and delta.name
                calls.append((delta.id, delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.name is None and delta.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    assert parser.called == bool(calls)
    return content, calls


def read(new_parser, text, parallel=True):
    """Return the content and the calls as (name, arguments); characters as pieces must give the same result."""
    content, calls = outcome(new_parser, [text], parallel)
    assert outcome(new_parser, text, parallel) == (content, calls)
    return content, [(name, arguments) for _, name, arguments in calls]
