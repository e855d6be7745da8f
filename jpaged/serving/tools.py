"""Tool calls as models write them: streaming parsers, and grammars that allow nothing else."""

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jpaged.chat import sources_of
from jpaged.core.params import shown
from jpaged.serving.codec import loads
from jpaged.serving.conversation import Function
from jpaged.structured.sound import WHITE_SPACE, sound_schema
from jpaged.tokenizer import CALL_TAGS

SPACE = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")  # both words are accepted in either format
# Of the arguments in a grammar: without a bound, a weak model may write white space without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


@dataclass
class ToolCallDelta:
    """Addition to a call.

    Attributes:
        index: index of the call in the choice.
        id: id of the call, in its first delta; else None.
        name: name of the tool, in the call's first delta; else None.
        arguments: JSON text to append.
        place: number of characters of the content, in the same piece, that precede the addition.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    place: int = field(default=0, compare=False)


class Parsed(NamedTuple):
    """Events that a piece of text has made certain."""

    content: str
    calls: list[ToolCallDelta]

    def in_order(self) -> Iterator[str | ToolCallDelta]:
        """Yield the texts, possibly empty, and the additions to calls in the order of the output."""
        start = 0
        for call in self.calls:
            yield self.content[start : call.place]
            yield call
            start = call.place
        yield self.content[start:]


class _NotACall(Exception):
    """Signal that text that looked like a call is not one."""


class _End(Exception):
    """Signal that no more text will follow."""


# Generator that reads the text. It yields wherever it needs more text than has arrived.
type _Reading[T] = Generator[None, None, T]


class ToolParser:
    """Streaming parser of the text of one choice into content and calls. Its result does not depend on the pieces.

    Arguments are returned as the model writes them, character by character; a name only when it is complete, one of the
    tools', and followed by the arguments. Text that is not a call after all is content. A call that breaks off after
    its beginning remains incomplete. White space around calls belongs to them.

    Missing or null arguments are `{}`, and an object inside a string is that object. With any other value, the text is
    not a call.

    Args:
        tool_names: a call of any other name is content.
        new_id: return a new id for a call.
        parallel: whether there may be more than one call; if not, the calls after the first are dropped.
    """

    def __init__(self, tool_names: Collection[str], new_id: Callable[[], str], parallel: bool = True):
        self._tool_names = frozenset(tool_names)
        self._new_id = new_id
        self._parallel = parallel
        self._text = ""  # received text that is not part of a result yet
        self._at = 0  # number of its characters that have been read
        self._ended = False
        self._num_calls = 0
        self._content = ""
        self._calls: dict[int, ToolCallDelta] = {}
        self._reading = self._read_all()

    @property
    def called(self) -> bool:
        """Whether a call was returned."""
        return self._num_calls > 0

    def feed(self, text: str) -> Parsed:
        """Parse more text, and return the events that are certain now."""
        self._text += text
        next(self._reading)
        return self._parsed()

    def finish(self) -> Parsed:
        """Return the text that was held back. No text may follow."""
        self._ended = True
        next(self._reading, None)
        return self._parsed()

    def _parsed(self) -> Parsed:
        content, calls, self._content, self._calls = self._content, self._calls, "", {}
        return Parsed(content, [call for call in calls.values() if self._parallel or call.index == 0])

    def _read_all(self) -> _Reading[None]:
        try:
            yield from self._read()
        except _End:
            if not self.called:
                self._content += self._text

    def _read(self) -> _Reading[None]:
        """Read the whole text in the format. It ends by _End."""
        raise NotImplementedError

    def _read_content(self) -> _Reading[None]:
        """Emit all further text as content."""
        while True:
            self._content += self._text
            self._text, self._at = "", 0
            yield from self._more()

    # Calls

    def _call(self) -> _Reading[bool]:
        """Read a call and emit it. If the text is no call, emit it as content and return False."""
        before = self._num_calls
        try:
            yield from self._object()
        except (_NotACall, _End):
            if self._num_calls == before:
                self._content += self._take()
                return False
        self._take()
        return True

    def _object(self) -> _Reading[None]:
        """Read a call's object. Raise _NotACall where it stops being one."""
        name, arguments, begun = None, "{}", False
        yield from self._space()
        yield from self._expect("{")
        while True:
            yield from self._space()
            key = _decoded((yield from self._text_of(self._string())))
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if begun:
                yield from self._value()
            elif key == "name":
                name = _decoded((yield from self._text_of(self._value())))
                if not isinstance(name, str) or name not in self._tool_names:
                    raise _NotACall
            elif key not in ARGUMENTS:
                yield from self._value()
            elif name is not None and (yield from self._peek()) == "{":
                begun = True
                self._begin(name)
                for _ in self._value():
                    self._append(self._take())
                    yield
                self._append(self._take())
            else:
                arguments = _as_object((yield from self._text_of(self._value())))
            yield from self._space()
            if (yield from self._peek()) == "}":
                self._at += 1
                break
            yield from self._expect(",")
        if name is None:
            raise _NotACall
        if not begun:
            self._begin(name)
            self._append(arguments)

    def _begin(self, name: str) -> None:
        """Open a call and drop the text up to here."""
        self._take()
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._calls[index] = ToolCallDelta(index, self._new_id(), name, place=len(self._content))

    def _append(self, arguments: str) -> None:
        if arguments:
            index = self._num_calls - 1
            call = self._calls.setdefault(index, ToolCallDelta(index, place=len(self._content)))
            call.arguments += arguments

    # JSON. Inside an array or an object, strings and depth are all that matters; arguments are as valid as the model
    # makes them.

    def _value(self) -> _Reading[None]:
        depth = 0
        while True:
            character = yield from self._peek()
            if character == '"':
                yield from self._string()
            elif character in "{[":
                self._at += 1
                depth += 1
            elif character in "}]" and depth:
                self._at += 1
                depth -= 1
            elif depth:
                self._at += 1
                continue
            else:  # a number, null, true, false, or invalid text in their place
                while (yield from self._peek()) not in ",:]}" + SPACE:
                    self._at += 1
            if not depth:
                return

    def _string(self) -> _Reading[None]:
        yield from self._expect('"')
        while (character := (yield from self._peek())) != '"':
            self._at += 1
            if character == "\\":
                yield from self._peek()
                self._at += 1
        self._at += 1

    # Text

    def _take(self) -> str:
        """Remove the text that has been read."""
        text, self._text, self._at = self._text[: self._at], self._text[self._at :], 0
        return text

    def _more(self) -> _Reading[None]:
        """Wait for text. Raise _End if none will follow."""
        if self._ended:
            raise _End
        yield

    def _peek(self) -> _Reading[str]:
        """Return the next character."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _expect(self, character: str) -> _Reading[None]:
        if (yield from self._peek()) != character:
            raise _NotACall
        self._at += 1

    def _space(self, characters: str = SPACE) -> _Reading[None]:
        while (yield from self._peek()) in characters:
            self._at += 1

    def _tag(self, tag: str) -> _Reading[bool]:
        """Skip white space and a tag; skip nothing if the tag is not there."""
        start = self._at
        yield from self._space()
        for character in tag:
            if (yield from self._peek()) != character:
                self._at = start
                return False
            self._at += 1
        return True

    def _text_of(self, reading: _Reading[None]) -> _Reading[str]:
        start = self._at
        yield from reading
        return self._text[start : self._at]


class HermesParser(ToolParser):
    """Parser of calls in tags, anywhere in the text. The closing tag may be missing."""

    OPENING, CLOSING = CALL_TAGS

    def _read(self) -> _Reading[None]:
        while True:
            yield from self._up_to_opening()
            if (yield from self._call()) and (yield from self._tag(self.CLOSING)):
                self._take()

    def _up_to_opening(self) -> _Reading[None]:
        """Emit content up to the next call and the white space in front of it; skip both."""
        while (start := self._text.find(self.OPENING)) < 0:
            self._at = len(self._text)
            if not self._ended or (self.called and self._text.isspace()):  # the last characters may belong to a call
                last = self._text.rfind(self.OPENING[0])
                begun = last >= 0 and self.OPENING.startswith(self._text[last:])
                self._at = len((self._text[:last] if begun else self._text).rstrip())
            self._content += self._take()
            yield from self._more()
        self._at = len(self._text[:start].rstrip())
        spaces = start - self._at
        self._content += self._take()
        self._at = spaces + len(self.OPENING)


class HermesOrAnswerParser(HermesParser):
    """Parser of an output that begins with a call, or has none."""

    def _read(self) -> _Reading[None]:
        if (yield from self._tag(self.OPENING)):
            self._at = 0
            yield from super()._read()
        yield from self._read_content()


class Llama3JsonParser(ToolParser):
    """Parser of an output that is all calls, or all content. Content after calls is content to its end."""

    PYTHON_TAG = "<|python_tag|>"
    SEPARATORS = SPACE + ";"

    def _read(self) -> _Reading[None]:
        while True:
            if self.called:
                yield from self._space(self.SEPARATORS)
            yield from self._tag(self.PYTHON_TAG)
            if not (yield from self._call()):
                break
        yield from self._read_content()


class ToolFormat:
    """Format in which a family of models writes calls. FORMATS holds all formats.

    Its grammars are llguidance's, as Lark text, with calls in the exact spacing of chat templates. Tags are text in
    them, so they fit every tokenizer; if a tokenizer has a tag among its added tokens, the compiler of the grammar must
    count that token as text too. Errors of a schema are found when a grammar is compiled, except that `parameters` must
    have the type "object": otherwise it is a ValueError here.
    """

    name = ""
    _parser_type: type[ToolParser]
    _opening = _closing = _separator = ""
    _arguments = ARGUMENTS[0]

    def parser(
        self, tool_names: Collection[str], new_id: Callable[[], str], parallel: bool = True, with_answer: bool = False
    ) -> ToolParser:
        """Return a parser for one choice: of any text, or of one that `grammar_with_answer` allows."""
        kind = HermesOrAnswerParser if with_answer else self._parser_type
        return kind(tool_names, new_id, parallel)

    def grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """Return a grammar of calls only, with arguments that fit the tools' schemas.

        It allows one call or, if `parallel`, one or more.
        """
        return f"start: {self._series(parallel)}\n" + self._rules(functions, self._opening)

    @property
    def tells_json_from_calls(self) -> bool:
        """Whether a JSON text can't be taken for a call."""
        return bool(self._opening)

    def grammar_with_answer(self, functions: Sequence[Function], parallel: bool, answer: Any) -> str:
        """Return a grammar of either calls, as `grammar` allows them, or a JSON text that fits the schema `answer`."""
        assert self.tells_json_from_calls, self.name
        schema = json.dumps(sound_schema(answer) | {"x-guidance": {"whitespace_pattern": WHITE_SPACE}})
        start = f"start: {self._series(parallel)} | answer\nanswer: %json {schema}\n"
        return start + self._rules(functions, self._opening)

    def lazy_grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """Return a grammar of any text; but once a call begins, it must be one that `grammar` allows."""
        raise NotImplementedError

    def _series(self, parallel: bool) -> str:
        return f"call ({json.dumps(self._separator)} call)*" if parallel else "call"

    def _rules(self, functions: Sequence[Function], opening: str) -> str:
        """Return the rule `call`, in which each call begins with `opening`. A string of Lark is one of JSON."""
        assert functions, "no functions, no calls"
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            head = f'{opening}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{self._arguments}": '
            parameters = {"type": "object"} | (function.parameters or {})
            if (kind := parameters["type"]) != "object":
                name = shown(function.name)
                raise ValueError(f'tools: the parameters of {name} must have the type "object", not {shown(kind)}')
            schema = json.dumps(sound_schema(parameters | {"x-guidance": SPACING}))
            rules.append(f"call_{i}: {json.dumps(head)} %json {schema} {json.dumps('}' + self._closing)}")
        return "\n".join(rules) + "\n"


