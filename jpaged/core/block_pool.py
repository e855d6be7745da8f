"""Pool of the KV blocks of one memory: reference counts, free blocks, and cached content of free blocks."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jpaged.core.blocks import Block, FreeList, Node, Parent
from jpaged.core.groups import Windows, held_windows, most_held
from jpaged.core.prefix_tree import PrefixTree

GONE = -1  # stands for a block that a sequence does not hold, because no later token sees it


class Match(NamedTuple):
    """Longest cached prefix: whole blocks, then possibly the beginning of one more.

    Attributes:
        block_ids: blocks of each group, `GONE` before the window of the next token.
        nodes: nodes of the whole blocks; a partial block is cached under the last one.
        num_tokens: tokens of all blocks.
        page: the state after these tokens; None for models without recurrent layers.
        num_known: with recurrent layers, tokens of the longest text that has keys and values, at least `num_tokens`.
    """

    block_ids: list[list[int]]
    nodes: list[int]
    num_tokens: int
    page: int | None = None
    num_known: int = 0


# Tokens from which on the common beginning of a block is shared, or half of a smaller block: a copy of the block must
# precede the next write to it. On a CPU, a copy of 64 tokens takes as long as the computation of one.
MIN_SHARED = 8


class BlockPool:
    """Reference-counted blocks with a prefix cache.

    The layers of a model form groups of equal size. A block holds the keys and values of one group, and any free block
    can be given to any group. Recurrent layers have one state instead. A page holds the states of all these layers
    after some token; it is a block of another kind, whose number is at least `num_blocks`.

    A prefix is a hit if each group has the blocks that the next token sees, and, with recurrent layers, its last node
    has the page of the state after it.

    Args:
        windows: the window of each group.
        reach: maximum tokens of a sequence in the steps in flight.
        num_pages: pages for the states of recurrent layers; 0 for models without such layers.
        copies_of: the pool on the device whose prefix cache the free blocks of this one, on the host, belong to, too.

    Attributes:
        tree: the prefix cache.
        on_evict: called with a cached block that is allocated for other content, while it is still cached.
        arriving: blocks whose content is written before the next step, after the copies of blocks.
        windows: as `held_windows` gives them.
        epoch: number of times that all content was forgotten.
        min_shared: number of tokens from which on the common beginning of a block is shared.
        most_held: for each group, the maximum blocks that a sequence holds at once; None: no limit.
        whole: the groups without a window.
        has_windows: whether some group has a window.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True,
        windows: Windows = (None,), reach: int = 0, num_pages: int = 0, copies_of: "BlockPool | None" = None,
    ):  # fmt: skip
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, not {num_blocks} blocks of {block_size}")
        self.num_blocks, self.block_size, self.num_pages = num_blocks, block_size, num_pages
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = held_windows(windows, block_size)
        self.most_held = most_held(windows, block_size, reach)
        self.whole = [group for group, window in enumerate(windows) if window is None]
        self.has_windows = len(self.whole) < len(windows)
        self.min_shared = min(-(-block_size // 2), MIN_SHARED)
        self.epoch = 0
        self.is_copy = copies_of is not None
        self.tree: PrefixTree = copies_of.tree if copies_of else PrefixTree(block_size, len(windows) + (num_pages > 0))
        self.on_evict: Callable[[Block], None] | None = None
        self.arriving: Collection[int] = ()
        self.clear()

    def clear(self) -> None:
        """Free every block, including those in use, and drop all content."""
        self.epoch += 1
        self.tree.clear()
        self._free, self._free_pages = FreeList(), FreeList()
        numbers = range(self.num_blocks + self.num_pages)
        lists = [self._free] * self.num_blocks + [self._free_pages] * self.num_pages
        self._blocks = [Block(*each, is_copy=self.is_copy) for each in zip(numbers, lists, strict=True)]
        for block in self._blocks:
            block.free_list.add(block, last=True)

    @property
    def num_free(self) -> int:
        """Number of free blocks of keys and values."""
        return self._free.size

    @property
    def num_free_pages(self) -> int:
        """Number of free pages."""
        return self._free_pages.size

    @property
    def num_used(self) -> int:
        """Number of blocks of keys and values in use."""
        return self.num_blocks - self.num_free

    def block(self, block_id: int) -> Block:
        """Return the state of a block."""
        return self._blocks[block_id]

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
        """Return one byte for each block of keys and values: its references, at most 127, plus 128 if it is cached."""
        blocks = self._blocks[: self.num_blocks]
        return bytes([(b.ref_count if b.ref_count < 127 else 127) + 128 * (b.node is not None) for b in blocks])

    def first_seen(self, group: int, position: int) -> int:
        """Return the first of a sequence's blocks that the token at a position, and later ones, see."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_blocks(self, count: int) -> int:
        """Return the maximum blocks that a sequence with the tokens of `count` blocks holds at once in all groups."""
        return sum(count if most is None else min(count, most) for most in self.most_held)

    def allocate(self, group: int = 0) -> int | None:
        """Return a free block with one reference and without its old content; None if no block is free."""
        return self._take(self._free, group)

    def allocate_page(self) -> int | None:
        """Return a free page as `allocate` does."""
        return self._take(self._free_pages, len(self.windows))

    def _take(self, free: FreeList, group: int) -> int | None:
        if not free.size:
            return None
        block = free.head
        if self.on_evict is not None and block.node is not None:
            self.on_evict(block)
        self.tree.detach(block)
        free.remove(block)
        block.group, block.ref_count = group, 1
        return block.block_id

    def next_evicted(self, *, pages: bool = False) -> Block | None:
        """Return the block, or the page, that is allocated next; None if none is free."""
        free = self._free_pages if pages else self._free
        return free.head if free.size else None

    def share(self, block_id: int) -> None:
        """Add a reference to a block that is in use or cached."""
        block = self._blocks[block_id]
        if block.ref_count == 0:
            assert block.node is not None, f"block {block_id} is free and holds nothing to share"
            block.free_list.remove(block)
        block.ref_count += 1

    def free(self, block_id: int) -> None:
        """Remove a reference. A block without references is free, but stays cached until it is allocated."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is freed more often than it is held"
        block.ref_count -= 1
        if block.ref_count == 0:
            block.free_list.add(block, last=block.node is not None)

    def remember(self, block_ids: Sequence[int], parent: Parent, tokens: Sequence[int]) -> int:
        """Add full blocks with written KV to the prefix cache, under their prefix, and return the node.

        If the cache has another block of a group with the same content, that block stays.

        Args:
            block_ids: the block of each group, or `GONE`.
        """
        assert len(tokens) == self.block_size, f"{len(tokens)} tokens in a block of {self.block_size}"
        return self._remember(block_ids, parent, tuple(tokens))

    def remember_beginning(self, block_ids: Sequence[int], parent: Parent, tokens: Sequence[int]) -> None:
        """Add the first tokens of a block of each group to the prefix cache, if a match with them can be worth a copy.

        The rest of the blocks is not offered, and no table may write there while they are cached.
        """
        assert 0 < len(tokens) < self.block_size, f"{len(tokens)} tokens in a block of {self.block_size}"
        if len(tokens) >= self.min_shared:
            self._remember(block_ids, parent, tuple(tokens))

    def node_of(self, parent: Parent, tokens: tuple[int, ...]) -> Node:
        """Return the node that offers some tokens under a parent. If it is new, it must get a block."""
        node, replaced = self.tree.add(parent, tokens)
        for block in replaced.held if replaced else ():
            self._drop(block)
        return node

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks and the free pages, each in the order of their eviction."""
        yield from self._free
        yield from self._free_pages

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """Return the longest cached prefix of some tokens. It changes nothing; `share` takes the blocks.

        The last block may match only in its first tokens, at least in `min_shared` of them, unless there are recurrent
        layers.
        """
        path, num_tokens, num_known = self.longest(tokens, salt)
        block_ids = [self._ids(path, group, num_tokens) for group in range(len(self.windows))]
        page = path[-1].blocks[-1] if self.num_pages and path else None
        nodes = [node.number for node in path[: num_tokens // self.block_size]]
        return Match(block_ids, nodes, num_tokens, page.block_id if page else None, num_known)

    def longest(self, tokens: Sequence[int], salt: str, *, copies: bool = False) -> tuple[list[Node], int, int]:
        """Return the nodes of the longest hit, its tokens, and those of the longest text with keys and values.

        Args:
            copies: blocks on the host are as good as those on the device, and the last one must be whole.
        """
        size, matched, path = self.block_size, 0, list[Node]()
        num_groups, has_pages = len(self.windows), self.num_pages > 0
        starts = [0] * num_groups  # of each group, the block after the last missing one
        lacks, num_nodes, num_tokens, num_known = False, 0, 0, 0  # of the longest hit
        for node, common in self.tree.walk(tokens, salt, None if has_pages or copies else self.min_shared):
            if common < size and any(block.block_id in self.arriving for block in node.blocks if block):
                break  # the next write would copy it
            path.append(node)
            matched += common
            blocks = [here or there for here, there in zip(node.blocks, node.copies)] if copies else node.blocks
            if None in blocks:
                for group in range(num_groups):
                    if blocks[group] is None:
                        lacks, starts[group] = True, len(path)
            if not lacks or all(start <= self.first_seen(group, matched) for group, start in enumerate(starts)):
                num_known = matched if has_pages else 0
                if not has_pages or blocks[-1] is not None:
                    num_nodes, num_tokens = len(path), matched
            if lacks and any(starts[group] for group in self.whole):
                break
        return path[:num_nodes], num_tokens, num_known

    def _ids(self, path: list[Node], group: int, position: int) -> list[int]:
        """Return the blocks of a group on a path of nodes, as far as the token at a position sees them."""
        first, block_ids = min(self.first_seen(group, position), len(path)), list[int]()
        for node in path[first:]:
            block = node.blocks[group]
            assert block is not None, f"the node {node.number} has no block of group {group}"
            block_ids.append(block.block_id)
        return [GONE] * first + block_ids

    def forget(self, block_id: int) -> None:
        """Remove a block from the prefix cache."""
        self.tree.detach(self._blocks[block_id])

    def forget_node(self, number: int) -> None:
        """Remove all blocks of a node from the prefix cache."""
        if node := self.tree.nodes.get(number):
            for block in node.held:
                self.tree.detach(block)

    def remember_page(self, page: int, number: int) -> None:
        """Add the page of the state after the text of a node to the prefix cache, unless the node has one."""
        if node := self.tree.nodes.get(number):
            self._fill(node, [*[GONE] * len(self.windows), page])

    def forget_page(self, number: int) -> None:
        """Remove the page of a node from the prefix cache. If it is free, it is allocated next."""
        if (node := self.tree.nodes.get(number)) and (page := node.blocks[-1]):
            self._drop(page)

    def reset_prefix_cache(self) -> None:
        """Forget all content and start a new epoch, for example for other parameters.

        Blocks computed by a sequence of an earlier epoch must not be remembered in this one.
        """
        self.epoch += 1
        self.tree.clear()

    def check_invariants(self, tables: Iterable[Sequence[Sequence[int]]] | None = None) -> None:
        """Recompute everything from scratch and compare, with the reference counts if all tables are given.

        Args:
            tables: the blocks of each group of each table, then its pages if there are any.
        """
        free: list[int] = []
        for free_list in (self._free, self._free_pages):
            count = len(free)
            for block in free_list:
                assert block.next.previous is block and block.previous.next is block, f"broken at {block.block_id}"
                assert len(free) < len(self._blocks), "the free list has a loop"
                assert block.free_list is free_list, f"block {block.block_id} is in another list"
                free.append(block.block_id)
            assert len(free) - count == free_list.size, f"{free_list.size} free by count, {len(free) - count} listed"
        assert len(free) == len(set(free)), "a block is free twice"
        for block in self._blocks:
            assert block.ref_count >= 0, f"block {block.block_id} has {block.ref_count} references"
        unheld = {block.block_id for block in self._blocks if block.ref_count == 0}
        assert unheld == set(free), f"unheld but not free, or the reverse: {unheld ^ set(free)}"
        self.tree.check_invariants(self._blocks, copies=self.is_copy, shortest=self.min_shared)
        if tables is not None:
            of_groups = [
                (block_id, group) for table in tables for group, ids in enumerate(table) for block_id in ids
                if block_id != GONE
            ]  # fmt: skip
            held = Counter(block_id for block_id, _ in of_groups)
            counted = Counter({block.block_id: block.ref_count for block in self._blocks if block.ref_count})
            assert held == counted, f"references held {held}, counted {counted}"
            for block_id, group in of_groups:
                assert self._blocks[block_id].group == group, f"block {block_id} is held in group {group}"

    def _remember(self, block_ids: Sequence[int], parent: Parent, tokens: tuple[int, ...]) -> int:
        """Return the node that offers some tokens under a parent, with the given blocks where it had none."""
        node = self.node_of(parent, tokens)
        if len(node.tokens) == len(tokens):
            self._fill(node, block_ids)
        return node.number

    def _fill(self, node: Node, block_ids: Sequence[int]) -> None:
        """Give blocks to a node, for the groups in which it has none."""
        for group, block_id in enumerate(block_ids):
            if block_id != GONE and node.blocks[group] is None:
                block = self._blocks[block_id]
                assert block.ref_count > 0, f"block {block_id} is remembered while no table holds it"
                self.tree.attach(node, block)

    def _drop(self, block: Block) -> None:
        """Forget a block. If it is free, it is allocated next."""
        self.tree.detach(block)
        if block.ref_count == 0:
            block.free_list.remove(block)
            block.free_list.add(block, last=False)
