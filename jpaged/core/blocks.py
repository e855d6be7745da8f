"""Blocks of a memory: their references, the list of free ones, and the texts that they hold."""

from collections.abc import Iterator

# The prefix of a text: the node of the block before it, or, for a first block, the salt of its request.
Parent = int | str


class FreeList:
    """Free blocks of one kind, in the order of their eviction.

    Blocks are taken from its head. A block without cached content returns to the head, a cached one to the tail, so
    that cached content is evicted in least-recently-used order; pinned content follows, in the same order. The list is
    doubly linked through the blocks themselves, because a prefix hit takes a block out of its middle (as vLLM's
    FreeKVCacheBlockQueue does).
    """

    def __init__(self) -> None:
        self.size = 0
        self._ends = Block(-1, self)  # sentinel of a circular list
        self._pinned = Block(-1, self)  # stands before the first block with pinned content
        self._pinned.next = self._pinned.previous = self._ends
        self._ends.next = self._ends.previous = self._pinned

    def __iter__(self) -> Iterator["Block"]:
        block = self._ends.next
        while block is not self._ends:
            if block is not self._pinned:
                yield block
            block = block.next

    @property
    def head(self) -> "Block":
        """The block that is evicted next; the list must not be empty."""
        first = self._ends.next
        return first.next if first is self._pinned else first

    def add(self, block: "Block", *, last: bool) -> None:
        """Add a block at the tail of those with its kind of content, or at the head."""
        is_pinned = block.node is not None and block.node.num_pins > 0
        before = self._ends.next if not last else self._ends if is_pinned else self._pinned
        block.previous, block.next = before.previous, before
        before.previous.next = before.previous = block
        self.size += 1

    def remove(self, block: "Block") -> None:
        """Remove a block, wherever it is."""
        block.previous.next, block.next.previous = block.next, block.previous
        self.size -= 1


class Block:
    """State of a block.

    It has a place in the `free_list` of its kind while `ref_count` is 0, and in the prefix cache while it has a `node`.
    It belongs to a group from its allocation on. `is_copy`: it is on the host.
    """

    __slots__ = ("block_id", "free_list", "group", "is_copy", "next", "node", "previous", "ref_count")

    def __init__(self, block_id: int, free_list: FreeList, *, is_copy: bool = False):
        self.block_id, self.free_list, self.is_copy = block_id, free_list, is_copy
        self.group = self.ref_count = 0
        self.node: Node | None = None
        self.previous: Block = self
        self.next: Block = self


class Node:
    """Text of a block in the prefix cache, with the block of each group that holds it, or None.

    Attributes:
        blocks: those on the device; with recurrent layers, the page of the state after the text is the last one.
        copies: likewise, those on the host.
        before: the node of the block before it; None for a first block, and if that node is lost.
        salt: the salt of the whole text; None if the text before it is lost, so that no request can find it.
        num_pins: number of pins (`Pins`).
        was_found: whether a request has found it.
        key: key of the whole text, once it is needed (`text_key`).
    """

    __slots__ = ("before", "blocks", "copies", "key", "num_pins", "number", "parent", "salt", "tokens", "was_found")

    def __init__(self, number: int, parent: Parent, before: "Node | None", tokens: tuple[int, ...], num_kinds: int):
        self.number, self.parent, self.before, self.tokens, self.num_pins = number, parent, before, tokens, 0
        self.salt: str | None = parent if isinstance(parent, str) else before.salt if before else None
        self.key: bytes | None = None
        self.was_found = False
        self.blocks: list[Block | None] = [None] * num_kinds
        self.copies: list[Block | None] = [None] * num_kinds

    @property
    def held(self) -> list[Block]:
        """All blocks that hold the text."""
        return [block for block in (*self.blocks, *self.copies) if block]

    def of(self, *, copies: bool) -> list[Block | None]:
        """Return the blocks of one memory."""
        return self.copies if copies else self.blocks
