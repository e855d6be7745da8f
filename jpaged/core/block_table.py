"""Map of one sequence from logical to physical blocks."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

from jpaged.core.block_pool import GONE, BlockPool
from jpaged.core.plan import CONTINUES, NO_STATE, NOWHERE

Copies = list[tuple[int, int]]  # (source, destination)


class BlockTable:
    """Block table of one sequence, for each group of layers.

    `block_ids[group][i]` holds tokens `[i * block_size, (i + 1) * block_size)`. The lists are equally long and grow at
    their ends. Entries change only by copy-on-write, by moves to another pool, and where a window has passed them.

    With recurrent layers, it has pages of states, too, each with the number of tokens before it, in their order. The
    last one is that of all scheduled tokens. Earlier ones are held until the commit of the steps that read them.

    Attributes:
        first: for each group, the number of leading blocks that are `GONE`.
        pages: (number of tokens, page).
    """

    __slots__ = ("block_ids", "first", "pages", "pool")

    def __init__(self, pool: BlockPool):
        self.pool = pool
        self.block_ids: tuple[list[int], ...] = tuple([] for _ in pool.windows)
        self.first = [0] * len(pool.windows)
        self.pages: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of blocks of each group, freed ones before a window included."""
        return len(self.block_ids[0])

    @property
    def held(self) -> list[int]:
        """The blocks of all groups."""
        return [block_id for ids, first in zip(self.block_ids, self.first) for block_id in ids[first:]]

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
        if stop == first + 1 and first < len(self.block_ids[0]):
            for held in self.block_ids:
                if not pool.is_private(held[first]):
                    break
            else:
                return []
        spare = pool.num_free - shortage([(self, start, end)])
        if spare < 0:
            return None
        copies = []
        for group, held in enumerate(self.block_ids):
            for index in range(first, stop):
                if index == len(held):
                    held.append(self._allocate(group))
                    continue
                source = held[index]
                if pool.ref_count(source) > 1 or (pool.is_cached(source) and spare > 0):
                    spare -= pool.ref_count(source) == 1
                    held[index] = self._allocate(group)
                    pool.free(source)
                    copies.append((source, held[index]))
                else:
                    pool.forget(source)
        return copies

    @property
    def needs_page(self) -> bool:
        """Whether the next token's state needs another page: there is none, or other tables hold it, too."""
        return not self.pages or self.pool.ref_count(self.pages[-1][1]) > 1

    def advance(self, ends: Sequence[int], kept: Container[int], num_drafts: int, spare: int) -> Copies:
        """Give pages to the states after the next tokens; return the page that each entry reads and the one it writes.

        The last state replaces the present one in its page, unless that must be kept, or other tables hold it.

        Args:
            ends: numbers of tokens after each entry of the plan.
            kept: numbers of tokens whose states are for the prefix cache.
            num_drafts: number of drafts among the entries, at the end. The state after each has a page of its own.
            spare: free pages beyond those that are needed.
        """
        pool, pages = self.pool, self.pages
        position, page = pages[-1] if pages else (0, NO_STATE)
        in_place = not self.needs_page
        if in_place and spare > 0 and position in kept:
            in_place, spare = False, spare - 1
        if in_place:
            pool.forget(page)
            pages.pop()
        last, entries = len(ends) - num_drafts - 1, Copies()
        for index, end in enumerate(ends):
            written = NOWHERE
            if index == last and in_place:
                written = page
            elif index >= last or (spare > 0 and end in kept):
                spare -= index < last
                new = pool.allocate_page()
                assert new is not None, "the free pages were counted first"
                written = new
            if written != NOWHERE:
                pages.append((end, written))
            entries.append((CONTINUES if index else page, written))
        return entries

    def leave_pages(self, position: int) -> None:
        """Free the pages of the states before the last one up to a position."""
        while len(self.pages) > 1 and self.pages[1][0] <= position:
            self.pool.free(self.pages.pop(0)[1])

    def rewind(self, position: int) -> None:
        """Free the pages of the states past a position."""
        while self.pages and self.pages[-1][0] > position:
            self.pool.free(self.pages.pop()[1])

    def share_page(self, position: int, page: int) -> None:
        """Start with a page that is in use or cached, in a table without one."""
        assert not self.pages, f"the table has the state after {self.pages[0][0]} tokens"
        self.pool.share(page)
        self.pages.append((position, page))

    def share(self, block_ids: Iterable[Iterable[int]]) -> None:
        """Fill an empty table with blocks of each group that are in use or cached, `GONE` where none is needed."""
        assert not len(self), f"a prefix can't follow {len(self)} blocks"
        for group, ids in enumerate(block_ids):
            held = self.block_ids[group]
            held.extend(ids)
            self.first[group] = held.count(GONE)
            for block_id in held[self.first[group] :]:
                self.pool.share(block_id)

    def leave(self, position: int) -> None:
        """Free the blocks that tokens from a position on do not see."""
        pool, length = self.pool, len(self)
        for group, (held, first) in enumerate(zip(self.block_ids, self.first)):
            stop = min(pool.first_seen(group, position), length)
            for index in range(first, stop):
                pool.free(held[index])
                held[index] = GONE
            self.first[group] = max(first, stop)

    def leaves_at(self) -> int:
        """Return the first position from which on `leave` frees a block."""
        size = self.pool.block_size
        ends = zip(self.first, self.pool.windows)
        return min((first + 1) * size + window - 1 for first, window in ends if window is not None)

    def free(self) -> None:
        """Free every block, the last first: the end of a prefix is evicted before its beginning."""
        self.rewind(-1)
        for _ in range(len(self)):
            for held in self.block_ids:
                if (block_id := held.pop()) != GONE:
                    self.pool.free(block_id)
        self.first = [0] * len(self.first)

    def _allocate(self, group: int) -> int:
        block_id = self.pool.allocate(group)
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
    """Return the number of blocks needed to append `[start, end)` to each table of one pool, one after the other.

    A span may be appended in several steps. Blocks that its window has passed by then are not needed at the same time.
    """
    missing = 0
    holders: dict[int, int] = {}  # numbers of holders, of blocks that an earlier table of `spans` leaves
    for table, start, end in spans:
        pool, length = table.pool, len(table.block_ids[0])
        first, stop = start // pool.block_size, -(-end // pool.block_size)
        for held, gone, most in zip(table.block_ids, table.first, pool.most_held):
            new = max(0, stop - length)
            missing += new if most is None else min(new, max(0, most - (length - gone)))
            for block_id in held[first:stop]:
                count = holders.get(block_id, pool.ref_count(block_id))
                if count > 1:
                    missing += 1
                    holders[block_id] = count - 1
    return missing


