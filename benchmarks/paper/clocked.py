"""The real engine behind the interface of the simulator's, on the clock on the wall."""

import time
from collections.abc import Callable, Iterable, Sequence

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import StepPlan
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine, MakeMasks, Pending, Runner
from jpaged.simulator.cost import StepLoad
from jpaged.simulator.engine import Served, drive_steps
from jpaged.simulator.traffic import Call, Schedule

OnStep = Callable[[StepLoad, float], object]
OnPlan = Callable[[Scheduler], object]


class RealEngine:
    """An engine without a tokenizer. A text of a trace becomes random tokens, the same ones for the same number.

    Args:
        on_step: called with the work and the seconds of each step, since the end of the one before or the last wait.
        on_plan: called during each step, with its plan scheduled and not committed.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, on_step: OnStep | None = None, on_plan: OnPlan | None = None
    ):
        self.scheduler, self._on_step, self._on_plan = scheduler, on_step, on_plan
        self._start, self._paused_at = time.perf_counter(), 0.0
        self._engine = Engine(scheduler, _Watched(runner, self), clock=lambda: self.now)
        self._last_plan: StepPlan | None = None
        self._since = 0.0

    @property
    def now(self) -> float:
        return (self._paused_at or time.perf_counter()) - self._start

    def pause(self) -> None:
        """Stop the clock."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Let the clock of a paused engine go on."""
        self._start += time.perf_counter() - self._paused_at
        self._paused_at = 0.0

    def add(self, request_id: str, call: Call, params: SamplingParams | BeamSearchParams) -> None:
        vocab = self.scheduler.vocab_size
        prompt = [token for text, tokens in call.prompt for token in text_tokens(text, tokens, vocab)]
        self._engine.add(request_id, prompt, params)

    def step(self) -> Iterable[Request]:
        ended = self._engine.step().ended
        if self._on_step and self._last_plan is not None:
            seconds = self.now - self._since
            self._on_step(StepLoad.of(self._last_plan), seconds)
            self._since = self.now
        return ended

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - self.now))
        self._since = self.now


class _Watched:
    """A runner that tells of its plans."""

    def __init__(self, runner: Runner, engine: RealEngine):
        self._runner, self._engine = runner, engine

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> Pending:
        self._engine._last_plan = plan
        if self._engine._on_plan:
            self._engine._on_plan(self._engine.scheduler)
        return self._runner.dispatch(plan, make_masks)

    def recover(self) -> None:
        self._runner.recover()


def take_turns(engines: Sequence[RealEngine], traces: Sequence[Sequence[Call]]) -> list[list[Served]]:
    """Run a trace on each engine, one step of each engine after the other, and return their served calls.

    The clock of an engine stands while another one works. So the speed of a machine, which drifts, is the same for all.
    """
    found: list[list[Served]] = [[] for _ in engines]
    left = []
    for engine, calls, served in zip(engines, traces, found, strict=True):
        engine.pause()
        left.append((engine, drive_steps(engine, Schedule(calls)), served))
    while left:
        for each in tuple(left):
            engine, steps, served = each
            engine.resume()
            if (ended := next(steps, None)) is None:
                left.remove(each)
            else:
                served += ended
            engine.pause()
    return found


def text_tokens(text: int, count: int, vocab_size: int) -> list[int]:
    """The first tokens of a text."""
    return [2 + (text * 7919 + i * i * 104_729) % (vocab_size - 2) for i in range(count)]
