"""Form in which a family of models writes calls: marks, and the body of a call between them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.ids import RANDOM, Ids
from jpaged.serving.tool_parsers.pieces import Reading
from jpaged.serving.tool_parsers.reader import CallReader

type Spell = Callable[[str], str]  # text -> its expression in Lark, with a token for each special mark


class Body(Protocol):
    """Syntax of a call between the marks of a form: name and arguments."""

    @property
    def is_list(self) -> bool:
        """Whether calls are the items of a list in brackets."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""

    def read(self, reader: CallReader) -> Reading[None]:
        """Read one call, or a list of calls, and emit it.

        Raises:
            NotACall: the text is no call; or it stops being one after `reader.begin`, and the text that the reader has
                not taken is content.
        """

    def head(self, function: Function) -> str:
        """Return the beginning of a call of a function, up to the first argument."""

    def rules(self, function: Function, name: str, spell: Spell) -> list[str]:
        """Return rules in Lark, of which `name` is a call of a function behind its head. Names of others begin with it.

        Raises:
            ValueError: the arguments can't be written in this form.
        """


@dataclass(frozen=True)
class Form:
    """Marks of calls as chat templates write them, with their white space. Parsers read any white space.

    A run of calls is written `start`, calls, `end`; each call `opening`, body, `closing`, with `separator` between two.

    Attributes:
        start: mark in front of a run; "": the whole output is calls, or has none.
        also: further marks that models write instead of `start`; `opening` if `start` may be missing.
        bare_opening: text that models write instead of `opening` at times; "": none.
        repeats: a run may have several calls; otherwise each call is a run, and `separator` is between runs.
        prefix: mark that may precede calls without `start`.
        marks: further marks that models write.
        begins: returns a regular expression of the beginning of calls without `start`, from the names of the tools.
        is_json: calls without `start` are JSON objects, like an answer in JSON.
        ids: form of the ids of calls.
        reasoning: name of the form of reasoning without which the content can't be read; "": there is none.
        variant: a token, and the form of the models that have this token in their tokenizer.
    """

    body: Body
    start: str = ""
    also: tuple[str, ...] = ()
    opening: str = ""
    bare_opening: str = ""
    closing: str = ""
    separator: str = ""
    end: str = ""
    repeats: bool = False
    prefix: str = ""
    marks: tuple[str, ...] = ()
    begins: Callable[[Iterable[str]], str] | None = None
    is_json: bool = False
    ids: Ids = RANDOM
    reasoning: str = ""
    variant: "tuple[str, Form] | None" = None

    @property
    def start_marks(self) -> tuple[str, ...]:
        """The mark that chat templates write in front of a run, if there is one."""
        return tuple(filter(None, (self.start.strip(),)))

    @property
    def starts(self) -> tuple[str, ...]:
        """Marks of which one precedes each run."""
        return (*self.start_marks, *self.also)

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts of which one precedes each call."""
        return (self.opening, self.bare_opening) if self.bare_opening else (self.opening,)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that may hold marks."""
        own = self.start, *self.also, self.opening, self.closing, self.end, self.prefix, *self.marks
        return own + self.body.texts
