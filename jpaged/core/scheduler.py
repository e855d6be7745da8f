"""Which tokens of which sequences run in the next step, and what their results change.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed_tokens`, and each
step's token budget is handed out in the order of the requests' ranks (the formula is vLLM V1's). Chunked prefill,
prefix-cache hits, forks and recomputation after a preemption all follow from that one subtraction.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Set
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from jpaged.config import Limits
from jpaged.core.bad_words import BadWords
from jpaged.core.beam import Beam, BeamSearch, Candidate
from jpaged.core.block_pool import BlockPool, Parent, common_length
from jpaged.core.block_table import BlockTable, Copies, append, move, num_distinct, shortage
from jpaged.core.params import MAX_TOP, BeamSearchParams, ContextLengthExceeded, InvalidParameter, SamplingParams
from jpaged.core.queue import RequestQueue, Turns
from jpaged.core.request import NON_FINITE, FinishReason, Request, Sample, Sequence, SequenceResult, forbidden_tokens

Ending = tuple[FinishReason, int | str | None]  # with the stop reason


@dataclass(frozen=True)
class ScheduleDecision:
    """One step's work, in this order: blocks to the host, block copies, blocks from the host, rows of the sampling
    state, then `num_scheduled_tokens[sequence]` tokens of each sequence.

    Attributes:
        swap_out: of each request that goes to the host, its blocks and where they go.
        forbidden: tokens that a sequence may not be given in this step.
        row_copies: {destination: source}, for sequences that forked.
        row_writes: sequences whose row must be made anew from their tokens.
        resumed: requests whose blocks come back from the host; they run from the next step on.
    """

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    forbidden: dict[Sequence, Set[int]] = field(default_factory=dict)
    swap_out: list[Copies] = field(default_factory=list)
    block_copies: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    row_copies: dict[int, int] = field(default_factory=dict)
    row_writes: list[Sequence] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def idle(self) -> bool:
        """Whether the step would do nothing at all."""
        return not (self.num_scheduled_tokens or self.swap_out or self.swap_in)


class Scheduler:
    """Continuous batching with preemption. Only `schedule` and `update` move generation on.

    A request is in `waiting` or in `running`, both in order of rank: its priority, if `policy` is "priority" (a lower
    number goes first), then its client's turn, then its arrival. The last running one gives its blocks up first, all
    its sequences together, so the first always goes on and every request ends.

    Args:
        host_pool: room for swapped blocks; None is none.
        preemption: "recompute", "swap" (where the host has room), or "auto", whichever costs less.
        block_swap_cost: what moving one block to the host and back costs, in tokens computed again in that time.
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
    ):
        self.pool = pool
        self.limits = limits
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.host_pool = host_pool
        self.policy = policy
        self.preemption = preemption
        self.block_swap_cost = block_swap_cost
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_swapped_blocks = 0
        self.prefix_queries = 0  # tokens of prompts that were looked up, and those that were found
        self.prefix_hits = 0
        self._arrivals = itertools.count()
        self._turns = Turns()
        self._free_rows = list(range(limits.max_num_seqs))
        self._row_copies: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def max_sequence_len(self, prompt_len: int = 0, num_sequences: int = 1) -> int:
        """Most tokens of each of some sequences that share a prompt. The last token sampled is never written, so it
        needs no slot."""
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
        cache_salt: str = "",
        bad_words: Iterable[tuple[int, ...]] = (),
    ) -> Request:
        """Queue a request. Raises InvalidParameter, with the numbers, for one that could never run.

        Args:
            client: whose turns it takes; None takes none, and comes in the order of arrival.
            bad_words: token ids of each text that the output may not hold.
        """
        if request_id in self.requests:
            raise InvalidParameter("request_id", f"{request_id!r} is already in use")
        if priority and self.policy != "priority":
            raise InvalidParameter("priority", f"{priority} has no meaning under the policy {self.policy!r}")
        self._check_tokens(prompt_token_ids, params)
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
        beam: BeamSearch[Sequence] | None = None
        num_top = params.logprobs
        if isinstance(params, BeamSearchParams):
            beam = BeamSearch(params.beam_width, max_tokens, params.length_penalty, params.early_stopping)
            # Stop strings may end any of them.
            num_top = max(num_top or 0, MAX_TOP if params.stop else self._num_candidates(params))
        request = Request(
            request_id, list(prompt_token_ids), params, seed, max_tokens, prompt,
            rank=(priority, self._turns.take(client, width), next(self._arrivals)), client=client,
            cache_salt=cache_salt, bad_words=BadWords(bad_words),
            endings=self.eos_token_ids.union(params.stop_token_ids), num_top=num_top, beam=beam,
        )  # fmt: skip
        request.sequences.append(Sequence(request, list(prompt_token_ids), BlockTable(self.pool)))
        self.requests[request_id] = request
        self.waiting.add(request)
        return request

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any moment and frees its blocks; None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.live:
                self.finish(sequence, FinishReason.ABORT)
        return request

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, and with its last one the request."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self._release(sequence)
        if sequence.request.finished:
            self._drop(sequence.request)

    def schedule(self) -> ScheduleDecision:
        """Hands out the token budget: to running requests first, then to waiting ones unless one had to give way."""
        decision = ScheduleDecision(row_copies=self._row_copies)
        self._row_copies = {}
        budget = self.limits.max_num_batched_tokens
        for request in list(self.running):
            if decision.preempted and request not in self.running:
                break  # preempted for one before it, and so is everything after it
            budget -= self._schedule_running(request, budget, decision)
        if decision.preempted or not self.waiting:
            return decision
        num_seqs = sum(request.seats for request in self.running)
        # What the running ones still lack for the tokens they already have is as good as taken.
        reserved = sum(self._lack(request) for request in self.running)
        while self.waiting and budget > 0:
            request = self.waiting.first
            num_seqs += request.seats
            if num_seqs > self.limits.max_num_seqs or not self._admit(request, reserved, decision):
                break
            if request not in decision.resumed:
                budget -= self._schedule_running(request, budget, decision)
            reserved += self._lack(request)
        return decision

    def update(self, decision: ScheduleDecision, results: Series[SequenceResult]) -> list[Sequence]:
        """Commits a step: result i belongs to the decision's i-th sequence.

        Returns the sequences that got a token: not those still inside their prompts, nor those that ended meanwhile.
        Of a beam search, the live beams, or, once it has ended, its outputs.
        """
        advanced: list[Sequence] = []
        beams: dict[Request, list[Sample]] = {}
        for request in decision.resumed:
            for sequence in request.live:
                self._remember(sequence)
        for (sequence, count), result in zip(decision.num_scheduled_tokens.items(), results, strict=True):
            request = sequence.request
            if sequence.finish_reason:
                continue
            sequence.num_computed_tokens += count
            assert sequence.num_computed_tokens <= sequence.num_tokens <= self.limits.max_model_len
            if _has_nan(result):
                beams.pop(request, None)
                advanced += [each for each in self._fail(request) if each not in advanced]
                continue
            self._remember(sequence)
            request.prompt_samples.extend(result.prompt)
            if not result.samples:
                continue
            if request.beam:
                beams.setdefault(request, []).append(result.samples[0])
                continue
            branches = [sequence]
            if len(result.samples) > 1:
                branches += [self._fork(sequence, index) for index in range(1, len(result.samples))]
                request.sequences = branches
            for branch, sample in zip(branches, result.samples, strict=True):
                branch.append(sample)
                ending = self._ending(branch, sample.token, branch.num_output_tokens)
                if ending:
                    self.finish(branch, *ending)
            advanced += branches
        for request, samples in beams.items():
            advanced += self._advance_beams(request, samples)
        return advanced

    def recover(self) -> None:
        """Restore a consistent state after a step that failed at any point.

        Nothing is known of the KV that the step may have written, so the content of all blocks is forgotten, on the
        host too, and every request waits to be recomputed from its tokens.
        """
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.clear()
        self._free_rows, self._row_copies = list(range(self.limits.max_num_seqs)), {}
        self.waiting, self.running = RequestQueue(), RequestQueue()
        self.requests = {name: request for name, request in self.requests.items() if not request.finished}
        for request in self.requests.values():
            for sequence in request.live:
                sequence.table, sequence.row = BlockTable(self.pool), None
                sequence.free()
            self.waiting.add(request)

    def check_invariants(self) -> None:
        """The pools' own checks against every live table, and the order of every sequence's integers."""
        queued = [*self.waiting, *self.running]
        assert sorted(map(id, queued)) == sorted(map(id, self.requests.values())), "a request is lost, or queued twice"
        sequences = [sequence for request in queued for sequence in request.live]
        for sequence in sequences:
            held = len(sequence.table.block_ids) * self.pool.block_size
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens <= self.limits.max_model_len, vars(sequence)
            assert sequence.num_computed_tokens <= held, f"{sequence.num_computed_tokens} computed, room for {held}"
        for request in self.waiting:
            for sequence in request.live:
                assert sequence.row is None, "a waiting request holds a row"
                assert sequence.table.pool is self.host_pool or not sequence.table.block_ids, (
                    "a waiting request holds blocks"
                )
        rows = [s.row for request in self.running for s in request.live] + self._free_rows
        assert Counter(rows) == Counter(range(self.limits.max_num_seqs)), f"rows: {rows}"
        assert sum(request.seats for request in self.running) <= self.limits.max_num_seqs
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
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.vocab_size:
                    raise InvalidParameter(name, f"{token} {bound}")
        if isinstance(params, BeamSearchParams) and self._num_candidates(params) > MAX_TOP:
            told = f"{len(params.stop_token_ids)} and a beam_width of {params.beam_width} are more than {MAX_TOP}"
            raise InvalidParameter("stop_token_ids", told)

    def _num_candidates(self, params: BeamSearchParams) -> int:
        """How many of its best tokens each beam must bring: as many as may go on, beside all that may end it."""
        return params.beam_width + len(self.eos_token_ids | set(params.stop_token_ids))

    def _schedule_running(self, request: Request, budget: int, decision: ScheduleDecision) -> int:
        """Schedules what fits of a request, taking blocks from those behind it if it must; returns the tokens used."""
        counts = self._counts(request, budget)
        spans = [(s.table, s.num_computed_tokens, s.num_computed_tokens + count) for s, count in counts.items()]
        while (copies := append(spans)) is None:
            victim = self.running.last
            self._preempt(victim, decision)
            if victim is request:
                return 0
        decision.block_copies.extend(copies)
        if request.params.min_tokens or request.bad_words:
            for sequence, count in counts.items():
                if sequence.num_samples(count) and (forbidden := forbidden_tokens(sequence)):
                    decision.forbidden[sequence] = forbidden
        decision.num_scheduled_tokens.update(counts)
        return sum(counts.values())

    def _counts(self, request: Request, budget: int) -> dict[Sequence, int]:
        """How many tokens of each sequence of a running request come next, within the budget.

        The last token of any waits until all have their blocks, and the last tokens of beams are computed in one
        step, for they are compared with each other.
        """
        live = request.live
        if len(live) == 1:
            (sequence,) = live
            count = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            return {sequence: count} if count > 0 else {}
        while any(self._follow(sequence) for sequence in live):
            pass  # one that has started may lead another
        together = request.beam is not None
        held_back = together or any(sequence.leader for sequence in live)
        counts: dict[Sequence, int] = {}
        for sequence in live:
            behind = sequence.num_tokens - held_back - sequence.num_computed_tokens
            count = min(behind, budget) if sequence.leader is None else 0
            if count > 0:
                counts[sequence] = count
                budget -= count
        at_their_last = all(s.num_computed_tokens + counts.get(s, 0) == s.num_tokens - 1 for s in live)
        if together and at_their_last and budget >= len(live):
            counts = {sequence: counts.get(sequence, 0) + 1 for sequence in live}
        return counts

    def _follow(self, sequence: Sequence) -> bool:
        """Starts a sequence that waits for its leader, if that has computed what they share."""
        if sequence.leader is None:
            return False
        leader, shared = sequence.leader
        if leader.num_computed_tokens < shared:
            return False
        size = self.pool.block_size
        sequence.table.share(leader.table.block_ids[: -(-shared // size)])
        sequence.nodes, sequence.num_computed_tokens = leader.nodes[: shared // size], shared
        sequence.leader = None
        return True

    def _lack(self, request: Request) -> int:
        """Blocks that a request still lacks for the tokens it has."""
        size, spans, lack = self.pool.block_size, [], 0
        for sequence in request.live:
            if sequence.leader:
                lack += -(-sequence.num_tokens // size) - sequence.leader[1] // size
            else:
                spans.append((sequence.table, sequence.num_computed_tokens, sequence.num_tokens))
        return lack + shortage(spans)

    def _admit(self, request: Request, reserved: int, decision: ScheduleDecision) -> bool:
        """Moves a waiting request to `running` if all its tokens fit: on top of what the host or the prefix cache has
        of it."""
        live = request.live
        tables = [sequence.table for sequence in live]
        swapped = any(table.block_ids for table in tables)
        if swapped:
            if num_distinct(tables) + self._lack(request) + reserved > self.pool.num_free:
                return False
            decision.swap_in.extend(move(tables, self.pool))
            decision.resumed.append(request)
        else:
            self._share_prefixes(request)
            if self._lack(request) + reserved > self.pool.num_free:
                for sequence in live:
                    sequence.free()
                return False
            if not request.admitted:
                live[0].num_cached_tokens = live[0].num_computed_tokens
                self.prefix_queries += live[0].num_tokens
                self.prefix_hits += live[0].num_cached_tokens
        for sequence in live:
            self._take_row(sequence)
            if request.params.has_state:
                decision.row_writes.append(sequence)
        request.admitted = True
        self.waiting.remove(request)
        self.running.add(request)
        self._turns.start(request.rank[1])
        return True

    def _share_prefixes(self, request: Request) -> None:
        """Starts each sequence with what the prefix cache has of it, or lets it wait for another of the request that
        has more in common with it."""
        before: Sequence | None = None
        # In sorted order nothing has more in common with a sequence than the one before it.
        for sequence in sorted(request.live, key=lambda s: s.tokens):
            # The last token is always computed: its hidden state is what the next token is sampled from.
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

    def _preempt(self, request: Request, decision: ScheduleDecision) -> None:
        """Takes all blocks of a running request away. It waits, in its place, to come back from the host or to be
        computed again."""
        live = request.live
        if self._should_swap(request):
            assert self.host_pool is not None
            moved = move([sequence.table for sequence in live], self.host_pool)
            decision.swap_out.append(moved)
            self.num_swapped_blocks += len(moved)
            for sequence in live:
                sequence.nodes = []  # it comes back in blocks that the prefix cache doesn't know
        for sequence in live:
            if sequence.table.pool is self.pool:
                sequence.free()
            self._give_row(sequence)
        self.running.remove(request)
        self.waiting.add(request)
        decision.preempted.append(request)
        self.num_preemptions += 1

    def _should_swap(self, request: Request) -> bool:
        """Whether a request goes to the host: never while its sequences wait for each other to be computed again."""
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

    def _ending(self, sequence: Sequence, token: int, length: int) -> Ending | None:
        """Why a sequence of `length` tokens of output ends with this one, if it does."""
        request = sequence.request
        if token in self.eos_token_ids and not request.params.ignore_eos:
            return FinishReason.STOP, None
        if token in request.params.stop_token_ids:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if length >= request.max_tokens else None

    def _advance_beams(self, request: Request, samples: list[Sample]) -> list[Sequence]:
        """Extends the live beams by what the step gave each of them: table and reference count do the rest."""
        search, parents, wanted = request.beam, request.live, request.params.logprobs or 0
        assert search is not None and len(samples) == len(parents), f"{len(samples)} of {len(parents)} beams were run"
        length = parents[0].num_output_tokens + 1

        def sample_of(candidate: Candidate) -> Sample:
            _, beam, token, logprob, rank = candidate
            *_, tokens, logprobs = samples[beam]
            return Sample(token, logprob, rank, tokens[:wanted], logprobs[:wanted])

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
        request.sequences = children
        return children

    def _fail(self, request: Request) -> list[Sequence]:
        """End a request whose logits are not finite. The prefix cache forgets its blocks, whose KV may be as bad."""
        ended = request.live
        for sequence in ended:
            for block_id in sequence.table.block_ids:
                self.pool.forget(block_id)
        for sequence in ended:
            self.finish(sequence, FinishReason.ERROR, NON_FINITE)
        return ended

    def _fork(self, sequence: Sequence, index: int) -> Sequence:
        """A second branch of a running sequence. They share blocks until one writes."""
        child = sequence.fork(index)
        self._take_row(child)
        if sequence.request.params.has_state:
            assert sequence.row is not None and child.row is not None
            self._row_copies[child.row] = sequence.row
        return child

    def _remember(self, sequence: Sequence) -> None:
        """Lets the blocks that are full by now be found by their content."""
        size, nodes = self.pool.block_size, sequence.nodes
        if sequence.num_computed_tokens // size <= len(nodes) or not self.pool.enable_prefix_caching:
            return
        for index in range(len(nodes), sequence.num_computed_tokens // size):
            parent: Parent = nodes[-1] if nodes else sequence.request.cache_salt
            tokens = sequence.tokens[index * size : (index + 1) * size]
            nodes.append(self.pool.remember(sequence.table.block_ids[index], parent, tokens))

    def _take_row(self, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()

    def _give_row(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._free_rows.append(sequence.row)
            sequence.row = None

    def _release(self, sequence: Sequence) -> None:
        sequence.free()
        self._give_row(sequence)

    def _drop(self, request: Request) -> None:
        """Forgets a request that has ended."""
        (self.running if request in self.running else self.waiting).remove(request)
        del self.requests[request.request_id]


def _has_nan(result: SequenceResult) -> bool:
    # All samples of a sequence are drawn from the same logits.
    return any(math.isnan(sample.logprob) for sample in (*result.samples[:1], *result.prompt))


def _width_name(params: SamplingParams | BeamSearchParams) -> str:
    if isinstance(params, BeamSearchParams):
        return "beam_width"
    return "best_of" if params.best_of else "n"
