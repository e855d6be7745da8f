"""Reasoning of gpt-oss: messages in the channel "analysis" of OpenAI's harmony form.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re

from jpaged.serving.reasoning_parsers.parser import Piece
from jpaged.serving.tool_parsers.pieces import overlap

MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
NEXT = ("<|start|>", "<|channel|>")
ROLES = ("assistant", "user")  # recipients that are no tools
MAX_HEADER = 256  # characters
HEADER = re.compile(
    r"\s*(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>[\w.-]+))?\s*<\|channel\|>"
    r"(?P<channel>analysis|commentary|final)\s*(?:to=(?P<recipient>[\w.-]+))?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*"
)
# Beginnings of headers. The prompt has "<|start|>assistant" in front of the first one.
BEGINNINGS = (*NEXT, "assistant", "to=")
CALL = "<|channel|>commentary to={} <|constrain|>json<|message|>"
CUT_OFF = tuple(
    start + channel
    for start in ("", "<|start|>assistant")
    for channel in ("<|channel|>analysis", "<|channel|>commentary to=", "<|channel|>final")
)


class HarmonyParser:
    """Streaming parser of messages. Those in "analysis" are reasoning; the texts of the others are the answer.

    A message to a recipient, in any channel, is a call: it stays in the answer with its header, and with `{}` if it is
    empty. Two other messages of a kind have a newline between them. Text outside of messages is answer.
    """

    def __init__(self) -> None:
        self._text = ""  # received text that is not part of a result yet
        self._pieces: list[Piece] = []
        self._is_header = True
        self._is_first = True
        self._in_message = self.is_reasoning = False
        self._has = {False: False, True: False}  # earlier messages that are answer, and that are reasoning
        self._separator = ""
        self._is_outside = False  # of messages
        self._is_call = self._is_empty = False  # the message

    def feed(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return the parts that are certain now, in the order of the output."""
        self._text += text
        while self._read_header(is_last) if self._is_header else self._read_body(is_last):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_header(self, is_last: bool) -> bool:
        """Read the header of a message. Return whether more can be read."""
        text, begin = self._text, self._text.lstrip()
        place = text.find(MESSAGE)
        may_be = any(begin.startswith(each) or each.startswith(begin) for each in BEGINNINGS)
        if may_be and place < 0 and len(text) < MAX_HEADER + len(MESSAGE) and not is_last:
            return False
        match = HEADER.fullmatch(text, 0, place) if 0 <= place <= MAX_HEADER else None
        if match is None:
            if is_last and place < 0 and (not begin or any(each.startswith(begin) for each in CUT_OFF)):
                self._text = ""
                return False
            self._begin(is_reasoning=False)
            if self._is_outside:
                self._separator = ""
            self._is_outside = True
            self._emit(text[:1])
            self._text = text[1:]
            return bool(self._text)
        self._is_outside = False
        self._text = text[place + len(MESSAGE) :]
        recipient = match["to"] or match["recipient"]
        if recipient is None or recipient in ROLES:
            self._begin(is_reasoning=match["channel"] == "analysis")
        else:
            self._begin(is_reasoning=False)
            self._separator = ""
            self._is_call = True
            self._emit(CALL.format(recipient))
            self._is_empty = True
        return True

    def _begin(self, *, is_reasoning: bool) -> None:
        self._is_header, self.is_reasoning = False, is_reasoning
        self._is_call = self._is_empty = False
        self._separator = "\n" if self._has[is_reasoning] else ""

    def _read_body(self, is_last: bool) -> bool:
        """Read the text of a message. Return whether more can be read."""
        text, marks = self._text, (*ENDS, *NEXT)
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        if not places:
            end = len(text) if is_last else len(text) - max(overlap(text, mark) for mark in marks)
            self._emit(text[:end])
            self._text = text[end:]
            return False
        place, mark = min(places)
        self._emit(text[:place])
        if self._is_empty:
            self._emit("{}")
        self._text = text[place + len(mark) * (mark in ENDS) :]
        self._is_header, self.is_reasoning = True, False
        return bool(self._text)

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(Piece(self._separator + text, self.is_reasoning))
            self._separator, self._is_empty = "", self._is_empty and text.isspace()
            if not self._is_call:
                self._has[self.is_reasoning] = True
