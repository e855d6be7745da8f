"""Choice of the tokens and sequences of the next step, and commit of its results.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed_tokens`, and each
step's token budget is handed out in the order of the requests' ranks (the formula is vLLM V1's). Chunked prefill,
prefix-cache hits, forks and recomputation after a preemption all follow from that one subtraction.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jpaged.config import Limits
from jpaged.core.bans import Bans
from jpaged.core.beam import Beam, BeamSearch, Candidate
from jpaged.core.block_pool import BlockPool, Parent, common_length
from jpaged.core.block_table import BlockTable, Copies, append, move, num_distinct, shortage
from jpaged.core.params import MAX_TOP, BeamSearchParams, ContextLengthExceeded, InvalidParameter, SamplingParams
from jpaged.core.plan import Pairs, Sample, Scheduled, StepPlan, StepResult
from jpaged.core.queue import RequestQueue, Turns
from jpaged.core.request import NON_FINITE, NOTHING_LEFT, FinishReason, Request, RequestFault, Sequence
from jpaged.core.rows import Rows
from jpaged.core.shares import Shares, Tenant

# The headroom of engines. In simulations of an overloaded pool (OPT-13B on an A100, ShareGPT's lengths), it cuts
# preemptions to a quarter and raises throughput by 3 to 5 %. With 64 tokens, the free blocks cost as much again.
HEADROOM = 16

_new = tuple.__new__  # of a named tuple takes half the time of its own

Ending = tuple[FinishReason, int | str | None]  # with the stop reason


@dataclass
class _Step:
    """Step from its scheduling to its commit: its plan, in parts until it is complete, and its requests."""

    plan: StepPlan | None = None
    order: list[Request] = field(default_factory=list)  # running requests; the last one is preempted first
    shares: Shares | None = None  # if there are several tenants
    rows: list[Scheduled] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # of `rows`, in the same order
    unsteady: list[Request] = field(default_factory=list)  # running requests without those on the steady path
    further_branches: int = 0  # of requests on the steady path, without the first of each
    swap_out: list[Pairs] = field(default_factory=list)
    block_copies: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    masked: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    preempted: list[tuple[Request, bool]] = field(default_factory=list)
    resumed: dict[Request, list[tuple[Sequence, int]]] = field(default_factory=dict)  # with their computed tokens


class Committed(NamedTuple):
    """Changes of a committed step.

    Attributes:
        advanced: the sequences that got a token, without those still inside their prompts and those that ended
            meanwhile. For a beam search, the live beams, or, once it has ended, its outputs.
        served: the requests with computed tokens in the step, without those that have ended meanwhile.
        preempted: the requests that lost their blocks for this step, each with whether the blocks were swapped out.
        resumed: the requests whose blocks were swapped in.
        faults: the requests whose own commit raised an exception. They must be expelled (`recover`).
    """

    advanced: Series[Sequence] = ()
    served: Series[Request] = ()
    preempted: Series[tuple[Request, bool]] = ()
    resumed: Series[Request] = ()
    faults: Mapping[Request, Exception] = MappingProxyType({})


class Scheduler:
    """Scheduler of continuous batching with preemption. Only `schedule` and `commit` advance generation.

    Several plans may be scheduled before the first is committed; they are committed in their order. A request that can
    continue without the host's knowledge of its last token does so. Blocks that a plan in flight may write are kept
    until the plan is committed: a sequence that ends releases its row and its blocks then, and nothing is preempted
    before all plans in flight are committed.

    A request is in `waiting` or in `running`, both in order of rank: its priority, if `policy` is "priority" (a lower
    number goes first), then its client's turn, then its arrival. The last running request is preempted first, with all
    its sequences, so the first always continues and every request ends. Tenants share the tokens of each step, the rows
    and the blocks (`Shares`); within a tenant, this order holds.

    Args:
        host_pool: room for swapped blocks, or None.
        preemption: "recompute", "swap" (where the host has room), or "auto", whichever costs less.
        block_swap_cost: cost of moving one block to the host and back, in tokens that could be computed in that time.
        tokens_beside_decodes: maximum tokens of a step in which some sequence is past its prompt, at least
            `max_num_seqs`; None: the limit of all steps. A long step makes such sequences wait.
        step_overhead: cost of a step without its tokens, in tokens that could be computed in that time, by which the
            tokens of a step for several tenants are limited; inf: they are not.
        headroom: tokens of each running sequence for which blocks stay free when another request is admitted. Without
            it, a full pool preempts the new request after a few steps, and all its work is lost.

    Attributes:
        holds_new: admit no request for the first time, so that only started requests continue.
        touched: the requests on which the step before the last `recover` may have worked.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        vocab_size: int,
        eos_token_ids: Series[int] = (),
        host_pool: BlockPool | None = None,
        policy: str = "fcfs",
        preemption: str = "auto",
        block_swap_cost: float = 0.0,
        tokens_beside_decodes: int | None = None,
        step_overhead: float = math.inf,
        headroom: int = 0,
    ):
        self.pool = pool
        self.limits = limits
        self.vocab_size = vocab_size
        # A tokenizer may know tokens that the model can't produce.
        self.eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self.host_pool = host_pool
        self.policy = policy
        self.preemption = preemption
        self.block_swap_cost = block_swap_cost
        self.tokens_beside_decodes = tokens_beside_decodes or limits.max_num_batched_tokens
        self.step_overhead = step_overhead
        self.headroom = headroom
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_swapped_blocks = 0
        self.prefix_queries = 0  # tokens of prompts that were looked up, and those that were found
        self.prefix_hits = 0
        self._arrivals = itertools.count()
        self._turns = Turns()
        self.rows = Rows(limits.max_num_seqs)
        self._in_flight: deque[_Step] = deque()
        self._leaving: set[Sequence] = set()  # ended, and still part of a step in flight
        self._must_drain = False  # something must be preempted
        self._owed: dict[Tenant, int] = {}  # tokens, by tenants to the others
        self._request_turns = itertools.count(1)
        self._restarted: list[Request] = []  # by `recover`, since the last plan
        self._at: Request | None = None  # the request that `schedule` is working on
        self._parked: dict[Request, None] | None = None  # while some requests are tried without the others
        self.holds_new = False
        self.touched: list[Request] = []

    @property
    def has_started(self) -> bool:
        """Whether there is an admitted request that has not ended."""
        return any(request.admitted for request in self.requests.values())

    @property
    def is_trying(self) -> bool:
        """Whether some requests are tried without the others, which are parked."""
        return self._parked is not None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to commit."""
        return bool(self.requests or self._in_flight)

    @property
    def leaving(self) -> Iterable[Sequence]:
        """Ended sequences whose blocks a step in flight may still write."""
        return self._leaving

    def max_sequence_len(self, prompt_len: int = 0, num_sequences: int = 1) -> int:
        """Return the maximum tokens of each of some sequences that share a prompt.

        The last sampled token is never written, so it needs no slot.
        """
        size = self.pool.block_size
        shared = min(prompt_len // size, self.pool.num_blocks)
        own = (self.pool.num_blocks - shared) // num_sequences
        return min(self.limits.max_model_len, (shared + own) * size + 1)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        seed: int,
        prompt: str | None = None,
        priority: int = 0,
        client: str | None = None,
        tenant: str | None = None,
        cache_salt: str = "",
        bad_words: Iterable[tuple[int, ...]] = (),
    ) -> Request:
        """Queue a request.

        Args:
            client: the client whose turns it takes; None: the order of arrival.
            tenant: the tenant with which it shares steps, rows and blocks; those without one are one more tenant.
            bad_words: token ids of each text that the output must not contain. Those with a token that the model can't
                produce are ignored.

        Raises:
            InvalidParameter: the request could never run; the message has the numbers.
        """
        if request_id in self.requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already in use")
        if priority and self.policy != "priority":
            raise InvalidParameter("priority", f"must be 0 under the policy {self.policy!r}, not {priority}")
        self._check_tokens(prompt_token_ids, params)
        params = self._with_counts(params)
        width, limits = params.num_sequences, self.limits
        if width > limits.max_num_seqs:
            name = _width_name(params)
            raise InvalidParameter(name, f"{width} sequences exceed the {limits.max_num_seqs} of a step (max_num_seqs)")
        length = len(prompt_token_ids)
        limit = self.max_sequence_len(length, width)
        max_tokens = max(1, limit - length) if params.max_tokens is None else params.max_tokens
        if length + max_tokens > limit:
            bound = "max_model_len" if limit == limits.max_model_len else "the size of the KV pool"
            bound += "" if width == 1 else f", for {width} sequences"
            raise ContextLengthExceeded(
                "prompt" if length >= limit else "max_tokens",
                # OpenAI's words, by which clients recognise this error.
                f"This model's maximum context length is {limit} tokens ({bound}). However, you requested "
                f"{length + max_tokens} tokens ({length} in the prompt, {max_tokens} in the completion). Please reduce "
                "the length of the prompt or completion.",
            )
        producible = [word for word in bad_words if all(0 <= token < self.vocab_size for token in word)]
        beam: BeamSearch[Sequence] | None = None
        num_top = params.logprobs
        if isinstance(params, SamplingParams) and params.logprob_token_ids:
            num_top = len(params.logprob_token_ids)
        if isinstance(params, BeamSearchParams):
            beam = BeamSearch(params.beam_width, max_tokens, params.length_penalty, params.early_stopping)
            # Stop strings may end any of them.
            num_top = max(num_top or 0, MAX_TOP if params.stop else self._num_candidates(params))
        request = Request(
            request_id, list(prompt_token_ids), params, seed, max_tokens, prompt,
            rank=(priority, self._turns.take(client, width), next(self._arrivals)), client=client, tenant=tenant,
            cache_salt=cache_salt,
            bans=Bans(
                producible, self.eos_token_ids.union(params.stop_token_ids), params.min_tokens,
                allowed=params.allowed_token_ids, vocab_size=self.vocab_size,
            ),
            end_tokens=frozenset(params.stop_token_ids).union(() if params.ignore_eos else self.eos_token_ids),
            num_top=num_top, beam=beam,
        )  # fmt: skip
        request.sequences.append(Sequence(request, list(prompt_token_ids), BlockTable(self.pool)))
        self._queue(request)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment and free its blocks; return None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.live:
                self.finish(sequence, FinishReason.ABORT)
        return request

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence, and with its last one the request."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._release(sequence)
        if sequence.request.finished:
            self._drop(sequence.request)

    def schedule(self) -> StepPlan | None:
        """Hand out the token budget: to running requests first, then to waiting ones unless one was preempted.

        Returns:
            The plan of the next step, or None if there is nothing to do before a plan in flight is committed.

        Raises:
            RequestFault: the work on one request raised an exception. `recover` is needed.
        """
        try:
            return self._schedule()
        except Exception as error:
            if self._at is None:
                raise
            raise RequestFault(self._at) from error
        finally:
            self._at = None

    def _schedule(self) -> StepPlan | None:
        if self._in_flight and self._must_drain:
            return None
        self._must_drain = False
        step, budget = _Step(), self.limits.max_num_batched_tokens
        if any(request.sequences[0].num_computed_tokens >= len(request.prompt_token_ids) for request in self.running):
            budget = min(budget, self.tokens_beside_decodes)
        step.shares = self._share(budget)
        if step.shares is None:
            step.order = list(self.running)
            num_yielded, budget = 0, self._continue_running(budget, step)
        else:
            step.order = step.shares.order
            self._make_room(step.shares, step)
            if self._must_drain:
                return None
            num_yielded, budget = len(step.preempted), self._continue_shared(budget, step.shares, step)
        if not (len(step.preempted) > num_yielded or self._must_drain):
            self._schedule_waiting(budget, step)
        self._at = None
        if not (step.rows or step.swap_out or step.swap_in):
            return None
        step.plan = StepPlan(
            rows=tuple(step.rows), swap_out=tuple(step.swap_out), block_copies=tuple(step.block_copies),
            swap_in=tuple(step.swap_in), masked=tuple(step.masked), **self.rows.differences(),
        )  # fmt: skip
        step.preempted[:0] = [(request, False) for request in self._restarted if not request.finished]
        self._restarted.clear()
        self._in_flight.append(step)
        return step.plan

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Commit the oldest plan in flight. Only this method commits tokens, forks and endings by a token."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "plans are committed in their order"
        advanced: list[Sequence] = []
        served: list[Request] = []  # the rows of a request are next to each other
        beams: dict[Request, list[Sample]] = {}
        faults: dict[Request, Exception] = {}
        for request, sequences in step.resumed.items():
            try:
                for sequence, computed in sequences:
                    if not sequence.finish_reason:
                        self._remember(sequence, computed)
            except Exception as error:
                faults[request] = error
        at, samples, prompts, size = 0, result.samples, result.prompt, self.pool.block_size
        caching = self.pool.enable_prefix_caching
        for index, (sequence, (_, start, count, num_samples)) in enumerate(zip(step.sequences, plan.rows, strict=True)):
            request, first, at = sequence.request, at, at + num_samples
            sequence.in_flight -= 1
            if num_samples:
                sequence.pending -= 1
            if faults and request in faults:
                continue
            try:
                if sequence.finish_reason:
                    if not sequence.in_flight:
                        self._release(sequence)
                    continue
                if not served or served[-1] is not request:
                    served.append(request)
                prompt = prompts.get(index, ()) if prompts else ()
                # All samples of a sequence are drawn from the same logits.
                if (num_samples and samples[first][1] != samples[first][1]) or (prompt and _has_nan(prompt)):
                    beams.pop(request, None)
                    advanced += [each for each in self._fail(request) if each not in advanced]
                    continue
                if caching and (start + count) // size > len(sequence.nodes):
                    self._remember(sequence, start + count)
                if prompt:
                    request.prompt_samples.extend(prompt)
                if not num_samples:
                    continue
                if request.beam:
                    beams.setdefault(request, []).append(samples[first])
                    continue
                if num_samples == 1:
                    self._take(sequence, samples[first])
                    advanced.append(sequence)
                    continue
                mine = samples[first:at]
                branches = [sequence, *(self._fork(sequence, branch) for branch in range(1, num_samples))]
                request.sequences = branches
                for branch, sample in zip(branches, mine, strict=True):
                    self._take(branch, sample)
                    if not branch.finish_reason:
                        self.rows.choose(branch)
                advanced += branches
            except Exception as error:
                faults[request] = error
        assert at == len(samples), f"{len(samples)} samples of {at}"
        for request, samples_of_beams in beams.items():
            try:
                advanced += self._advance_beams(request, samples_of_beams)
            except Exception as error:
                faults[request] = error
        if faults:
            advanced = [sequence for sequence in advanced if sequence.request not in faults]
            served = [request for request in served if request not in faults]
        return Committed(advanced, served, step.preempted, list(step.resumed), faults)

    def recover(self, *, expelled: Collection[Request] = (), tried: Collection[Request] | None = None) -> None:
        """Restore a consistent state after a step that failed at any point, or for other parameters.

        The content of all blocks is forgotten, on the host too, and so are the results of the plans in flight. Every
        request waits to be recomputed from its tokens.

        Args:
            expelled: requests that end with an error. Nothing else is done with them, whatever their state.
            tried: the requests that wait; all others, and new ones, are parked until `release`. None: all wait.
        """
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.clear()
        self.rows.clear()
        self._in_flight.clear()
        self._leaving.clear()
        self._must_drain = False
        idle = {*self.waiting, *(self._parked or ())} - {self.waiting.first if self.waiting else None}
        self.touched = [request for request in self.requests.values() if request not in idle]
        self._restarted += self.running
        self.num_preemptions += len(self.running)
        self.waiting, self.running = RequestQueue(), RequestQueue()
        self._parked = None if tried is None else {}
        for request in expelled:
            for sequence in request.live:
                sequence.finish_reason = FinishReason.ERROR
        self.requests = {name: request for name, request in self.requests.items() if not request.finished}
        for request in self.requests.values():
            for sequence in request.live:
                sequence.table, sequence.row = BlockTable(self.pool), None
                sequence.in_flight = sequence.pending = sequence.steady_until = 0
                sequence.free()
            if not any(sequence.num_output_tokens for sequence in request.live):
                request.prompt_samples.clear()  # they are told all at once, and come from the same parameters
            if tried is None or request in tried:
                self.waiting.add(request)
            else:
                self._queue(request)

    def release(self, requests: Iterable[Request] | None = None) -> None:
        """Let parked requests wait in the queue; None: all of them, and park no further ones."""
        assert self._parked is not None, "nothing is parked"
        for request in list(self._parked) if requests is None else requests:
            if self._parked.pop(request, request) is None:  # it has not ended meanwhile
                self.waiting.add(request)
        if requests is None:
            self._parked = None

    def _queue(self, request: Request) -> None:
        if self._parked is None:
            self.waiting.add(request)
        else:
            self._parked[request] = None

    def check_invariants(self) -> None:
        """Check the pools against every live table, and the order of every sequence's integers."""
        queued = [*self.waiting, *self.running, *(self._parked or ())]
        assert sorted(map(id, queued)) == sorted(map(id, self.requests.values())), "a request is lost, or queued twice"
        sequences = [sequence for request in queued for sequence in request.live]
        for sequence in sequences:
            held = len(sequence.table.block_ids) * self.pool.block_size
            known = sequence.num_tokens + sequence.pending
            assert 0 <= sequence.num_computed_tokens <= known <= self.limits.max_model_len, sequence
            assert sequence.num_computed_tokens <= held, f"{sequence.num_computed_tokens} computed, room for {held}"
        for request in self.waiting:
            for sequence in request.live:
                assert sequence.row is None, "a waiting request holds a row"
                assert not sequence.in_flight, "a waiting request is part of a step in flight"
                assert sequence.table.pool is self.host_pool or not sequence.table.block_ids, (
                    "a waiting request holds blocks"
                )
        counts = Counter(sequence for step in self._in_flight for sequence in step.sequences)
        flying = [sequence for sequence in (*sequences, *self._leaving) if sequence.in_flight]
        assert counts == Counter({sequence: sequence.in_flight for sequence in flying}), "miscounted in flight"
        assert all(sequence.finish_reason and sequence.in_flight for sequence in self._leaving), "nothing leaves"
        held_rows = [s.row for request in self.running for s in request.live] + [s.row for s in self._leaving]
        rows = Counter([*held_rows, *self.rows.free])
        assert rows == Counter(range(self.limits.max_num_seqs)), f"rows: {rows}"
        num_seats = sum(request.seats for request in self.running) + len(self._leaving)
        assert num_seats <= self.limits.max_num_seqs, f"{num_seats} rows may be needed"
        sequences += self._leaving
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.check_invariants(s.table.block_ids for s in sequences if s.table.pool is pool)

    def _check_tokens(self, prompt_token_ids: list[int], params: SamplingParams | BeamSearchParams) -> None:
        bound = f"is outside the vocabulary [0, {self.vocab_size})"
        if not prompt_token_ids:
            raise InvalidParameter("prompt", "must hold at least one token")
        # A prompt can be long, and the engine's other requests wait meanwhile: no loop in Python unless it is wrong.
        if set(map(type, prompt_token_ids)) != {int} or not (
            min(prompt_token_ids) >= 0 and max(prompt_token_ids) < self.vocab_size
        ):
            wrong = next(x for x in prompt_token_ids if type(x) is not int or not 0 <= x < self.vocab_size)
            raise InvalidParameter("prompt", f"token id {wrong!r} {bound}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            for token in getattr(params, name, None) or ():
                if not 0 <= token < self.vocab_size:
                    raise InvalidParameter(name, f"{token} {bound}")
        if isinstance(params, BeamSearchParams) and self._num_candidates(params) > MAX_TOP:
            told = f"{len(params.stop_token_ids)} and a beam_width of {params.beam_width} are more than {MAX_TOP}"
            raise InvalidParameter("stop_token_ids", told)

    def _with_counts(self, params: SamplingParams | BeamSearchParams) -> SamplingParams | BeamSearchParams:
        """Return parameters whose numbers of logprobs are not -1, the whole vocabulary."""
        counts: dict[str, Any] = {}
        for name in ("logprobs", "prompt_logprobs"):
            if (given := getattr(params, name)) is None:
                continue
            count, limit = self.vocab_size if given == -1 else given, self.limits.max_logprobs
            if count > limit:
                raise InvalidParameter(name, f"must be at most {limit} (max_logprobs), not {given}")
            counts[name] = count
        return replace(params, **counts) if -1 in (params.logprobs, params.prompt_logprobs) else params

    def _num_candidates(self, params: BeamSearchParams) -> int:
        """Return the number of best tokens that each beam needs: as many as may continue, and all that may end it."""
        return params.beam_width + len(self.eos_token_ids | set(params.stop_token_ids))

    def _claims(self, step: _Step) -> tuple[int, int]:
        """Return the rows and the free blocks that are not available to waiting requests.

        The rows are those in use, or needed without another admission. The blocks are those that running requests still
        lack for their present tokens.
        """
        # The sequences of a request on the steady path lack nothing: the last block of each is its own.
        num_steady = len(self.running) - len(step.unsteady) + step.further_branches
        num_seats = num_steady + sum(request.seats for request in step.unsteady) + len(self._leaving)
        return num_seats, sum(self._lack(request) for request in step.unsteady)

    def _share(self, budget: int) -> Shares | None:
        """Return the shares of tenants in a step; None without several, or while no new request may start."""
        if self.holds_new or len(self.running.tenants.keys() | self.waiting.tenants.keys()) < 2:
            self._owed.clear()
            return None
        return Shares(
            self.running, self.waiting, self.pool, self.limits.max_num_seqs, budget=budget,
            overhead=self.step_overhead, chunk=self.tokens_beside_decodes, turns=self._request_turns, owed=self._owed,
        )  # fmt: skip

    def _make_room(self, shares: Shares, step: _Step) -> None:
        """Preempt requests beyond the fair shares of their tenants for waiting ones within that of another tenant."""
        number = self._num_victims(shares, step) if self.waiting else 0
        if number and self._in_flight:
            self._must_drain = True
            return
        for _ in range(number):
            self._at = step.order.pop()
            self._preempt(self._at, step)

    def _num_victims(self, shares: Shares, step: _Step) -> int:
        """Return how many of the last running requests must be preempted for the waiting ones that may take room."""
        entitled = shares.entitled(self.waiting)
        if not entitled:
            return 0
        most, size, number = shares.num_yielding(entitled[0]), self.pool.block_size, 0
        seats = sum(request.seats for request in self.running)
        blocks = self.pool.num_free - sum(map(self._lack, self.running))
        for request in entitled:
            blocks -= self._num_blocks(request)
            victims = number
            while seats + request.seats > self.limits.max_num_seqs or blocks < seats * self.headroom // size:
                if victims == most:
                    return number
                victims += 1
                seats -= step.order[-victims].seats
                blocks += self._num_blocks(step.order[-victims])
            seats, number = seats + request.seats, victims
        return number

    def _num_blocks(self, request: Request) -> int:
        """Return the number of blocks that a request holds and lacks, without regard to cached ones."""
        return num_distinct(sequence.table for sequence in request.live) + self._lack(request)

    def _continue_running(self, budget: int, step: _Step) -> int:
        """Schedule running requests in the order of their ranks; return the tokens that are left."""
        rows, sequences = step.rows, step.sequences
        for request in step.order:  # without its end, as far as that is preempted
            branches = request.sequences
            if len(branches) == 1:
                sequence = branches[0]
                start = sequence.num_computed_tokens
                if start < sequence.steady_until and budget > 0:  # so it is for most requests of most steps
                    rows.append(_new(Scheduled, (sequence.row, start, 1, 1)))
                    sequences.append(sequence)
                    sequence.num_computed_tokens = start + 1
                    sequence.in_flight += 1
                    sequence.pending += 1
                    budget -= 1
                    continue
            self._at = request
            if len(branches) > 1 and (count := self._continue_branches(request, budget, step)):
                budget -= count
                continue
            budget -= self._schedule_running(request, budget, step)
            if self._must_drain:
                break
        return budget

    def _continue_shared(self, budget: int, shares: Shares, step: _Step) -> int:
        """Schedule running requests with the tokens of their tenants' shares; return the tokens that are left."""
        for request in step.order:
            self._at = request
            tokens = min(budget, shares.grants.get(request, 0))
            budget -= self._continue_branches(request, tokens, step) or self._schedule_running(request, tokens, step)
            if self._must_drain:
                break
        if not (step.rows or self._must_drain):  # no share sufficed, or who had one was preempted
            step.unsteady.clear()
            budget = self._continue_running(budget, step)
        return budget

    def _schedule_waiting(self, budget: int, step: _Step) -> None:
        """Admit waiting requests in their order, as far as rows, blocks and the budget allow."""
        if not (self.waiting and self.rows.num_free):
            return
        shares, num_seats, reserved = step.shares, *self._claims(step)
        while budget > 0 and (request := self._next_waiting(step)):
            self._at = request
            growth = num_seats * self.headroom // self.pool.block_size
            num_seats += request.seats
            if num_seats > self.limits.max_num_seqs or not self._admit(request, reserved + growth, step):
                break
            count = 0
            if request not in step.resumed:
                room = min(budget, shares.room(request)) if shares else budget
                count = self._schedule_running(request, room, step)
                budget -= count
            reserved += self._lack(request)
            if shares:
                shares.admit(request, count)

    def _next_waiting(self, step: _Step) -> Request | None:
        """Return the first waiting request that may be admitted."""
        if self.holds_new:
            return self.waiting.first_admitted
        if step.shares:
            return step.shares.next_waiting(self.waiting)
        return self.waiting.first if self.waiting else None

    def _continue_branches(self, request: Request, budget: int, step: _Step) -> int:
        """Schedule the next token of each branch, if all are before their `steady_until`; return the tokens used."""
        live = request.live
        if len(live) > budget or any(s.num_computed_tokens >= s.steady_until for s in live):
            return 0
        for sequence in live:
            step.rows.append(_new(Scheduled, (sequence.row, sequence.num_computed_tokens, 1, 1)))
            sequence.num_computed_tokens += 1
            sequence.in_flight += 1
            sequence.pending += 1
        step.sequences += live
        step.further_branches += len(live) - 1
        return len(live)

    def _schedule_running(self, request: Request, budget: int, step: _Step) -> int:
        """Schedule the part of a request that fits, preempting later requests if necessary; return the tokens used."""
        step.unsteady.append(request)
        counts = self._counts(request, budget)
        spans = [(s.table, s.num_computed_tokens, s.num_computed_tokens + count) for s, count in counts.items()]
        lengths = [len(table.block_ids) for table, _, _ in spans]
        while (copies := append(spans)) is None:
            if self._in_flight:
                self._must_drain = True
                return 0
            victim = self._at = step.order.pop()
            self._preempt(victim, step)
            if victim is request:
                return 0
            self._at = request
        step.block_copies += copies
        for (sequence, count), (table, start, end), length in zip(counts.items(), spans, lengths):
            if copies or len(table.block_ids) > length:
                self.rows.change(sequence, start // self.pool.block_size, -(-end // self.pool.block_size))
            self._schedule_sequence(sequence, count, step)
        return sum(counts.values())

    def _schedule_sequence(self, sequence: Sequence, count: int, step: _Step) -> None:
        """Put some tokens of a sequence, for which it has the blocks, into a step."""
        request, row = sequence.request, sequence.row
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        num_samples = sequence.num_samples(end)
        assert row is not None, "only running sequences have a row"
        if num_samples and (request.bans or sequence.constraint is not None):
            length = sequence.num_output_tokens + sequence.pending
            banned = request.bans.next_tokens(sequence.tokens, length)
            if banned or sequence.constraint is not None:
                step.masked.append((row, banned))
        step.rows.append(Scheduled(row, start, count, num_samples))
        step.sequences.append(sequence)
        sequence.num_computed_tokens = end
        sequence.in_flight += 1
        sequence.pending += num_samples > 0
        sequence.steady_until = self._steady_until(sequence) if num_samples == 1 else 0

    def _steady_until(self, sequence: Sequence) -> int:
        """Return the position up to which a sequence continues by one token and one sample in each step.

        This holds for any samples: up to there it needs no mask, and its block is its own. A request forks once, and
        its branches are sampled only while none waits for its leader: no block of theirs becomes shared meanwhile.
        """
        request, size = sequence.request, self.pool.block_size
        if request.waits or request.bans:
            return 0
        end_of_block = -(-sequence.num_computed_tokens // size) * size
        return min(end_of_block, request.max_length - 1)

    def _counts(self, request: Request, budget: int) -> dict[Sequence, int]:
        """Return the number of next tokens of each sequence of a running request, within the budget.

        The last token of each sequence waits until all sequences have their blocks. The last tokens of beams are
        computed in one step, because they are compared with each other.
        """
        live = request.live
        if len(live) == 1:
            (sequence,) = live
            count = min(sequence.behind, budget)
            return {sequence: count} if count > 0 else {}
        while any(self._follow(sequence) for sequence in live):
            pass  # one that has started may lead another
        together = request.beam is not None
        held_back = together or any(sequence.leader for sequence in live)
        counts: dict[Sequence, int] = {}
        for sequence in live:
            behind = sequence.behind - held_back
            count = min(behind, budget) if sequence.leader is None else 0
            if count > 0:
                counts[sequence] = count
                budget -= count
        at_their_last = all(s.behind - counts.get(s, 0) == 1 for s in live)
        if together and at_their_last and budget >= len(live):
            counts = {sequence: counts.get(sequence, 0) + 1 for sequence in live}
        return counts

    def _follow(self, sequence: Sequence) -> bool:
        """Start a sequence that waits for its leader if the leader has computed their shared tokens."""
        if sequence.leader is None:
            return False
        leader, shared = sequence.leader
        if leader.num_computed_tokens < shared or leader.in_flight:
            return False
        size = self.pool.block_size
        sequence.table.share(leader.table.block_ids[: -(-shared // size)])
        sequence.nodes, sequence.num_computed_tokens = leader.nodes[: shared // size], shared
        sequence.leader = None
        self.rows.change(sequence, 0, len(sequence.table.block_ids))
        return True

    def _lack(self, request: Request) -> int:
        """Return the number of blocks that a request still lacks for the tokens it has."""
        self._at = request
        size, spans, lack = self.pool.block_size, [], 0
        for sequence in request.live:
            if sequence.leader:
                lack += -(-sequence.num_tokens // size) - sequence.leader[1] // size
            else:
                spans.append((sequence.table, sequence.num_computed_tokens, sequence.num_tokens))
        return lack + shortage(spans)

    def _admit(self, request: Request, reserved: int, step: _Step) -> bool:
        """Move a waiting request to `running` if all its tokens fit, in addition to its swapped or cached blocks."""
        live = request.live
        tables = [sequence.table for sequence in live]
        swapped = any(table.block_ids for table in tables)
        if swapped:
            if num_distinct(tables) + self._lack(request) + reserved > self.pool.num_free:
                return False
            step.swap_in += move(tables, self.pool)
            step.resumed[request] = [(sequence, sequence.num_computed_tokens) for sequence in live]
        else:
            if not self._find_room(request, reserved):
                for sequence in live:
                    sequence.free()
                return False
            if not request.admitted:
                live[0].num_cached_tokens = live[0].num_computed_tokens
                self.prefix_queries += live[0].num_tokens
                self.prefix_hits += live[0].num_cached_tokens
        for sequence in live:
            self.rows.admit(sequence)
        request.admitted = True
        self.waiting.remove(request)
        self.running.add(request)
        step.order.append(request)
        self._turns.start(request.rank[1])
        return True

    def _find_room(self, request: Request, reserved: int) -> bool:
        """Take the cached blocks of a waiting request; return whether there is room for its other tokens, too."""
        self._share_prefixes(request)
        return self._lack(request) + reserved <= self.pool.num_free

    def _share_prefixes(self, request: Request) -> None:
        """Start each sequence with its blocks in the prefix cache.

        A sequence that has more in common with another one of the request waits for that one instead.
        """
        before: Sequence | None = None
        # In sorted order nothing has more in common with a sequence than the one before it.
        for sequence in sorted(request.live, key=lambda s: s.tokens):
            sequence.epoch = self.pool.epoch
            # The last token is always computed: the next token is sampled from its hidden state.
            limit = sequence.num_tokens - 1
            match = self.pool.match(sequence.tokens[:limit], request.cache_salt)
            cached = 0 if self._wants_prompt_samples(request) else match.num_tokens
            if before:
                shared = min(common_length(before.tokens, sequence.tokens), before.num_tokens - 1)
                if shared > cached:
                    sequence.leader = before, shared
            if cached and not sequence.leader:
                sequence.table.share(match.block_ids)
                sequence.nodes, sequence.num_computed_tokens = match.nodes, cached
            before = sequence

    def _wants_prompt_samples(self, request: Request) -> bool:
        wanted = len(request.prompt_token_ids) - 1 if request.params.prompt_logprobs is not None else 0
        return len(request.prompt_samples) < wanted

    def _preempt(self, request: Request, step: _Step) -> None:
        """Take all blocks of a running request. It waits, in its place, to be swapped in or recomputed."""
        live, swaps = request.live, self._should_swap(request)
        if swaps:
            assert self.host_pool is not None
            moved = move([sequence.table for sequence in live], self.host_pool)
            step.swap_out.append(tuple(moved))
            self.num_swapped_blocks += len(moved)
            for sequence in live:
                sequence.nodes = []  # it comes back in blocks that the prefix cache doesn't know
        for sequence in live:
            if sequence.table.pool is self.pool:
                sequence.free()
            self.rows.release(sequence)
        self.running.remove(request)
        self.waiting.add(request)
        step.preempted.append((request, swaps))
        self.num_preemptions += 1

    def _should_swap(self, request: Request) -> bool:
        """Return whether to swap a request out: never while its sequences wait for each other to be computed again."""
        if self.preemption == "recompute" or self.host_pool is None or any(s.leader for s in request.live):
            return False
        filled: dict[int, int] = {}  # tokens by block
        for sequence in request.live:
            for index, block_id in enumerate(sequence.table.block_ids):
                tokens = min(self.pool.block_size, sequence.num_computed_tokens - index * self.pool.block_size)
                filled[block_id] = max(tokens, filled.get(block_id, 0))
        if not 0 < len(filled) <= self.host_pool.num_free:
            return False
        return self.preemption == "swap" or len(filled) * self.block_swap_cost < sum(filled.values())

    def _take(self, sequence: Sequence, sample: Sample) -> None:
        """Add a token to a sequence, which it may end."""
        sequence.append(sample)
        request, token = sequence.request, sample[0]
        if token in request.end_tokens or len(sequence.tokens) >= request.max_length:
            ending = self._ending(sequence, token, sequence.num_output_tokens)
            assert ending is not None
            self.finish(sequence, *ending)
        elif request.bans.follow_output and request.bans.leave_none(sequence.tokens, sequence.num_output_tokens):
            self.finish(sequence, FinishReason.STOP, NOTHING_LEFT)

    def _ending(self, sequence: Sequence, token: int, length: int) -> Ending | None:
        """Return how a sequence of `length` output tokens ends with this one; None if it continues."""
        request = sequence.request
        if token in request.end_tokens:
            is_eos = token in self.eos_token_ids and not request.params.ignore_eos
            return FinishReason.STOP, None if is_eos else token
        return (FinishReason.LENGTH, None) if length >= request.max_tokens else None

    def _advance_beams(self, request: Request, samples: list[Sample]) -> list[Sequence]:
        """Extend the live beams by their samples of the step, through tables and reference counts."""
        search, parents, wanted = request.beam, request.live, request.params.logprobs or 0
        assert search is not None and len(samples) == len(parents), f"{len(samples)} of {len(parents)} beams were run"
        length = parents[0].num_output_tokens + 1

        def sample_of(candidate: Candidate) -> Sample:
            _, beam, token, logprob, rank = candidate
            *_, tokens, logprobs, version = samples[beam]
            return Sample(token, logprob, rank, tokens[:wanted], logprobs[:wanted], version)

        def end(candidate: Candidate) -> Sequence | None:
            parent = parents[candidate.beam]
            ending = self._ending(parent, candidate.token, length)
            if (ending is None or ending[0] == FinishReason.LENGTH) and request.find_stop:
                stop = request.find_stop(parent, candidate.token)
                ending = (FinishReason.STOP, stop) if stop is not None else ending
            if ending is None:
                return None
            hypothesis = parent.branch(0)
            hypothesis.append(sample_of(candidate))
            hypothesis.finish_reason, hypothesis.stop_reason = ending
            return hypothesis

        beams = [
            Beam(parent.cumulative_logprob, sample.top_tokens, sample.top_logprobs)
            for parent, sample in zip(parents, samples)
        ]
        live = search.advance(beams, length, end)
        for beam in set(range(len(parents))) - {candidate.beam for candidate in live}:
            self._release(parents[beam])
        if search.done:
            # Where every token is forbidden, the beams end as they are.
            request.sequences = [hypothesis.beam for hypothesis in search.hypotheses] or parents
            for index, sequence in enumerate(request.sequences):
                sequence.index, sequence.finish_reason = index, sequence.finish_reason or FinishReason.STOP
            self._drop(request)
            return request.outputs
        children: list[Sequence] = []
        for index, candidate in enumerate(live):
            parent = parents[candidate.beam]
            children.append(self._fork(parent, index) if parent in children else parent)
        for index, (child, candidate) in enumerate(zip(children, live)):
            child.index = index
            child.append(sample_of(candidate))
            self.rows.choose(child)
        request.sequences = children
        return children

    def _fail(self, request: Request) -> list[Sequence]:
        """End a request whose logits are not finite.

        The prefix cache forgets its blocks, whose KV may be invalid too.
        """
        ended = request.live
        for sequence in ended:
            for block_id in sequence.table.block_ids:
                self.pool.forget(block_id)
        for sequence in ended:
            self.finish(sequence, FinishReason.ERROR, NON_FINITE)
        return ended

    def _fork(self, sequence: Sequence, index: int) -> Sequence:
        """Return a second branch of a running sequence. They share blocks until one writes."""
        child = sequence.fork(index)
        self.rows.fork(sequence, child)
        return child

    def _remember(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Add the blocks that are full of computed tokens to the prefix cache.

        Tokens computed before a reset of the prefix cache, or from such tokens, are never added.
        """
        pool, nodes = self.pool, sequence.nodes
        size = pool.block_size
        if not pool.enable_prefix_caching or sequence.epoch != pool.epoch:
            return
        for index in range(len(nodes), num_computed_tokens // size):
            parent: Parent = nodes[-1] if nodes else sequence.request.cache_salt
            tokens = sequence.tokens[index * size : (index + 1) * size]
            nodes.append(self.pool.remember(sequence.table.block_ids[index], parent, tokens))

    def _release(self, sequence: Sequence) -> None:
        """Release the blocks and the row of an ended sequence, once no step in flight writes there."""
        if sequence.in_flight:
            self._leaving.add(sequence)
            return
        self._leaving.discard(sequence)
        sequence.free()
        self.rows.release(sequence)

    def _drop(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self._parked is None or self._parked.pop(request, request) is not None:
            (self.running if request in self.running else self.waiting).remove(request)
        del self.requests[request.request_id]


def _has_nan(prompt: Series[Sample]) -> bool:
    return any(math.isnan(sample.logprob) for sample in prompt)


def _width_name(params: SamplingParams | BeamSearchParams) -> str:
    if isinstance(params, BeamSearchParams):
        return "beam_width"
    return "best_of" if params.best_of else "n"
