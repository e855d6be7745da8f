"""All KV blocks of a device: who holds them, which are free, and what the free ones still remember."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

ROOT_KEY = b""


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Prefix-cache key of a full block: its tokens and, through its parent's key, all tokens before it."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class _Block:
    """A block's state, and its place in the free list while `ref_count` is 0."""

    __slots__ = ("block_id", "key", "next", "previous", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.previous: _Block = self
        self.next: _Block = self


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    The free list is also the eviction order: blocks are taken from its head. A block that holds nothing worth keeping
    is put back at the head, one with a key at the tail, so that cached content leaves in least-recently-used order.
    The list is doubly linked through the blocks themselves, because a prefix hit takes a block out of its middle
    (as vLLM's FreeKVCacheBlockQueue does). Every method but `check_invariants` is O(1) per block.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_free = 0
        self._blocks = [_Block(i) for i in range(num_blocks)]
        self._head = _Block(-1)  # sentinel of a circular list: _head.next is taken first
        self._cached: dict[bytes, _Block] = {}
        for block in self._blocks:
            self._link(block, before=self._head)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def allocate(self) -> int | None:
        """A block with one reference, its old content forgotten; None if none is free."""
        if not self.num_free:
            return None
        block = self._head.next
        if block.key is not None:
            del self._cached[block.key]
            block.key = None
        self._unlink(block)
        block.ref_count = 1
        return block.block_id

    def share(self, block_id: int) -> None:
        """One more reference to a block that is in use or cached."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.key is not None, f"block {block_id} is free and holds nothing to share"
            self._unlink(block)
        block.ref_count += 1

    def free(self, block_id: int) -> None:
        """One reference less; at none the block can be taken again, and until then be found by its key."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is freed more often than it is held"
        block.ref_count -= 1
        if block.ref_count == 0:
            self._link(block, before=self._head if block.key is not None else self._head.next)

    def remember(self, block_id: int, key: bytes) -> None:
        """Lets a full block whose KV is written be found by its key. If another block already is, that one stays."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is remembered while nobody holds it"
        if self.enable_prefix_caching and block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of chained keys. Changes nothing: `share` takes them."""
        found = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def reset_prefix_cache(self) -> None:
        """Forgets all content, say because the parameters have changed."""
        for block in self._cached.values():
            block.key = None
        self._cached.clear()

    def check_invariants(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Recomputes everything from scratch; with the block ids of all live tables, the reference counts too."""
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
        keyed = {block.key: block for block in self._blocks if block.key is not None}
        assert keyed == self._cached, "the prefix cache and the blocks' keys differ"
        if tables is not None:
            held = Counter(block_id for table in tables for block_id in table)
            counted = Counter({block.block_id: block.ref_count for block in self._blocks if block.ref_count})
            assert held == counted, f"references held {held}, counted {counted}"

    def _link(self, block: _Block, before: _Block) -> None:
        block.previous, block.next = before.previous, before
        before.previous.next = before.previous = block
        self.num_free += 1

    def _unlink(self, block: _Block) -> None:
        block.previous.next, block.next.previous = block.next, block.previous
        self.num_free -= 1
