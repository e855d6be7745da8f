"""The chains of sequences of a call, as its units see them."""

from collections.abc import Callable

from pallas_kernels.cpu.code import I8, I32, I64, Value, Variable
from pallas_kernels.cpu.ffi import CallFrame
from pallas_kernels.options import CONTINUES


class ChainsFrame:
    """Writer of the code that reads the chains of a call.

    Tokens and pages are clamped: no value reads or writes outside the arrays.

    Args:
        tokens: an argument with the tokens as its first axis.
        states: the argument with the pages; chains are the three arguments after it.
    """

    def __init__(self, call: CallFrame, tokens: int, states: int):
        self.call, self.code = call, call.code
        self._starts, self._reads, self._writes = range(states + 1, states + 4)
        self.num_tokens, self.num_pages = call.size(tokens, 0), call.size(states, 0)
        self.num_sequences = call.size(self._reads, 0)

    def _integer(self, argument: int, index: Value) -> Value:
        return self.code.cast("sext", self.code.load(self.call.argument(argument), index, I32), I64)

    def first(self, s: Value) -> Value:
        """Return the first token of a sequence; of number S, the first token that no sequence owns."""
        token = self._integer(self._starts, s)
        return self.code.maximum(self.code.minimum(token, self.num_tokens), token * 0)

    def is_head(self, s: Value) -> Value:
        """Return whether a sequence is the first one of a chain and has tokens."""
        code = self.code
        continues = code.both(self._integer(self._reads, s).compare("==", CONTINUES), s.compare(">", 0))
        return code.both(code.invert(continues), self.first(s).compare("<", self.first(s + 1)))

    def read_page(self, s: Value, zero: Callable[[], None], load: Callable[[Value], None]) -> None:
        """Write the code that starts a chain: `zero`, or `load` of a page."""
        page = self._integer(self._reads, s)
        with self.code.when(page.compare("<", 0)):
            zero()
        with self.code.when(page.compare(">=", 0)):
            load(self.code.minimum(page, self.num_pages - 1))

    def walk(self, head: Value, add: Callable[[Value, Value], None], write: Callable[[Value], None]) -> None:
        """Write the loop over a chain.

        Args:
            add: writes the code for the tokens of a sequence, from the first one to below the end.
            write: writes the code for the page of a sequence.
        """
        code = self.code
        s = Variable(head)
        with code.as_long_as(lambda: s.get().compare(">=", 0)):
            begin, stop = self.first(s.get()), self.first(s.get() + 1)
            add(begin, stop)
            page = self._integer(self._writes, s.get())
            with (
                code.when(begin.compare("<", stop)),
                code.when(page.compare(">=", 0)),
                code.when(page.compare("<", self.num_pages)),
            ):
                write(page)
            s.set(s.get() + 1)
            is_end = s.get().compare(">=", self.num_sequences)
            # The number after the last sequence is no index.
            following = code.minimum(s.get(), self.num_sequences - 1)
            continues = code.both(code.invert(is_end), self._integer(self._reads, following).compare("==", CONTINUES))
            s.set(code.select(continues, s.get(), head * 0 - 1))

    def clear(self, array: Value, row_bytes: int) -> None:
        """Write zeros into the rows of a result that no sequence owns."""
        code, first = self.code, self.first(self.num_sequences)
        with code.loop(first * row_bytes, self.num_tokens * row_bytes) as i:
            code.store(code.value(0, I8), array, i)
