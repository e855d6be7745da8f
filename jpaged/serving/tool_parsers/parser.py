"""Streaming parser of tool calls: one engine for the forms of all models."""

from collections.abc import Callable, Collection

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.calls import Parsed
from jpaged.serving.tool_parsers.form import Form
from jpaged.serving.tool_parsers.pieces import SPACE, End, NotACall, Reading, overlap
from jpaged.serving.tool_parsers.reader import CallReader


class ToolParser(CallReader):
    """Streaming parser of the text of one choice into content and calls. Its result does not depend on the pieces.

    A name is returned only when it is complete, one of the tools', and followed by the arguments. Text that is not a
    call after all is content. A call that breaks off after its beginning remains incomplete, and the text from there
    on is content. Marks may be missing at the end of a call. White space around calls belongs to them.

    Args:
        form: the form of calls.
        functions: the tools; a call of any other name is content.
        new_id: return a new id for a call from its name and its index.
        parallel: whether there may be more than one call; if not, the calls after the first are dropped.
        at_beginning: an output that does not begin with a call has none.
    """

    def __init__(
        self, form: Form, functions: Collection[Function], new_id: Callable[[str, int], str], parallel: bool = True,
        at_beginning: bool = False,
    ):  # fmt: skip
        super().__init__(functions, new_id)
        self._form = form
        self._parallel = parallel
        self._at_beginning = at_beginning or not form.starts
        self._reading = self._read_all()

    def feed(self, text: str) -> Parsed:
        """Parse more text, and return the events that are certain now."""
        self.text += text
        next(self._reading)
        return self._parsed()

    def finish(self) -> Parsed:
        """Return the text that was held back. No text may follow."""
        self.ended = True
        next(self._reading, None)
        return self._parsed()

    def _parsed(self) -> Parsed:
        content, calls = self.parsed()
        return Parsed(content, [call for call in calls if self._parallel or call.index == 0])

    def _read_all(self) -> Reading[None]:
        try:
            if not self._at_beginning:
                yield from self._read_anywhere()
            if not self._form.starts:
                yield from self._read_calls()
            elif (yield from self._begins_with_call()):
                yield from self._read_anywhere()
            while True:
                self.content += self.text
                self.text, self.at = "", 0
                yield from self.more()
        except End:
            if not (self.called and self.text.isspace()):
                self.content += self.text

    def _read_anywhere(self) -> Reading[None]:
        """Read calls behind their marks, and content between them. It ends by End."""
        while True:
            mark = yield from self._up_to_start()
            end = self.at
            if mark == self._form.opening:
                self.at -= len(mark)
            else:  # some models repeat it
                while (yield from self.tag(mark)):
                    pass
            if not (yield from self._run()):
                self.at = end
                self.content += self.take()

    def _begins_with_call(self) -> Reading[bool]:
        """Return whether the text begins with one of the marks; skip nothing."""
        try:
            yield from self.space()
            yield from self.choose(self._form.starts)
        except (NotACall, End):
            self.at = 0
            return False
        self.at = 0
        return True

    def _read_calls(self) -> Reading[None]:
        """Read calls without marks of their own, up to the first other text."""
        while True:
            if self.called:
                yield from self._skip_separators()
            yield from self.tag(self._form.prefix)
            if not (yield from self._run()):
                self.at = 0
                return

    def _skip_separators(self) -> Reading[None]:
        try:
            yield from self.space(SPACE + self._form.separator)
        except End:
            self.take()
            raise

    def _up_to_start(self) -> Reading[str]:
        """Emit content up to the next mark and the white space in front of it; read both, and return the mark."""
        starts = self._form.starts
        while not (found := [(place, -len(mark), mark) for mark in starts if (place := self.text.find(mark)) >= 0]):
            self.at = len(self.text)
            if not self.ended or (self.called and self.text.isspace()):  # the last characters may belong to a call
                begun = max(overlap(self.text, mark) for mark in starts)
                self.at = len(self.text[: len(self.text) - begun].rstrip())
            self.content += self.take()
            yield from self.more()
        start, _, mark = min(found)
        self.at = len(self.text[:start].rstrip())
        spaces = start - self.at
        self.content += self.take()
        self.at = spaces + len(mark)
        return mark

    def _run(self) -> Reading[bool]:
        """Read the calls of one run and their marks. If there is none, read nothing and return False."""
        form, before = self._form, self.num_calls
        while True:
            place, known = self.at, self.num_calls
            try:
                yield from self.space()
                yield from self.choose(form.openings)
                yield from form.body.read(self)
            except (NotACall, End):
                if self.num_calls == known:
                    self.at = place
                    break
                self.at = 0
                closed = yield from self.tag(form.closing.strip())
                self.take()
                if closed and form.repeats:
                    continue
                return True
            yield from self.tag(form.closing.strip())
            self.take()
            if not form.repeats:
                return True
        if self.num_calls == before:
            return False
        yield from self.tag(form.end.strip())
        self.take()
        return True
