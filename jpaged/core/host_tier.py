"""Second tier of the prefix cache: copies of evicted blocks on the host, which return when their text is wanted."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jpaged.core.block_pool import BlockPool
from jpaged.core.blocks import Block, Node
from jpaged.core.disk_tier import DiskTier

LEAST_MOVED = 4  # fewer blocks take as long to move as so many
# Share of the time of all steps that may be spent on blocks whose text may never come again, by the time of a move
# alone. Where that was 0.014, steps took 1.00 to 1.04 of their time without moves (benchmarks/engine/agents.py).
MOST_SLOWER = 0.01


class Moves(NamedTuple):
    """Moves of blocks as (source, destination); page p of a pool is -1 - p.

    Attributes:
        from_files: blocks of the device whose content was read from files.
    """

    out: list[tuple[int, int]]
    back: list[tuple[int, int]]
    from_files: list[int]


class Found(NamedTuple):
    """Cached prefix of a text, part of which is on the host only.

    Attributes:
        path: its nodes.
        missing: in the order of the text, the nodes with the groups whose blocks are on the host only.
        num_tokens: tokens of the prefix.
    """

    path: list[Node]
    missing: list[tuple[Node, int]]
    num_tokens: int


class HostTier:
    """Moves of cached blocks between the pool on the device and that on the host, which share a prefix tree.

    A block that is evicted from the device is copied to the least recently used place of the host, unless its copy is
    there, or the place is pinned and the block is not. A copy returns to the device when a request with its text is to
    start, and stays on the host, too. Moves take effect at once in the tree, and are part of the next plan. Until then,
    no place of the host that a move reads or writes is given away: `take` returns the moves and ends this.

    Args:
        cost: cost of moving one block to the host and back, in tokens that could be computed in that time.
        overlaps: whether steps run while blocks move to the host. Otherwise, if that takes more than `MOST_SLOWER` of
            the time of computing them, only pinned texts and those that were found before are copied.

    Attributes:
        disk: the files of blocks; None: there are none.
        num_out, num_back: number of blocks and pages that went to the host, and that returned, so far.
    """

    def __init__(self, device: BlockPool, host: BlockPool, cost: float, *, overlaps: bool = True):
        assert host.tree is device.tree, "both pools have one prefix cache"
        self.device, self.host, self.cost = device, host, cost
        self.keeps_all = overlaps or cost / 2 <= MOST_SLOWER * device.block_size
        self.disk: DiskTier | None = None
        self.num_out = self.num_back = 0
        self._out: list[tuple[int, int]] = []
        # From the number of a block on the device to that on the host; None: its content was read from a file.
        self._back: dict[int, int | None] = {}
        self._held: list[int] = []
        if self.is_worthwhile:
            device.on_evict = self._keep
            device.arriving = self._back.keys()

    @property
    def is_worthwhile(self) -> bool:
        """Whether moving a block both ways costs less than computing its tokens."""
        return self.device.enable_prefix_caching and self.cost < self.device.block_size

    @property
    def held(self) -> tuple[list[int], ...]:
        """The places of the host that are not given away before the next plan, of each group and then the pages."""
        kinds = range(self.host.tree.num_kinds)
        return tuple([place for place in self._held if self.host.block(place).group == kind] for kind in kinds)

    def open_files(self, names: Iterable[str], most: int, token_s: float) -> None:
        """Write blocks that come to the host to files, and read them; the arguments are those of `DiskTier`."""
        self.disk = DiskTier(self.device, self.host, self._back, names, most, token_s)

    def clear(self) -> None:
        """Forget the moves, after the pools have been cleared."""
        self._out.clear()
        self._back.clear()
        self._held.clear()

    def hold(self, block_ids: Iterable[int]) -> None:
        """Give no place of the host away before the next plan."""
        for block_id in block_ids:
            self.host.share(block_id)
            self._held.append(block_id)

    def take(self) -> Moves:
        """Return the moves since the last call."""
        back = [(host, device) for device, host in self._back.items() if host is not None]
        read = [device for device, host in self._back.items() if host is None]
        moves = Moves([*self._out], back, read)
        self.num_out += len(moves.out)
        self.num_back += len(moves.back)
        for block_id in self._held:
            self.host.free(block_id)
        self.clear()
        first, first_there = self.device.num_blocks, self.host.num_blocks
        return Moves(
            [_pair(source, place, first, first_there) for source, place in moves.out],
            [_pair(place, source, first_there, first) for place, source in moves.back],
            [block_id if block_id < first else first - 1 - block_id for block_id in moves.from_files],
        )

    def find(self, tokens: Sequence[int], salt: str) -> Found | None:
        """Return the longest cached prefix of a text; None if it is on the device as a whole."""
        if not self.host.tree.num_copies:
            return None
        path, num_tokens, _ = self.device.longest(tokens, salt, copies=True)
        firsts = [self.device.first_seen(group, num_tokens) for group in range(len(self.device.windows))]
        missing = [
            (node, group) for index, node in enumerate(path) for group, first in enumerate(firsts)
            if index >= first and node.blocks[group] is None
        ]  # fmt: skip
        if path and self.device.num_pages and path[-1].blocks[-1] is None:
            missing.append((path[-1], len(firsts)))
        return Found(path, missing, num_tokens) if missing else None

    def cost_of(self, count: int) -> float:
        """Return the cost of moving some blocks to the device, in tokens."""
        return self.cost / 2 * max(count, LEAST_MOVED)

    def most(self, cost: float) -> int:
        """Return the maximum number of blocks that can be moved to the device at a cost."""
        return math.floor(2 * cost / self.cost)

    def load(self, found: Found, most: int) -> int:
        """Move the first blocks of a prefix that are missing on the device there; return their number.

        They are free there, and evicted last.
        """
        device, missing = self.device, found.missing[:most]
        self.hold(copy.block_id for node, group in missing if (copy := node.copies[group]))
        held = [block for node in found.path for block in node.blocks if block]
        for block in held:
            device.share(block.block_id)
        moved = 0
        for node, group in missing:
            block_id = device.allocate_page() if group == len(device.windows) else device.allocate(group)
            copy = node.copies[group]
            if block_id is None or copy is None:
                break
            block = device.block(block_id)
            device.tree.attach(node, block)
            self._back[block_id] = copy.block_id
            held.append(block)
            moved += 1
        places = {node.number: index for index, node in enumerate(found.path)}
        for block in sorted(held, key=lambda block: -places[block.node.number] if block.node else 0):
            device.free(block.block_id)
        return moved

    def _keep(self, block: Block) -> None:
        """Copy a cached block to the host before it is given to other content."""
        node, group = block.node, block.group
        assert node is not None, "the block is cached"
        if block.block_id in self._back:  # it is evicted in the step that would load it
            del self._back[block.block_id]
            return
        if node.copies[group] is not None or len(node.tokens) < self.device.block_size:
            return
        if not (self.keeps_all or node.num_pins or node.was_found):
            return
        host, is_page = self.host, group == len(self.device.windows)
        evicted = host.next_evicted(pages=is_page)
        if evicted is None or (evicted.node is not None and evicted.node.num_pins and not node.num_pins):
            return
        place = host.allocate_page() if is_page else host.allocate(group)
        assert place is not None, "a place is free"
        host.block(place).group = group
        host.tree.attach(node, host.block(place))
        self._out.append((block.block_id, place))
        self._held.append(place)
        if self.disk is not None:
            self.disk.write(host.block(place))


def _pair(source: int, place: int, first: int, first_there: int) -> tuple[int, int]:
    """Return a move with pages as -1 - p, where blocks from the first numbers on are pages."""
    return (source, place) if source < first else (first - 1 - source, first_there - 1 - place)
