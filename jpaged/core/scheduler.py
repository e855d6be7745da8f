"""Which tokens of which sequences run in the next step, and what their results change.

There is no prefill phase and no decode phase: a sequence is behind by `num_tokens - num_computed_tokens`, and each
step's token budget is handed out first come, first served (the formula is vLLM V1's). Chunked prefill, prefix-cache
hits and recomputation after a preemption all follow from that one subtraction.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from jpaged.config import Limits
from jpaged.core.block_pool import ROOT_KEY, BlockPool, block_key
from jpaged.core.block_table import BlockTable
from jpaged.core.request import FinishReason, InvalidParameter, Request, SamplingParams, Sequence


@dataclass(frozen=True)
class ScheduleDecision:
    """One step's work: first the block copies, then `num_scheduled_tokens[sequence]` tokens of each sequence."""

    num_scheduled_tokens: dict[Sequence, int] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """Continuous batching with preemption by recomputation. Only `schedule` and `update` move generation on.

    A request is in `waiting` or in `running`, both in order of arrival; the youngest running one gives its blocks up
    first, so the oldest always goes on and every request ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        vocab_size: int,
        eos_token_ids: Series[int] = (),
    ):
        self.pool = pool
        self.limits = limits
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def max_sequence_len(self) -> int:
        """Most tokens of one sequence. The last token sampled is never written, so it needs no slot."""
        return min(self.limits.max_model_len, self.pool.num_blocks * self.pool.block_size + 1)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        prompt: str | None = None,
    ) -> Request:
        """Queues a request. Raises InvalidParameter, with the numbers, for one that could never run."""
        if request_id in self.waiting or request_id in self.running:
            raise InvalidParameter("request_id", f"{request_id!r} is already in use")
        length, limit = len(prompt_token_ids), self.max_sequence_len
        if not length:
            raise InvalidParameter("prompt", "must hold at least one token")
        for token in prompt_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise InvalidParameter("prompt", f"token id {token!r} is outside the vocabulary [0, {self.vocab_size})")
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter("stop_token_ids", f"{token} is outside the vocabulary [0, {self.vocab_size})")
        bound = "the model's max_model_len" if limit == self.limits.max_model_len else "what the KV pool can hold"
        if length >= limit:
            raise InvalidParameter(
                "prompt", f"has {length} tokens; at most {limit - 1} fit with one token of output ({bound})"
            )
        max_tokens = limit - length if params.max_tokens is None else params.max_tokens
        if length + max_tokens > limit:
            raise InvalidParameter(
                "max_tokens", f"{max_tokens} after a prompt of {length} tokens exceeds {limit} tokens in all ({bound})"
            )
        request = Request(request_id, list(prompt_token_ids), params, seed, max_tokens, prompt)
        request.sequences.append(Sequence(request, list(prompt_token_ids), length, BlockTable(self.pool)))
        self.waiting[request_id] = request
        return request

    def fork(self, sequence: Sequence) -> Sequence:
        """A second branch of a running request, scheduled beside the first. They share blocks until one writes."""
        request = sequence.request
        assert request.request_id in self.running and not sequence.finish_reason, "only what runs can fork"
        child = sequence.fork()
        request.sequences.append(child)
        return child

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any moment and frees its blocks; None if it is unknown or has ended."""
        request = self.waiting.get(request_id) or self.running.get(request_id)
        if request is not None:
            for sequence in _live(request):
                self.finish(sequence, FinishReason.ABORT)
        return request

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, and with its last one the request."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.free()
        request = sequence.request
        if request.finished:
            (self.running if request.request_id in self.running else self.waiting).pop(request.request_id)

    def schedule(self) -> ScheduleDecision:
        """Hands out the token budget: to running requests first, then to waiting ones unless one had to give way."""
        decision = ScheduleDecision()
        budget = self.limits.max_num_batched_tokens
        for request in list(self.running.values()):
            if request.request_id not in self.running:
                break  # preempted for an older one, and so is everything after it
            budget -= self._schedule_running(request, budget, decision)
        if decision.preempted:
            return decision
        num_seqs = sum(1 for request in self.running.values() for _ in _live(request))
        # What the running ones still lack for the tokens they already have is as good as taken.
        reserved = sum(_shortage(request) for request in self.running.values()) if self.waiting else 0
        while self.waiting and budget > 0:
            request = next(iter(self.waiting.values()))
            num_seqs += sum(1 for _ in _live(request))
            if num_seqs > self.limits.max_num_seqs or not self._admit(request, reserved):
                break
            budget -= self._schedule_running(request, budget, decision)
            reserved += _shortage(request)
        return decision

    def update(self, decision: ScheduleDecision, token_ids: Series[int], logprobs: Series[float]) -> list[Sequence]:
        """Commits a step: row i of the results belongs to the decision's i-th sequence.

        Returns the sequences that got a token; one still inside its prompt got none, one that ended meanwhile is
        left alone.
        """
        advanced = []
        for (sequence, count), token, logprob in zip(
            decision.num_scheduled_tokens.items(), token_ids, logprobs, strict=True
        ):
            if sequence.finish_reason:
                continue
            sequence.num_computed_tokens += count
            assert sequence.num_computed_tokens <= sequence.num_tokens <= self.limits.max_model_len
            self._remember(sequence, count)
            if sequence.num_computed_tokens < sequence.num_tokens:
                continue
            sequence.append(token, logprob)
            advanced.append(sequence)
            params = sequence.request.params
            if token in self.eos_token_ids and not params.ignore_eos:
                self.finish(sequence, FinishReason.STOP)
            elif token in params.stop_token_ids:
                self.finish(sequence, FinishReason.STOP, token)
            elif sequence.num_tokens - sequence.num_prompt_tokens >= sequence.request.max_tokens:
                self.finish(sequence, FinishReason.LENGTH)
        return advanced

    def check_invariants(self) -> None:
        """The pool's own check against every live table, and the order of every sequence's integers."""
        assert not self.waiting.keys() & self.running.keys(), "a request both waits and runs"
        sequences = [s for queue in (self.waiting, self.running) for request in queue.values() for s in _live(request)]
        for sequence in sequences:
            held = len(sequence.table.block_ids) * self.pool.block_size
            assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens <= self.limits.max_model_len, vars(sequence)
            assert sequence.num_computed_tokens <= held, f"{sequence.num_computed_tokens} computed, room for {held}"
        assert all(not s.table.block_ids for r in self.waiting.values() for s in _live(r)), (
            "a waiting request holds blocks"
        )
        self.pool.check_invariants(sequence.table.block_ids for sequence in sequences)

    def _schedule_running(self, request: Request, budget: int, decision: ScheduleDecision) -> int:
        """Schedules what fits of a request, taking blocks from younger ones if it must; returns the tokens used."""
        used, copies, scheduled = 0, [], {}
        for sequence in _live(request):
            start = sequence.num_computed_tokens
            count = min(sequence.num_tokens - start, budget - used)
            if count == 0:
                continue
            while (new_copies := sequence.table.append(start, start + count)) is None:
                victim = next(reversed(self.running.values()))
                self._preempt(victim, decision)
                if victim is request:
                    return 0
            copies += new_copies
            scheduled[sequence] = count
            used += count
        decision.block_copies.extend(copies)
        decision.num_scheduled_tokens.update(scheduled)
        return used

    def _admit(self, request: Request, reserved: int) -> bool:
        """Moves a waiting request to `running`, on top of what the prefix cache has of it, if all its tokens fit."""
        for sequence in _live(request):
            # The last token is always computed: its hidden state is what the next token is sampled from.
            cached = self.pool.match(self._keys(sequence, (sequence.num_tokens - 1) // self.pool.block_size))
            sequence.table.share_prefix(cached)
            sequence.num_computed_tokens = len(cached) * self.pool.block_size
        if _shortage(request) + reserved > self.pool.num_free:
            for sequence in _live(request):
                sequence.free()
            return False
        for sequence in _live(request):
            if sequence.num_tokens == sequence.num_prompt_tokens:
                sequence.num_cached_tokens = sequence.num_computed_tokens
        self.running[request.request_id] = self.waiting.pop(request.request_id)
        return True

    def _preempt(self, request: Request, decision: ScheduleDecision) -> None:
        """Takes all blocks of a running request away; it waits at the front of the queue to be computed again."""
        for sequence in _live(request):
            sequence.free()
        self.waiting[request.request_id] = self.running.pop(request.request_id)
        self.waiting.move_to_end(request.request_id, last=False)
        decision.preempted.append(request)
        self.num_preemptions += 1

    def _remember(self, sequence: Sequence, count: int) -> None:
        """Lets the blocks that the last `count` computed tokens have filled be found by their content."""
        size = self.pool.block_size
        first, full = (sequence.num_computed_tokens - count) // size, sequence.num_computed_tokens // size
        if self.pool.enable_prefix_caching and first < full:
            keys = self._keys(sequence, full)
            for index in range(first, full):
                self.pool.remember(sequence.table.block_ids[index], keys[index])

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Keys of the first `count` full blocks; [] without a prefix cache."""
        if not self.pool.enable_prefix_caching:
            return []
        keys, size = sequence.block_keys, self.pool.block_size
        while len(keys) < count:
            start = len(keys) * size
            keys.append(block_key(keys[-1] if keys else ROOT_KEY, sequence.tokens[start : start + size]))
        return keys[:count]


def _live(request: Request) -> Iterator[Sequence]:
    return (sequence for sequence in request.sequences if not sequence.finish_reason)


def _shortage(request: Request) -> int:
    """Blocks a request still lacks for the tokens it has."""
    return sum(s.table.shortage(s.num_computed_tokens, s.num_tokens) for s in _live(request))