def move(tables: Sequence[BlockTable], to: BlockPool) -> Copies:
    """Move tables that share blocks into another pool, where they share them as before: each block moves once.

    The pool must have a free block for each. The result is the source and the destination of each; page p is -1 - p.
    """
    moved: dict[int, int] = {}
    last, last_there = tables[0].pool.num_blocks if tables else 0, to.num_blocks

    def place_of(block_id: int, allocate: Callable[[], int | None]) -> int:
        if block_id in moved:
            to.share(moved[block_id])
        else:
            destination = allocate()
            assert destination is not None, f"{to.num_free} free blocks or {to.num_free_pages} free pages are too few"
            moved[block_id] = destination
        return moved[block_id]

    for table in tables:
        block_ids, first, pages = [list(ids) for ids in table.block_ids], list(table.first), list(table.pages)
        table.free()
        table.pool, table.first = to, first
        for group, (ids, held) in enumerate(zip(block_ids, table.block_ids)):
            held += ids[: first[group]]
            held += [place_of(block_id, partial(to.allocate, group)) for block_id in ids[first[group] :]]
        table.pages += [(position, place_of(page, to.allocate_page)) for position, page in pages]
    return [
        (source, place) if source < last else (last - 1 - source, last_there - 1 - place)
        for source, place in moved.items()
    ]


def page_shortage(tables: Iterable[BlockTable]) -> int:
    """Return the number of pages that some tables of one pool need for their next states."""
    return sum(table.needs_page for table in tables)
