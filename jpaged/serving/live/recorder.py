"""Numbers and events of the engine, for viewers."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import StepOutput

MAX_NUMBER = 2**16 - 1  # requests are numbered from 1 to this, then from 1 again
MAX_EVENTS = 32  # the latest are kept
MAX_COPIES = 8  # that one step tells of
MAX_KNOWN = 1024  # requests whose numbers may be asked for


@dataclass(slots=True)
class _Course:
    """Progress of a request: its arrival, the meaning of its next step, and whether it has output."""

    number: int
    arrival: float
    next_step: str | None = "admit"  # or "resume", after a preemption
    begun: bool = False


class Recorder:
    """Recorder of totals and the latest events.

    It is an observer of the engine, used only on the engine's thread except for `known`. Requests have numbers in the
    order of their arrival, so neither their ids nor their texts leave it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.tokens = 0  # of output
        self.timed_tokens = 0  # those that came in a step right after another one
        self.token_seconds = 0.0  # total seconds of these
        self.first_tokens = 0
        self.first_token_seconds = 0.0  # from the arrivals of their requests, in all
        self.copies = 0
        self._clock = clock
        self._courses: dict[Request, _Course] = {}
        self._expected: dict[Request, _Course] = {}  # those of whom their next step has something to tell
        self._known: dict[str, int] = {}
        self._arrivals, self._serials = itertools.count(), itertools.count(1)
        self._last_step: float | None = None

    def number(self, request: Request) -> int:
        """Return the number of a live request; a request that was not seen on arrival gets one now."""
        return (self._courses.get(request) or self._count(request)).number

    def known(self, request_id: str) -> int | None:
        """Return the number of a request that runs or ran recently, for callers that know its id."""
        return self._known.get(request_id)

    def added(self, request: Request) -> None:
        """Give an accepted request a number."""
        self._count(request)

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """Record the tokens and events of a step."""
        now, committed = self._clock(), output.committed
        made = len(output.deltas)
        if output.ended:  # some of which may give all their tokens at once
            made = sum(len(delta.samples) for delta in output.deltas)
        self.tokens += made
        if self._last_step is not None:
            self.timed_tokens += made
            self.token_seconds += made * (now - self._last_step)
        self._last_step = now if scheduler.has_work else None
        for request, swapped in committed.preempted:
            if course := self._courses.get(request):
                self._tell("preempt", number=course.number, swapped=swapped)
                course.next_step = "resume"
                self._expected[request] = course
        for request in committed.resumed:
            if course := self._courses.get(request):
                self._tell("resume", number=course.number, swapped=True)
                course.next_step = None
        copies = output.plan.block_copies if output.plan is not None else ()
        self.copies += len(copies)
        for source, destination in copies[:MAX_COPIES]:
            shared = scheduler.pool.ref_count(source) > 0
            self._tell("copy", source=source, destination=destination, shared=shared)
        if self._expected:  # in most steps of a steady load it is empty
            for request in committed.served:
                if course := self._expected.get(request):
                    self._advanced(request, course, now)

    def ended(self, request: Request) -> None:
        """Record the end of a request."""
        self._expected.pop(request, None)
        if course := self._courses.pop(request, None):
            tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
            self._tell("end", number=course.number, tokens=tokens, reason=request.sequences[0].finish_reason)

    def _count(self, request: Request) -> _Course:
        course = _Course(1 + next(self._arrivals) % MAX_NUMBER, self._clock())
        self._courses[request] = self._expected[request] = course
        self._known[request.request_id] = course.number
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return course

    def _advanced(self, request: Request, course: _Course, now: float) -> None:
        first, number = request.sequences[0], course.number
        if course.next_step == "resume":
            self._tell("resume", number=number, swapped=False)
        elif course.next_step == "admit" and first.num_cached_tokens:
            self._tell("hit", number=number, tokens=first.num_cached_tokens, prompt=first.num_prompt_tokens)
        course.next_step = None
        if not course.begun and first.num_output_tokens:
            course.begun = True
            self.first_tokens += 1
            self.first_token_seconds += now - course.arrival
            if len(request.sequences) > 1:
                self._tell("fork", number=number, branches=len(request.sequences))
        if course.begun:
            del self._expected[request]

    def _tell(self, kind: str, **facts: Any) -> None:
        self.events.append({"serial": next(self._serials), "kind": kind, **facts})
