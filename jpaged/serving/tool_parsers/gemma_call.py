"""Calls of FunctionGemma and Gemma 4: `call:name{key:value,...}`, with texts between marks instead of quotes.

Google documents the form of FunctionGemma
(https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices); Gemma 4 differs in its marks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jpaged.serving.codec import loads
from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Spell
from jpaged.serving.tool_parsers.json_call import NAME
from jpaged.serving.tool_parsers.pieces import End, NotACall, Reading
from jpaged.serving.tool_parsers.raw_text import text_rules
from jpaged.serving.tool_parsers.reader import CallReader
from jpaged.serving.tool_parsers.schema import in_order, json_rule, properties_of, types_of
from jpaged.serving.tool_parsers.values import converter, types_by_name

ENDS = frozenset(",]}")


@dataclass(frozen=True)
class GemmaCall:
    """Name and arguments. Values without a mark are numbers, `true`, `false`, `null`, or texts.

    Attributes:
        quote: mark around texts.
    """

    quote: str
    is_list = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return (self.quote,)

    def read(self, reader: CallReader) -> Reading[None]:
        """Read a call. Each value is emitted as it comes."""
        name = yield from reader.word(NAME)
        if (yield from reader.peek()) != "{":
            raise NotACall
        reader.begin(name)
        yield from self._object(reader, types_by_name(reader.functions[name]))

    def head(self, function: Function) -> str:
        """Return the name with the brace behind it."""
        return f"{function.name}{{"

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rules of a call: its arguments in the alphabetical order of the models' templates.

        Other values than texts are JSON.
        """
        schemas, required = properties_of(function)
        rules, parts = [], []
        for index, (key, schema) in enumerate(sorted(schemas.items())):
            value = f"{name}_{index}"
            if "string" in types_of(schema) or not types_of(schema):
                rules.append(f"{value}: {spell(f'{key}:{self.quote}')} {value}_text")
                rules += text_rules(schema, f"{value}_text", self.quote, spell)
            else:
                rules.append(f"{value}: {spell(f'{key}:')} {json_rule(schema)}")
            parts.append((value, key in required))
        inside = in_order(parts, spell(","))
        return [f"{name}: {inside} {spell('}')}", *rules]

    def _object(self, reader: CallReader, types: Mapping[str, frozenset[str]]) -> Reading[None]:
        reader.at += 1
        reader.append("{")
        separator = ""
        yield from reader.space()
        while (yield from reader.peek()) != "}":
            key = yield from self._key(reader)
            yield from reader.space()
            reader.append(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(reader, converter(types.get(key, frozenset())))
            yield from self._next(reader, "}")
        reader.at += 1
        reader.append("}")

    def _list(self, reader: CallReader) -> Reading[None]:
        reader.at += 1
        reader.append("[")
        is_first = True
        yield from reader.space()
        while (yield from reader.peek()) != "]":
            if not is_first:
                reader.append(", ")
            is_first = False
            yield from self._value(reader)
            yield from self._next(reader, "]")
        reader.at += 1
        reader.append("]")

    def _next(self, reader: CallReader, closing: str) -> Reading[None]:
        """Skip the comma between two items."""
        yield from reader.space()
        if (yield from reader.peek()) != closing:
            yield from reader.expect(",")
            yield from reader.space()

    def _key(self, reader: CallReader) -> Reading[str]:
        """Read a name with its colon; it may stand between marks."""
        start = reader.at
        while (yield from reader.peek()) not in ":{}[],":
            reader.at += 1
        key = reader.text[start : reader.at]
        yield from reader.expect(":")
        return key.strip().removeprefix(self.quote).removesuffix(self.quote).strip('"')

    def _value(self, reader: CallReader, convert: Callable[[str], str] | None = None) -> Reading[None]:
        character = yield from reader.peek()
        if character in "{[":
            with reader.nested():
                yield from self._object(reader, {}) if character == "{" else self._list(reader)
        elif character == '"':
            yield from reader.string()
            reader.append(reader.text[: reader.at])
        elif (yield from reader.tag(self.quote, space="")):
            yield from self._text(reader) if convert is None else self._converted(reader, convert)
        else:
            reader.append(_scalar((yield from reader.text_of(_until_end(reader)))))

    def _text(self, reader: CallReader) -> Reading[None]:
        reader.append('"')
        pass_on = lambda text: reader.append(json.dumps(text, ensure_ascii=False)[1:-1])
        yield from reader.until(self.quote, pass_on)
        reader.append('"')

    def _converted(self, reader: CallReader, convert: Callable[[str], str]) -> Reading[None]:
        """Read a text that stands for a value of another type: FunctionGemma's templates mark all values."""
        parts: list[str] = []
        try:
            yield from reader.until(self.quote, parts.append)
        except End:
            reader.append(json.dumps("".join(parts), ensure_ascii=False)[:-1])
            raise
        reader.append(convert("".join(parts)))


def _until_end(reader: CallReader) -> Reading[None]:
    while (yield from reader.peek()) not in ENDS:
        reader.at += 1


def _scalar(text: str) -> str:
    """Return a value without marks as JSON."""
    try:
        return json.dumps(loads(text), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(text.strip(), ensure_ascii=False)
