"""Text that arrives in pieces, read by generators that yield wherever they need more of it."""

import re
from collections.abc import Callable, Generator, Iterable, Sequence

SPACE = " \t\r\n"
# Many characters at once: a step of a generator takes a microsecond.
PLAIN = re.compile(r'[^"\\]+')  # inside a string
INSIDE = re.compile(r'[^"\[\]{}<]+')  # inside an array or an object, between strings


class NotACall(Exception):
    """Signal that text that looked like a call is not one, or stops being one."""


class End(Exception):
    """Signal that no more text will follow."""


# Generator that reads the text. It yields wherever it needs more text than has arrived.
type Reading[T] = Generator[None, None, T]


class Pieces:
    """Received text, and a place in it. Results of its methods do not depend on the pieces.

    Attributes:
        text: received text that has not been taken.
        at: number of its characters that have been read.
        ended: no more text will follow.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def take(self) -> str:
        """Remove the text that has been read."""
        text, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return text

    def more(self) -> Reading[None]:
        """Wait for text. Raise End if none will follow."""
        if self.ended:
            raise End
        yield

    def peek(self) -> Reading[str]:
        """Return the next character."""
        while self.at == len(self.text):
            yield from self.more()
        return self.text[self.at]

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Skip and return the next characters that have arrived, as far as a pattern matches."""
        match = pattern.match(self.text, self.at)
        assert match is not None, (pattern, self.text[self.at :][:1])
        self.at = match.end()
        return match[0]

    def expect(self, text: str) -> Reading[None]:
        """Skip a text. Raise NotACall where another one comes."""
        for character in text:
            if (yield from self.peek()) != character:
                raise NotACall
            self.at += 1

    def space(self, characters: str = SPACE) -> Reading[None]:
        """Skip white space."""
        while (yield from self.peek()) in characters:
            self.at += 1

    def word(self, characters: frozenset[str]) -> Reading[str]:
        """Return the next characters as far as they are some of those given."""
        start = self.at
        while (yield from self.peek()) in characters:
            self.at += 1
        return self.text[start : self.at]

    def tag(self, tag: str, space: str = SPACE) -> Reading[bool]:
        """Skip white space and a tag; skip nothing if there is none. The end of the text may cut it off."""
        start = self.at
        if not tag:
            return False
        try:
            yield from self.space(space)
            yield from self.expect(tag)
        except NotACall:
            self.at = start
            return False
        except End:
            return False
        return True

    def choose(self, marks: Iterable[str]) -> Reading[str]:
        """Skip one of some marks and return it. Raise NotACall if none of them comes."""
        start, left = self.at, list(marks)
        while left:
            read = self.text[start : self.at]
            if read in left:
                return read
            character = yield from self.peek()
            left = [mark for mark in left if mark.startswith(read + character)]
            self.at += 1
        self.at = start
        raise NotACall

    def items(self, read: Callable[[], Reading[None]]) -> Reading[None]:
        """Read a list in brackets that has items."""
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from read()
            yield from self.space()
            if (yield from self.peek()) == "]":
                self.at += 1
                return
            yield from self.expect(",")

    def text_of(self, reading: Reading[None]) -> Reading[str]:
        """Return the text that some reading reads."""
        start = self.at
        yield from reading
        return self.text[start : self.at]

    def until(self, mark: str, pass_on: Callable[[str], None], before: Sequence[str] = ()) -> Reading[None]:
        """Take the text up to a mark, which is skipped, and pass it on as soon as it is certain.

        Args:
            before: further marks at which the text ends; they are not skipped.
        """
        self.take()
        marks = (mark, *before)
        while not (found := [(place, each) for each in marks if (place := self.text.find(each)) >= 0]):
            begun = max(overlap(self.text, each) for each in marks)
            self.at = len(self.text) if self.ended else len(self.text) - begun
            pass_on(self.take())
            yield from self.more()
        self.at, ending = min(found)
        pass_on(self.take())
        if ending == mark:
            self.at = len(mark)
            self.take()

    def value(self) -> Reading[None]:
        """Read a JSON value. Inside an array or an object, only strings and depth matter.

        Raises:
            NotACall: a mark comes, which is no part of a value.
        """
        depth = 0
        while True:
            character = yield from self.peek()
            if character == '"':
                yield from self.string()
            elif character in "{[":
                self.at += 1
                depth += 1
            elif character in "}]" and depth:
                self.at += 1
                depth -= 1
            elif character == "<" and depth:
                raise NotACall
            elif depth:
                self.skip(INSIDE)
                continue
            else:  # a number, null, true, false, or invalid text in their place
                while (yield from self.peek()) not in ",:]}" + SPACE:
                    self.at += 1
            if not depth:
                return

    def string(self) -> Reading[None]:
        """Read a JSON string."""
        yield from self.expect('"')
        while (character := (yield from self.peek())) != '"':
            if character == "\\":
                self.at += 1
                yield from self.peek()
                self.at += 1
            else:
                self.skip(PLAIN)
        self.at += 1


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text with which a mark begins, but not the whole mark."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return len(text) - start if start >= 0 else 0
