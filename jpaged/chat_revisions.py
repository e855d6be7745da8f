"""Revisions of conversations with tool calls: forms in which some chat templates accept calls, and others do not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jpaged.tokenizer import CALL_TAGS

type Message = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")  # fields that templates read


def revisions(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages and, if some have calls, revisions of them, of which the last has calls as text.

    Each revision comes with the arguments of calls as objects, and as JSON text, which DeepSeek's templates demand.
    """
    first, earlier = [_named(message) for message in messages], list[list[Message]]()
    for revise in (list, _apart, _one_by_one, _thought, _as_text):
        revised = revise(first)
        for each in (revised, [_with_text_arguments(message) for message in revised]):
            if each not in earlier:
                earlier.append(each)
                yield each


def _named(message: Message) -> Message:
    """Return a message with its reasoning in each field that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    return message if reasoning is None else {**message, **dict.fromkeys(REASONING, reasoning)}


def _with_text_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{**call["function"], "arguments": _json(call["function"]["arguments"])} for call in calls]
    return {**message, "tool_calls": [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]}


def _apart(messages: Sequence[Message]) -> list[Message]:
    """Return messages of which none has a text and calls: DeepSeek R1's template prints only the text."""
    revised = list[Message]()
    for message in messages:
        if message.get("tool_calls"):
            if message["content"]:
                revised.append(_without(message, "tool_calls"))
                message = _without(message, *REASONING)
            message = {**message, "content": None}
        revised.append(message)
    return revised


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, in front of its result: Llama 3's templates refuse several."""
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    revised, moved = list[Message](), set[Any]()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if message["role"] != "tool" or message.get("tool_call_id") not in moved:
                revised.append(message)
            continue
        for call in calls:
            revised.append({**message, "tool_calls": [call]})
            message = {**_without(message, *REASONING), "content": ""}
            if (name := call.get("id")) in results:
                revised.append(results[name])
                moved.add(name)
    return revised


def _thought(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, whose text is a part of the reasoning: gpt-oss's template refuses both."""
    revised = list[Message]()
    for message in _one_by_one(messages):
        if message.get("tool_calls") and message.get(REASONING[0]) and message["content"]:
            text = f"{message[REASONING[0]]}\n\n{message['content']}"
            message = {**message, **dict.fromkeys(REASONING, text), "content": ""}
        revised.append(message)
    return revised


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages with calls as a part of their text: some templates print no calls."""
    opening, closing = CALL_TAGS
    revised = list[Message]()
    for message in messages:
        parts = [message["content"]] if message["content"] else []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text = f'{{"name": {_json_text(function["name"])}, "arguments": {_json(function["arguments"])}}}'
            parts.append(f"{opening}\n{text}\n{closing}")
        revised.append({**_without(message, "tool_calls"), "content": "\n".join(parts)})
    return revised


def _without(message: Message, *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json_text(arguments)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
