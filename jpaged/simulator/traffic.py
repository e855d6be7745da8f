"""Traffic of a simulation: requests with their arrivals, by a schedule or by users that wait for their answers."""

import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from jpaged.bench.workload import Lengths

Segment = tuple[int, int]  # (number of a text, tokens of its beginning)
MAX_TEXT = 2**31 - 1


class Call(NamedTuple):
    """One request of a trace.

    Attributes:
        arrival: seconds after the beginning.
        prompt: texts that follow each other. Equal numbers stand for equal tokens.
        output: tokens of each output.
        answer: number of the output's text, with which a later prompt may contain it.
        width: number of outputs, or of beams.
        beam: whether a beam search finds the outputs.
        pin_s: seconds for which it pins its prefix.
    """

    arrival: float
    prompt: tuple[Segment, ...]
    output: int
    answer: int
    width: int = 1
    beam: bool = False
    pin_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(tokens for _, tokens in self.prompt)


def calls_of(
    lengths: Sequence[Lengths], arrivals: Iterable[float] | None = None, *, width: int = 1, beam: bool = False
) -> list[Call]:
    """Return requests of some lengths. After a shared prefix, no two requests have a text in common.

    Args:
        arrivals: seconds after the beginning, in ascending order; None: all at once.
    """
    num_prefixes = 1 + max((each.prefix for each in lengths), default=0)
    calls = []
    for i, (each, arrival) in enumerate(zip(lengths, arrivals or [0.0] * len(lengths), strict=True)):
        text, answer = num_prefixes + 2 * i, num_prefixes + 2 * i + 1
        prefix = ((each.prefix, each.prefix_tokens),) if each.prefix_tokens else ()
        calls.append(Call(arrival, (*prefix, (text, each.prompt)), each.output, answer, width, beam))
    return calls


def save_trace(calls: Iterable[Call], path: Path) -> None:
    """Write a trace as JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(call._asdict()) + "\n" for call in calls)


def load_trace(path: Path) -> list[Call]:
    """Read the trace of a file.

    Raises:
        ValueError: a line is no request; the message has its number.
    """
    calls = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            call = Call(**json.loads(line))
            call = call._replace(prompt=tuple((text, tokens) for text, tokens in call.prompt))
            _check(call)
            calls.append(call)
        except (TypeError, ValueError) as error:
            raise ValueError(f"trace: {path}, line {number} is no request: {error}") from error
    if not calls:
        raise ValueError(f"trace: {path} holds no request")
    return calls


def _check(call: Call) -> None:
    lengths = [("prompt", tokens) for _, tokens in call.prompt]
    for name, number in [("output", call.output), ("width", call.width), *lengths]:
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}: must be at least 1, not {number!r}")
    if not call.prompt:
        raise ValueError("prompt: must hold at least one token")
    for text in (call.answer, *(text for text, _ in call.prompt)):
        if type(text) is not int or not 0 <= text < MAX_TEXT:
            raise ValueError(f"text: must be a number below {MAX_TEXT}, not {text!r}")
    for name, seconds in (("arrival", call.arrival), ("pin_s", call.pin_s)):
        if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
            raise ValueError(f"{name}: must be at least 0 s, not {seconds!r}")
    if type(call.beam) is not bool:
        raise ValueError(f"beam: must be true or false, not {call.beam!r}")


class Arrivals(Protocol):
    """Source of requests."""

    def due(self, now: float) -> Iterable[Call]:
        """Yield the requests that have arrived until now, each once."""

    def next_arrival(self) -> float | None:
        """Return the time of the next request; None: it depends on the end of another one, or there is none."""

    def ended(self, call: Call, now: float) -> None:
        """Take the end of a request."""


class Schedule:
    """Requests that arrive at fixed times, whatever happens to the others (an open loop)."""

    def __init__(self, calls: Sequence[Call]):
        self._calls, self._next = sorted(calls, key=lambda call: call.arrival), 0

    def due(self, now: float) -> Iterator[Call]:
        """Yield the requests that have arrived until now, each once."""
        while self._next < len(self._calls) and self._calls[self._next].arrival <= now:
            self._next += 1
            yield self._calls[self._next - 1]

    def next_arrival(self) -> float | None:
        """Return the time of the next request; None after the last one."""
        return self._calls[self._next].arrival if self._next < len(self._calls) else None

    def ended(self, call: Call, now: float) -> None:
        """Do nothing: no arrival depends on it."""


class Users:
    """Users with one request each at a time (a closed loop): after its answer, a user thinks before the next one.

    Args:
        calls: requests in the order in which users take them; their arrivals do not matter.
        think_s: seconds from an answer to the same user's next request.
        first: times of the users' first requests, in ascending order. None: they come one after another within
            `think_s`, or within `RAMP_S`.

    Attributes:
        sent: the requests so far, in the order of their arrivals.
        exhausted: whether a user has found no further request.
    """

    RAMP_S = 1.0

    def __init__(self, calls: Iterable[Call], users: int, think_s: float = 0.0, first: Sequence[float] | None = None):
        if users < 1 or not 0 <= think_s < math.inf:
            raise ValueError(f"users: at least one, with at least 0 s to think, not {users} with {think_s:g} s")
        self._calls, self._think_s, self.exhausted = iter(calls), think_s, False
        ramp = max(think_s, self.RAMP_S)
        self._free = [i * ramp / users for i in range(users)] if first is None else list(first)
        self.sent: list[Call] = []

    def due(self, now: float) -> Iterator[Call]:
        """Yield the requests that have arrived until now, each once."""
        while self._free and self._free[0] <= now:
            call = next(self._calls, None)
            if call is None:
                self.exhausted = True
                self._free.clear()
                return
            self.sent.append(call._replace(arrival=heapq.heappop(self._free)))
            yield self.sent[-1]

    def next_arrival(self) -> float | None:
        """Return the time of the next request; None while all users wait for answers, or after the last request."""
        return self._free[0] if self._free else None

    def ended(self, call: Call, now: float) -> None:
        """Let a user think, and then send the next request."""
        if not self.exhausted:
            heapq.heappush(self._free, now + self._think_s)
