"""Reasoning that models write between marks in front of their answers."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Marks(NamedTuple):
    """Texts around the reasoning of a family of models."""

    opening: str
    closing: str


MARKS: Mapping[str, Marks] = {
    "deepseek_r1": Marks("<think>", "</think>"),
    "qwen3": Marks("<think>", "</think>"),
}


def marks_of(name: str, templates: Iterable[str]) -> Marks | None:
    """Return the marks of a model's reasoning; None if it is not told from the answer.

    Args:
        name: one of MARKS, "none", or "auto": the first whose closing mark is in a chat template.
        templates: chat templates of the model.
    """
    if name == "auto":
        texts = list(templates)
        return next((marks for marks in MARKS.values() if any(marks.closing in text for text in texts)), None)
    return MARKS.get(name)


class ReasoningParser:
    """Streaming parser of one output into reasoning and answer. Its result does not depend on the pieces.

    White space around the reasoning belongs to neither. An output without an opening mark is an answer. Reasoning that
    breaks off has no answer.

    Args:
        is_open: the prompt ends with the opening mark.
    """

    def __init__(self, marks: Marks, is_open: bool):
        self._marks = marks
        self._text = ""  # received text that is not part of a result yet
        self._stage = "reasoning" if is_open else "opening"
        self._has_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the reasoning has begun and has not ended."""
        return self._stage == "reasoning"

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
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
        return reasoning, answer

    def _read_opening(self, is_last: bool) -> None:
        """Skip the opening mark, or find that there is none."""
        begin, opening = self._text.lstrip(), self._marks.opening
        if begin.startswith(opening):
            self._text, self._stage = begin.removeprefix(opening), "reasoning"
        elif is_last or not opening.startswith(begin):
            self._stage = "answer"

    def _read_reasoning(self, is_last: bool) -> str:
        """Return the text up to the closing mark, or up to white space or a part of the mark at its end."""
        text, closing = self._text if self._has_reasoning else self._text.lstrip(), self._marks.closing
        found, after, rest = text.partition(closing)
        if after:
            self._stage = "space"
        elif not is_last:
            found = text[: len(text) - _overlap(text, closing)]
        found = found.rstrip()
        self._text = rest if after else text[len(found) :]
        self._has_reasoning |= bool(found)
        return found


def _overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text with which a mark begins."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
