"""Memory of all sequences: KV blocks and states on the device and on the host, and the rows of running sequences."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable

from jpaged.core.block_pool import BlockPool, Match
from jpaged.core.block_table import BlockTable, move, page_shortage, shortage
from jpaged.core.blocks import Parent
from jpaged.core.disk_tier import Files
from jpaged.core.host_tier import HostTier
from jpaged.core.pages import STATE_EVERY
from jpaged.core.pins import Pins
from jpaged.core.plan import Pairs
from jpaged.core.prefix_tree import common_length
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.rows import Rows


class Memory:
    """Blocks and rows of all sequences. The caller decides which request gets or loses them.

    Args:
        pool: blocks on the device.
        num_rows: maximum number of running sequences.
        host_pool, preemption: as in `Scheduler`.
        swap_costs: of a block and of a page, as in `Scheduler`.
        exact: tokens of outputs are computed one by one, also after a preemption, and are not in the prefix cache: they
            are attended in another order than tokens of prompts, which the same text may be later.
        num_adapters: number of slots for adapters.
        pinned_share: maximum share of the pool that the pinned prefixes of each tenant take.
        moves_overlap: as in `HostTier`.

    Attributes:
        pins: the pinned prefixes.
        tier: moves of cached blocks to the host and back; None if the pool on the host keeps no copies.
        leaving: ended sequences whose row and blocks a step in flight may still write.
    """

    def __init__(
        self, pool: BlockPool, host_pool: BlockPool | None, num_rows: int, preemption: str,
        swap_costs: tuple[float, float], exact: bool = False, num_adapters: int = 0,
        pinned_share: float = 1.0, moves_overlap: bool = True,
    ):  # fmt: skip
        self.pool, self.host_pool, self.rows = pool, host_pool, Rows(num_rows, num_adapters)
        self.preemption, self.swap_costs, self.exact = preemption, swap_costs, exact
        self._every = -(-STATE_EVERY // pool.block_size) * pool.block_size
        keeps_copies = host_pool is not None and host_pool.is_copy
        self.tier: HostTier | None = None
        if host_pool and keeps_copies:
            self.tier = HostTier(pool, host_pool, swap_costs[0], overlaps=moves_overlap)
        self.pins = Pins(pool.tree, int(pinned_share * pool.num_blocks / len(pool.windows)))
        self.leaving: set[Sequence] = set()

    def clear(self, requests: Iterable[Request]) -> None:
        """Free all blocks and rows in any state, and forget their content, also on the host.

        The requests that continue lose every computed token.
        """
        self.pins.clear()
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                pool.clear()
        if self.tier:
            self.tier.clear()
            if self.tier.disk is not None:
                self.tier.disk.abandon()
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

    @property
    def divides(self) -> bool:
        """Whether the next tokens of a sequence may need several entries of a plan."""
        return self.exact or self.pool.num_pages > 0

    def page_lack(self, request: Request) -> int:
        """Return the maximum number of pages that a request still needs for its next states."""
        if not self.pool.num_pages:
            return 0
        pages = self._pages(request)
        on_host = any(sequence.table.pool is not self.pool for sequence in request.live)
        if request.beam and request.seats > 1:  # a step reads the states of parents while it writes those of beams
            return max(0, 2 * request.seats - len(pages) * (not on_host))
        if request.unforked:  # all branches read the state of the prompt
            return request.num_sequences + (on_host or not pages)
        return page_shortage(sequence.table for sequence in request.live) + len(pages) * on_host

    def _pages(self, request: Request) -> set[int]:
        return {page for sequence in request.live for _, page in sequence.table.pages}

    def keeps_state(self, sequence: Sequence, position: int) -> bool:
        """Return whether the prefix cache shall hold the state of recurrent layers after some tokens of a sequence.

        In a prompt, these are the ends of the last whole block, of the blocks that another prompt had in common, and of
        every `STATE_EVERY` tokens. In an output, it is the end of each block, for the next turn of a conversation.
        """
        pool = self.pool
        if position % pool.block_size or not (position and pool.enable_prefix_caching) or sequence.epoch != pool.epoch:
            return False
        last = self._last_kept(sequence)
        return position in (last, sequence.known_until) or not position % self._every or position > last

    def _last_kept(self, sequence: Sequence) -> int:
        size = self.pool.block_size
        return (sequence.num_prompt_tokens - 1) // size * size

    def ends(self, sequence: Sequence, count: int) -> list[int]:
        """Return the positions after each of a plan's entries for the next `count` tokens of a sequence."""
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        if not self.divides:
            return [end]
        alone = range(max(start + 1, sequence.num_prompt_tokens), end if self.exact else 0)
        kept = list[int]()
        if self.pool.num_pages:
            every, last = self._every, self._last_kept(sequence)
            kept = [last, sequence.known_until, *range((start // every + 1) * every, min(end, last), every)]
            kept = [position for position in kept if start < position < end and self.keeps_state(sequence, position)]
        return [*sorted({*kept, *alone}), end]

    def most(self, sequence: Sequence, spare: int) -> int:
        """Return the maximum next tokens of a sequence with `spare` entries beyond one."""
        most = sequence.behind
        if self.exact:
            most = min(most, sequence.behind_in_prompt + (not sequence.behind_in_prompt) + spare)
        if self.pool.num_pages and most > 1:
            ends = self.ends(sequence, most)
            most = ends[min(spare, len(ends) - 1)] - sequence.num_computed_tokens
        return most

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds."""
        return len({block_id for sequence in request.live for block_id in sequence.table.held})

    def wanted_files(self, request: Request, most_s: float) -> Files:
        """Return the files to read for a waiting request, as `DiskTier.want` does."""
        if not self.tier or self.tier.disk is None or len(request.live) > 1 or self._lacks_samples(request):
            return []
        (sequence,) = request.live
        if len(sequence.table):  # it was swapped out
            return []
        tokens = sequence.tokens[: sequence.num_tokens - 1]
        num_blocks = self.pool.most_blocks(-(-sequence.num_tokens // self.pool.block_size))
        return self.tier.disk.want(request.request_id, tokens, request.cache_salt, num_blocks, most_s)

    def forget_node(self, number: int) -> None:
        """Remove all blocks of a node from the prefix cache, in all tiers."""
        if self.tier and self.tier.disk is not None and (node := self.pool.tree.nodes.get(number)):
            self.tier.disk.forget(node)
        self.pool.forget_node(number)

    def restore(self, request: Request, reserved: int, budget: int, *, alone: bool) -> int | None:
        """Move the cached prefix of a waiting request from the host, if that costs less than its computation.

        Args:
            reserved: free blocks that are not available to it.
            budget: tokens that the moves may cost.
            alone: no other request waits for this step, so that the moves may cost more.

        Returns:
            The cost in tokens; None: a part has moved, and the others should move before the request starts.
        """
        if self.tier is None or len(request.live) > 1 or self._lacks_samples(request):
            return 0
        if self.tier.disk is not None and self.tier.disk.fetching == request.request_id:
            return None
        (sequence,), pool = request.live, self.pool
        tokens, salt = sequence.tokens[: sequence.num_tokens - 1], request.cache_salt
        if (found := self.tier.find(tokens, salt)) is None:
            return 0
        blocks = [block for node in found.path for block in node.blocks[: len(pool.windows)] if block]
        wanted = pool.most_blocks(-(-sequence.num_tokens // pool.block_size))
        if wanted - sum(block.ref_count > 0 for block in blocks) + reserved > pool.num_free:
            return 0
        cost = self.tier.cost_of(len(found.missing))
        if cost >= found.num_tokens - pool.match(tokens, salt).num_tokens:
            return 0
        if cost <= budget or alone:
            self.tier.load(found, len(found.missing))
            return math.ceil(cost)
        self.tier.load(found, self.tier.most(budget))
        return None

    def _lacks_samples(self, request: Request) -> bool:
        """Return whether logprobs of the prompt are wanted, which cached tokens do not give."""
        num_wanted = 0 if request.params.prompt_logprobs is None else len(request.prompt_token_ids) - 1
        return len(request.prompt_samples) < num_wanted

    def share_prefixes(self, request: Request) -> None:
        """Start each sequence of a waiting request with its blocks in the prefix cache.

        A sequence that has more in common with another one of the request waits for that one instead.
        """
        before: Sequence | None = None
        # In sorted order, no sequence has more in common with a sequence than the one before it.
        ordered = sorted(request.live, key=lambda s: s.tokens)
        # The last token is always computed: the next token is sampled from its hidden state.
        matches = [self.pool.match(s.tokens[: s.num_tokens - 1], request.cache_salt) for s in ordered]
        lacks = self._lacks_samples(request) or _would_repeat(ordered, matches)
        for sequence, match in zip(ordered, matches, strict=True):
            sequence.epoch = self.pool.epoch
            cached, sequence.known_until = 0 if lacks else match.num_tokens, match.num_known
            if before:
                shared = min(common_length(before.tokens, sequence.tokens), before.num_tokens - 1)
                while before.leader and before.leader[1] > shared:  # it will start after these tokens
                    before, _ = before.leader
                if shared > cached and before.num_computed_tokens <= shared:
                    sequence.leader = before, shared
            if self.tier and not self.tier.keeps_all:
                for number in match.nodes:
                    self.pool.tree.nodes[number].was_found = True
            if cached and not sequence.leader:
                sequence.table.share(match.block_ids)
                sequence.nodes, sequence.num_computed_tokens = match.nodes, cached
                if match.page is not None:
                    sequence.table.share_page(cached, match.page)
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
        if self.pool.num_pages:
            sequence.table.share_page(*leader.table.pages[-1])
        sequence.leader = None
        self.rows.change(sequence, 0, len(sequence.table))
        return True

    def leads_to(self, sequence: Sequence) -> int | None:
        """Return the number of tokens at which a sequence waits for others, which start there with its blocks.

        It waits only if the window of a group could pass blocks that they need, or if they need its state there. None:
        it does not wait.
        """
        if not (self.pool.has_windows or self.pool.num_pages):
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
        num_pages = len(self._pages(request))
        if not 0 < num_blocks <= self.host_pool.num_free or num_pages > self.host_pool.num_free_pages:
            return False
        filled = [dict[int, int]() for _ in self.pool.windows]  # of each group, the tokens by block
        for sequence in request.live:
            table = sequence.table
            for tokens_of, block_ids, first in zip(filled, table.block_ids, table.first):
                for index in range(first, len(block_ids)):
                    tokens = min(size, sequence.num_computed_tokens - index * size)
                    tokens_of[block_ids[index]] = max(tokens, tokens_of.get(block_ids[index], 0))
        recomputed = max(*(s.num_computed_tokens for s in request.live), *(sum(each.values()) for each in filled))
        block_cost, page_cost = self.swap_costs
        return self.preemption == "swap" or num_blocks * block_cost + num_pages * page_cost < recomputed

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
        ended = ended and not pool.num_pages  # no state follows the beginning of a block
        if ended and stop >= min(table.first) and (tokens := sequence.tokens[stop * size : num_computed_tokens]):
            parent = nodes[-1] if nodes else sequence.request.cache_salt
            pool.remember_beginning([ids[stop] for ids in table.block_ids], parent, tokens)

    def remember_state(self, sequence: Sequence, position: int) -> None:
        """Add the state after a committed position to the prefix cache if it shall be there; free those before it.

        In an output, it takes the place of the one at the end of the block before.
        """
        pool, table, nodes = self.pool, sequence.table, sequence.nodes
        table.leave_pages(position)
        (at, page), number = table.pages[0], position // pool.block_size - 1
        if at != position or number >= len(nodes) or not self.keeps_state(sequence, position):
            return
        pool.remember_page(page, nodes[number])
        before = position - pool.block_size
        if before > self._last_kept(sequence) and before % self._every:
            pool.forget_page(nodes[number - 1])

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
        for position, page in sequence.table.pages:
            child.table.share_page(position, page)
        self.rows.fork(sequence, child)
        return child

    def release(self, sequence: Sequence) -> None:
        """Release the blocks and the row of an ended sequence, once no step in flight writes there."""
        if sequence.in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
        request = sequence.request
        # Without an output token no sample has shown yet that the KV is finite. Beams that are dropped have no reason.
        valid = sequence.finish_reason not in (None, FinishReason.ERROR) and sequence.num_output_tokens > 0
        if valid and sequence.table.pool is self.pool:
            self.remember(sequence, min(sequence.num_computed_tokens, sequence.num_tokens - 1), ended=True)
            if request.pin_s:
                self.pins.keep(request.tenant, sequence.nodes, request.pin_s)
        sequence.free()
        self.rows.release(sequence)

    def check_invariants(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Check the rows and the pools against all sequences that have not ended."""
        leaving, running = self.leaving, list(running)
        assert all(sequence.finish_reason and sequence.in_flight for sequence in leaving), "nothing leaves"
        rows = Counter([*(sequence.row for sequence in (*running, *leaving)), *self.rows.free])
        assert rows == Counter(range(self.rows.size)), f"rows: {rows}"
        self.rows.adapters.check_invariants(
            each.request.adapter for each in (*running, *leaving) if each.row is not None
        )
        for sequence in waiting:
            assert sequence.row is None, "a waiting request holds a row"
            on_host = sequence.table.pool is self.host_pool
            assert on_host or not len(sequence.table), "a waiting request holds blocks"
        tables = [sequence.table for sequence in (*running, *waiting, *leaving)]
        for pool in (self.pool, self.host_pool):
            if pool is not None:
                held = [(*table.block_ids, [page for _, page in table.pages]) for table in tables if table.pool is pool]
                if self.tier and pool is self.host_pool:
                    held.append(self.tier.held)
                pool.check_invariants(held)


def _would_repeat(ordered: list[Sequence], matches: list[Match]) -> bool:
    """Return whether one sequence of a request would compute what another one finds in the prefix cache.

    The request could then need more blocks than the pool has. It happens if the state, or the blocks of a window, are
    missing where the texts of two sequences part.

    Args:
        ordered: sequences in the order of their texts.
    """
    for (one, other), found in zip(itertools.pairwise(ordered), itertools.pairwise(matches)):
        least, most = sorted(match.num_tokens for match in found)
        if least < most and least < min(most, common_length(one.tokens, other.tokens)):
            return True
    return False
