"""Literals of Python or JSON in the text of a model, as JSON."""

import json
import re
from collections.abc import Callable

from jpaged.serving.codec import loads
from jpaged.serving.tool_parsers.pieces import SPACE, End, NotACall, Reading
from jpaged.serving.tool_parsers.reader import CallReader

WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
CLOSING = {"[": "]", "(": ")", "{": "}"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0", "/": "/"}
CODES = {"x": 2, "u": 4, "U": 8}  # escapes with the hexadecimal digits of a character
ENDS = frozenset(",)]}:" + SPACE)
PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}  # inside a string


def json_of(literal: str) -> str | None:
    """Return a literal of Python or JSON as JSON; None if a text is none."""
    reader = CallReader((), lambda name, index: name)
    reader.text, reader.ended = literal, True
    try:
        for _ in read_literal(reader):
            pass
    except (NotACall, End):
        return None
    return None if reader.text[reader.at :] else reader.parsed().calls[0].arguments


def read_literal(reader: CallReader, convert: Callable[[str], str] | None = None) -> Reading[None]:
    """Read a literal of Python or JSON, and emit it as JSON. Raise NotACall where it stops being one.

    Args:
        convert: returns the JSON of a text, which is emitted when the text is complete. None: texts are emitted as they
            come.
    """
    character = yield from reader.peek()
    if character in "\"'":
        yield from _read_string(reader, reader.append) if convert is None else _read_converted(reader, convert)
    elif character in CLOSING:
        with reader.nested():
            yield from _read_items(reader)
    else:
        text = yield from reader.text_of(_until_end(reader))
        reader.append(WORDS.get(text) or _number(text))


def _until_end(reader: CallReader) -> Reading[None]:
    while (yield from reader.peek()) not in ENDS:
        reader.at += 1


def _number(text: str) -> str:
    """Return a number of Python as JSON. Raise NotACall if it is none."""
    try:
        return json.dumps(int(text))
    except ValueError:
        pass
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError as error:
        raise NotACall from error


def _read_items(reader: CallReader) -> Reading[None]:
    """Read a list, a tuple or a dictionary."""
    opening = yield from reader.peek()
    closing, is_dict = CLOSING[opening], opening == "{"
    reader.at += 1
    reader.append("{" if is_dict else "[")
    yield from reader.space()
    is_first = True
    while (yield from reader.peek()) != closing:
        if not is_first:
            reader.append(", ")
        is_first = False
        if is_dict:
            if (yield from reader.peek()) not in "\"'":  # a name in JSON is a text
                raise NotACall
            yield from _read_string(reader, reader.append)
            yield from reader.space()
            yield from reader.expect(":")
            reader.append(": ")
            yield from reader.space()
        yield from read_literal(reader)
        yield from reader.space()
        if (yield from reader.peek()) != closing:
            yield from reader.expect(",")
            yield from reader.space()
    reader.at += 1
    reader.append("}" if is_dict else "]")


def _read_converted(reader: CallReader, convert: Callable[[str], str]) -> Reading[None]:
    parts: list[str] = []
    try:
        yield from _read_string(reader, parts.append)
    except (End, NotACall):
        reader.append("".join(parts))
        raise
    reader.append(convert(loads("".join(parts))))


def _read_string(reader: CallReader, emit: Callable[[str], None]) -> Reading[None]:
    """Read a string in quotation marks of one or three characters."""
    quote = yield from reader.peek()
    reader.at += 1
    if (yield from _is_next(reader, quote)):
        reader.at += 1
        if not (yield from _is_next(reader, quote)):
            emit('""')
            return
        reader.at += 1
        quote *= 3
    emit('"')
    while True:
        character = yield from reader.peek()
        if character == quote[0]:
            start = reader.at
            while reader.at - start < len(quote) and (yield from _is_next(reader, quote[0])):
                reader.at += 1
            if reader.at - start == len(quote):
                emit('"')
                return
            emit(json.dumps(quote[0] * (reader.at - start))[1:-1])
        elif character == "\\":
            emit(json.dumps((yield from _escaped(reader)), ensure_ascii=False)[1:-1])
        else:
            emit(json.dumps(reader.skip(PLAIN[quote[0]]), ensure_ascii=False)[1:-1])


def _is_next(reader: CallReader, character: str) -> Reading[bool]:
    """Return whether a character comes next; False at the end of the text."""
    while reader.at == len(reader.text):
        if reader.ended:
            return False
        yield
    return reader.text[reader.at] == character


def _escaped(reader: CallReader) -> Reading[str]:
    """Read an escape and return its text. Unknown ones stand for themselves, as in Python."""
    reader.at += 1
    kind = yield from reader.peek()
    reader.at += 1
    if kind in "\\'\"":
        return kind
    if kind not in CODES:
        return ESCAPES.get(kind, f"\\{kind}")
    code = yield from _code(reader, CODES[kind])
    if 0xD800 <= code < 0xDC00:  # JSON writes characters beyond 16 bits as two escapes
        yield from reader.expect("\\u")
        code = 0x10000 + ((code - 0xD800) << 10) + ((yield from _code(reader, 4)) - 0xDC00)
    if not (0 <= code < 0xD800 or 0xE000 <= code < 0x110000):
        raise NotACall
    return chr(code)


def _code(reader: CallReader, digits: int) -> Reading[int]:
    start = reader.at
    while reader.at - start < digits:
        yield from reader.peek()
        reader.at += 1
    try:
        return int(reader.text[start : reader.at], 16)
    except ValueError as error:
        raise NotACall from error
