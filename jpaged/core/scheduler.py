"""Choice of the tokens and sequences of the next step: which requests continue, are admitted, and are preempted.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed_tokens`, and each
step's token budget is handed out in the order of the requests' ranks (the formula is vLLM V1's). Chunked prefill,
prefix-cache hits, forks and recomputation after a preemption all follow from that one subtraction.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Series
from types import MappingProxyType

from jpaged.config import Limits
from jpaged.core.adapter_slots import Passing
from jpaged.core.admission import Capacity, make_request
from jpaged.core.block_pool import BlockPool
from jpaged.core.block_table import BlockTable
from jpaged.core.commit import Commit, Committed, finish
from jpaged.core.disk_tier import DiskTier, Files
from jpaged.core.draft_costs import UNKNOWN, DecodeCosts, DraftModelLimits
from jpaged.core.drafting import MOST_BESIDE, Drafting, Wanted
from jpaged.core.drafts import ModelDrafter
from jpaged.core.memory import Memory
from jpaged.core.params import InvalidParameter, Params
from jpaged.core.plan import StepPlan, StepResult
from jpaged.core.planned_step import PlannedStep
from jpaged.core.queue import Queues, RequestQueue, Turns
from jpaged.core.request import FinishReason, Request, RequestFault, Sequence
from jpaged.core.shares import Shares
from jpaged.core.text_key import salt_with

# The headroom of engines. In simulations of an overloaded pool (OPT-13B on an A100, ShareGPT's lengths), it cuts
# preemptions to a quarter and raises throughput by 3 to 5 %. A headroom of 64 tokens leaves so many blocks free that
# throughput falls by as much again.
HEADROOM = 16
NO_DRAFTS: Mapping[Sequence, Series[int]] = MappingProxyType({})


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
        page_swap_cost: likewise, of a page of states.
        tokens_beside_decodes: maximum tokens of a step in which some sequence is past its prompt, at least
            `max_num_seqs`; None: the limit of all steps. A long step makes such sequences wait.
        step_overhead: cost of a step without its tokens, in tokens that could be computed in that time. It limits the
            tokens of a step for several tenants; inf: no limit.
        headroom: tokens of each running sequence for which blocks stay free when another request is admitted. Without
            it, a full pool preempts the new request after a few steps, and all its work is lost.
        decode_costs, draft_model: as in `Drafting`.
        num_adapters, pinned_share, moves_overlap: as in `Memory`.

    Attributes:
        drafting: the drafts of requests.
        holds_new: admit no request for the first time, so that only started requests continue.
        touched: the requests on which the step before the last `recover` may have worked.
        prefix_queries: number of prompt tokens that were looked up in the prefix cache.
        prefix_hits: number of prompt tokens that came from the prefix cache.
        num_drafted: number of times that a sequence had drafts in a step.
        num_drafts, num_kept: number of drafts, and of those that were kept.
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
        page_swap_cost: float = 0.0,
        tokens_beside_decodes: int | None = None,
        step_overhead: float = math.inf,
        headroom: int = 0,
        decode_costs: DecodeCosts = UNKNOWN,
        draft_model: DraftModelLimits | None = None,
        num_adapters: int = 0,
        pinned_share: float = 1.0,
        moves_overlap: bool = True,
    ):
        self.limits, self.vocab_size, self.policy = limits, vocab_size, policy
        # A tokenizer may know tokens that the model can't produce.
        self.eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self.tokens_beside_decodes = tokens_beside_decodes or limits.max_num_batched_tokens
        self.step_overhead, self.headroom = step_overhead, headroom
        self.drafting = Drafting(limits, pool, decode_costs, draft_model)
        swap_costs = block_swap_cost, page_swap_cost
        self.memory = Memory(
            pool,
            host_pool,
            limits.max_num_seqs,
            preemption,
            swap_costs,
            limits.exact,
            num_adapters,
            pinned_share,
            moves_overlap,
        )
        self.pool, self.host_pool, self.rows = pool, host_pool, self.memory.rows
        self.queues = Queues()
        self.holds_new = False
        self.touched: list[Request] = []
        self.num_preemptions = self.num_swapped_blocks = self.prefix_queries = self.prefix_hits = 0
        self.num_drafted = self.num_drafts = self.num_kept = 0
        self._arrivals = itertools.count()
        self._turns = Turns()
        self._passing = Passing()
        self._in_flight: deque[PlannedStep] = deque()
        self._must_drain = False  # something must be preempted before the next plan
        self._restarted: list[Request] = []  # by `recover`, since the last plan

    @property
    def requests(self) -> dict[str, Request]:
        """All requests that have not ended, by id."""
        return self.queues.by_id

    @property
    def waiting(self) -> RequestQueue:
        """Requests without blocks on the device."""
        return self.queues.waiting

    @property
    def running(self) -> RequestQueue:
        """Requests with rows and blocks on the device."""
        return self.queues.running

    @property
    def has_started(self) -> bool:
        """Whether there is an admitted request that has not ended."""
        return any(request.admitted for request in self.requests.values())

    @property
    def is_trying(self) -> bool:
        """Whether some requests are tried without the others, which are parked."""
        return self.queues.parked is not None

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to commit."""
        return bool(self.requests or self._in_flight)

    @property
    def capacity(self) -> Capacity:
        """Sizes that limit every request."""
        pool = self.pool
        return Capacity(
            self.limits,
            pool.num_blocks,
            pool.block_size,
            pool.most_held,
            self.vocab_size,
            self.eos_token_ids,
            pool.num_pages,
        )

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: Params,
        *,
        seed: int,
        prompt: str | None = None,
        priority: int = 0,
        client: str | None = None,
        tenant: str | None = None,
        cache_salt: str = "",
        pin_s: float = 0.0,
        adapter: int | None = None,
        bad_words: Iterable[tuple[int, ...]] = (),
    ) -> Request:
        """Queue a request. The arguments are as in `make_request` and `Request`.

        Raises:
            InvalidParameter: the request could never run; the message has the numbers.
        """
        if request_id in self.requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already in use")
        if priority and self.policy != "priority":
            raise InvalidParameter("priority", f"must be 0 under the policy {self.policy!r}, not {priority}")
        if not 0 <= pin_s < math.inf:
            raise InvalidParameter("pin_s", f"must be a finite number of seconds, at least 0, not {pin_s}")
        request = make_request(request_id, prompt_token_ids, params, seed, bad_words, self.capacity)
        request.prompt, request.client, request.tenant, request.adapter = prompt, client, tenant, adapter
        request.cache_salt, request.pin_s = salt_with(adapter, cache_salt), pin_s
        request.rank = priority, self._turns.take(client, request.num_sequences), next(self._arrivals)
        request.sequences.append(Sequence(request, list(prompt_token_ids), BlockTable(self.pool)))
        request.sequences[0].drafter = self.drafting.drafter_of(request)
        self.queues.add(request)
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
        finish(sequence, reason, stop_reason, self.queues, self.memory)

    def advance(self, now: float) -> None:
        """Take the present time in seconds, by which pins of prefixes end."""
        self.memory.pins.advance(now)

    @property
    def disk(self) -> DiskTier | None:
        """The files of cached blocks."""
        return self.memory.tier.disk if self.memory.tier else None

    def close_files(self) -> None:
        """Keep no further blocks in files."""
        if self.memory.tier:
            self.memory.tier.disk = None

    def wanted_files(self) -> Iterator[Files]:
        """Yield the files to read before the next step, of each waiting request; `disk.arrive` follows each time.

        Beside running requests, it yields those of one request, whose reading takes no more time than the tokens of a
        step with decodes.
        """
        if self.disk is None:
            return
        self.disk.fetching = None
        if self._must_wait or self.holds_new:
            return
        bounded = self.running and self.disk.token_s
        most_s = self.tokens_beside_decodes * self.disk.token_s if bounded else math.inf
        for request in list(itertools.islice(self.waiting, len(self.rows.free))):
            if files := self.memory.wanted_files(request, most_s):
                yield files
                if bounded:
                    return

    def wanted_drafts(self) -> list[Wanted]:
        """Return the sequences that want drafts of a draft model in the next step, and how many."""
        if self._must_wait:
            return []
        return self.drafting.wanted([sequence for request in self.running for sequence in request.live])

    @property
    def _must_wait(self) -> bool:
        """Whether the next plan should follow the commit of the plans in flight.

        Something must be preempted, or at least one in `MOST_BESIDE` of the running sequences waits for its sample. If
        the others went on alone, both parts would take turns, and the waiting ones would miss every other step.
        """
        num_waiting = sum(step.num_waiting for step in self._in_flight)
        if not num_waiting:
            return self._must_drain and bool(self._in_flight)
        return self._must_drain or MOST_BESIDE * num_waiting >= sum(len(request.live) for request in self.running)

    def schedule(self, drafts: Mapping[Sequence, Series[int]] = NO_DRAFTS) -> StepPlan | None:
        """Hand out the token budget: to running requests first, then to waiting ones unless one was preempted.

        Args:
            drafts: the tokens that a draft model expects next in some sequences.

        Returns:
            The plan of the next step, or None if there is nothing to do before a plan in flight is committed.

        Raises:
            RequestFault: the work on one request raised an exception. `recover` is needed.
        """
        if self._must_wait:
            return None
        for sequence, tokens in drafts.items():
            assert isinstance(sequence.drafter, ModelDrafter), "only these sequences want drafts"
            sequence.drafter.take(sequence.num_tokens, tokens)
        step = PlannedStep(self.queues, self.memory, may_preempt=not self._in_flight)
        try:
            self._fill(step)
        except Exception as error:
            if step.at is None:
                raise
            raise RequestFault(step.at) from error
        finally:
            self.num_preemptions += len(step.preempted)
            self.num_swapped_blocks += len(step.swap_out)
        self._must_drain = step.must_drain
        plan = step.complete()
        if plan is not None:
            step.preempted[:0] = [(request, False) for request in self._restarted if not request.finished]
            self._restarted.clear()
            self._in_flight.append(step)
        return plan

    def _fill(self, step: PlannedStep) -> None:
        """Fill a step with running requests, then with waiting ones unless one was preempted for lack of blocks."""
        budget = self.limits.max_num_batched_tokens
        if any(request.sequences[0].num_computed_tokens >= len(request.prompt_token_ids) for request in self.running):
            budget = min(budget, self.tokens_beside_decodes)
        shares, num_yielded = None, 0
        if self.holds_new or len(self.running.tenants.keys() | self.waiting.tenants.keys()) < 2:
            self.queues.owed.clear()
            step.order = list(self.running)
            step.choose_drafts(self.drafting, budget)
            budget = step.continue_running(budget)
        else:
            overhead, chunk = self.step_overhead, self.tokens_beside_decodes
            shares = Shares(self.queues, self.memory, budget=budget, overhead=overhead, chunk=chunk)
            step.order = shares.order
            # Requests beyond the fair shares of their tenants yield to waiting ones within that of another tenant.
            num_yielded = shares.num_victims(step, self.headroom) if self.waiting else 0
            if num_yielded and not step.may_preempt:
                step.must_drain = True
                return
            for _ in range(num_yielded):
                step.preempt_last()
            step.choose_drafts(self.drafting, budget)
            budget = step.continue_shared(budget, shares.grants)
        if not (len(step.preempted) > num_yielded or step.must_drain):
            self._schedule_waiting(budget, step, shares)

    def _schedule_waiting(self, budget: int, step: PlannedStep, shares: Shares | None) -> None:
        """Admit waiting requests in their order, as far as rows, blocks and the budget allow."""
        if not (self.waiting and self.rows.free):
            return
        num_seats, reserved = step.claims()
        while budget > 0 and (request := self._next_waiting(shares)):
            step.at = request
            if not self.rows.adapters.has_room(request.adapter):
                break
            growth = num_seats * self.headroom * len(self.pool.windows) // self.pool.block_size
            num_seats += request.seats
            if num_seats + step.num_further > self.limits.max_num_seqs:
                break
            if not step.has_pages(request):
                break
            moved = self._admit(request, reserved + growth, budget, step)
            if moved is None:
                break
            budget, count = max(0, budget - moved), 0
            if budget and request not in step.resumed:
                count = step.schedule(request, min(budget, shares.room(request)) if shares else budget)
                budget -= count
            reserved += step.lack([request])
            if shares:
                shares.admit(request, count)

    def _next_waiting(self, shares: Shares | None) -> Request | None:
        if self.holds_new:
            return self.waiting.first_admitted
        if shares:
            return shares.next_waiting()
        return self._passing.next(self.waiting, self.rows.adapters) if self.waiting else None

    def _admit(self, request: Request, reserved: int, budget: int, step: PlannedStep) -> int | None:
        """Let a waiting request run if all its tokens fit, in addition to its swapped or cached blocks.

        Returns:
            The cost of moving its prefix from the host, in tokens; None: it still waits.
        """
        moved: int | None = 0
        if num_swapped := self.memory.num_held(request):
            if num_swapped + step.lack([request]) + reserved > self.pool.num_free:
                return None
            step.resume(request)
        else:
            moved = self.memory.restore(request, reserved, budget, alone=not step.rows)
            if moved is None or not self._find_room(request, reserved):
                for sequence in request.live:
                    sequence.free()
                return None
            if not request.admitted:
                (first,) = request.live
                first.num_cached_tokens = first.num_computed_tokens
                self.prefix_queries += first.num_tokens
                self.prefix_hits += first.num_cached_tokens
        self._passing.admit(request)
        step.admit(request)
        self._turns.start(request.rank[1])
        return moved

    def _find_room(self, request: Request, reserved: int) -> bool:
        """Take the cached blocks of a waiting request; return whether there is room for its other tokens, too."""
        self.memory.share_prefixes(request)
        return self.memory.lack(request) + reserved <= self.pool.num_free

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Commit the oldest plan in flight. Only this method commits tokens, forks and endings by a token."""
        step = self._in_flight.popleft()
        assert step.plan is plan, "plans are committed in their order"
        commit = Commit(self.queues, self.memory, self.drafting)
        committed = commit.run(step, result)
        if self._in_flight:
            self._in_flight[-1].num_waiting += commit.num_woken
        for drafts, kept in committed.verified:
            self.num_drafted += 1
            self.num_drafts += drafts
            self.num_kept += kept
        return committed

    def recover(self, *, expelled: Collection[Request] = (), tried: Collection[Request] | None = None) -> None:
        """Restore a consistent state after a step that failed at any point, or for other parameters.

        The content of all blocks is forgotten, on the host too, and so are the results of the plans in flight. Every
        request waits to be recomputed from its tokens.

        Args:
            expelled: requests that end with an error. Nothing else is done with them, whatever their state.
            tried: the requests that wait; all others, and new ones, are parked until `release`. None: all wait.
        """
        self._in_flight.clear()
        self._must_drain = False
        waiting = self.waiting
        idle = {*waiting, *(self.queues.parked or ())} - {waiting.first if waiting else None}
        self.touched = [request for request in self.requests.values() if request not in idle]
        self._restarted += self.running
        self.num_preemptions += len(self.running)
        for request in expelled:
            for sequence in request.live:
                sequence.finish_reason = FinishReason.ERROR
        self.queues.restart(tried)
        self.memory.clear(self.requests.values())
        for request in self.requests.values():
            if not any(sequence.num_output_tokens for sequence in request.live):
                request.prompt_samples.clear()  # returned with the first token, so from the same parameters
                request.sums.clear()

    def keep_kv(self) -> None:
        """Let requests continue on their KV with other parameters. Their later tokens depend on both."""
        self.pool.reset_prefix_cache()
        for request in self.requests.values():
            for sequence in request.live:
                if sequence.mixed_from is None and (sequence.num_computed_tokens or sequence.leader):
                    # Tokens of steps in flight, which have the old parameters, are counted as mixed, too.
                    sequence.mixed_from = sequence.num_output_tokens

    def release(self, requests: Iterable[Request] | None = None) -> None:
        """Let parked requests wait in the queue; None: all of them, and park no further ones."""
        self.queues.release(requests)

    def check_invariants(self) -> None:
        """Check the queues, the memory, the steps in flight, and the order of every sequence's integers."""
        self.queues.check_invariants()
        for sequence in (sequence for request in self.requests.values() for sequence in request.live):
            room = len(sequence.table) * self.pool.block_size
            known = sequence.num_tokens + sequence.pending
            assert 0 <= sequence.num_computed_tokens <= known <= self.limits.max_model_len, sequence
            assert sequence.num_computed_tokens <= room, f"{sequence.num_computed_tokens} computed, room for {room}"
            pages = [position for position, _ in sequence.table.pages]
            assert pages == sorted(set(pages)), f"states after {pages} tokens"
            if self.pool.num_pages:
                assert (pages or [0])[-1] == sequence.num_computed_tokens, f"{pages} of {sequence.num_computed_tokens}"
        running = [sequence for request in self.running for sequence in request.live]
        idle = [sequence for request in (*self.waiting, *(self.queues.parked or ())) for sequence in request.live]
        assert not any(sequence.in_flight for sequence in idle), "a waiting request is part of a step in flight"
        self.memory.check_invariants(running, idle)
        counts = Counter(sequence for step in self._in_flight for sequence in step.sequences)
        flying = {s: s.in_flight for s in (*running, *self.memory.leaving) if s.in_flight}
        assert counts == Counter(flying), "miscounted in flight"
        num_seats = sum(request.seats for request in self.running) + len(self.memory.leaving)
        assert num_seats <= self.limits.max_num_seqs, f"{num_seats} rows may be needed"
