"""Prefix cache as a radix tree: texts of blocks, and the blocks that hold them on the device and on the host."""

import bisect
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

from jpaged.core.blocks import Block, Node, Parent
from jpaged.core.cache_events import CacheEvents

_tokens = operator.attrgetter("tokens")


class PrefixTree:
    """Radix tree whose edges are the tokens of whole blocks (like SGLang's, arXiv:2312.07104, but split at blocks).

    The number of a node is never reused: a path of nodes stands for one exact text. Tokens are compared, not hashed, so
    a hit is never wrong. The children of a node are sorted by their tokens: the block with the longest common beginning
    is found as fast as an equal one. A block that is only partly filled is a leaf. No child of a node is the beginning
    of another one. A node stays while it has a block, on the device or on the host, or children.

    Args:
        num_kinds: number of groups of layers, and one more for pages if there are any.

    Attributes:
        num_copies: number of blocks and pages on the host that hold a text.
        events: a record of the changes, if someone takes them.
    """

    def __init__(self, block_size: int, num_kinds: int):
        self.block_size, self.num_kinds = block_size, num_kinds
        self._numbers = itertools.count()
        self.num_copies = 0
        self.events: CacheEvents | None = None
        self.nodes: dict[int, Node] = {}
        self.children: dict[Parent, list[Node]] = {}

    def clear(self) -> None:
        """Forget all texts, and detach all blocks."""
        for node in self.nodes.values():
            for block in node.held:
                block.node = None
        self.nodes.clear()
        self.children.clear()
        self.num_copies = 0
        if self.events is not None:
            self.events.clear()

    def walk(self, tokens: Sequence[int], salt: str, shortest: int | None) -> Iterator[tuple[Node, int]]:
        """Yield the nodes of the longest known prefix of some tokens, each with the number of common tokens.

        Args:
            shortest: least number of common tokens of a last block that is equal in its beginning only; None: every
                block is equal as a whole.
        """
        parent: Parent = salt
        at, size = 0, self.block_size
        while siblings := self.children.get(parent):
            wanted = tuple(tokens[at : at + size])
            place = bisect.bisect_left(siblings, wanted, key=_tokens)
            if len(wanted) == size and place < len(siblings) and siblings[place].tokens == wanted:
                node = siblings[place]
                yield node, size
            else:
                if shortest is not None:
                    # In sorted order, only the two neighbours of a text can have the most in common with it.
                    # Another one may be missed next to a text whose blocks are lost.
                    near = siblings[max(place - 1, 0) : place + 1]
                    node = max(near, key=lambda each: common_length(each.tokens, wanted))
                    if (common := common_length(node.tokens, wanted)) >= shortest:
                        yield node, common
                return
            parent, at = node.number, at + size

    def add(self, parent: Parent, tokens: tuple[int, ...]) -> tuple[Node, Node | None]:
        """Return the node that offers some tokens under a parent, and a node whose text it offers in addition."""
        siblings = self.children.setdefault(parent, [])
        at = bisect.bisect_left(siblings, tokens, key=_tokens)
        if at < len(siblings) and siblings[at].tokens[: len(tokens)] == tokens:
            return siblings[at], None
        before = self.nodes.get(parent) if isinstance(parent, int) else None
        node = Node(next(self._numbers), parent, before, tokens, self.num_kinds)
        self.nodes[node.number] = node
        siblings.insert(at, node)
        # The beginning of these tokens, of which no more than one is cached, comes directly before them.
        shorter = siblings[at - 1] if at else None
        return node, shorter if shorter and tokens[: len(shorter.tokens)] == shorter.tokens else None

    def attach(self, node: Node, block: Block) -> None:
        """Give a node a block that holds its text, of a group for which its memory has none."""
        blocks = node.of(copies=block.is_copy)
        assert blocks[block.group] is None, f"the node {node.number} has a block of group {block.group}"
        assert block.node is None, f"block {block.block_id} was written while the prefix cache offered it"
        blocks[block.group], block.node = block, node
        self.num_copies += block.is_copy
        if self.events is not None:
            self.events.store(node, block)

    def detach(self, block: Block) -> None:
        """Take a block from its node, if it has one, and remove the nodes that hold nothing then."""
        node, block.node = block.node, None
        if node is None:
            return
        node.of(copies=block.is_copy)[block.group] = None
        self.num_copies -= block.is_copy
        if self.events is not None:
            self.events.remove(node, block)
        while not (node.number in self.children or any(node.blocks) or any(node.copies)):
            siblings = self.children[node.parent]
            del siblings[bisect.bisect_left(siblings, node.tokens, key=_tokens)]
            del self.nodes[node.number]
            if siblings:
                break
            del self.children[node.parent]
            if not isinstance(node.parent, int) or node.parent not in self.nodes:
                break
            node = self.nodes[node.parent]

    def check_invariants(self, blocks: Iterable[Block], *, copies: bool, shortest: int) -> None:
        """Check the tree against all blocks of one memory.

        Args:
            copies: whether it is that of the host.
            shortest: least number of tokens of a node.
        """
        nodes = [node for siblings in self.children.values() for node in siblings]
        assert {node.number: node for node in nodes} == self.nodes, "lost in the cache"
        cached = {block.block_id for block in blocks if block.node is not None}
        offered = [(node, kind, block) for node in nodes for kind, block in enumerate(node.of(copies=copies)) if block]
        assert cached == {block.block_id for _, _, block in offered}, "lost in the cache"
        assert not copies or self.num_copies == len(cached), f"{self.num_copies} copies by count, not {len(cached)}"
        for node, kind, block in offered:
            assert (block.node, block.group) == (node, kind), f"{block.block_id} is misplaced"
        for parent, siblings in self.children.items():
            texts = [node.tokens for node in siblings]
            assert texts and texts == sorted(set(texts)), f"the children of {parent!r} are out of order"
            repeated = any(common_length(a, b) == len(a) for a, b in itertools.pairwise(texts))
            assert not repeated, f"a child of {parent!r} is the beginning of the next: {texts}"
            assert all(node.parent == parent for node in siblings), f"a child of {parent!r} has another parent"
        for node in nodes:
            assert node.held or node.number in self.children, f"the node {node.number} holds nothing"
            if len(node.tokens) < self.block_size:
                assert len(node.tokens) >= shortest, f"the node {node.number} offers {len(node.tokens)} tokens"
                assert node.number not in self.children, f"the node {node.number} is not full and has children"
                assert not any(node.copies), f"the node {node.number} is not full and on the host"


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
