"""Reader of calls: text in pieces, and the calls and the content that are certain so far."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from jpaged.serving.conversation import Function
from jpaged.serving.tool_parsers.calls import Parsed, ToolCallDelta
from jpaged.serving.tool_parsers.pieces import NotACall, Pieces

MAX_DEPTH = 100  # lists and objects in each other


class CallReader(Pieces):
    """Text of one choice, with its calls and its content.

    Attributes:
        functions: the tools by name.
        content: content that has not been returned.
    """

    def __init__(self, functions: Collection[Function], new_id: Callable[[str, int], str]):
        super().__init__()
        self.functions = {function.name: function for function in functions}
        self.content = ""
        self.num_calls = 0
        self._depth = 0
        self._new_id = new_id
        self._calls: dict[int, ToolCallDelta] = {}

    @property
    def called(self) -> bool:
        """Whether a call was begun."""
        return self.num_calls > 0

    def begin(self, name: str) -> None:
        """Open a call and drop the text up to here. Raise NotACall if there is no such tool."""
        if name not in self.functions:
            raise NotACall
        self.take()
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._calls[index] = ToolCallDelta(index, self._new_id(name, index), name, place=len(self.content))

    def append(self, arguments: str) -> None:
        """Append JSON text to the arguments of the last call, and drop the text up to here."""
        self.take()
        if arguments:
            index = self.num_calls - 1
            call = self._calls.setdefault(index, ToolCallDelta(index, place=len(self.content)))
            call.arguments += arguments

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Read a list or an object. Raise NotACall if too many are around it."""
        if self._depth == MAX_DEPTH:
            raise NotACall
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def parsed(self) -> Parsed:
        """Return the events since the last ones."""
        parsed = Parsed(self.content, list(self._calls.values()))
        self.content, self._calls = "", {}
        return parsed
