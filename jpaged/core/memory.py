"""Memory of all sequences: KV blocks on the device and on the host, and the rows of running sequences."""

from collections import Counter
from collections.abc import Iterable

from jpaged.core.block_pool import BlockPool, Parent, common_length
from jpaged.core.block_table import BlockTable, move, num_distinct, shortage
from jpaged.core.plan import Pairs
from jpaged.core.request import Request, Sequence
from jpaged.core.rows import Rows


class Memory:
    """Blocks and rows of all sequences. The caller decides which request gets or loses them.

    Args:
        pool: blocks on the device.
        num_rows: maximum number of running sequences.
        host_pool, preemption, block_swap_cost: as in `Scheduler`.

    Attributes:
        leaving: ended sequences whose row and blocks a step in flight may still write.
    """

    def __init__(
        self, pool: BlockPool, host_pool: BlockPool | None, num_rows: int, preemption: str, block_swap_cost: float
    ):
        self.pool = pool
        self.host_pool = host_pool
        self.rows = Rows(num_rows)
        self.preemption = preemption
        self.block_swap_cost = block_swap_cost
        self.leaving: set[Sequence] = set()

    def clear(self, requests: Iterable[Request]) -> None:
        """Free all blocks and rows and forget their content, also on the host, whatever their state.

        Args:
            requests: the requests that continue. They lose every computed token.
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
                lack += -(-sequence.num_tokens // size) - sequence.leader[1] // size
            else:
                spans.append((sequence.table, sequence.num_computed_tokens, sequence.num_tokens))
        return lack + shortage(spans)

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds."""
        return num_distinct(sequence.table for sequence in request.live)

    def share_prefixes(self, request: Request) -> None:
        """Start each sequence of a waiting request with its blocks in the prefix cache.

        A sequence that has more in common with another one of the request waits for that one instead.
        """
        before: Sequence | None = None
        # In sorted order, no sequence has more in common with a sequence than the one before it.
        for sequence in sorted(request.live, key=lambda s: s.tokens):
            sequence.epoch = self.pool.epoch
            # The last token is always computed: the next token is sampled from its hidden state.
            limit = sequence.num_tokens - 1
            match = self.pool.match(sequence.tokens[:limit], request.cache_salt)
            cached = 0 if request.wants_prompt_samples else match.num_tokens
            if before:
                shared = min(common_length(before.tokens, sequence.tokens), before.num_tokens - 1)
                if shared > cached:
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
        sequence.table.share(leader.table.block_ids[: -(-shared // size)])
        sequence.nodes, sequence.num_computed_tokens = leader.nodes[: shared // size], shared
        sequence.leader = None
        self.rows.change(sequence, 0, len(sequence.table.block_ids))
        return True

    def evict(self, request: Request) -> Pairs:
        """Take all blocks and rows of a running request.

        Returns:
            The moves of its blocks to the host; empty if they were freed.
        """
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
        size = self.pool.block_size
        filled: dict[int, int] = {}  # tokens by block
        for sequence in request.live:
            for index, block_id in enumerate(sequence.table.block_ids):
                tokens = min(size, sequence.num_computed_tokens - index * size)
                filled[block_id] = max(tokens, filled.get(block_id, 0))
        if not 0 < len(filled) <= self.host_pool.num_free:
            return False
        return self.preemption == "swap" or len(filled) * self.block_swap_cost < sum(filled.values())

    def remember(self, sequence: Sequence, num_computed_tokens: int) -> None:
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
            nodes.append(pool.remember(sequence.table.block_ids[index], parent, tokens))

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """Return a second branch of a running sequence. Both share every block until one of them writes into it."""
        child = sequence.branch(index)
        child.table, child.num_computed_tokens = sequence.table.fork(), sequence.num_computed_tokens
        child.nodes, child.epoch = list(sequence.nodes), sequence.epoch
        self.rows.fork(sequence, child)
        return child

    def release(self, sequence: Sequence) -> None:
        """Release the blocks and the row of an ended sequence, once no step in flight writes there."""
        if sequence.in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
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
            assert on_host or not sequence.table.block_ids, "a waiting request holds blocks"
        tables = [sequence.table for sequence in (*running, *waiting, *leaving)]
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.check_invariants(table.block_ids for table in tables if table.pool is pool)
