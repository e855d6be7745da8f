"""Answers that consist of parts: reasoning, texts and calls in the order of the output."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jpaged.core.request import FinishReason, OutputDelta
from jpaged.serving.answer import ChatAnswer, Choice
from jpaged.serving.codec import JsonObject
from jpaged.serving.tool_parsers.calls import Parsed, ToolCallDelta


@dataclass
class Part:
    """Text, reasoning, or call of a tool.

    Attributes:
        text: the text, or the arguments of the call.
        is_reasoning: the text is reasoning.
        call_id: id of the call; None for a text.
        name: name of the tool.
        cut_off: the output ended within the part, at a limit.
        logprobs: those of the tokens of a text, if requested.
        new_logprobs: those of its last addition.
    """

    text: str = ""
    is_reasoning: bool = False
    call_id: str | None = None
    name: str = ""
    cut_off: bool = False
    logprobs: list[JsonObject] = field(default_factory=list)
    new_logprobs: list[JsonObject] = field(default_factory=list)


class PartsAnswer(ChatAnswer):
    """Answer with one choice. Its whole body has the parts that the events of a stream add up to.

    Subclasses return the events of a part.
    """

    needs_part = False  # an empty output has an empty text

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.parts: list[Part] = []
        self._events: list[JsonObject] = []

    @property
    def ending(self) -> tuple[FinishReason | str | None, int | str | None]:
        """Reason for the end of the answer, and its stop reason."""
        choice = self._choices[0]
        return choice.finish_reason, choice.stop_reason

    def events(self, index: int) -> Iterable[JsonObject]:
        """Return the events since the last ones."""
        events, self._events = self._events, []
        return events

    def _add_reasoning(self, choice: Choice, text: str) -> None:
        self._add_piece(choice, text, is_reasoning=True)

    def _add_text(self, choice: Choice, delta: OutputDelta) -> None:
        parser = choice.parser
        parsed = [parser.feed(delta.text) if parser else Parsed(delta.text, [])]
        if parser and delta.finish_reason:
            parsed.append(parser.finish())
        for piece in chain.from_iterable(each.in_order() for each in parsed):
            self._add_piece(choice, piece)
        if delta.finish_reason:
            if self.needs_part and all(part.is_reasoning for part in self.parts):
                self._end_part()
                self._begin(Part())
            self._end_part(cut_off=delta.finish_reason != FinishReason.STOP)

    def _add_piece(self, choice: Choice, piece: str | ToolCallDelta, *, is_reasoning: bool = False) -> None:
        """Add a piece of the output to its part, with the logprobs since the last piece if it is text."""
        logprobs: list[JsonObject] = []
        if piece and (found := self._token_logprobs(choice)):
            logprobs, choice.tokens = found["content"], []
        if isinstance(piece, ToolCallDelta):
            if piece.id is not None:
                self._end_part()
                self._begin(Part(call_id=piece.id, name=piece.name or ""))
            text = piece.arguments
        else:
            last = self.parts[-1] if self.parts else None
            if piece and (last is None or last.call_id is not None or last.is_reasoning != is_reasoning):
                self._end_part()
                self._begin(Part(is_reasoning=is_reasoning))
            text = piece
        if text:
            part = self.parts[-1]
            part.text += text
            if part.call_id is None and not is_reasoning:
                part.new_logprobs = logprobs
                part.logprobs += logprobs
            self._events += self._grown(part, text)

    def _begin(self, part: Part) -> None:
        self.parts.append(part)
        self._events += self._begun(part)

    def _end_part(self, *, cut_off: bool = False) -> None:
        """End the last part."""
        if self.parts:
            self.parts[-1].cut_off = cut_off
            self._events += self._ended(self.parts[-1])

    def _begun(self, part: Part) -> Iterable[JsonObject]:
        """Return the events of a new part, which is empty."""
        raise NotImplementedError

    def _grown(self, part: Part, text: str) -> Iterable[JsonObject]:
        """Return the events of an addition to a part."""
        raise NotImplementedError

    def _ended(self, part: Part) -> Iterable[JsonObject]:
        """Return the events of the end of a part."""
        raise NotImplementedError
