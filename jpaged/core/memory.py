"""Memory of all sequences: KV blocks on the device and on the host, and the rows of running sequences."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jpaged.core.block_pool import BlockPool, Parent, common_length
from jpaged.core.block_table import BlockTable, move, shortage
from jpaged.core.plan import Admitted, Chosen, Entry, Pairs
from jpaged.core.request import FinishReason, Request, Sequence


class Rows:
    """Rows of `size` sequences. A running sequence has one, on host and device, from admission to release."""

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Release every row and drop all differences."""
        self._sequences: list[Sequence | None] = [None] * self.size
        self.free = list(range(self.size))
        self._copies: dict[int, int] = {}  # {destination: source}: a later copy replaces an earlier one
        self._admitted: dict[int, Admitted] = {}
        self._chosen: dict[int, Chosen] = {}
        self._entries: dict[int, list[Entry]] = {}  # by row
        self._released: dict[int, None] = {}

    def __getitem__(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a row, and add its whole state to the next plan."""
        row, request = self._take(sequence), sequence.request
        self._admitted[row] = Admitted(
            row,
            tuple(sequence.tokens),
            sequence.num_prompt_tokens,
            request.params,
            sequence.seed,
            tuple(map(tuple, sequence.table.block_ids)),
            request.num_top,
            num_scored=None if request.params.prompt_logprobs is None else len(request.prompt_samples),
            banned=request.bans.single_tokens,
        )

    def fork(self, sequence: Sequence, child: Sequence) -> None:
        """Give a branch a row with the state of its parent."""
        assert sequence.row is not None
        self._copies[self._take(child)] = sequence.row

    def choose(self, sequence: Sequence) -> None:
        """Add the last token of a sequence, which the host has chosen, to the next plan."""
        assert sequence.row is not None
        self._chosen[sequence.row] = Chosen(sequence.row, sequence.tokens[-1], sequence.seed)

    def change(self, sequence: Sequence, first: int, stop: int) -> None:
        """Add the entries [first, stop) of a sequence's block table to the next plan."""
        row = sequence.row
        assert row is not None
        changed = self._entries.setdefault(row, [])
        for group, (block_ids, gone) in enumerate(zip(sequence.table.block_ids, sequence.table.first)):
            changed += [Entry(row, group, index, block_ids[index]) for index in range(max(first, gone), stop)]

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's row, if it has one."""
        row = sequence.row
        if row is None:
            return
        sequence.row, sequence.steady_until, self._sequences[row] = None, 0, None
        self.free.append(row)
        self._released[row] = None
        self._copies.pop(row, None)
        self._chosen.pop(row, None)
        self._admitted.pop(row, None)
        self._entries.pop(row, None)

    def differences(self) -> dict[str, tuple[Any, ...]]:
        """Return the fields of the next `StepPlan` that describe rows, and reset them."""
        differences: dict[str, tuple[Any, ...]] = dict(
            released_rows=tuple(self._released),
            row_copies=tuple((source, row) for row, source in self._copies.items()),
            admitted=tuple(self._admitted.values()),
            chosen=tuple(self._chosen.values()),
            entries=tuple(itertools.chain.from_iterable(self._entries.values())),
        )
        self._copies, self._admitted, self._chosen, self._entries, self._released = {}, {}, {}, {}, {}
        return differences

    def _take(self, sequence: Sequence) -> int:
        row = sequence.row = self.free.pop()
        self._sequences[row] = sequence
        return row


class Memory:
    """Blocks and rows of all sequences. The caller decides which request gets or loses them.

    Args:
        pool: blocks on the device.
        num_rows: maximum number of running sequences.
        host_pool, preemption, block_swap_cost: as in `Scheduler`.
        exact: tokens of outputs are computed one by one, also after a preemption, and are not in the prefix cache: they
            are attended in another order than tokens of prompts, which the same text may be later.

    Attributes:
        leaving: ended sequences whose row and blocks a step in flight may still write.
    """

    def __init__(
        self, pool: BlockPool, host_pool: BlockPool | None, num_rows: int, preemption: str, block_swap_cost: float,
        exact: bool = False,
    ):  # fmt: skip
        self.pool, self.host_pool, self.rows = pool, host_pool, Rows(num_rows)
        self.preemption, self.block_swap_cost, self.exact = preemption, block_swap_cost, exact
        self.leaving: set[Sequence] = set()

    def clear(self, requests: Iterable[Request]) -> None:
        """Free all blocks and rows in any state, and forget their content, also on the host.

        The requests that continue lose every computed token.
        """
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.clear()
        self.rows.clear()
        self.leaving.clear()
        for request in requests:
            for sequence in request.live:
                sequence.table, sequence.row = BlockTable(self.pool), None
                sequence.in_flight = sequence.pending = sequence.steady_until = 0
                sequence.free()

    def lack(self, request: Request) -> int:
        """Return the number of blocks that a request still lacks for the tokens it has."""
        size, spans, lack = self.pool.block_size, [], 0
        for sequence in request.live:
            if sequence.leader:
                lack += self.pool.most_blocks(-(-sequence.num_tokens // size) - sequence.leader[1] // size)
            else:
                spans.append((sequence.table, sequence.num_computed_tokens, sequence.num_tokens))
        return lack + shortage(spans)

    def parts(self, sequence: Sequence, count: int) -> list[int]:
        """Return the numbers of tokens of a plan's entries for the next `count` tokens of a sequence."""
        in_prompt = min(count, sequence.behind_in_prompt)
        if not self.exact or in_prompt == count:
            return [count]
        return [in_prompt] * (in_prompt > 0) + [1] * (count - in_prompt)

    def most(self, sequence: Sequence, spare: int) -> int:
        """Return the maximum next tokens of a sequence with `spare` entries beyond one."""
        if not self.exact:
            return sequence.behind
        return sequence.behind_in_prompt + (not sequence.behind_in_prompt) + spare

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds."""
        return len({block_id for sequence in request.live for block_id in sequence.table.held})

    def share_prefixes(self, request: Request) -> None:
        """Start each sequence of a waiting request with its blocks in the prefix cache.

        A sequence that has more in common with another one of the request waits for that one instead.
        """
        before: Sequence | None = None
        num_wanted = 0 if request.params.prompt_logprobs is None else len(request.prompt_token_ids) - 1
        lacks = len(request.prompt_samples) < num_wanted  # logprobs of the prompt, which cached tokens do not give
        # In sorted order, no sequence has more in common with a sequence than the one before it.
        for sequence in sorted(request.live, key=lambda s: s.tokens):
            sequence.epoch = self.pool.epoch
            # The last token is always computed: the next token is sampled from its hidden state.
            limit = sequence.num_tokens - 1
            match = self.pool.match(sequence.tokens[:limit], request.cache_salt)
            cached = 0 if lacks else match.num_tokens
            if before:
                shared = min(common_length(before.tokens, sequence.tokens), before.num_tokens - 1)
                while before.leader and before.leader[1] > shared:  # it will start after these tokens
                    before, _ = before.leader
                if shared > cached and before.num_computed_tokens <= shared:
                    sequence.leader = before, shared
            if cached and not sequence.leader:
                sequence.table.share(match.block_ids)
                sequence.nodes, sequence.num_computed_tokens = match.nodes, cached
            before = sequence

    def follow(self, sequence: Sequence) -> bool:
        """Start a sequence that waits for its leader, if the leader has computed their shared tokens."""
        if sequence.leader is None:
            return False
        leader, shared = sequence.leader
        if leader.num_computed_tokens < shared or leader.in_flight:
            return False
        size = self.pool.block_size
        sequence.table.share(ids[: -(-shared // size)] for ids in leader.table.block_ids)
        sequence.nodes, sequence.num_computed_tokens = leader.nodes[: shared // size], shared
        sequence.leader = None
        self.rows.change(sequence, 0, len(sequence.table))
        return True

    def leads_to(self, sequence: Sequence) -> int | None:
        """Return the number of tokens at which a sequence waits for others, which start there with its blocks.

        It waits only if the window of a group could pass blocks that they need. None: it does not wait.
        """
        if not self.pool.has_windows:
            return None
        places = (other.leader[1] for other in sequence.request.live if other.leader and other.leader[0] is sequence)
        return min(places, default=None)

    def evict(self, request: Request) -> Pairs:
        """Take a running request's blocks and rows; return the blocks' moves to the host, none if they were freed."""
        live, moves = request.live, Pairs()
        if self._should_swap(request):
            assert self.host_pool is not None
            moves = tuple(move([sequence.table for sequence in live], self.host_pool))
        for sequence in live:
            if moves:
                sequence.nodes = []  # it will return in blocks that the prefix cache doesn't know
            else:
                sequence.free()
            self.rows.release(sequence)
        return moves

    def _should_swap(self, request: Request) -> bool:
        """Return whether to swap a request out: never while its sequences wait for each other to be computed again."""
        if self.preemption == "recompute" or self.host_pool is None or any(s.leader for s in request.live):
            return False
        size, num_blocks = self.pool.block_size, self.num_held(request)
        if not 0 < num_blocks <= self.host_pool.num_free:
            return False
        filled = [dict[int, int]() for _ in self.pool.windows]  # of each group, the tokens by block
        for sequence in request.live:
            table = sequence.table
            for tokens_of, block_ids, first in zip(filled, table.block_ids, table.first):
                for index in range(first, len(block_ids)):
                    tokens = min(size, sequence.num_computed_tokens - index * size)
                    tokens_of[block_ids[index]] = max(tokens, tokens_of.get(block_ids[index], 0))
        recomputed = max(*(s.num_computed_tokens for s in request.live), *(sum(each.values()) for each in filled))
        return self.preemption == "swap" or num_blocks * self.block_swap_cost < recomputed

    def remember(self, sequence: Sequence, num_computed_tokens: int, *, ended: bool = False) -> None:
        """Add the blocks that are full of computed tokens to the prefix cache, and the last one of an ended sequence.

        Tokens computed before a reset of the prefix cache, or from such tokens, are never added.
        """
        pool, nodes = self.pool, sequence.nodes
        size = pool.block_size
        if not pool.enable_prefix_caching or sequence.epoch != pool.epoch:
            return
        if self.exact:
            num_computed_tokens = min(num_computed_tokens, sequence.num_prompt_tokens)
        table, stop = sequence.table, num_computed_tokens // size
        if len(nodes) < stop <= min(table.first):
            return  # the sequence came from the host, without these blocks
        for index in range(len(nodes), stop):
            parent: Parent = nodes[-1] if nodes else sequence.request.cache_salt
            tokens = sequence.tokens[index * size : (index + 1) * size]
            nodes.append(pool.remember([ids[index] for ids in table.block_ids], parent, tokens))
        if ended and stop >= min(table.first) and (tokens := sequence.tokens[stop * size : num_computed_tokens]):
            parent = nodes[-1] if nodes else sequence.request.cache_salt
            pool.remember_beginning([ids[stop] for ids in table.block_ids], parent, tokens)

    def leave(self, sequence: Sequence, position: int) -> None:
        """Free the blocks of a running sequence that tokens from a position on do not see."""
        sequence.table.leave(position)
        sequence.leaves_at = sequence.table.leaves_at()

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Return a second branch of a running sequence. Both share every block until one of them writes into it."""
        child = sequence.branch(index)
        child.table.share(sequence.table.block_ids)
        child.num_computed_tokens, child.nodes = sequence.num_computed_tokens, list(sequence.nodes)
        child.epoch, child.leaves_at = sequence.epoch, sequence.leaves_at
        self.rows.fork(sequence, child)
        return child

    def release(self, sequence: Sequence) -> None:
        """Release the blocks and the row of an ended sequence, once no step in flight writes there."""
        if sequence.in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
        # Without an output token no sample has shown yet that the KV is finite. Beams that are dropped have no reason.
        valid = sequence.finish_reason not in (None, FinishReason.ERROR) and sequence.num_output_tokens > 0
        if valid and sequence.table.pool is self.pool:
            self.remember(sequence, min(sequence.num_computed_tokens, sequence.num_tokens - 1), ended=True)
        sequence.free()
        self.rows.release(sequence)

    def check_invariants(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Check the rows and the pools against all sequences that have not ended."""
        leaving, running = self.leaving, list(running)
        assert all(sequence.finish_reason and sequence.in_flight for sequence in leaving), "nothing leaves"
        rows = Counter([*(sequence.row for sequence in (*running, *leaving)), *self.rows.free])
        assert rows == Counter(range(self.rows.size)), f"rows: {rows}"
        for sequence in waiting:
            assert sequence.row is None, "a waiting request holds a row"
            on_host = sequence.table.pool is self.host_pool
            assert on_host or not len(sequence.table), "a waiting request holds blocks"
        tables = [sequence.table for sequence in (*running, *waiting, *leaving)]
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.check_invariants(table.block_ids for table in tables if table.pool is pool)
