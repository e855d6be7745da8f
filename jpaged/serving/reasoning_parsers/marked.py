"""Reasoning between marks in front of an answer."""

from collections.abc import Sequence

from jpaged.serving.reasoning_parsers.parser import Piece
from jpaged.serving.tool_parsers.pieces import overlap


class MarkedParser:
    """Streaming parser of an output whose reasoning, if it has any, stands between marks in front of the answer.

    White space around the reasoning belongs to neither. An output without an opening mark is an answer. Reasoning that
    breaks off has no answer.

    Args:
        openings: marks, of which the first that fits begins the reasoning.
        closings: marks, of which one ends it.
        is_open: the prompt ends with the opening mark.
        calls: marks of tool calls, which end the reasoning too, and begin the answer.
    """

    def __init__(self, openings: Sequence[str], closings: Sequence[str], is_open: bool, calls: Sequence[str] = ()):
        self._openings, self._closings, self._calls = openings, closings, calls
        self._text = ""  # received text that is not part of a result yet
        self._stage = "reasoning" if is_open else "opening"
        self._has_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and has not ended."""
        return self._stage == "reasoning"

    def feed(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return the additions to the reasoning and to the answer that are certain now."""
        self._text += text
        reasoning = answer = ""
        if self._stage == "opening":
            self._read_opening(is_last)
        if self._stage == "reasoning":
            reasoning = self._read_reasoning(is_last)
        if self._stage == "space":
            self._text = self._text.lstrip()
            if self._text:
                self._stage = "answer"
        if self._stage == "answer":
            answer, self._text = self._text, ""
        return [piece for piece in (Piece(reasoning, True), Piece(answer, False)) if piece.text]

    def _read_opening(self, is_last: bool) -> None:
        """Skip the opening mark, or find that there is none."""
        begin = self._text.lstrip()
        if not is_last and any(opening.startswith(begin) and opening != begin for opening in self._openings):
            return
        opening = next((each for each in self._openings if begin.startswith(each)), None)
        if opening is None:
            self._stage = "answer"
        else:
            self._text, self._stage = begin.removeprefix(opening), "reasoning"

    def _read_reasoning(self, is_last: bool) -> str:
        """Return the text up to the mark at its end, or up to white space or a part of the mark."""
        text, marks = self._text if self._has_reasoning else self._text.lstrip(), (*self._closings, *self._calls)
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        end, rest = len(text), None
        if places:
            self._stage = "space"
            end, mark = min(places)
            rest = text[end + len(mark) * (mark not in self._calls) :]
        elif not is_last:
            end -= max(overlap(text, mark) for mark in marks)
        found = text[:end].rstrip()
        self._text = text[len(found) :] if rest is None else rest
        self._has_reasoning |= bool(found)
        return found
