"""Tool calls of an output, as far as they are certain."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


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
