"""Interface of the parsers of reasoning."""

from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """Part of an output.

    Attributes:
        text: the text, without marks.
        is_reasoning: the text is reasoning; otherwise it is answer, in which tool calls may stand.
    """

    text: str
    is_reasoning: bool


class ReasoningParser(Protocol):
    """Streaming parser of one output into reasoning and answer. Its result does not depend on the pieces."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, unless a mark comes."""

    def feed(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return the parts that are certain now, in the order of the output."""
