"""Single-threaded engine: it queues requests, runs steps, and returns text. The runner is an argument."""

import copy
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Series
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict, Unpack, cast

from tokenizers import Tokenizer

from jpaged.core.cache_events import CacheEvent, CacheEvents
from jpaged.core.commands import (
    PARTS,
    Command,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadAdapter,
    UpdateParams,
    WakeUp,
)
from jpaged.core.commit import Committed
from jpaged.core.params import InvalidParameter, Params, SamplingParams
from jpaged.core.plan import StepPlan, StepResult
from jpaged.core.request import NON_FINITE, Decoder, FinishReason, OutputDelta, Request, RequestFault, Sequence
from jpaged.core.scheduler import NO_DRAFTS, Scheduler
from jpaged.engine import certify
from jpaged.engine.adapter_names import AdapterNames
from jpaged.engine.draft_model import DraftModel
from jpaged.engine.output import delta_of, whole_deltas
from jpaged.engine.prefix_files import BlockFiles, PrefixFiles
from jpaged.structured.compiler import GrammarCompiler
from jpaged.structured.masks import MakeMasks, Masks
from jpaged.tokenizer import Detokenizer, TokenDecoder, Vocabulary, tokenize_bad_words

if TYPE_CHECKING:
    from jpaged.structured.grammar import Constraint


logger = logging.getLogger(__name__)


class Pending(Protocol):
    """Dispatched step."""

    def wait(self) -> None:
        """Wait until the next step should be dispatched, so that the device goes on without a break."""

    def result(self) -> StepResult:
        """Wait for the step's tokens and return its result."""


class Runner(certify.Identified, Protocol):
    """Interface of the device side to the engine."""

    def dispatch(self, plan: StepPlan, make_masks: MakeMasks | None = None) -> Pending:
        """Start a step without waiting for it. Plans run in the order of their dispatch.

        Args:
            make_masks: called once the model's part of the step is dispatched; None if the plan masks no row.
        """

    def check(self, command: UpdateParams) -> None:
        """Check a command that is to run later.

        Raises:
            ValueError: `control` would reject it.
        """

    def control(self, command: Command) -> None:
        """Run a command on parameters, memory or adapters after the dispatched steps.

        Raises:
            ValueError: that is not possible; nothing is changed.
        """

    def recover(self) -> None:
        """Make the runner usable after a step that raised an error. The content of all blocks and rows may be lost."""


class EventSink(Protocol):
    """Receiver of the changes of the prefix cache."""

    def publish(self, events: Series[CacheEvent], adapter_name: Callable[[int], str | None]) -> None:
        """Take the changes of a step, without waiting.

        Args:
            adapter_name: returns the name of an adapter's number in a salt.
        """

    def close(self) -> None:
        """Expect no further changes."""


class Progress(NamedTuple):
    """New tokens of a request.

    Attributes:
        tokens: number of new tokens, of all its branches.
        gap: seconds since the previous token of the request; None for the first token.
    """

    request: Request
    tokens: int
    gap: float | None


class StepOutput(NamedTuple):
    """Result of a step.

    Attributes:
        plan: None if there was nothing to do.
        committed: the scheduler's changes.
        deltas: the additions to each output that the step extended. If the outputs of a request are known only at its
            end, each of them is one delta of its last step.
        ended: the requests that the step finished.
        progress: the requests with new tokens.
        faults: the requests that have ended because the work on them raised an exception.
    """

    plan: StepPlan | None = None
    committed: Committed = Committed()
    deltas: Series[OutputDelta] = ()
    ended: Series[Request] = ()
    progress: Series[Progress] = ()
    faults: Mapping[Request, Exception] = MappingProxyType({})


