"""Pool of the KV blocks of one memory: reference counts, free blocks, and cached content of free blocks."""

import bisect
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# The prefix of a block: the node of the block before it, or, for a first block, the salt of its request.
Parent = int | str


class Match(NamedTuple):
    """Longest cached prefix: whole blocks, then possibly the beginning of one more.

    Attributes:
        nodes: nodes of the whole blocks; a partial block is cached under the last one.
        num_tokens: tokens of all blocks.
    """

    block_ids: list[int]
    nodes: list[int]
    num_tokens: int


class _Block:
    """State of a block.

    It has a place in the free list while `ref_count` is 0, and in the prefix cache while it has a `node`.
    """

    __slots__ = ("block_id", "next", "node", "parent", "previous", "ref_count", "tokens")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.node: int | None = None
        self.parent: Parent = ""
        self.tokens: tuple[int, ...] = ()
        self.previous: _Block = self
        self.next: _Block = self


_tokens = operator.attrgetter("tokens")

# Tokens from which on the common beginning of a block is shared, or half of a smaller block: a copy of the block must
# precede the next write to it. On a CPU, a copy of 64 tokens takes as long as the computation of one.
MIN_SHARED = 8


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    The free list is also the eviction order: blocks are taken from its head. A block without cached content returns to
    the head, a cached one to the tail, so that cached content is evicted in least-recently-used order. The list is
    doubly linked through the blocks themselves, because a prefix hit takes a block out of its middle (as vLLM's
    FreeKVCacheBlockQueue does).

    The prefix cache is a radix tree whose edges are the tokens of whole blocks (like SGLang's, arXiv:2312.07104, but
    split at blocks). The number of a node is never reused: a path of nodes stands for one exact text. Tokens are
    compared, not hashed, so a hit is never wrong. The children of a node are sorted by their tokens: the block with the
    longest common beginning is found as fast as an equal one. A block that is only partly filled is a leaf. No child of
    a node is the beginning of another one.

    Attributes:
        epoch: number of times that all content was forgotten.
        min_shared: number of tokens from which on the common beginning of a block is shared.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} blocks of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.min_shared = min(-(-block_size // 2), MIN_SHARED)
        self.epoch = 0
        self._nodes = itertools.count()
        self.clear()

    def clear(self) -> None:
        """Free every block, including those in use, and drop all content."""
        self.epoch += 1
        self.num_free = 0
        self._blocks = [_Block(i) for i in range(self.num_blocks)]
        self._head = _Block(-1)  # sentinel of a circular list: _head.next is taken first
        self._children: dict[Parent, list[_Block]] = {}
        for block in self._blocks:
            self._link(block, before=self._head)

    @property
    def num_used(self) -> int:
        """Number of blocks in use."""
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """Return the number of tables that hold a block."""
        return self._blocks[block_id].ref_count

    def is_private(self, block_id: int) -> bool:
        """Return whether the block is writable: one table holds it, and it is not in the prefix cache."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.node is None

    def is_cached(self, block_id: int) -> bool:
        """Return whether the block is in the prefix cache."""
        return self._blocks[block_id].node is not None

    def states(self) -> bytes:
        """Return one byte for each block: its references, at most 127, plus 128 if it is cached."""
        return bytes([(b.ref_count if b.ref_count < 127 else 127) + 128 * (b.node is not None) for b in self._blocks])

    def allocate(self) -> int | None:
        """Return a free block with one reference and without its old content; None if no block is free."""
        if not self.num_free:
            return None
        block = self._head.next
        self._forget(block)
        self._unlink(block)
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a block that is in use or cached."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.node is not None, f"block {block_id} is free and holds nothing to share"
            self._unlink(block)
        block.ref_count += 1

    def free(self, block_id: int) -> None:
        """Remove a reference. A block without references is free, but stays cached until it is allocated."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is freed more often than it is held"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._link(block, before=self._head if block.node is not None else self._head.next)

    def remember(self, block_id: int, parent: Parent, tokens: Sequence[int]) -> int:
        """Add a full block with written KV to the prefix cache, under its prefix, and return its node.

        If the cache has another block with the same content, that block stays, and its node is returned.
        """
        assert len(tokens) == self.block_size, f"{len(tokens)} tokens in a block of {self.block_size}"
        node = self._remember(block_id, parent, tuple(tokens)).node
        assert node is not None
        return node

    def remember_beginning(self, block_id: int, parent: Parent, tokens: Sequence[int]) -> None:
        """Add the first tokens of a block to the prefix cache, if a match with them can be worth a copy.

        The rest of the block is not offered, and no table may write there while the block is cached.
        """
        assert 0 < len(tokens) < self.block_size, f"{len(tokens)} tokens in a block of {self.block_size}"
        if len(tokens) >= self.min_shared:
            self._remember(block_id, parent, tuple(tokens))

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """Return the longest cached prefix of some tokens. It changes nothing; `share` takes the blocks.

        The last block may match only in its first tokens, at least in `min_shared` of them.
        """
        block_ids: list[int] = []
        nodes: list[int] = []
        parent: Parent = salt
        size, matched = self.block_size, 0
        while siblings := self._children.get(parent):
            wanted = tuple(tokens[matched : matched + size])
            at = bisect.bisect_left(siblings, wanted, key=_tokens)
            if len(wanted) == size and at < len(siblings) and siblings[at].tokens == wanted:
                block = siblings[at]
                assert block.node is not None
                block_ids.append(block.block_id)
                nodes.append(block.node)
                parent, matched = block.node, matched + size
                continue
            # In sorted order, only the two neighbours of a text can have the most in common with it.
            block = max(siblings[max(at - 1, 0) : at + 1], key=lambda near: common_length(near.tokens, wanted))
            common = common_length(block.tokens, wanted)
            if common >= self.min_shared:
                block_ids.append(block.block_id)
                matched += common
            break
        return Match(block_ids, nodes, matched)

    def forget(self, block_id: int) -> None:
        """Remove a block from the prefix cache."""
        self._forget(self._blocks[block_id])

    def reset_prefix_cache(self) -> None:
        """Forget all content and start a new epoch, for example for other parameters.

        Blocks computed by a sequence of an earlier epoch must not be remembered in this one.
        """
        self.epoch += 1
        for block in self._blocks:
            self._forget(block)

    def check_invariants(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Recompute everything from scratch and compare, with the reference counts if all `tables` are given."""
        free: list[int] = []
        block = self._head.next
        while block is not self._head:
            assert block.next.previous is block and block.previous.next is block, f"broken link at {block.block_id}"
            assert len(free) < self.num_blocks, "the free list has a loop"
            free.append(block.block_id)
            block = block.next
        assert len(free) == len(set(free)) == self.num_free, f"{self.num_free} free by count, {len(free)} in the list"
        for block in self._blocks:
            assert block.ref_count >= 0, f"block {block.block_id} has {block.ref_count} references"
        unheld = {block.block_id for block in self._blocks if block.ref_count == 0}
        assert unheld == set(free), f"unheld but not free, or the reverse: {unheld ^ set(free)}"
        nodes = [block.node for block in self._blocks if block.node is not None]
        assert len(nodes) == len(set(nodes)), f"a node stands for two blocks: {nodes}"
        cached = {block.block_id for block in self._blocks if block.node is not None}
        assert cached == {b.block_id for siblings in self._children.values() for b in siblings}, "lost in the cache"
        for parent, siblings in self._children.items():
            texts = [block.tokens for block in siblings]
            assert texts and texts == sorted(set(texts)), f"the children of {parent!r} are out of order"
            repeated = any(common_length(a, b) == len(a) for a, b in itertools.pairwise(texts))
            assert not repeated, f"a child of {parent!r} is the beginning of the next: {texts}"
            assert all(block.parent == parent for block in siblings), f"a child of {parent!r} has another parent"
        for block in self._blocks:
            if block.node is not None and len(block.tokens) < self.block_size:
                assert len(block.tokens) >= self.min_shared, f"block {block.block_id} offers {len(block.tokens)} tokens"
                assert block.node not in self._children, f"block {block.block_id} is not full and has children"
        if tables is not None:
            held = Counter(block_id for table in tables for block_id in table)
            counted = Counter({block.block_id: block.ref_count for block in self._blocks if block.ref_count})
            assert held == counted, f"references held {held}, counted {counted}"

    def _remember(self, block_id: int, parent: Parent, tokens: tuple[int, ...]) -> _Block:
        """Return the block that offers some tokens under a parent: one that did before, or else the given one."""
        block, siblings = self._blocks[block_id], self._children.setdefault(parent, [])
        assert block.ref_count > 0, f"block {block_id} is remembered while no table holds it"
        at = bisect.bisect_left(siblings, tokens, key=_tokens)
        if at < len(siblings) and siblings[at].tokens[: len(tokens)] == tokens:
            return siblings[at]
        assert block.node is None, f"block {block_id} was written while the prefix cache offered it"
        block.node, block.parent, block.tokens = next(self._nodes), parent, tokens
        siblings.insert(at, block)
        # The beginning of these tokens, of which no more than one is cached, comes directly before them.
        if at and tokens[: len(siblings[at - 1].tokens)] == siblings[at - 1].tokens:
            self._replace(siblings[at - 1])
        return block

    def _replace(self, block: _Block) -> None:
        """Forget a block whose content another one offers. It is allocated next if it is free."""
        self._forget(block)
        if block.ref_count == 0:
            self._unlink(block)
            self._link(block, before=self._head.next)

    def _forget(self, block: _Block) -> None:
        if block.node is None:
            return
        siblings = self._children[block.parent]
        del siblings[bisect.bisect_left(siblings, block.tokens, key=_tokens)]
        if not siblings:
            del self._children[block.parent]
        block.node, block.parent, block.tokens = None, "", ()

    def _link(self, block: _Block, before: _Block) -> None:
        block.previous, block.next = before.previous, before
        before.previous.next = before.previous = block
        self.num_free += 1

    def _unlink(self, block: _Block) -> None:
        block.previous.next, block.next.previous = block.next, block.previous
        self.num_free -= 1


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
