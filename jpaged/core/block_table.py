"""Map of one sequence from logical to physical blocks."""

from collections.abc import Iterable, Sequence

from jpaged.core.block_pool import BlockPool

Copies = list[tuple[int, int]]  # (source, destination)


class BlockTable:
    """Block table of one sequence: `block_ids[i]` holds tokens `[i * block_size, (i + 1) * block_size)`.

    It grows at its end. Entries change only by copy-on-write and by moves to another pool.
    """

    __slots__ = ("block_ids", "pool")

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.block_ids: list[int] = []

    def append(self, start: int, end: int) -> Copies | None:
        """Make the slots of tokens `[start, end)` writable by this sequence only.

        Shared blocks are replaced by new ones (copy-on-write), and so are blocks in the prefix cache, if there is room.
        Missing blocks are added.

        Returns:
            The block copies that must run on the device before the tokens are written, or None, with nothing changed,
            if the pool has too few free blocks.
        """
        pool, size = self.pool, self.pool.block_size
        first, stop = start // size, -(-end // size)
        held = self.block_ids
        if stop == first + 1 and first < len(held) and pool.is_private(held[first]):
            return []
        spare = pool.num_free - shortage([(self, start, end)])
        if spare < 0:
            return None
        copies = []
        for index in range(first, stop):
            if index == len(held):
                held.append(self._allocate())
                continue
            source = held[index]
            if pool.ref_count(source) > 1 or (pool.is_cached(source) and spare):
                held[index] = self._allocate()
                pool.free(source)
                copies.append((source, held[index]))
            else:
                pool.forget(source)
        return copies

    def share(self, block_ids: Iterable[int]) -> None:
        """Fill an empty table with blocks that are in use or cached."""
        assert not self.block_ids, f"a prefix can't follow {len(self.block_ids)} blocks"
        for block_id in block_ids:
            self.pool.share(block_id)
            self.block_ids.append(block_id)

    def free(self) -> None:
        """Free every block, the last first: the end of a prefix is evicted before its beginning."""
        while self.block_ids:
            self.pool.free(self.block_ids.pop())

    def _allocate(self) -> int:
        block_id = self.pool.allocate()
        assert block_id is not None, "append counted the free blocks first"
        return block_id


Span = tuple[BlockTable, int, int]  # tokens [start, end) of a table


def append(spans: Sequence[Span]) -> Copies | None:
    """Append to several tables of one pool as `BlockTable.append` does: to all or, without enough room, to none."""
    if len(spans) == 1:
        table, start, end = spans[0]
        return table.append(start, end)
    if spans and shortage(spans) > spans[0][0].pool.num_free:
        return None
    copies: Copies = []
    for table, start, end in spans:
        more = table.append(start, end)
        assert more is not None, "the free blocks were counted first"
        copies += more
    return copies


def shortage(spans: Iterable[Span]) -> int:
    """Return the number of blocks needed to append `[start, end)` to each table of one pool, one after the other."""
    missing = 0
    holders: dict[int, int] = {}  # numbers of holders, of blocks that an earlier table of `spans` leaves
    for table, start, end in spans:
        pool, held = table.pool, table.block_ids
        first, stop = start // pool.block_size, -(-end // pool.block_size)
        missing += max(0, stop - len(held))
        for block_id in held[first:stop]:
            count = holders.get(block_id, pool.ref_count(block_id))
            if count > 1:
                missing += 1
                holders[block_id] = count - 1
    return missing


def move(tables: Iterable[BlockTable], to: BlockPool) -> Copies:
    """Move tables that share blocks into another pool, where they share them as before: each block moves once.

    The pool must have a free block for each. The result is the source and the destination of each.
    """
    moved: dict[int, int] = {}
    for table in tables:
        block_ids = list(table.block_ids)
        table.free()
        table.pool = to
        for block_id in block_ids:
            if block_id in moved:
                to.share(moved[block_id])
            else:
                destination = to.allocate()
                assert destination is not None, f"{to.num_free} free blocks are too few"
                moved[block_id] = destination
            table.block_ids.append(moved[block_id])
    return list(moved.items())
