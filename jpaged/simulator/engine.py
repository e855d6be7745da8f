"""Engine on a virtual clock: the real scheduler and allocator, and a cost model in place of the device."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Sample, StepPlan, StepResult
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.simulator.cost import StepCost, StepLoad
from jpaged.simulator.traffic import MAX_TEXT, Arrivals, Call

VOCAB_SIZE = MAX_TEXT  # the token of a text is its number
MAX_BRANCHES = 2**16


class Served(NamedTuple):
    """Request that has ended.

    Attributes:
        first, end: seconds from the beginning to its first and its last token.
        number: its place in the order of arrivals, from 0 on.
    """

    call: Call
    first: float
    end: float
    number: int = 0

    @property
    def normalised(self) -> float:
        """Latency per token of output, in seconds."""
        return (self.end - self.call.arrival) / self.call.output


class StepRecord(NamedTuple):
    """Record of a step of a simulated engine.

    Attributes:
        seconds: its duration.
        samples: sampled tokens.
        running: running requests during the step.
        used: blocks in use during the step.
    """

    seconds: float
    samples: int
    running: int
    used: int


class VirtualEngine:
    """Scheduler whose steps take the time of a cost model. No model runs: the tokens come from the trace.

    Args:
        on_plan: called during each step, with its plan scheduled and not committed.
        block_move_s: seconds of moving a block to the host or back. Moves to the host run beside the step, and moves to
            the device before it.

    Attributes:
        steps: number of steps.
        last: the last step.
    """

    def __init__(
        self, scheduler: Scheduler, cost: StepCost, *, seed: int = 0,
        on_plan: Callable[[Scheduler], object] | None = None, block_move_s: float = 0.0,
    ):  # fmt: skip
        self.scheduler, self._cost, self._on_plan = scheduler, cost, on_plan
        self._block_move_s = block_move_s
        self.now, self.steps = 0.0, 0
        self.last = StepRecord(0.0, 0, 0, 0)
        self._answers: dict[str, list[Sample]] = {}  # one for each output
        self._samples: dict[int, Sample] = {}  # of each row
        self._widths: dict[int, int] = {}  # of each row with a beam
        self._starting: list[Request] = []  # without a first token
        self._candidates = Candidates(seed)

    def add(self, request_id: str, call: Call, params: SamplingParams | BeamSearchParams) -> None:
        """Queue a request."""
        prompt = [text for text, tokens in call.prompt for _ in range(tokens)]
        self.scheduler.add(request_id, prompt, params, seed=0, pin_s=call.pin_s)
        self._answers[request_id] = [Sample(branch(call.answer, i), 0.0) for i in range(params.num_sequences)]

    def wait(self, until: float) -> None:
        """Let time pass without work."""
        self.now = max(self.now, until)

    def step(self) -> Iterable[Request]:
        """Run a step and return the requests that it ends, with their times.

        Raises:
            RuntimeError: the waiting requests can never run.
        """
        scheduler = self.scheduler
        scheduler.advance(self.now)
        plan = scheduler.schedule()
        if plan is None:
            raise RuntimeError(f"{len(scheduler.waiting)} requests wait, and none can be scheduled")
        load = StepLoad.of(plan)
        out_s, back_s = (self._block_move_s * len(moves) for moves in (plan.swap_out, plan.swap_in))
        seconds = max(self._cost.seconds(load) if load.rows else 0.0, out_s) + back_s
        self.now += seconds
        self.steps += 1
        self.last = StepRecord(seconds, load.samples, len(scheduler.running), scheduler.pool.num_used)
        self._follow_rows(plan)
        if self._on_plan:
            self._on_plan(scheduler)
        before = len(scheduler.requests)
        committed = scheduler.commit(plan, self._result(plan))
        if self._starting:
            started = [request for request in self._starting if request.sequences[0].num_output_tokens]
            for request in started:
                request.metrics.first_token_ts = self.now
                self._starting.remove(request)
        if len(scheduler.requests) == before:
            return ()
        ended = dict.fromkeys(s.request for s in committed.advanced if s.finish_reason and s.request.finished)
        for request in ended:
            request.metrics.finished_ts = self.now
            del self._answers[request.request_id]
        return ended

    def _follow_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            self._widths.pop(row, None)
        for _, row in plan.row_copies:
            self._follow_row(row)
        for admitted in plan.admitted:
            request = self._follow_row(admitted.row)
            if not request.metrics.first_token_ts and request not in self._starting:
                self._starting.append(request)

    def _follow_row(self, row: int) -> Request:
        sequence = self.scheduler.rows[row]
        request, index = sequence.request, sequence.index
        if isinstance(request.params, BeamSearchParams):
            self._widths[row], index = request.params.beam_width, 0
        self._samples[row] = self._answers[request.request_id][index]
        return request

    def _result(self, plan: StepPlan) -> StepResult:
        samples, widths = self._samples, self._widths
        if not widths and self.last.samples == len(plan.rows):
            return StepResult([samples[row] for row, _, _, _ in plan.rows])
        drawn: list[Sample] = []
        for row, _, _, num_samples in plan.rows:
            if num_samples == 1:
                sample = samples[row]
                drawn.append(self._candidates.of(sample.token, widths[row]) if row in widths else sample)
            elif num_samples:  # the request forks
                drawn += self._answers[self.scheduler.rows[row].request.request_id]
        return StepResult(drawn)


def branch(answer: int, index: int) -> int:
    """Return the number of the text of an output: the answer's number for the first output, a new one for others."""
    return -(answer * MAX_BRANCHES + index) if index else answer


