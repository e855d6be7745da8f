"""Calls whose arguments are a JSON object."""

import json
import re
import string
from dataclasses import dataclass
from typing import Any

from jpaged.serving.codec import loads
from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.form import Spell
from jpaged.serving.tool_parsers.pieces import NotACall, Reading
from jpaged.serving.tool_parsers.reader import CallReader
from jpaged.serving.tool_parsers.schema import arguments_of, json_rule

ARGUMENTS = ("arguments", "parameters")  # both words are accepted in every form
NAME = frozenset(string.ascii_letters + string.digits + "_.-")  # as in `Function.name`
ID = "/[a-zA-Z0-9]{9}/"  # of Mistral
MAX_BETWEEN = 80  # characters between a name and its arguments


@dataclass(frozen=True)
class JsonObject:
    """Object with the name and the arguments.

    Arguments are returned as the model writes them, character by character. Missing or null arguments are `{}`, and an
    object inside a string is that object. With any other value, the text is not a call.

    Attributes:
        arguments: the word for arguments that chat templates write.
        may_have_id: chat templates write Mistral's id behind the arguments.
    """

    arguments: str = ARGUMENTS[0]
    may_have_id: bool = False
    is_list = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return ()

    def read(self, reader: CallReader) -> Reading[None]:
        """Read an object."""
        name, arguments, begun = None, "{}", False
        yield from reader.expect("{")
        while True:
            yield from reader.space()
            key = decoded((yield from reader.text_of(reader.string())))
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            if begun:
                decoded((yield from reader.text_of(reader.value())))
            elif key == "name":
                name = decoded((yield from reader.text_of(reader.value())))
                if not isinstance(name, str) or name not in reader.functions:
                    raise NotACall
            elif key not in ARGUMENTS:
                decoded((yield from reader.text_of(reader.value())))
            elif name is not None and (yield from reader.peek()) == "{":
                begun = True
                reader.begin(name)
                yield from read_object(reader)
            else:
                arguments = _as_object((yield from reader.text_of(reader.value())))
            yield from reader.space()
            if (yield from reader.peek()) == "}":
                reader.at += 1
                break
            yield from reader.expect(",")
        if name is None:
            raise NotACall
        if not begun:
            reader.begin(name)
            reader.append(arguments)

    def head(self, function: Function) -> str:
        """Return the beginning of an object in the exact spacing of chat templates."""
        return f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{self.arguments}": '

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rule of the arguments and the end of the object."""
        own_id = f"""({spell(', "id": "')} {ID} {spell('"')})?""" if self.may_have_id else ""
        return [f"{name}: {json_rule(arguments_of(function))} {own_id} {spell('}')}"]


OBJECT = JsonObject()


@dataclass(frozen=True)
class NamedJson:
    """Name, a text between, and the object of the arguments.

    Attributes:
        before: text in front of the name that belongs to it; it may be missing.
        between: text between name and arguments, as chat templates write it.
        pattern: regular expression of all texts that may stand there.
        has_index: chat templates write a colon and the index of the call behind the name.
        after: text after the arguments, as chat templates write it; it may be missing.
        id_mark: mark in front of Mistral's id, which some templates write behind the name; "": none.
    """

    between: str
    pattern: str
    before: str = ""
    after: str = ""
    id_mark: str = ""
    has_index: bool = False
    is_list = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return (self.between, self.after, self.id_mark)

    def read(self, reader: CallReader) -> Reading[None]:
        """Read a call."""
        name = yield from reader.word(NAME)
        if name not in reader.functions:
            name = name.removeprefix(self.before)
        if name not in reader.functions:
            raise NotACall
        start = reader.at
        while (yield from reader.peek()) != "{":
            reader.at += 1
            if reader.at - start > MAX_BETWEEN:
                raise NotACall
        if not re.fullmatch(self.pattern, reader.text[start : reader.at]):
            raise NotACall
        reader.begin(name)
        yield from read_object(reader)
        if self.after:
            yield from reader.tag(self.after.strip())

    def head(self, function: Function) -> str:
        """Return the name with the text in front of it."""
        return f"{self.before}{function.name}"

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rule of the text behind the name."""
        index = '":" /[0-9]{1,4}/' if self.has_index else ""
        own_id = f"({spell(self.id_mark)} {ID})?" if self.id_mark else ""
        return [
            f"{name}: {index} {own_id} {spell(self.between)} {json_rule(arguments_of(function))} {spell(self.after)}"
        ]


@dataclass(frozen=True)
class JsonList:
    """List of objects, or one object without a list.

    Attributes:
        named: form of calls that models write in its place.
        writes_named: chat templates write `named`, and not a list.
        item: form of an item.
    """

    named: NamedJson | None = None
    writes_named: bool = False
    item: JsonObject = OBJECT

    @property
    def is_list(self) -> bool:
        """Whether chat templates write a list."""
        return not self.writes_named

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        return self.named.texts if self.named else ()

    def read(self, reader: CallReader) -> Reading[None]:
        """Read a list."""
        character = yield from reader.peek()
        if character == "{":
            yield from self.item.read(reader)
            return
        if character != "[" and self.named is not None:
            yield from self.named.read(reader)
            return

        def item() -> Reading[None]:
            yield from self.item.read(reader)
            reader.take()

        yield from reader.items(item)

    def head(self, function: Function) -> str:
        """Return the beginning of an item, or of a call in its place."""
        return self._written.head(function)

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return the rules of an item, or of a call in its place."""
        return self._written.rules(function, name, spell)

    @property
    def _written(self) -> JsonObject | NamedJson:
        return self.named if self.writes_named and self.named else self.item


def read_object(reader: CallReader) -> Reading[None]:
    """Read the arguments of a call that has begun, and emit each piece as it comes."""
    try:
        for _ in reader.value():
            reader.append(reader.take())
            yield
    finally:
        reader.append(reader.take())


def decoded(text: str) -> Any:
    """Return the value of a JSON text. Raise NotACall if it is invalid."""
    try:
        return loads(text)
    except ValueError as error:
        raise NotACall from error


def _as_object(value: str) -> str:
    """Return the object in a value of arguments, as JSON. Raise NotACall if there is none."""
    if value.startswith("{"):
        return value
    inner = decoded(value)
    if inner is None:
        return "{}"
    if isinstance(inner, str) and isinstance(decoded(inner), dict):
        return inner
    raise NotACall
