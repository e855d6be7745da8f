"""Numbers and events of the engine, for viewers."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import StepOutput
from jpaged.serving.codec import JsonObject

MAX_NUMBER = 2**16 - 1  # requests are numbered from 1 to this, then from 1 again
MAX_EVENTS = 32  # the latest are kept
MAX_COPIES = 8  # copies of one step that become events
MAX_KNOWN = 1024  # requests whose numbers may be asked for


class Recorder:
    """Recorder of totals and the latest events.

    It is an observer of the engine, used only on the engine's thread except for `known`. Requests have numbers in the
    order of their arrival, so neither their ids nor their texts leave it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.events: deque[JsonObject] = deque(maxlen=MAX_EVENTS)
        self.tokens = 0  # output tokens
        self.timed_tokens = 0  # output tokens of steps that directly follow another step
        self.token_seconds = 0.0  # for each timed token, the seconds of its step
        self.first_tokens = 0
        self.first_token_seconds = 0.0  # sum of the seconds from arrivals to first tokens
        self.copies = 0
        self._clock = clock
        self._numbers: dict[Request, int] = {}
        self._expected: dict[Request, str] = {}  # requests whose next step is an event: "admit", or "resume"
        self._known: dict[str, int] = {}
        self._arrivals, self._serials = itertools.count(), itertools.count(1)
        self._last_step: float | None = None

    def number(self, request: Request) -> int:
        """Return the number of a live request; a request that was not seen on arrival gets one now."""
        if request not in self._numbers:
            self.added(request)
        return self._numbers[request]

    def known(self, request_id: str) -> int | None:
        """Return the number of a request that runs or ran recently, for callers that know its id."""
        return self._known.get(request_id)

    def added(self, request: Request) -> None:
        """Give an accepted request a number."""
        number = 1 + next(self._arrivals) % MAX_NUMBER
        self._numbers[request], self._expected[request] = number, "admit"
        self._known[request.request_id] = number
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """Record the tokens and events of a step."""
        now, committed = self._clock(), output.committed
        made = len(output.deltas)
        if output.ended:  # a request that ends may deliver all its tokens at once
            made = sum(len(delta.samples) for delta in output.deltas)
        self.tokens += made
        if self._last_step is not None:
            self.timed_tokens += made
            self.token_seconds += made * (now - self._last_step)
        self._last_step = now if scheduler.has_work else None
        for request, swapped in committed.preempted:
            if number := self._numbers.get(request):
                self._tell("preempt", number=number, swapped=swapped)
                self._expected[request] = "resume"
        for request in committed.resumed:
            if number := self._numbers.get(request):
                self._tell("resume", number=number, swapped=True)
                self._expected.pop(request, None)
        copies = output.plan.block_copies if output.plan is not None else ()
        self.copies += len(copies)
        for source, destination in copies[:MAX_COPIES]:
            shared = scheduler.pool.ref_count(source) > 0
            self._tell("copy", source=source, destination=destination, shared=shared)
        if self._expected:  # it is empty in most steps
            for request in committed.served:
                if event := self._expected.pop(request, None):
                    self._started(request, event)
        for request, _, gap in output.progress:
            if gap is None and (number := self._numbers.get(request)):
                self.first_tokens += 1
                self.first_token_seconds += request.metrics.first_token_ts - request.metrics.queued_ts
                if len(request.sequences) > 1:
                    self._tell("fork", number=number, branches=len(request.sequences))

    def ended(self, request: Request) -> None:
        """Record the end of a request."""
        self._expected.pop(request, None)
        if number := self._numbers.pop(request, None):
            tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
            self._tell("end", number=number, tokens=tokens, reason=request.sequences[0].finish_reason)

    def _started(self, request: Request, event: str) -> None:
        """Record the first step of a request after its admission or its preemption."""
        first, number = request.sequences[0], self._numbers[request]
        if event == "resume":
            self._tell("resume", number=number, swapped=False)
        elif first.num_cached_tokens:
            self._tell("hit", number=number, tokens=first.num_cached_tokens, prompt=first.num_prompt_tokens)

    def _tell(self, kind: str, **facts: Any) -> None:
        self.events.append({"serial": next(self._serials), "kind": kind, **facts})
