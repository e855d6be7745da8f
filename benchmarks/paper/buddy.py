"""Contiguous reservations in a buddy system, as the PagedAttention paper assumes for Orca (arXiv:2309.06180, 6.1)."""

from jpaged.core.block_pool import BlockPool


class BuddyPool(BlockPool):
    """A pool whose blocks are reserved in runs of consecutive ones. A run has a power of two as its size, and begins at
    a multiple of it.

    The blocks of a run beyond a reservation belong to nobody and stay unused until the reservation ends.
    """

    def clear(self) -> None:
        super().clear()
        self._holes: dict[int, set[int]] = {}  # first blocks of the free runs, by size
        self._runs: dict[int, tuple[int, int]] = {}  # (first block, size) of the run of each held block
        self._held: dict[int, int] = {}  # blocks that are held of each run, by its first one
        self.reserved = 0  # blocks of all held runs
        start = 0
        for bit in reversed(range(self.num_blocks.bit_length())):
            if self.num_blocks >> bit & 1:
                self._holes.setdefault(1 << bit, set()).add(start)
                start += 1 << bit

    def reserve(self, tokens: int) -> list[int] | None:
        """Consecutive blocks for so many tokens, each with one reference; None if no free run is long enough."""
        wanted = -(-tokens // self.block_size)
        size = 1 << (wanted - 1).bit_length()
        found = min((hole for hole, starts in self._holes.items() if hole >= size and starts), default=None)
        if found is None:
            return None
        start = min(self._holes[found])
        self._holes[found].remove(start)
        while found > size:
            found //= 2
            self._holes.setdefault(found, set()).add(start + found)
        block_ids = list(range(start, start + wanted))
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.free_list.remove(block)
            block.ref_count = 1
            self._runs[block_id] = start, size
        self._held[start] = wanted
        self.reserved += size
        return block_ids

    def free(self, block_id: int) -> None:
        super().free(block_id)
        start, size = self._runs.pop(block_id)
        self._held[start] -= 1
        if self._held[start]:
            return
        del self._held[start]
        self.reserved -= size
        while (buddy := start ^ size) in self._holes.get(size, ()):
            self._holes[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._holes.setdefault(size, set()).add(start)
