"""Prefixes that are evicted after all others, for a time and within a share of the pool."""

import math
from collections.abc import Sequence

from jpaged.core.blocks import Node
from jpaged.core.prefix_tree import PrefixTree

Owner = str | None  # a tenant


class Pins:
    """Pinned texts of a prefix tree. Their free blocks are evicted last, so that no pin makes a request wait.

    Args:
        most: maximum number of pinned blocks of text of each owner; the least recently used ones of the owner give way.

    Attributes:
        now: the present time in seconds, as the last `advance` has told.
        count: number of pins.
    """

    def __init__(self, tree: PrefixTree, most: int):
        self._tree, self.most = tree, most
        self.now, self.count, self._next = 0.0, 0, math.inf
        self._until: dict[Owner, dict[Node, float]] = {}  # the ends of texts first, in the order of use

    def keep(self, owner: Owner, numbers: Sequence[int], seconds: float) -> None:
        """Pin the nodes of a path for some time from now on, and for no less than before."""
        pinned, until = self._until.setdefault(owner, {}), self.now + seconds
        path = [node for number in numbers[: self.most] if (node := self._tree.nodes.get(number))]
        for node in reversed(path):
            before = pinned.pop(node, None)
            pinned[node] = until if before is None else max(before, until)
            if before is None:
                self._change(node, 1)
        while len(pinned) > self.most:
            node = next(iter(pinned))
            del pinned[node]
            self._change(node, -1)
        self._next = min(self._next, until)

    def advance(self, now: float) -> None:
        """Take the present time, and end the pins whose time is over."""
        self.now = now
        if now < self._next:
            return
        for owner, pinned in list(self._until.items()):
            for node in [node for node, until in pinned.items() if until <= now]:
                del pinned[node]
                self._change(node, -1)
            if not pinned:
                del self._until[owner]
        self._next = min((until for pinned in self._until.values() for until in pinned.values()), default=math.inf)

    def clear(self) -> None:
        """End all pins."""
        for pinned in self._until.values():
            for node in pinned:
                self._change(node, -1)
        self._until.clear()
        self._next = math.inf

    def _change(self, node: Node, number: int) -> None:
        """Add pins to a node, and let its free blocks take their place in the order of eviction."""
        self.count += number
        was, node.num_pins = node.num_pins, node.num_pins + number
        if bool(was) != bool(node.num_pins):
            for block in node.held:
                if block.ref_count == 0 and block.node is node:  # the tree may have forgotten it
                    block.free_list.remove(block)
                    block.free_list.add(block, last=True)
