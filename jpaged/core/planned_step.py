"""One step from its planning to its commit: tokens of running requests, the blocks for them, and preemptions."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass, field

from jpaged.config import DRAFTING_SEQS
from jpaged.core.block_table import BlockTable, Copies, append, move, page_shortage, shortage
from jpaged.core.branches import next_counts
from jpaged.core.drafting import Drafting
from jpaged.core.drafts import Offer
from jpaged.core.memory import Memory
from jpaged.core.plan import Scheduled, StepPlan
from jpaged.core.queue import Queues
from jpaged.core.request import Request, Sequence

_new = tuple.__new__  # Call it directly: the constructor of a named tuple takes twice the time.


@dataclass(eq=False, slots=True)
class PlannedStep:
    """Step that grows by the scheduler's decisions until its plan is complete, and then waits for its commit.

    Every decision changes the queues and the memory at once.

    Attributes:
        may_preempt: whether no other step is in flight, which could write the blocks of a preempted request.
        order: running requests; the last one is preempted first.
        at: the request on which the planning works, which is to blame for an exception.
        num_further: number of entries beyond one of each sequence, without drafts.
        drafts_of: the drafts of sequences.
        must_drain: whether a request must be preempted, and cannot be before the steps in flight are committed.
        num_waiting: number of sequences whose next step waits for the result of this one.
        sequences: sequences of `rows`, in the same order.
        unsteady: running requests except those on the steady path.
        further_branches: number of branches of requests on the steady path, without the first of each.
        preempted: requests that lost their blocks, each with whether the blocks were swapped out.
        resumed: requests whose blocks were swapped in, each with the computed tokens of its sequences.
        pages: of the sequences that are not on the steady path, the pages of each entry.
    """

    queues: Queues
    memory: Memory
    may_preempt: bool
    order: list[Request] = field(default_factory=list)
    at: Request | None = None
    must_drain: bool = False
    num_waiting: int = 0
    num_further: int = 0
    plan: StepPlan | None = None
    rows: list[Scheduled] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    unsteady: list[Request] = field(default_factory=list)
    further_branches: int = 0
    swap_out: Copies = field(default_factory=list)
    block_copies: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    from_files: list[int] = field(default_factory=list)
    masked: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)
    drafts_of: dict[Sequence, list[int]] = field(default_factory=dict)
    preempted: list[tuple[Request, bool]] = field(default_factory=list)
    resumed: dict[Request, list[tuple[Sequence, int]]] = field(default_factory=dict)
    pages: dict[Sequence, Copies] = field(default_factory=dict)

    def complete(self) -> StepPlan | None:
        """Return the plan, with all differences of rows since the last one; None if there is nothing to do."""
        if tier := self.memory.tier:
            moves = tier.take()
            self.swap_out += moves.out
            self.swap_in += moves.back
            self.from_files += moves.from_files
        if not (self.rows or self.swap_out or self.swap_in or self.from_files):
            return None
        self.plan = StepPlan(
            rows=tuple(self.rows),
            swap_out=tuple(self.swap_out),
            block_copies=tuple(self.block_copies),
            swap_in=tuple(self.swap_in),
            from_files=tuple(self.from_files),
            masked=tuple(self.masked),
            drafts=tuple(self.drafts),
            pages=tuple(self._pages_of_rows()) if self.memory.pool.num_pages else (),
            **self.memory.rows.differences(),
        )
        return self.plan

    def _pages_of_rows(self) -> Iterator[tuple[int, int]]:
        """Yield the pages that each entry reads and writes; on the steady path, a state stays in its page."""
        first, of_entries = self.memory.pool.num_blocks, {sequence: iter(each) for sequence, each in self.pages.items()}
        for sequence, entry in zip(self.sequences, self.rows, strict=True):
            if sequence in of_entries:
                read, written = next(of_entries[sequence])
            else:
                _, read = sequence.table.pages[-1]
                written, sequence.table.pages[-1] = read, (entry.start + 1, read)
            yield read - first if read >= first else read, written - first if written >= first else written

    def claims(self) -> tuple[int, int]:
        """Return the rows and the free blocks that are not available to waiting requests.

        The rows are those in use, or needed without another admission. The blocks are those that running requests still
        lack for their present tokens.
        """
        # The sequences of a request on the steady path lack nothing: no other table holds the last block of any.
        num_steady = len(self.order) - len(self.unsteady) + self.further_branches
        num_seats = num_steady + sum(request.seats for request in self.unsteady) + len(self.memory.leaving)
        return num_seats, self.lack(self.unsteady)

    def lack(self, requests: Iterable[Request]) -> int:
        """Return the number of blocks that some requests still lack for their present tokens."""
        lack = 0
        for request in requests:
            self.at = request
            lack += self.memory.lack(request)
        return lack

    def preempt_last(self) -> None:
        """Take all blocks of the last running request. It waits, in its place, to be swapped in or recomputed."""
        request = self.at = self.order.pop()
        moves = self.memory.evict(request)
        self.swap_out += moves
        self.queues.preempt(request)
        self.preempted.append((request, bool(moves)))

    def resume(self, request: Request) -> None:
        """Move the blocks of a swapped request back from the host, before the tokens of the step."""
        if tier := self.memory.tier:  # no move of this step may overwrite them
            tables = [sequence.table for sequence in request.live]
            tier.hold({*(i for table in tables for i in table.held), *(p for table in tables for _, p in table.pages)})
        self.swap_in += move([sequence.table for sequence in request.live], self.memory.pool)
        self.resumed[request] = [(sequence, sequence.num_computed_tokens) for sequence in request.live]

    def admit(self, request: Request) -> None:
        """Give a waiting request, which has its cached or swapped blocks, its rows, and let it run."""
        for sequence in request.live:
            self.memory.rows.admit(sequence)
        self.queues.admit(request)
        self.order.append(request)

    def continue_running(self, budget: int) -> int:
        """Schedule running requests in their order; return the tokens that are left."""
        rows, sequences = self.rows, self.sequences
        for request in self.order:  # without its end, as far as that is preempted
            branches = request.sequences
            if len(branches) == 1:
                sequence = branches[0]
                start = sequence.num_computed_tokens
                if start < sequence.steady_until and budget > 0:  # true for most requests in most steps
                    rows.append(_new(Scheduled, (sequence.row, start, 1, 1)))
                    sequences.append(sequence)
                    sequence.num_computed_tokens = start + 1
                    sequence.in_flight += 1
                    sequence.pending += 1
                    budget -= 1
                    continue
            self.at = request
            advance = self.schedule if len(branches) == 1 else self._continue
            budget -= advance(request, budget)
            if self.must_drain:
                break
        return budget

    def continue_shared(self, budget: int, grants: dict[Request, int]) -> int:
        """Schedule running requests with the tokens granted to each; return the tokens that are left."""
        for request in self.order:
            self.at = request
            budget -= self._continue(request, min(budget, grants.get(request, 0)))
            if self.must_drain:
                break
        if not (self.rows or self.must_drain):  # no grant sufficed, or its request was preempted
            self.unsteady.clear()
            budget = self.continue_running(budget)
        return budget

    def _continue(self, request: Request, budget: int) -> int:
        """Schedule a running request: the next token of each branch if all are steady; return the tokens used."""
        live = request.live
        if len(live) > budget or any(s.num_computed_tokens >= s.steady_until for s in live):
            return self.schedule(request, budget)
        for sequence in live:
            self.rows.append(_new(Scheduled, (sequence.row, sequence.num_computed_tokens, 1, 1)))
            sequence.num_computed_tokens += 1
            sequence.in_flight += 1
            sequence.pending += 1
        self.sequences += live
        self.further_branches += len(live) - 1
        return len(live)

    def schedule(self, request: Request, budget: int) -> int:
        """Schedule the part of a request that fits, preempting later requests if necessary; return the tokens used."""
        self.unsteady.append(request)
        counts = next_counts(request, budget, self.memory, self._spare(request))
        drafts = self._drafts(counts, budget - sum(counts.values()))
        pool, tables = self.memory.pool, [sequence.table for sequence in counts]
        spans = [
            (s.table, s.num_computed_tokens, s.num_computed_tokens + count + len(drafts.get(s, ())))
            for s, count in counts.items()
        ]
        num_pages = page_shortage(tables) + sum(map(len, drafts.values())) if pool.num_pages else 0
        # Nothing is preempted for drafts.
        if drafts and (shortage(spans) > pool.num_free or num_pages > pool.num_free_pages):
            drafts, spans = {}, [(s.table, start, start + counts[s]) for s, (_, start, _) in zip(counts, spans)]
        lengths = [len(table) for table, _, _ in spans]
        while self._lacks_pages(tables) or (copies := append(spans)) is None:
            if not self.may_preempt:
                self.must_drain = True
                return 0
            self.preempt_last()
            if self.at is request:
                return 0
            self.at = request
        self.block_copies += copies
        size = pool.block_size
        if pool.num_pages:
            self._advance_pages(request, counts, drafts)
        for (sequence, count), (table, start, end), length in zip(counts.items(), spans, lengths):
            if copies or len(table) > length:
                self.memory.rows.change(sequence, start // size, -(-end // size))
            self._add(sequence, count)
            if sequence in drafts:
                self._add_drafts(sequence, drafts[sequence])
        return sum(counts.values()) + sum(map(len, drafts.values()))

    def has_pages(self, request: Request) -> bool:
        """Return whether the free pages suffice for a waiting request and the running requests."""
        if not self.memory.pool.num_pages:
            return True
        return sum(map(self.memory.page_lack, [request, *self.unsteady])) <= self.memory.pool.num_free_pages

    def _lacks_pages(self, tables: list[BlockTable]) -> bool:
        pool = self.memory.pool
        return pool.num_pages > 0 and page_shortage(tables) > pool.num_free_pages

    def _advance_pages(self, request: Request, counts: dict[Sequence, int], drafts: dict[Sequence, list[int]]) -> None:
        """Give pages to the next states of a request's sequences, before their entries are added.

        States for the prefix cache get those pages that neither these sequences nor running branches need.
        """
        memory, pool = self.memory, self.memory.pool
        needed = page_shortage(sequence.table for sequence in counts) + sum(map(len, drafts.values()))
        claims = sum(memory.page_lack(each) for each in self.order if each.num_sequences > 1 and each is not request)
        for sequence, count in counts.items():
            start, ends, found = sequence.num_computed_tokens, memory.ends(sequence, count), drafts.get(sequence, ())
            ends += range(ends[-1] + 1, ends[-1] + 1 + len(found))
            kept = [position for position in (start, *ends) if memory.keeps_state(sequence, position)]
            spare = pool.num_free_pages - needed - claims
            needed -= sequence.table.needs_page + len(found)
            self.pages[sequence] = sequence.table.advance(ends, kept, len(found), spare)

    def _spare(self, request: Request) -> int:
        """Return how many entries a request may have beyond one of each of its sequences."""
        if not self.memory.divides or all(sequence.behind <= 1 for sequence in request.live):
            return 0
        num_seats = sum(each.seats for each in self.order) + len(self.memory.leaving) + self.num_further
        return max(0, self.memory.rows.size - num_seats)

    def choose_drafts(self, drafting: Drafting, budget: int) -> None:
        """Choose the drafts of the step: of sequences that compute their last token, if it is part of the output."""
        if not drafting.max_drafts:
            return
        offers, num_seqs = {}, sum(len(request.live) for request in self.order)
        for request in self.order:
            self.at = request
            for sequence in request.live:
                if offer := self._offer(sequence, num_seqs):
                    offers[sequence] = offer
        num_waiting = sum(len(request.live) for request in self.order if request.waits) if offers else 0
        self.at, self.drafts_of = None, drafting.choose(offers, num_seqs, budget - num_seqs, num_waiting)

    def _offer(self, sequence: Sequence, num_seqs: int) -> Offer | None:
        """Return the drafts that a sequence could have in a step of some sequences."""
        drafter, constraint, start = sequence.drafter, sequence.constraint, sequence.num_computed_tokens
        if drafter is None or (start < drafter.rests_until and not sequence.request.waits) or sequence.pending:
            return None
        if start < sequence.num_prompt_tokens or start + 1 < sequence.num_tokens:
            return None
        forced: Series[int] = ()
        if constraint is not None:
            if num_seqs > DRAFTING_SEQS:
                return None  # sampling many masked drafts takes longer than the steps that they save
            forced = constraint.forced()
        if not (offer := drafter.offer(sequence.tokens, forced, sequence.most_drafts)):
            return None
        end_tokens = sequence.request.end_tokens
        count = next((i for i, token in enumerate(offer.tokens) if token in end_tokens), len(offer.tokens))
        if constraint is not None:
            count = constraint.allowed(offer.tokens[:count])
        return Offer(offer.tokens[:count], offer.chances[:count]) if count else None

    def _drafts(self, counts: dict[Sequence, int], budget: int) -> dict[Sequence, list[int]]:
        """Return the chosen drafts of some sequences, as far as the budget allows."""
        found: dict[Sequence, list[int]] = {}
        for sequence, count in counts.items():
            if count == 1 and (drafts := self.drafts_of.get(sequence, [])[:budget]):
                found[sequence] = drafts
                budget -= len(drafts)
        return found

    def _add_drafts(self, sequence: Sequence, drafts: list[int]) -> None:
        """Schedule drafts of a sequence whose last token is scheduled, each with a sample after it."""
        request, row, start = sequence.request, sequence.row, sequence.num_computed_tokens
        assert row is not None, "only running sequences have a row"
        for place, token in enumerate(drafts):
            self.drafts.append((len(self.rows), token))
            self.rows.append(Scheduled(row, start + place, 1, 1))
        self.sequences += [sequence] * len(drafts)
        if request.bans or sequence.constraint is not None:
            known = [*sequence.tokens, *drafts]
            banned = [
                request.bans.next_tokens(known[: start + place], start + place - sequence.num_prompt_tokens)
                for place in range(len(drafts) + 1)
            ]
            if any(banned) or sequence.constraint is not None:
                self.masked = [each for each in self.masked if each[0] != row] + [(row, each) for each in banned]
        sequence.num_computed_tokens += len(drafts)
        sequence.in_flight += len(drafts)
        sequence.pending += len(drafts)

    def _add(self, sequence: Sequence, count: int) -> None:
        request, row = sequence.request, sequence.row
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        # No token is drawn inside the prompt, and one for each branch at its end.
        num_samples = 0 if end < len(sequence.tokens) else request.num_sequences if request.unforked else 1
        assert row is not None, "only running sequences have a row"
        if num_samples and (request.bans or sequence.constraint is not None):
            banned = request.bans.next_tokens(sequence.tokens, sequence.num_output_tokens + sequence.pending)
            if banned or sequence.constraint is not None:
                self.masked.append((row, banned))
        ends, at = self.memory.ends(sequence, count), start
        for stop in ends:
            self.rows.append(Scheduled(row, at, stop - at, num_samples if stop == end else 0))
            at = stop
        self.sequences += [sequence] * len(ends)
        self.num_further += len(ends) - 1
        sequence.num_computed_tokens = end
        sequence.in_flight += len(ends)
        sequence.pending += num_samples > 0
        self.num_waiting += num_samples > 0 and sequence.waits
        sequence.steady_until = 0
        # A request forks once, and its branches are sampled only while none waits for its leader. No block of theirs
        # becomes shared meanwhile.
        if num_samples == 1 and not (sequence.waits or request.bans):
            size, drafter = self.memory.pool.block_size, sequence.drafter
            sequence.steady_until = min(-(-end // size) * size, request.max_length - 1)
            if drafter is not None:
                sequence.steady_until = min(sequence.steady_until, drafter.rests_until)