class Candidates:
    """Candidates of beams without a model: the k-th has a probability of k^-a.

    The exponent a is drawn anew for each beam, so that the probability of the first one is anything from a tenth to
    nearly 1, as with a language model.
    """

    PEAKS = tuple(1 + 5 * i / 15 for i in range(16))
    VOCAB, MOST = 32_000, 32

    def __init__(self, seed: int = 0):
        self._rng = random.Random(seed)
        self._logprobs = [_peaked(a, self.VOCAB, self.MOST) for a in self.PEAKS]

    def of(self, token: int, width: int) -> Sample:
        """Return the best candidates of a beam; `token` is the best one."""
        logprobs = self._rng.choice(self._logprobs)[:width]
        return Sample(token, 0.0, 1, range(token, token + len(logprobs)), logprobs)


@functools.cache
def _peaked(a: float, vocab_size: int, count: int) -> list[float]:
    """Return the logprobs of the likeliest tokens, the k-th of which has a probability of k^-a over the sum of all."""
    norm = math.log(sum(k**-a for k in range(1, vocab_size + 1)))
    return [-a * math.log(k) - norm for k in range(1, count + 1)]


def drive(engine: VirtualEngine, source: Arrivals, *, shares: bool = True, together: bool = False) -> list[Served]:
    """Run all requests of a source through an engine, and return them in the order of their ends: see `drive_steps`."""
    return [each for ended in drive_steps(engine, source, shares=shares, together=together) for each in ended]


def drive_steps(
    engine: VirtualEngine, source: Arrivals, *, shares: bool = True, together: bool = False
) -> Iterator[Sequence[Served]]:
    """Run the requests of a source through an engine, and yield after each step the calls that have ended.

    The id of a call's first request is "N.0" for the N-th call of the source, from 0 on.

    Args:
        shares: run the outputs or beams of a call as one request, which shares blocks, not each as one of its own.
        together: answers are known once no request runs any more, as in static batching.
    """
    running: dict[str, _Running] = {}
    answered: list[_Running] = []
    numbers = itertools.count()
    while True:
        for call in source.due(engine.now):
            requests, number = params_of(call.output, call.width, beam=call.beam, shares=shares), next(numbers)
            running[str(number)] = _Running(call, number, len(requests))
            for i, params in enumerate(requests):
                engine.add(f"{number}.{i}", call._replace(answer=branch(call.answer, i)), params)
        if not engine.scheduler.has_work:
            if (at := source.next_arrival()) is None:
                return
            engine.wait(at)
            continue
        for request in engine.step():
            each = running[name := request.request_id.partition(".")[0]]
            each.first = min(each.first, request.metrics.first_token_ts)
            each.left -= 1
            if not each.left:
                answered.append(running.pop(name))
        if together and engine.scheduler.running:
            yield ()
            continue
        now = engine.now
        served = [Served(each.call, now if together else each.first, now, each.number) for each in answered]
        for each in answered:
            source.ended(each.call, now)
        answered.clear()
        yield served


@dataclass
class _Running:
    """Call with the number of its requests that run, and the time of its first token so far."""

    call: Call
    number: int
    left: int
    first: float = math.inf


@functools.lru_cache(maxsize=4096)  # the checks of parameters take a tenth of a simulation's time
def params_of(output: int, width: int, *, beam: bool, shares: bool) -> tuple[SamplingParams | BeamSearchParams, ...]:
    """Return the parameters of the requests that a call becomes.

    Args:
        output: tokens of each output.
        width: number of outputs or beams.
        shares: whether they share one request.
    """
    if beam and shares:
        return (BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True),)
    params = SamplingParams(n=width if shares else 1, temperature=1.0, max_tokens=output, ignore_eos=True)
    return (params,) * (1 if shares else width)
