"""Single-threaded engine: it queues requests, runs steps, and returns text. The runner is an argument."""

import copy
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from tokenizers import Tokenizer

from jpaged.config import Limits
from jpaged.core.params import BeamSearchParams, InvalidParameter, SamplingParams
from jpaged.core.plan import StepPlan, StepResult
from jpaged.core.request import NON_FINITE, FinishReason, OutputDelta, Request, RequestFault, Sequence
from jpaged.core.scheduler import Committed, Scheduler
from jpaged.engine.output import last_deltas, newest_delta, whole_deltas
from jpaged.structured.compiler import GrammarCompiler
from jpaged.structured.masks import Masks
from jpaged.tokenizer import Detokenizer, Vocabulary, tokenize_bad_words

if TYPE_CHECKING:
    from jpaged.structured.grammar import Constraint


logger = logging.getLogger(__name__)


class Pending(Protocol):
    """Dispatched step."""

    def wait(self) -> None:
        """Wait until the next step should be dispatched, so that the device goes on without a break."""

    def result(self) -> StepResult:
        """Wait for the step's tokens and return its result."""


InFlight = Literal["recompute", "keep", "wait"]
PauseMode = Literal["keep", "wait", "abort"]
TAGS = frozenset(("weights", "kv_cache"))

MakeMasks = Callable[[], Any]  # [M, ceil(V / 32)] uint32 of NumPy, for the M masked rows of a plan


class Runner(Protocol):
    """Interface of the device side to the engine."""

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> Pending:
        """Start a step without waiting for it. Plans run in the order of their dispatch.

        Args:
            make_masks: called once the model's part of the step is dispatched; None if the plan masks no row.
        """

    def check_params(self, state: Any) -> None:
        """Check parameters for `update_params`.

        Raises:
            ValueError: `update_params` would reject them.
        """

    def update_params(self, state: Any) -> None:
        """Serve other parameters from the next step on, also after `sleep`."""

    def sleep(self, level: int) -> None:
        """Let go of the pool and of the parameters: copied to the host's memory (1) or dropped (2).

        Raises:
            ValueError: that is not possible; nothing is changed.
        """

    def wake_up(self, tags: Collection[str]) -> None:
        """Take back what `sleep` has let go of: "weights", "kv_cache" or both.

        Raises:
            ValueError: the parameters were dropped.
        """

    def recover(self) -> None:
        """Make the runner usable after a step that raised an error. The content of all blocks and rows may be lost."""


class Progress(NamedTuple):
    """New tokens of a request.

    Attributes:
        tokens: number of new tokens, of all its branches.
        gap: seconds since its previous token; None for the first.
    """

    request: Request
    tokens: int
    gap: float | None


class StepOutput(NamedTuple):
    """Result of a step.

    Attributes:
        plan: None if there was nothing to do.
        committed: the scheduler's changes.
        deltas: the additions to each output that the step extended. A request whose outputs are known only at its end
            has each of them then, whole.
        ended: the requests that the step finished.
        progress: the requests with new tokens.
        faults: the requests that have ended because the work on them raised an exception.
    """

    plan: StepPlan | None
    committed: Committed
    deltas: list[OutputDelta]
    ended: list[Request]
    progress: tuple[Progress, ...] = ()
    faults: Mapping[Request, Exception] = MappingProxyType({})


