"""Calls that name each argument in tags. The schema of a function gives the types of the values."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Spell
from jpaged.serving.tool_parsers.json_call import NAME
from jpaged.serving.tool_parsers.pieces import End, NotACall, Reading
from jpaged.serving.tool_parsers.raw_text import text_rules
from jpaged.serving.tool_parsers.reader import CallReader
from jpaged.serving.tool_parsers.schema import json_rule, properties_of, types_of
from jpaged.serving.tool_parsers.values import converted, types_by_name


@dataclass(frozen=True)
class Tags:
    """Tags around names and values, as chat templates write them.

    Attributes:
        name_end: text after the function's name.
        key_open, key_close: texts around the name of an argument.
        value_open, value_close: texts around its value. Newlines there are no part of the value. With newlines, a value
            also ends in front of a line with the next argument or the end of the call: models forget `value_close`.
        value_end: text after the argument.
        end: text at the end of the call.
    """

    name_end: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    value_end: str
    end: str
    is_list = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return (self.name_end, self.key_open, self.key_close, self.value_open, self.value_close, self.end)

    def read(self, reader: CallReader) -> Reading[None]:
        """Read a call. A text is emitted as it comes, another value when it is complete."""
        name = yield from reader.word(NAME)
        yield from reader.expect(self.name_end.strip())
        marks = self.key_open, self.end
        yield from reader.space()
        mark = yield from reader.choose(marks)
        reader.begin(name)
        reader.append("{")
        types = types_by_name(reader.functions[name])
        separator = ""
        while mark != self.end:
            key = yield from self._key(reader)
            reader.append(f"{separator}{_quoted(key)}: ")
            separator = ", "
            yield from self._value(reader, types.get(key, frozenset()))
            mark = yield from self._next(reader, marks)
        reader.append("}")

    def head(self, function: Function) -> str:
        """Return the name with the text behind it, without a newline at its end."""
        return function.name + self.name_end.rstrip("\n")

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rules of a call: its arguments in the order of the schema.

        Newlines may be missing except around values: GLM's templates differ in them.
        """
        schemas, required = properties_of(function)
        rules, parts = [], _spell_loosely(self.name_end[len(self.name_end.rstrip("\n")) :], spell)
        for index, (key, schema) in enumerate(schemas.items()):
            value = f"{name}_{index}"
            if "string" in types_of(schema) or not types_of(schema):
                rules += text_rules(schema, value, self.value_close, spell, self._next_lines)
            else:
                rules.append(f"{value}: {json_rule(schema)} {spell(self.value_close)}")
            head = _spell_loosely(f"{self.key_open}{key}{self.key_close}", spell)
            part = f"{head} {spell(self.value_open)} {value} {_spell_loosely(self.value_end, spell)}".strip()
            parts += f" {part}" if key in required else f" ({part})?"
        return [f"{name}: {parts} {spell(self.end)}", *rules]

    @property
    def _next_lines(self) -> tuple[str, ...]:
        """Beginnings of the lines in front of which a value ends without `value_close`."""
        return (f"\n{self.key_open}", f"\n{self.end}") if self.value_close.startswith("\n") else ()

    def _next(self, reader: CallReader, marks: tuple[str, ...]) -> Reading[str]:
        """Read the mark after an argument. Other text ends the call."""
        try:
            yield from reader.space()
            return (yield from reader.choose(marks))
        except NotACall:
            reader.at = 0
            reader.append("}")
            raise
        except End:
            if any(mark.startswith(reader.text.strip()) for mark in marks):
                reader.at = len(reader.text)
                reader.take()
            raise

    def _key(self, reader: CallReader) -> Reading[str]:
        """Read the name of an argument, and skip the text up to its value."""
        start, closing = reader.at, self.key_close.strip()
        while not reader.text.endswith(closing, start, reader.at):
            yield from reader.peek()
            reader.at += 1
        key = reader.text[start : reader.at - len(closing)].strip()
        if opening := self.value_open.strip():
            yield from reader.space()
            yield from reader.expect(opening)
        return key

    def _value(self, reader: CallReader, types: frozenset[str]) -> Reading[None]:
        trims = self.value_close.startswith("\n")
        if trims and (yield from reader.peek()) == "\n":
            reader.at += 1
        if types <= {"string"}:
            yield from _read_text(reader, self.value_close.strip(), trims, self._next_lines)
            return
        parts: list[str] = []
        try:
            yield from reader.until(self.value_close.strip(), parts.append, self._next_lines)
        except End:
            reader.append(_quoted("".join(parts))[:-1])
            raise
        text = "".join(parts)
        reader.append(converted(text.removesuffix("\n") if trims else text, types))


def _spell_loosely(text: str, spell: Spell) -> str:
    """Return the expression of a text whose newline at the end may be missing."""
    return f"{spell(text.rstrip('\n'))} {'"\\n"?' if text.endswith('\n') else ''}".strip()


def _read_text(reader: CallReader, mark: str, trims: bool, before: Sequence[str]) -> Reading[None]:
    """Emit the text up to a mark or to one of those in `before` as a JSON string; drop the last newline if `trims`."""
    held = ""

    def pass_on(text: str) -> None:
        nonlocal held
        text, held = held + text, ""
        if trims and text.endswith("\n"):
            text, held = text[:-1], "\n"
        reader.append(_quoted(text)[1:-1])

    reader.append('"')
    yield from reader.until(mark, pass_on, before)
    reader.append('"')


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