class EngineStats(NamedTuple):
    """Numbers of an engine at one moment: requests, KV blocks, and counts since the start.

    Attributes:
        num_groups: groups of layers; a block holds the tokens of one of them.
        num_host_blocks: evicted blocks of the prefix cache on the host, at present.
        num_pinned: pinned blocks of text, those of each tenant by themselves.
        num_evicted, num_returned: blocks that went to the host when they were evicted, and that returned.
        num_read: blocks that were read from files.
        prefix_queries: prompt tokens that were looked up in the prefix cache.
        prefix_hits: tokens among them that were in it.
        num_drafted: times that a sequence had drafts in a step.
        num_drafts, num_kept: drafts, and those that became output.
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
    num_drafted: int = 0
    num_drafts: int = 0
    num_kept: int = 0
    num_groups: int = 1
    num_host_blocks: int = 0
    num_pinned: int = 0
    num_evicted: int = 0
    num_returned: int = 0
    num_read: int = 0


class Placing(TypedDict, total=False):
    """Options of a request for the scheduler.

    Attributes:
        prompt: the prompt as text, for the output.
        priority: under the policy "priority", requests with a lower number run first.
        client: the client whose turns the request takes in the queue; None: the order of arrival.
        tenant: the tenant with which the request shares steps, rows and blocks; None is one more tenant.
        cache_salt: only requests with the same salt share cached prefixes.
        pin_s: seconds after the request's end for which its prefix is evicted after all that is not pinned.
    """

    prompt: str | None
    priority: int
    client: str | None
    tenant: str | None
    cache_salt: str
    pin_s: float


class RequestOptions(Placing, total=False):
    """Options of `Engine.add`.

    Attributes:
        constraint: the constraint that a `GrammarCompiler` made of `params.structured_outputs`.
        bad_words: the token ids of `params.bad_words`, from a caller that has them.
        adapter: the name of the adapter that computes the request; None: the model alone does.
        shown_tokens: special tokens that are part of the text, because a parser reads them.
    """

    constraint: "Constraint | None"
    bad_words: tuple[tuple[int, ...], ...] | None
    adapter: str | None
    shown_tokens: frozenset[int]


class Engine:
    """Engine with continuous batching: `add` or `abort` requests, and call `step` for their output.

    Args:
        tokenizer: None for an engine with token ids only.
        seed: seed of the seeds of requests without one.
        max_in_flight: number of steps that may be dispatched before the host sees the first one's tokens.
        clock: returns the present time in seconds, for the times of requests.
        draft_model: computes drafts before a step, if the scheduler's settings name one.
        files: the runner, if the scheduler keeps blocks in files (`DiskTier`).
        events: receives the changes of the prefix cache.

    Attributes:
        limits: maximum sizes of sequences and steps.
        adapters: the names of the adapters that requests may have.
        asleep: the parts whose memory `Sleep` has freed, "weights" or "kv_cache". Until they return, no step begins.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None = None, *, seed: int = 0,
        max_in_flight: int = 1, clock: Callable[[], float] = time.monotonic, draft_model: DraftModel | None = None,
        files: BlockFiles | None = None, events: EventSink | None = None,
    ):  # fmt: skip
        self.scheduler, self.limits = scheduler, scheduler.limits
        self.runner, self._files = runner, PrefixFiles(scheduler, files, clock)
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer) if tokenizer else None
        self._masks = Masks(scheduler.vocab_size)
        self._seeds = random.Random(seed)
        self._has_failed = False
        self._last_result = 0.0  # its time; 0: none since the engine had no work
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._draft_model = draft_model
        self._events = events
        if events is not None:
            scheduler.pool.tree.events = CacheEvents(scheduler.pool.block_size)
        self._in_flight: deque[tuple[StepPlan, float, Pending]] = deque()  # with the times of their dispatch
        self._next_params: UpdateParams | None = None  # waits until the started requests have ended
        self.adapters = AdapterNames()
        self._paused: str | None = None  # the mode of `Pause`
        self.asleep: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        """Whether a step would have an effect: there are requests or an update of parameters, and no pause."""
        if not self._may_begin:
            return bool(self._in_flight)
        return self.scheduler.has_work or self.is_updating

    @property
    def is_paused(self) -> bool:
        """Whether no step begins until `Resume`. Under "wait", this holds once the started requests have ended."""
        return self._paused is not None and not (self._paused == "wait" and self.scheduler.has_started)

    @property
    def _may_begin(self) -> bool:
        return not (self.is_paused or self.asleep)

    @property
    def _has_room(self) -> bool:
        """Whether another step may be dispatched now."""
        return len(self._in_flight) < self._max_in_flight and self._may_begin

    def stats(self) -> EngineStats:
        """Return numbers; any thread may call it at any time."""
        scheduler, pool, tier = self.scheduler, self.scheduler.pool, self.scheduler.memory.tier
        return EngineStats(
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting), num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used, block_size=pool.block_size, num_preemptions=scheduler.num_preemptions,
            num_swapped_blocks=scheduler.num_swapped_blocks, prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits, num_drafted=scheduler.num_drafted, num_drafts=scheduler.num_drafts,
            num_kept=scheduler.num_kept, num_groups=len(pool.windows),
            num_host_blocks=pool.tree.num_copies, num_pinned=scheduler.memory.pins.count,
            num_evicted=tier.num_out if tier else 0, num_returned=tier.num_back if tier else 0,
            num_read=tier.disk.num_read if tier and tier.disk is not None else 0,
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
        self, request_id: str, prompt_token_ids: list[int], params: Params, *, constraint: "Constraint | None" = None,
        bad_words: tuple[tuple[int, ...], ...] | None = None, adapter: str | None = None,
        shown_tokens: frozenset[int] = frozenset(), **placing: Unpack[Placing],
    ) -> Request:  # fmt: skip
        """Queue a request, with the options of `RequestOptions`.

        Raises:
            InvalidParameter: the request could never run.
            ParamsDeleted: it wants certificates, and the arrays of the parameters were deleted.
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
        tokens = params.truncated(prompt_token_ids, self.limits.max_model_len)
        seed = params.seed if isinstance(params, SamplingParams) else 0
        seed = self._seeds.getrandbits(64) if seed is None else seed
        number = self.adapters.number(adapter)
        request = self.scheduler.add(
            request_id, tokens, params, seed=seed, bad_words=bad_words, adapter=number, **placing
        )
        request.metrics.queued_ts = self._clock()
        try:
            self._equip(request, constraint, shown_tokens)
            certify.begin(request, self.runner)
        except BaseException:
            self.abort(request_id)
            raise
        return request

    def _equip(self, request: Request, constraint: "Constraint | None", shown: frozenset[int]) -> None:
        """Give a new request a decoder and the state of its constraint."""
        (sequence,), params = request.sequences, request.params
        sequence.constraint = copy.copy(constraint)
        if self.vocabulary is not None and params.detokenize:
            decoder = TokenDecoder(
                self.vocabulary, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens, shown=shown,
                keeps_first_space=constraint is not None,
            )  # fmt: skip
            sequence.decoder = Detokenizer(decoder, stop=params.stop, include_stop=params.include_stop_str_in_output)
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

    def control(self, command: Command) -> StepOutput:
        """Run a command, and return the last output of the requests that it has ended.

        Some commands take effect in further steps: see `is_in_effect`.

        Raises:
            ValueError: the command is not possible; nothing is changed.
        """
        match command:
            case Pause():
                return self._pause(command)
            case Resume():
                self._paused, self.scheduler.holds_new = None, self.is_updating
            case Sleep():
                self.runner.control(command)
                self.restart()
                self.asleep = PARTS
                self._tell_draft_model(command)
            case WakeUp(tags):
                self.runner.control(WakeUp(self.asleep.intersection(tags)))
                self.asleep = self.asleep.difference(tags)
                self._tell_draft_model(command)
            case UpdateParams(in_flight=in_flight):
                self.runner.check(command)
                if in_flight == "wait" and self.scheduler.has_started:
                    self._next_params, self.scheduler.holds_new = command, True
                else:
                    self._exchange(command)
            case ResetPrefixCache():
                self.scheduler.pool.reset_prefix_cache()
                self._files.delete()
                self._tell_draft_model(command)
            case LoadAdapter(name):
                numbered = replace(command, number=self.adapters.next_number())
                self.runner.control(numbered)
                self.adapters.add(name, numbered.number)
                self._drop_adapters()
            case UnloadAdapter(name):
                self.adapters.remove(name)
                self._drop_adapters()
        self._publish_events()
        return StepOutput()

    def _publish_events(self) -> None:
        if self._events is not None and (record := self.scheduler.pool.tree.events) and (events := record.take()):
            self._events.publish(events, self.adapters.name_of)

    def _drop_adapters(self) -> None:
        """Forget the adapters without a name that no request has."""
        slots = self.scheduler.rows.adapters
        wanted = {request.adapter for request in self.scheduler.requests.values()}
        for number in self.adapters.take_unused(lambda number: number in wanted or slots.is_used(number)):
            slots.forget(number)
            self.runner.control(UnloadAdapter("", number))

    def _tell_draft_model(self, command: Command) -> None:
        if self._draft_model is not None:
            self._draft_model.control(command)

    def is_in_effect(self, command: Command) -> bool:
        """Return whether a command that was run needs no further step to take effect."""
        match command:
            case Pause():
                return not self.has_work
            case UpdateParams():
                return not self.is_updating
        return True

    def _pause(self, pause: Pause) -> StepOutput:
        self._paused, self.scheduler.holds_new = pause.mode, self.is_updating or pause.mode == "wait"
        ended = list(self.scheduler.requests.values()) if pause.mode == "abort" else []
        deltas: list[OutputDelta] = []
        for request in ended:
            texts = [s.decoder.flush() if s.decoder and not s.finish_reason else "" for s in request.sequences]
            self.abort(request.request_id)
            if request.streams:
                deltas += [delta_of(s, s.index, text, []) for s, text in zip(request.sequences, texts)]
            else:
                deltas += whole_deltas(request)
        return StepOutput(deltas=deltas, ended=ended)

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
            self.scheduler.advance(self._clock())
            self._dispatch()
            if not self._in_flight:
                assert not self.has_work, "there is work, and none of it was scheduled"
                return StepOutput()
            plan, dispatched_at, pending = self._in_flight.popleft()
            result = pending.result()
            self._note_time(plan, dispatched_at)
            committed = self.scheduler.commit(plan, result)
            if not self.has_work:
                self._last_result = 0.0
        except RequestFault as fault:
            self.restart(expelled=[fault.request])
            self.runner.recover()
            assert isinstance(fault.__cause__, Exception), "a fault has a cause"
            return StepOutput(faults={fault.request: fault.__cause__})
        except BaseException:
            self.restart()
            self.runner.recover()
            raise
        self._publish_events()
        return self._output(plan, committed, dispatched_at)

    def _note_time(self, plan: StepPlan, dispatched_at: float) -> None:
        """Note the time from the last result to that of a step, with the host's work on both."""
        now = self._clock()
        start = self._last_result or dispatched_at
        self.scheduler.drafting.learn_step(plan, now - start, overlaps=dispatched_at < start)
        self._last_result = now

    def _dispatch(self) -> None:
        """Run an update that has waited for started requests, then dispatch steps as far as they may overlap."""
        if self._next_params is not None and not self.scheduler.has_started:
            self._exchange(self._next_params)
        while self._has_room and (plan := self._next_plan()):
            # Masks do not depend on the device's results, and are made while it works.
            make_masks = functools.partial(self._masks.of_plan, plan, self._constraint) if plan.masked else None
            self._in_flight.append((plan, self._clock(), self.runner.dispatch(plan, make_masks)))
            self._files.write()

    def _next_plan(self) -> StepPlan | None:
        """Read the files that the next step wants, and plan it."""
        self._files.read()
        return self.scheduler.schedule(self._drafts())

    def close(self, *, save: bool = True) -> None:
        """End the events, and write the cached prefixes to `kv_cache_dir` for the next start. No step may follow.

        Args:
            save: whether they are written, if there is such a folder.
        """
        if self._events is not None:
            self._events.close()
        if save:
            self._files.save(pool=not self.asleep)

    def _drafts(self) -> Mapping[Sequence, Series[int]]:
        """Return the drafts of the draft model for the next step. If it fails, the engine goes on without it."""
        if self._draft_model is None or not (wanted := self.scheduler.wanted_drafts()):
            return NO_DRAFTS
        start = self._clock()
        try:
            drafts = self._draft_model.propose(wanted)
        except Exception:
            logger.exception("the draft model has failed, and is not used until the next start")
            self._draft_model = None
            self.scheduler.drafting.stop()
            return NO_DRAFTS
        seconds = self._clock() - start
        self.scheduler.drafting.learn_round(wanted, seconds)
        if self._last_result:
            self._last_result += seconds  # the next step does not take this time
        return drafts

    def _constraint(self, row: int) -> "Constraint | None":
        return cast("Constraint | None", self.scheduler.rows[row].constraint)

    def _output(self, plan: StepPlan, committed: Committed, dispatched_at: float) -> StepOutput:
        """Return the output of a committed step, after the work on its texts and metrics."""
        faults = dict(committed.faults)
        deltas = self._deltas(committed.advanced, faults)
        progress = self._progress(committed.served, dispatched_at, faults)
        ended = [r for r in dict.fromkeys(sequence.request for sequence in committed.advanced) if r.finished]
        for request in ended:
            request.metrics.finished_ts = self._clock()
            if request.sequences[0].stop_reason == NON_FINITE and not self._has_failed:
                self._has_failed = True  # every request may end for this reason, and one line is enough
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
                first = sequence.num_read
                text = self._read(sequence)
                if sequence.finish_reason:
                    certify.certify(sequence, self.runner)
                if request.streams:
                    samples = sequence.samples[first:]
                    deltas.append(delta_of(sequence, sequence.index, text, samples))
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

    def restart(self, *, expelled: Collection[Request] = (), tried: Collection[Request] | None = None) -> None:
        """Recompute all requests from their tokens, with the arguments of `Scheduler.recover`."""
        self._in_flight.clear()
        self.scheduler.recover(expelled=expelled, tried=tried)

    def _progress(
        self, served: Iterable[Request], dispatched_at: float, faults: dict[Request, Exception]
    ) -> list[Progress]:
        """Update the metrics of requests after a step, and return those with new tokens."""
        now, progress = self._clock(), []
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
                progress.append(Progress(request, new, None if is_first else now - metrics.last_token_ts))
                metrics.first_token_ts = now if is_first else metrics.first_token_ts
                metrics.last_token_ts, metrics.num_generation_tokens = now, tokens
        return progress

    def _exchange(self, update: UpdateParams) -> None:
        """Serve the parameters of an update, which replaces a waiting one."""
        self._next_params, self.scheduler.holds_new = None, self._paused == "wait"
        if update.in_flight == "keep":
            self.scheduler.keep_kv()
        else:
            self.restart()
        self._files.end()
        self.runner.control(update)
        self.asleep -= {"weights"}
        self._tell_draft_model(update)
        certify.follow(self.scheduler.requests.values(), self.runner, update.in_flight)

    def _read(self, sequence: Sequence) -> str:
        """Return the text that the sequence's new tokens add; a stop string in it ends the sequence there."""
        decoder, text = sequence.decoder, ""
        if sequence.stop_reason == NON_FINITE:
            return text
        if sequence.constraint is not None and (error := sequence.constraint.error):
            self._finish(sequence, FinishReason.ERROR, error)
        while sequence.num_read < sequence.num_output_tokens:
            sequence.num_read += 1
            if decoder is not None:
                text += self._read_token(sequence, decoder)
        if decoder is not None and sequence.finish_reason:
            text += decoder.flush()
            sequence.decoder = None
        sequence.text += text
        return text

    def _read_token(self, sequence: Sequence, decoder: Decoder) -> str:
        """Return the text of the token that was read last."""
        params, read = sequence.request.params, sequence.num_read
        is_last = read == sequence.num_output_tokens
        is_stop_string = isinstance(sequence.stop_reason, str)
        # A token that ends the text is not part of it.
        ends = is_last and sequence.finish_reason == FinishReason.STOP and not is_stop_string
        if ends and not params.include_stop_str_in_output:
            return ""
        token = sequence.tokens[sequence.num_prompt_tokens + read - 1]
        text, stop = decoder.step(token, may_stop=read > params.min_tokens)
        if stop is not None and sequence.finish_reason != FinishReason.ERROR:
            self._finish(sequence, FinishReason.STOP, stop)
            sequence.cut(read)
        return text

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str) -> None:
        """End a sequence, or change the reason of one that has just ended."""
        if sequence.finish_reason:
            sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        else:
            self.scheduler.finish(sequence, reason, stop_reason)


def _find_stop(sequence: Sequence, token: int) -> str | None:
    """Return the stop string that a token would complete, without adding the token."""
    may_stop = sequence.num_output_tokens + 1 > sequence.request.params.min_tokens
    assert sequence.decoder is not None, "stop strings need text"
    _, stop = copy.copy(sequence.decoder).step(token, may_stop=may_stop)
    return stop