class EngineStats(NamedTuple):
    """Numbers of an engine at one moment: requests, KV blocks, and counts since the start.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and those found there.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    block_size: int
    num_preemptions: int
    num_swapped_blocks: int
    prefix_queries: int
    prefix_hits: int


class Engine:
    """Engine with continuous batching: `add` or `abort` requests, and call `step` for their output.

    Args:
        tokenizer: None for an engine with token ids only.
        seed: seed of the seeds of requests without one.
        max_in_flight: number of steps that may be dispatched before the host sees the first one's tokens.
        clock: source of the times of requests, in seconds.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None = None, *, seed: int = 0,
        max_in_flight: int = 1, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer) if tokenizer else None
        self._masks = Masks(scheduler.vocab_size)
        self._seeds = random.Random(seed)
        self._has_failed = False
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._in_flight: deque[tuple[StepPlan, float, Pending]] = deque()  # with the times of their dispatch
        self._next_params: Any = None  # once the requests that have started have ended
        self._paused: PauseMode | None = None
        self._asleep: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: there are requests or a parameter update to work on, and no pause."""
        if not self._may_begin:
            return bool(self._in_flight)
        return self.scheduler.has_work or self.is_updating

    @property
    def is_paused(self) -> bool:
        """Whether no step begins until `resume`. Under "wait", that is so once the started requests have ended."""
        return self._paused is not None and not (self._paused == "wait" and self.scheduler.has_started)

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that `sleep` has let go of, "weights" and "kv_cache". While there are any, no step begins."""
        return self._asleep

    @property
    def _may_begin(self) -> bool:
        return not (self.is_paused or self._asleep)

    @property
    def _has_room(self) -> bool:
        """Whether another step may be dispatched now."""
        return len(self._in_flight) < self._max_in_flight and self._may_begin

    @property
    def limits(self) -> Limits:
        """Maximum sizes of sequences and steps."""
        return self.scheduler.limits

    def stats(self) -> EngineStats:
        """Return numbers; any thread may call it at any time."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting), pool.num_blocks, pool.num_used, pool.block_size,
            scheduler.num_preemptions, scheduler.num_swapped_blocks, scheduler.prefix_queries, scheduler.prefix_hits,
        )  # fmt: skip

    @property
    def is_updating(self) -> bool:
        """Whether new parameters wait for requests to end."""
        return self._next_params is not None

    def grammar_compiler(self) -> GrammarCompiler | None:
        """Return a new compiler of structured outputs for the engine's model, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return GrammarCompiler(self.tokenizer, self.scheduler.vocab_size, self.scheduler.eos_token_ids)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        client: str | None = None,
        tenant: str | None = None,
        cache_salt: str = "",
        constraint: "Constraint | None" = None,
        bad_words: tuple[tuple[int, ...], ...] | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            priority: under the policy "priority", requests with a lower number run first.
            cache_salt: only requests with the same salt share cached prefixes.
            client: the client whose turns it takes in the queue; None: the order of arrival.
            tenant: the tenant with which it shares steps, rows and blocks; those without one are one more tenant.
            constraint: the constraint that a `GrammarCompiler` made of `params.structured_outputs`.
            bad_words: the token ids of `params.bad_words`, from a caller that has them.

        Raises:
            InvalidParameter: the request could never run.
        """
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise InvalidParameter(name, "needs a tokenizer, and this engine has none")
        if params.structured_outputs and constraint is None:
            raise InvalidParameter(
                "structured_outputs", "the engine takes constraints that a GrammarCompiler has compiled"
            )
        if bad_words is None:
            bad_words = tokenize_bad_words(self.tokenizer, params.bad_words) if params.bad_words else ()
        given = params.seed if isinstance(params, SamplingParams) else 0
        request = self.scheduler.add(
            request_id, params.truncated(prompt_token_ids, self.scheduler.limits.max_model_len), params,
            seed=self._seeds.getrandbits(64) if given is None else given, prompt=prompt, priority=priority,
            client=client, tenant=tenant, cache_salt=cache_salt, bad_words=bad_words,
        )  # fmt: skip
        request.metrics.queued_ts = self._clock()
        try:
            self._equip(request, constraint)
        except BaseException:
            self.abort(request_id)
            raise
        return request

    def _equip(self, request: Request, constraint: "Constraint | None") -> None:
        """Give a new request a decoder and the state of its constraint."""
        (sequence,), params = request.sequences, request.params
        sequence.constraint = copy.copy(constraint)
        if self.vocabulary is not None and params.detokenize:
            sequence.decoder = Detokenizer(
                self.vocabulary, request.prompt_token_ids, stop=params.stop,
                include_stop=params.include_stop_str_in_output, skip_special_tokens=params.skip_special_tokens,
                keeps_first_space=constraint is not None,
            )  # fmt: skip
        if request.beam and params.stop:
            request.find_stop = _find_stop

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; return None if it is unknown or has ended."""
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            try:
                self.scheduler.abort(request_id)
            except Exception:
                logger.exception("request %s can't be ended, and is expelled", request_id)
                self.restart(expelled=[request])
            request.metrics.finished_ts = self._clock()
        return request

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes. Blocks that running requests have computed so far are never cached either."""
        self.scheduler.pool.reset_prefix_cache()

    def update_params(self, source: Any, in_flight: InFlight = "recompute") -> None:
        """Serve other parameters of the same tree, shapes and dtypes.

        Nothing is compiled, and arrays that lie as the engine's own are not copied. No KV of the old parameters is
        found in the prefix cache afterwards. `Sample.version` says which update drew a token.

        Args:
            source: an `nnx.Module`, an `nnx.State`, or nested dicts of arrays, with all or some of the parameters,
                named as in the engine's module or below its `trained_path`.
            in_flight: what becomes of started requests. "recompute": steps in flight are dropped, and the requests are
                computed again from their tokens, which they keep, so that every further token depends on the new
                parameters only. "keep": the requests continue on the KV of the old parameters. "wait": they end first,
                with the old parameters, in further steps, in which no other request starts; `is_updating` is False once
                that is done. A later update replaces a waiting one.

        Raises:
            ValueError: the parameters do not match; the message has the first difference, and nothing is changed.
        """
        _check_choice("in_flight", in_flight, InFlight)
        self.runner.check_params(source)
        if in_flight == "wait" and self.scheduler.has_started:
            self._next_params, self.scheduler.holds_new = source, True
        else:
            self._exchange(source, keep=in_flight == "keep")

    def pause(self, mode: PauseMode = "keep") -> StepOutput:
        """Begin no step until `resume`. Requests can be added meanwhile and wait.

        Args:
            mode: "keep": running requests wait too, with their KV; `step` commits the steps in flight. "wait": they end
                first, in further steps, in which no other request starts. "abort": all requests are ended.

        Returns:
            The last output of the requests that it has ended.

        Raises:
            ValueError: the mode is unknown.
        """
        _check_choice("pause: mode", mode, PauseMode)
        self._paused, self.scheduler.holds_new = mode, self.is_updating or mode == "wait"
        ended = list(self.scheduler.requests.values()) if mode == "abort" else []
        deltas = []
        for request in ended:
            texts = [s.decoder.flush() if s.decoder and not s.finish_reason else "" for s in request.sequences]
            self.abort(request.request_id)
            deltas += last_deltas(request, texts)
        return StepOutput(None, Committed(), deltas, ended)

    def resume(self) -> None:
        """End a pause."""
        self._paused, self.scheduler.holds_new = None, self.is_updating

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV pool and of the parameters, and begin no step until `wake_up`.

        Requests are kept, and computed again from their tokens afterwards. Only references are dropped: arrays that a
        trainer holds too stay as they are.

        Args:
            level: 1: keep a copy of the parameters in the memory of the host. 2: keep none; `update_params` brings the
                next ones, and counts as their awakening.

        Raises:
            ValueError: the level is unknown, or the runner can't sleep; nothing is changed.
        """
        if level not in (1, 2):
            raise ValueError(f"level: must be 1 (parameters on the host) or 2 (dropped), not {level!r}")
        self.runner.sleep(level)
        self.restart()
        self._asleep = TAGS

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `sleep` has freed. Nothing is compiled.

        Args:
            tags: "weights" (the parameters), "kv_cache", or both; None: both. Weights alone can be updated before the
                pool takes its memory.

        Raises:
            ValueError: a tag is unknown, or the parameters were dropped and there are no new ones.
        """
        wanted = TAGS if tags is None else frozenset(tags)
        if unknown := wanted - TAGS:
            raise ValueError(f"tags: must be of {sorted(TAGS)}, not {sorted(unknown)}")
        self.runner.wake_up(wanted & self._asleep)
        self._asleep -= wanted

    def wait(self) -> None:
        """Wait until the next step should begin, which then has the newest requests. It may also begin earlier."""
        if len(self._in_flight) == 1 and self._has_room:
            self._in_flight[0][2].wait()

    def step(self) -> StepOutput:
        """Dispatch steps as far as they may overlap, and commit the oldest; without work, do nothing.

        An exception in the scheduling, the commit or the text of one request ends this request alone
        (`StepOutput.faults`). Any other exception is passed on. The engine stays usable: its requests are recomputed by
        the next steps, to the same tokens, or can be aborted or expelled (`restart`).
        """
        try:
            if self.is_updating and not self.scheduler.has_started:
                self._exchange(self._next_params)
            while self._has_room and (plan := self.scheduler.schedule()):
                self._in_flight.append((plan, self._clock(), self.runner.dispatch(plan, self._make_masks(plan))))
            if not self._in_flight:
                assert not self.has_work, "there is work, and none of it was scheduled"
                return StepOutput(None, Committed(), [], [])
            plan, dispatched_at, pending = self._in_flight.popleft()
            committed = self.scheduler.commit(plan, pending.result())
        except RequestFault as fault:
            self.restart(expelled=[fault.request])
            self.runner.recover()
            assert isinstance(fault.__cause__, Exception), "a fault has a cause"
            return StepOutput(None, Committed(), [], [], faults={fault.request: fault.__cause__})
        except BaseException:
            self.restart()
            self.runner.recover()
            raise
        faults = dict(committed.faults)
        deltas = self._deltas(committed.advanced, faults)
        progress = self._progress(committed.served, dispatched_at, faults)
        ended = [r for r in dict.fromkeys(sequence.request for sequence in committed.advanced) if r.finished]
        for request in ended:
            request.metrics.finished_ts = self._clock()
            if request.sequences[0].stop_reason == NON_FINITE and not self._has_failed:
                self._has_failed = True  # every request may be ended so, and one line is enough
                logger.error("request %s ended: %s; the parameters may hold NaN", request.request_id, NON_FINITE)
        if faults:
            self.restart(expelled=faults)
            names = {request.request_id for request in faults}
            deltas = [delta for delta in deltas if delta.request_id not in names]
            ended = [request for request in ended if request not in faults]
        return StepOutput(plan, committed, deltas, ended, progress, faults)

    def _deltas(self, advanced: Iterable[Sequence], faults: dict[Request, Exception]) -> list[OutputDelta]:
        """Return the additions to outputs by a step's tokens, and add the requests for which that fails to `faults`."""
        deltas: list[OutputDelta] = []
        others: dict[Request, None] = {}
        for sequence in advanced:
            request = sequence.request
            try:
                text = self._read(sequence)
                if request.streams:
                    deltas.append(newest_delta(sequence, text))
                else:
                    others[request] = None
            except Exception as error:
                faults[request] = error
        for request in others:
            try:
                if request.finished:
                    deltas += whole_deltas(request)
            except Exception as error:
                faults[request] = error
        return deltas

    def restart(self, **options: Any) -> None:
        """Recompute all requests from their tokens, with the options of `Scheduler.recover`."""
        self._in_flight.clear()
        self.scheduler.recover(**options)

    def _progress(
        self, served: Iterable[Request], dispatched_at: float, faults: dict[Request, Exception]
    ) -> tuple[Progress, ...]:
        """Update the metrics of requests after a step, and return those with new tokens."""
        now, found = self._clock(), []
        for request in served:
            metrics = request.metrics
            metrics.scheduled_ts = metrics.scheduled_ts or dispatched_at
            try:
                tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
            except Exception as error:
                faults[request] = error
                continue
            if (new := tokens - metrics.num_generation_tokens) > 0:
                is_first = metrics.num_generation_tokens == 0
                found.append(Progress(request, new, None if is_first else now - metrics.last_token_ts))
                metrics.first_token_ts = now if is_first else metrics.first_token_ts
                metrics.last_token_ts, metrics.num_generation_tokens = now, tokens
        return tuple(found)

    def _exchange(self, source: Any, *, keep: bool = False) -> None:
        """Start again with other parameters, which replace waiting ones, or keep the KV of running requests."""
        self._next_params, self.scheduler.holds_new = None, self._paused == "wait"
        if keep:
            self.reset_prefix_cache()
        else:
            self.restart()
        self.runner.update_params(source)
        self._asleep -= {"weights"}

    def _make_masks(self, plan: StepPlan) -> MakeMasks | None:
        """Return a function that computes a plan's masks while the device works: they do not depend on its results."""
        if not plan.masked:
            return None
        rows = [(self.scheduler.rows[row].constraint, banned) for row, banned in plan.masked]
        return lambda: self._masks.write(rows)

    def _read(self, sequence: Sequence) -> str:
        """Return the text that the sequence's last token adds; a stop string in it ends the sequence."""
        decoder, text = sequence.decoder, ""
        if sequence.stop_reason == NON_FINITE:
            return text
        if sequence.constraint is not None and (error := sequence.constraint.error):
            self._finish(sequence, FinishReason.ERROR, error)
        if decoder is None:
            return text
        # A token that ends the text is not part of it.
        if sequence.finish_reason != FinishReason.STOP or _ended_by_text(sequence):
            text, stop = _decode(decoder, sequence, sequence.tokens[-1])
            if stop is not None and sequence.finish_reason != FinishReason.ERROR:
                self._finish(sequence, FinishReason.STOP, stop)
        if sequence.finish_reason:
            text += decoder.flush()
            sequence.decoder = None
        sequence.text += text
        return text

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str) -> None:
        """End a sequence, or change the reason of one that has just ended."""
        if sequence.finish_reason:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        else:
            self.scheduler.finish(sequence, reason, stop_reason)


def _check_choice(name: str, value: str, choices: Any) -> None:
    """Raise a ValueError for a value that a Literal does not list."""
    if value not in get_args(choices):
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, get_args(choices)))}, not {value!r}")


def _ended_by_text(sequence: Sequence) -> bool:
    return sequence.request.params.include_stop_str_in_output or isinstance(sequence.stop_reason, str)


def _decode(decoder: Detokenizer, sequence: Sequence, token: int) -> tuple[str, str | None]:
    return decoder.step(token, may_stop=sequence.num_output_tokens > sequence.request.params.min_tokens)


def _find_stop(sequence: Sequence, token: int) -> str | None:
    """Return the stop string that a token would complete, without adding the token."""
    may_stop = sequence.num_output_tokens + 1 > sequence.request.params.min_tokens
    stop: str | None = copy.copy(sequence.decoder).step(token, may_stop=may_stop).stop
    return stop
