"""BlockPool and BlockTable against a brute-force model, on tiny pools, with every invariant checked at every step."""

import hypothesis.stateful as stateful
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from jpaged.core.block_pool import ROOT_KEY, BlockPool, block_key
from jpaged.core.block_table import BlockTable


def test_blocks_are_taken_in_order_and_run_out():
    pool = BlockPool(3, 4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert pool.num_free == 0 and pool.num_used == 3


def test_a_block_without_content_is_taken_before_cached_ones_and_those_oldest_first():
    pool = BlockPool(3, 4)
    a, b, c = (pool.allocate() for _ in range(3))
    pool.remember(a, b"a")
    pool.remember(b, b"b")
    for block_id in (a, b, c):
        pool.free(block_id)
    assert [pool.allocate(), pool.allocate()] == [c, a]
    assert pool.match([b"b"]) == [b] and pool.match([b"a"]) == []


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_list():
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    for block_id in blocks:
        pool.remember(block_id, bytes([block_id]))
        pool.free(block_id)
    pool.share(blocks[1])
    pool.check_invariants([[blocks[1]]])
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [blocks[0], blocks[2], None]


def test_only_whole_chains_match():
    pool = BlockPool(4, 2)
    keys = [block_key(ROOT_KEY, [1, 2])]
    keys.append(block_key(keys[0], [3, 4]))
    other = block_key(block_key(ROOT_KEY, [9, 9]), [3, 4])
    assert other != keys[1]
    blocks = [pool.allocate(), pool.allocate()]
    pool.remember(blocks[1], keys[1])
    assert pool.match(keys) == []
    pool.remember(blocks[0], keys[0])
    assert pool.match(keys) == blocks
    pool.reset_prefix_cache()
    assert pool.match(keys) == []
    pool.check_invariants([blocks])


def test_without_a_prefix_cache_nothing_is_remembered():
    pool = BlockPool(1, 2, enable_prefix_caching=False)
    pool.remember(pool.allocate(), b"x")
    assert pool.match([b"x"]) == []


def test_fork_shares_and_the_first_writer_copies():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    assert table.append(0, 6) == []
    child = table.fork()
    assert child.block_ids == table.block_ids and pool.num_used == 2
    (copy,) = child.append(6, 7)
    assert copy == (table.block_ids[1], child.block_ids[1]) and child.block_ids[0] == table.block_ids[0]
    assert table.append(6, 7) == [], "the last holder writes in place"
    assert table.slot(6) == table.block_ids[1] * 4 + 2
    child.free()
    table.free()
    pool.check_invariants([])
    assert pool.num_used == 0


def test_append_is_all_or_nothing():
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    assert table.append(0, 9) is None and pool.num_used == 0
    assert table.append(0, 8) == []


@pytest.mark.parametrize("blocks, size", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(blocks, size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: setattr(pool, "num_free", 99),
        lambda pool: setattr(pool._blocks[0], "ref_count", 1),
        lambda pool: setattr(pool._blocks[1], "key", b"stray"),
        lambda pool: setattr(pool._blocks[1], "next", pool._blocks[1]),
    ],
)
def test_check_invariants_can_fail(break_it):
    pool = BlockPool(4, 4)
    pool.check_invariants([])
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants([])


class TablesAgainstContent(stateful.RuleBasedStateMachine):
    """Tables over a pool of 6 blocks of 2 tokens. The model is the content that each table's tokens must have: copies
    and writes are carried out on a list of slots, and every table must always read back its own tokens."""

    @stateful.initialize()
    def start(self):
        self.pool = BlockPool(6, 2)
        self.memory: list[int | None] = [None] * 12
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.counter = 0

    @stateful.rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def begin(self, tokens):
        table, keys = BlockTable(self.pool), []
        for start in range(0, len(tokens) - 1, 2):
            if start + 2 < len(tokens):
                keys.append(block_key(keys[-1] if keys else ROOT_KEY, tokens[start : start + 2]))
        table.share_prefix(self.pool.match(keys))
        cached = 2 * len(table.block_ids)
        content: list[int] = tokens[:cached]
        self.tables.append((table, content))
        self.write(len(self.tables) - 1, tokens[cached:])
        if not content:
            self.tables.pop()

    def write(self, index, tokens):
        table, content = self.tables[index]
        start, free = len(content), self.pool.num_free
        shortage = table.shortage(start, start + len(tokens))
        copies = table.append(start, start + len(tokens))
        assert (copies is None) == (shortage > free)
        if copies is None:
            assert self.pool.num_free == free
            return
        assert free - self.pool.num_free == shortage
        before = list(self.memory)
        for source, destination in copies:
            self.memory[2 * destination : 2 * destination + 2] = before[2 * source : 2 * source + 2]
        content.extend(tokens)
        key = ROOT_KEY
        for position, token in enumerate(content):
            if position >= start:
                self.memory[table.slot(position)] = token
            if position % 2:
                key = block_key(key, content[position - 1 : position + 1])
                self.pool.remember(table.block_ids[position // 2], key)

    @stateful.precondition(lambda self: self.tables)
    @stateful.rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        self.write(data.draw(st.integers(0, len(self.tables) - 1)), [token])

    @stateful.precondition(lambda self: self.tables)
    @stateful.rule(data=st.data())
    def fork(self, data):
        table, content = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
        self.tables.append((table.fork(), list(content)))

    @stateful.precondition(lambda self: self.tables)
    @stateful.rule(data=st.data())
    def free(self, data):
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        table.free()

    @stateful.rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @stateful.invariant()
    def everything_reads_back(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants(table.block_ids for table, _ in self.tables)
        for table, content in self.tables:
            assert [self.memory[table.slot(i)] for i in range(len(content))] == content


TestTablesAgainstContent = TablesAgainstContent.TestCase
TestTablesAgainstContent.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