class _Hermes(ToolFormat):
    name = "hermes"
    _parser_type = HermesParser
    _opening, _closing, _separator = HermesParser.OPENING + "\n", "\n" + HermesParser.CLOSING, "\n"

    def lazy_grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        start = "(before call)* TEXT" if parallel else "TEXT | before call"
        before = f"before[lazy]: TEXT {json.dumps(HermesParser.OPENING)}\nTEXT: /(?s:.*)/\n"
        return f"start: {start}\n{before}" + self._rules(functions, self._opening.removeprefix(HermesParser.OPENING))


class _Llama3Json(ToolFormat):
    name = "llama3_json"
    _parser_type = Llama3JsonParser
    _separator = "; "
    _arguments = ARGUMENTS[1]

    def lazy_grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        text = r'TEXT: /(?s:.*)/ & ~/\{"name":(?s:.*)/'
        return f"start: TEXT | {self._series(parallel)}\n{text}\n" + self._rules(functions, self._opening)


FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (_Llama3Json(), _Hermes())}


def detect(chat_template: str) -> str | None:
    """Return the name of a chat template's format, or None if it is none of FORMATS."""
    if HermesParser.OPENING in chat_template:  # other formats use the same outer tag
        return None if "<function=" in chat_template or "<arg_key>" in chat_template else "hermes"
    # A call has "parameters" right after "name". A tool's definition has "description" between them.
    if "python_tag" in chat_template or re.search(r'"name\\?":[^,]*,[^,"]*"parameters', chat_template):
        return "llama3_json"
    return None


def tool_format(name: str, tokenizer: Any, chat_template: str | None = None) -> ToolFormat | None:
    """Return the format of a model's tool calls; None if it has none.

    Args:
        name: one of FORMATS, "none", or "auto": detected from the chat template.
        tokenizer: has the model's own template, unless another is given.
    """
    if name == "auto":
        sources = [chat_template] if chat_template else sources_of(tokenizer).values()
        name = next(filter(None, map(detect, sources)), "none")
    return FORMATS.get(name)


def _decoded(text: str) -> Any:
    """Return the value of a JSON text. Raise _NotACall if it is invalid."""
    try:
        return loads(text)
    except ValueError as error:
        raise _NotACall from error


def _as_object(value: str) -> str:
    """Return the object in a value of arguments, as JSON. Raise _NotACall if there is none."""
    if value.startswith("{"):
        return value
    decoded = _decoded(value)
    if decoded is None:
        return "{}"
    if isinstance(decoded, str) and isinstance(_decoded(decoded), dict):
        return decoded
    raise _NotACall
