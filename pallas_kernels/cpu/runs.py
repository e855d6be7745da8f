"""Runs of decode tokens: consecutive sequences whose contexts have the same blocks in a part."""

from typing import NamedTuple

from pallas_kernels.cpu.code import I64, Value, Variable
from pallas_kernels.cpu.contexts import PART, TABLES, ContextsFrame

WORDS = 4  # int64 numbers of a run


class Run(NamedTuple):
    """A part of the contexts of some sequences.

    Attributes:
        part: its number within a context.
        first, sequences: the first sequence, and their number.
        longest: the one with the longest context.
    """

    part: Value
    first: Value
    sequences: Value
    longest: Value


def load_run(frame: ContextsFrame, runs: Value, index: Value) -> Run:
    """Return a run of a list."""
    return Run(*(frame.code.load(runs, index * WORDS + i, I64) for i in range(WORDS)))


def write_runs(frame: ContextsFrame, most: int, runs: Value) -> Value:
    """Write the list of all runs [R, WORDS], and return their number.

    A run has at most `most` sequences. Its keys are those of the sequence with the longest context, of which the
    others see the first ones.
    """
    code, count, stop = frame.code, Variable(frame.code.value(0, I64)), Variable(frame.code.value(0, I64))
    with code.loop(0, frame.num_sequences) as s, code.when(frame.is_decode(s)):
        stop.set(code.maximum(stop.get(), frame.first_key(s) // PART + frame.num_parts(s)))
    with code.loop(0, stop.get()) as part:
        last = Variable(code.value(-2, I64))  # sequence of the present run
        with code.loop(0, frame.num_sequences) as s:
            first = frame.first_key(s) // PART
            has_part = code.both(first.compare("<=", part), (first + frame.num_parts(s)).compare(">", part))
            with code.when(code.both(frame.is_decode(s), has_part)):
                _add(frame, most, code.at(runs, count.get() * WORDS, I64), (part, s), last, count)
    return count.get()


def _add(
    frame: ContextsFrame, most: int, end: Value, part_of: tuple[Value, Value], last: Variable, count: Variable
) -> None:
    """Write the addition of a part of a sequence to the last run, or of a new run at the end of the list."""
    code, (part, s) = frame.code, part_of
    run = code.at(end, -WORDS, I64)
    joins = Variable(code.value(0, I64))
    if most > 1:
        with code.when(last.get().compare("==", s - 1)), code.when(code.load(run, 2, I64).compare("<", most)):
            joins.set(_shares(frame, part, s, code.load(run, 3, I64)))
    with code.when(joins.get().compare("==", 1)):
        code.store(code.load(run, 2, I64) + 1, run, 2)
        longest = code.load(run, 3, I64)
        code.store(code.select(frame.length(s).compare(">", frame.length(longest)), s, longest), run, 3)
    with code.when(joins.get().compare("==", 0)):
        for i, value in enumerate((part, s, s * 0 + 1, s)):
            code.store(value, end, i)
        count.set(count.get() + 1)
    last.set(s)


def _shares(frame: ContextsFrame, part: Value, s: Value, other: Value) -> Value:
    """Return whether two sequences have the same blocks in a part, as far as both have tokens."""
    code, size, width = frame.code, frame.spec.block_size, frame.call.size(TABLES, 1)
    tokens = code.minimum(code.minimum(frame.length(s), frame.length(other)), (part + 1) * PART)
    block, stop = Variable(part * PART // size), (tokens + (size - 1)) // size

    def goes_on() -> Value:
        at = block.get()
        inside = at.compare("<", stop)
        at = code.minimum(at, width - 1)
        same = frame.integer(TABLES, s * width + at).compare("==", frame.integer(TABLES, other * width + at))
        return code.both(inside, same)

    with code.as_long_as(goes_on):
        block.set(block.get() + 1)
    return code.cast("zext", block.get().compare(">=", stop), I64)
