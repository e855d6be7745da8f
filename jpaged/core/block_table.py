"""One sequence's map from logical to physical blocks."""

from jpaged.core.block_pool import BlockPool


class BlockTable:
    """`block_ids[i]` holds tokens `[i * block_size, (i + 1) * block_size)`. Grows at its end; never remapped but for
    copy-on-write."""

    def __init__(self, pool: BlockPool, block_ids: list[int] | None = None):
        self.pool = pool
        self.block_ids: list[int] = block_ids or []

    def shortage(self, start: int, end: int) -> int:
        """How many blocks `append(start, end)` would take from the pool."""
        first, stop = start // self.pool.block_size, -(-end // self.pool.block_size)
        shared = sum(self.pool.ref_count(block_id) > 1 for block_id in self.block_ids[first:stop])
        return max(0, stop - len(self.block_ids)) + shared

    def append(self, start: int, end: int) -> list[tuple[int, int]] | None:
        """Makes the slots of tokens `[start, end)` writable by this sequence alone.

        A shared block among them is replaced by a new one (copy-on-write); missing ones are added. Returns the
        (source, destination) block copies that must run on the device before the tokens are written, or None, with
        nothing changed, if the pool has too few free blocks.
        """
        pool = self.pool
        if self.shortage(start, end) > pool.num_free:
            return None
        copies = []
        for index in range(start // pool.block_size, -(-end // pool.block_size)):
            if index == len(self.block_ids):
                self.block_ids.append(self._allocate())
            elif pool.ref_count(source := self.block_ids[index]) > 1:
                self.block_ids[index] = self._allocate()
                pool.free(source)
                copies.append((source, self.block_ids[index]))
        return copies

    def share_prefix(self, block_ids: list[int]) -> None:
        """Starts an empty table with blocks that others hold or that the pool remembers."""
        assert not self.block_ids, f"a prefix can't follow {len(self.block_ids)} blocks"
        for block_id in block_ids:
            self.pool.share(block_id)
        self.block_ids.extend(block_ids)

    def fork(self) -> "BlockTable":
        """A table that shares every block with this one."""
        table = BlockTable(self.pool)
        table.share_prefix(self.block_ids)
        return table

    def free(self) -> None:
        """Gives every block back, the last first: the end of a prefix is evicted before its beginning."""
        while self.block_ids:
            self.pool.free(self.block_ids.pop())

    def slot(self, position: int) -> int:
        """Flat slot of the token at `position`."""
        index, offset = divmod(position, self.pool.block_size)
        return self.block_ids[index] * self.pool.block_size + offset

    def _allocate(self) -> int:
        block_id = self.pool.allocate()
        assert block_id is not None, "append counted the free blocks first"
        return block_id
