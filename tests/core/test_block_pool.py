"""BlockPool and BlockTable against a brute-force model, on tiny pools, with every invariant checked at every step."""

from dataclasses import dataclass, field

import hypothesis.stateful as stateful
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jpaged.core.block_pool import MIN_SHARED, BlockPool, Match
from jpaged.core.block_table import BlockTable, append, move, shortage
from tests.core.planted import BUGS
from tests.support.fake_runner import slot


def remembering(pool: BlockPool, *texts: list[int], salt: str = "") -> list[int]:
    """Writes whole blocks of some texts, one block after the other, and lets go of them all, the last first. Returns
    the block ids."""
    block_ids, size = [], pool.block_size
    for text in texts:
        parent: int | str = salt
        for start in range(0, len(text), size):
            block_ids.append(pool.allocate())
            parent = pool.remember([block_ids[-1]], parent, text[start : start + size])
    for block_id in reversed(block_ids):
        pool.free(block_id)
    return block_ids


def forked(table: BlockTable) -> BlockTable:
    child = BlockTable(table.pool)
    child.share(table.block_ids)
    return child


def num_distinct(tables) -> int:
    return len({block_id for table in tables for block_id in table.block_ids[0]})


def test_blocks_are_taken_in_order_and_run_out():
    pool = BlockPool(3, 4)
    assert pool.enable_prefix_caching, "unless told otherwise"
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert pool.num_free == 0 and pool.num_used == 3


def test_a_table_frees_its_last_block_first_so_that_the_end_of_a_prefix_is_evicted_first():
    pool = BlockPool(4, 1)
    table, parent = BlockTable(pool), ""
    table.append(0, 4)
    for block_id, token in zip(table.block_ids[0], [5, 6, 7, 8]):
        parent = pool.remember([block_id], parent, [token])
    table.free()
    for evicted in (1, 2, 3):
        pool.allocate()
        assert pool.match([5, 6, 7, 8]).num_tokens == 4 - evicted


def test_states_count_references_and_mark_cached_blocks():
    pool = BlockPool(3, 1)
    cached, shared = pool.allocate(), pool.allocate()
    pool.remember([cached], "", [5])
    for _ in range(200):
        pool.share(shared)
    states = pool.states()
    assert (states[cached], states[shared], states[2]) == (128 + 1, 127, 0)
    pool.free(cached)
    assert pool.states()[cached] == 128


def test_a_block_without_content_is_taken_before_cached_ones_and_those_oldest_first():
    pool = BlockPool(3, 1)
    a, b, c = (pool.allocate() for _ in range(3))
    pool.remember([a], "", [1])
    pool.remember([b], "", [2])
    for block_id in (a, b, c):
        pool.free(block_id)
    assert [pool.allocate(), pool.allocate()] == [c, a]
    assert pool.match([2]).block_ids[0] == [b] and pool.match([1]).block_ids[0] == []


def test_a_hit_takes_a_block_out_of_the_middle_of_the_free_list():
    pool = BlockPool(3, 1)
    blocks = remembering(pool, [1], [2], [3])
    pool.share(blocks[1])
    pool.check_invariants([[[blocks[1]]]])
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [blocks[2], blocks[0], None]


def test_only_whole_chains_match():
    pool = BlockPool(4, 2)
    first, second = remembering(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5]).block_ids[0] == pool.match([1, 2, 3, 4]).block_ids[0] == [first, second]
    assert pool.match([9, 9, 3, 4]) == pool.match([3, 4]) == Match([[]], [], 0)
    pool.reset_prefix_cache()
    assert pool.match([1, 2, 3, 4]) == Match([[]], [], 0)
    pool.check_invariants([])


def test_a_last_block_may_begin_alike():
    pool = BlockPool(8, 4)
    a, b, *_ = remembering(pool, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9])
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 9])[:3:2] == ([[a, b]], 7)
    assert pool.match([1, 2, 3, 4, 5, 6])[:3:2] == ([[a, b]], 6), "a text that ends inside the block"
    assert pool.match([1, 2, 3, 4, 5, 0])[:3:2] == ([[a]], 4), "less than half a block is not worth a copy"
    assert pool.match([1, 2, 3, 5])[:3:2] == ([[a]], 3), "of two that begin alike, the one with more in common"
    assert len(pool.match([1, 2, 3, 4, 5, 6, 7]).nodes) == 1, "what comes next is remembered under whole blocks alone"


def test_large_blocks_are_shared_from_a_few_common_tokens_on():
    pool = BlockPool(2, 64)
    remembering(pool, list(range(64)))
    assert pool.match([*range(MIN_SHARED), 99])[:3:2] == ([[0]], MIN_SHARED)
    assert pool.match([*range(MIN_SHARED - 1), 99]) == Match([[]], [], 0)


def beginning(pool: BlockPool, tokens: list[int], parent: int | str = "") -> int:
    """Writes the beginning of a block, and lets go of it. Returns the block id."""
    block_id = pool.allocate()
    pool.remember_beginning([block_id], parent, tokens)
    pool.free(block_id)
    return block_id


def test_the_beginning_of_a_block_matches_and_is_no_whole_block():
    pool = BlockPool(4, 4)
    part = beginning(pool, [1, 2, 3])
    pool.check_invariants([])
    for wanted in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 9, 9]):
        assert pool.match(wanted) == Match([[part]], [], 3), "nothing can follow it"
    assert pool.match([1, 2]) == Match([[part]], [], 2) and pool.match([1, 9]) == Match([[]], [], 0)
    table = BlockTable(pool)
    table.share([[part]])
    assert table.append(3, 4) == [(part, table.block_ids[0][0])], "it is copied before another token is written"
    assert pool.match([1, 2, 3]).block_ids[0] == [part]


def test_too_short_a_beginning_is_not_remembered():
    pool = BlockPool(4, 4)
    part = beginning(pool, [1])
    assert not pool.is_cached(part) and pool.allocate() == part
    pool.check_invariants([[[part]]])


def test_a_longer_text_replaces_its_beginning_whose_block_is_then_allocated_first():
    pool = BlockPool(5, 4)
    (other,) = remembering(pool, [9, 9, 9, 9])
    short = beginning(pool, [1, 2])
    longer = beginning(pool, [1, 2, 3])
    assert not pool.is_cached(short) and pool.match([1, 2]).block_ids[0] == [longer]
    (whole,) = remembering(pool, [1, 2, 3, 4])
    assert whole == short and not pool.is_cached(longer) and pool.match([1, 2, 3]).block_ids[0] == [whole]
    assert beginning(pool, [1, 2, 3]) == longer and not pool.is_cached(longer), "the whole block offers it already"
    assert pool.is_cached(other)
    pool.check_invariants([])


def test_a_salt_keeps_texts_apart():
    pool = BlockPool(4, 2)
    plain = remembering(pool, [1, 2])
    salted = remembering(pool, [1, 2], salt="a")
    assert (
        plain != salted and pool.match([1, 2]).block_ids[0] == plain and pool.match([1, 2], "a").block_ids[0] == salted
    )
    assert pool.match([1, 2], "b") == Match([[]], [], 0)


def test_the_same_content_is_remembered_once():
    pool = BlockPool(2, 2)
    a, b = pool.allocate(), pool.allocate()
    assert pool.remember([a], "", [1, 2]) == pool.remember([b], "", [1, 2]) == pool.remember([a], "", [1, 2])
    assert pool.is_cached(a) and not pool.is_cached(b)
    pool.forget(a)
    assert pool.match([1, 2]).block_ids[0] == []


def test_what_follows_an_evicted_block_is_found_again_once_its_text_is():
    pool = BlockPool(2, 2)
    parent, child = (pool.allocate() for _ in range(2))
    old = pool.remember([parent], "", [1, 2])
    pool.remember([child], old, [3, 4])
    pool.forget(parent)
    pool.check_invariants([[[parent, child]]])
    assert pool.match([1, 2, 3, 4]).block_ids[0] == []
    new = pool.remember([parent], "", [1, 2])
    assert new == old and pool.match([1, 2, 3, 4]).block_ids == [[parent, child]]
    pool.forget(child)
    pool.forget(parent)
    assert pool.remember([parent], "", [1, 2]) != new, "a number stands for one text, and is not used again"


def test_without_a_prefix_cache_a_table_still_shares():
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    assert pool.match([1, 2]) == Match([[]], [], 0)


def test_fork_shares_and_the_first_writer_copies():
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    assert table.append(0, 6) == []
    child = forked(table)
    assert child.block_ids[0] == table.block_ids[0] and pool.num_used == 2
    (copy,) = child.append(6, 7)
    assert copy == (table.block_ids[0][1], child.block_ids[0][1]) and child.block_ids[0][0] == table.block_ids[0][0]
    assert table.append(6, 7) == [], "the last holder writes in place"
    child.free()
    table.free()
    pool.check_invariants([])
    assert pool.num_used == 0


@pytest.mark.parametrize("room", [False, True])
def test_a_cached_block_is_copied_before_it_is_written_if_there_is_room_and_else_forgotten(room):
    pool = BlockPool(1 + room, 4)
    (cached,) = remembering(pool, [1, 2, 3, 4])
    table = BlockTable(pool)
    table.share(pool.match([1, 2, 3, 9]).block_ids)
    copies = table.append(3, 4)
    assert copies == ([(cached, table.block_ids[0][0])] if room else [])
    assert (table.block_ids[0] == [cached]) == (not room)
    assert pool.match([1, 2, 3, 4]).block_ids[0] == ([cached] if room else [])
    pool.check_invariants([table.block_ids])


def test_append_is_all_or_nothing():
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    assert table.append(0, 9) is None and pool.num_used == 0
    assert table.append(0, 8) == []


def test_blocks_that_are_shared_by_several_writers_cost_all_but_one_of_them_a_copy():
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    table.append(0, 3)
    spans = [(each, 3, 5) for each in (table, forked(table), forked(table))]
    lacking, free = shortage(spans), pool.num_free
    assert len(append(spans)) == 2 and lacking == free - pool.num_free == 2 + 3
    before = [list(each.block_ids[0]) for each, _, _ in spans]
    assert append([(each, 5, 9) for each, _, _ in spans]) is None, "one of the three is one block short"
    assert [each.block_ids[0] for each, _, _ in spans] == before and pool.num_free == 2


def test_tables_move_between_pools_and_share_as_before():
    pool, host = BlockPool(6, 2), BlockPool(4, 2)
    host.allocate()
    parent, stranger = BlockTable(pool), BlockTable(pool)
    stranger.append(0, 1)
    parent.append(0, 5)
    child = forked(parent)
    child.append(5, 6)
    parent.free()
    twin = forked(child)
    before = list(child.block_ids[0])
    assert num_distinct([child, twin]) == 3
    moved = move([child, twin], host)
    assert [source for source, _ in moved] == before and [d for _, d in moved] == child.block_ids[0] == twin.block_ids[
        0
    ]
    assert child.pool is host and pool.num_used == 1 and host.num_used == 4
    pool.check_invariants([stranger.block_ids])
    host.check_invariants([[[0]], child.block_ids, twin.block_ids])


@pytest.mark.parametrize("blocks, size", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(blocks, size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: setattr(pool._free, "size", 99),
        lambda pool: setattr(pool._blocks[0], "ref_count", 1),
        lambda pool: setattr(pool._blocks[3], "node", pool._blocks[0].node),
        lambda pool: setattr(pool._blocks[1], "node", pool._blocks[0].node),
        lambda pool: setattr(pool._blocks[1], "node", None),
        lambda pool: setattr(pool._blocks[1], "group", 1),
        lambda pool: setattr(pool._blocks[1].node, "parent", "a"),
        lambda pool: pool.tree.nodes.popitem(),
        lambda pool: pool._blocks[1].node.blocks.__setitem__(0, None),
        lambda pool: setattr(pool._blocks[1], "next", pool._blocks[1]),
        lambda pool: pool.tree.children[""].reverse(),
        lambda pool: pool.tree.children[""].pop(),
        lambda pool: pool.tree.children.update({5: []}),
        lambda pool: setattr(pool._blocks[2].node, "tokens", (5,)),
        lambda pool: setattr(pool._blocks[2].node, "tokens", (1, 2, 3, 4, 5)),
        lambda pool: setattr(pool._blocks[0].node, "tokens", (1, 2)),
    ],
)
def test_check_invariants_can_fail(break_it):
    pool = BlockPool(4, 4)
    remembering(pool, [1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7, 8])
    pool.check_invariants([])
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check_invariants([])


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), max_size=12),
    wanted=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_the_children_of_a_node_are_searched_as_if_one_by_one(texts, wanted):
    pool = BlockPool(12, 3)
    held = [pool.allocate() for _ in texts]
    for block_id, text in zip(held, texts):
        remember = pool.remember if len(text) == 3 else pool.remember_beginning
        remember([block_id], "", text)
    for block_id in held:
        pool.free(block_id)
    pool.check_invariants([])
    match = pool.match(wanted)
    most = max((common(text, wanted) for text in texts), default=0)
    assert match.num_tokens == (most if most >= 2 else 0)


def common(a, b) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@dataclass
class Writer:
    """A table, its expected content, and the nodes of its full blocks."""

    table: BlockTable
    salt: str
    content: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


class TablesAgainstContent(stateful.RuleBasedStateMachine):
    """Tables over a small pool, and a host's to move to. The model is what each table must read back, as (salt, all
    tokens so far), and a list of what the prefix cache has been told and not lost since, which is searched one by one.
    """

    @stateful.initialize(blocks=st.integers(1, 7), size=st.integers(1, 4))
    def start(self, blocks, size):
        self.size = size
        self.pool, self.host = BlockPool(blocks, size), BlockPool(3, size, enable_prefix_caching=False)
        self.memory = {self.pool: [None] * blocks * size, self.host: [None] * 3 * size}
        self.writers: list[Writer] = []
        self.away: list[Writer] = []
        self.remembered: dict[int, tuple[int | str, list[int], int]] = {}  # node: parent, tokens, block

    @stateful.rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=11), salt=st.sampled_from(["", "", "a"]))
    def begin(self, tokens, salt):
        match = self.pool.match(tokens[:-1], salt)
        nodes, found = self.search(tokens[:-1], salt)
        assert match.nodes == nodes and match.num_tokens in found, "a hit is missed, or wrong"
        table = BlockTable(self.pool)
        table.share(match.block_ids)
        writer = Writer(table, salt, tokens[: match.num_tokens], match.nodes)
        self.write((writer, tokens[match.num_tokens :]))
        if writer.content:
            self.writers.append(writer)

    def search(self, tokens, salt):
        """The longest remembered prefix: its nodes, and the number of its tokens.

        Next to a text whose block is lost, the beginning of another one may be missed.
        """
        parent, nodes, at = salt, [], 0
        while True:
            wanted = tokens[at : at + self.size]
            children = [
                (text, node, block) for node, (under, text, block) in self.remembered.items() if under == parent
            ]
            whole = [node for text, node, block in children if text == wanted and len(text) == self.size]
            if not whole or self.remembered[whole[0]][2] is None:
                most = max((common(text, wanted) for text, _, block in children if block is not None), default=0)
                lost = max((common(text, wanted) for text, _, block in children if block is None), default=0)
                most = most if 2 * most >= self.size else 0
                return nodes, {at + most, at} if lost >= most else {at + most}
            (parent,) = whole
            nodes.append(parent)
            at += self.size

    def lose(self, block_ids):
        """Forget the cached content of some blocks. A text with others after it stays, without a block."""
        for node, (parent, text, block) in self.remembered.items():
            if block in block_ids:
                self.remembered[node] = parent, text, None
        self.prune()

    def prune(self):
        while lost := [
            node for node, (_, _, block) in self.remembered.items()
            if block is None and all(parent != node for parent, _, _ in self.remembered.values())
        ]:  # fmt: skip
            for node in lost:
                del self.remembered[node]

    def write(self, *work):
        """Of each writer that there is room for, some more tokens."""
        pool, size, free = self.pool, self.size, self.pool.num_free
        spans = [(writer.table, len(writer.content), len(writer.content) + len(tokens)) for writer, tokens in work]
        before = [list(table.block_ids[0]) for table, _, _ in spans]
        first = before[0][spans[0][1] // size :]
        private = [block_id for block_id in first if pool.is_cached(block_id) and pool.ref_count(block_id) == 1]
        lacking = shortage(spans)
        copies = append(spans)
        assert (copies is None) == (lacking > free)
        if copies is None:
            assert (pool.num_free, [table.block_ids[0] for table, _, _ in spans]) == (free, before)
            return
        assert free - pool.num_free == lacking
        if lacking < free:
            assert not set(private) & set(spans[0][0].block_ids[0]), "there was room to keep what the cache offers"
        self.lose([block_id for table, start, _ in spans for block_id in table.block_ids[0][start // size :]])
        self.copy(copies, pool, pool)
        for (writer, tokens), (table, start, end) in zip(work, spans):
            writer.content.extend(tokens)
            for position in range(start, end):
                assert pool.ref_count(table.block_ids[0][position // size]) == 1
                self.memory[pool][slot(table, position)] = writer.salt, writer.content[: position + 1]
        for writer, _ in work:
            self.remember(writer)

    def remember(self, writer):
        size, nodes = self.size, writer.nodes
        for index in range(len(nodes), len(writer.content) // size):
            parent = nodes[-1] if nodes else writer.salt
            text, block_id = writer.content[index * size : (index + 1) * size], writer.table.block_ids[0][index]
            same = [node for node, entry in self.remembered.items() if entry[:2] == (parent, text)]
            node = self.pool.remember([block_id], parent, text)
            assert same == [node] if same else all(node not in other.nodes for other in self.writers)
            if not same or self.remembered[node][2] is None:
                self.offer(node, parent, text, block_id)
            nodes.append(node)

    def offer(self, node, parent, text, block_id):
        """A text replaces its beginnings."""
        for other, (under, short, _) in list(self.remembered.items()):
            if under == parent and short == text[: len(short)] and other != node:
                del self.remembered[other]
        self.remembered[node] = parent, text, block_id

    def copy(self, pairs, source, destination):
        before, size = list(self.memory[source]), self.size
        for i, o in pairs:
            self.memory[destination][o * size : (o + 1) * size] = before[i * size : (i + 1) * size]

    @stateful.precondition(lambda self: self.writers)
    @stateful.rule(data=st.data(), count=st.integers(1, 4))
    def append(self, data, count):
        writers = data.draw(st.permutations(self.writers))[:count]
        self.write(*((writer, data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))) for writer in writers))

    @stateful.precondition(lambda self: self.writers)
    @stateful.rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.writers))
        self.writers.append(Writer(forked(parent.table), parent.salt, list(parent.content), list(parent.nodes)))

    @stateful.precondition(lambda self: self.writers)
    @stateful.rule(data=st.data())
    def free(self, data):
        self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1))).table.free()

    @stateful.precondition(lambda self: self.writers)
    @stateful.rule(data=st.data())
    def end(self, data):
        """As `free`, but the beginning of the last block is remembered."""
        writer = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        parent, index = writer.nodes[-1] if writer.nodes else writer.salt, len(writer.content) // self.size
        text = writer.content[index * self.size :]
        if text and len(writer.nodes) == index:
            block_id, texts = (
                writer.table.block_ids[0][index],
                [t for p, t, _ in self.remembered.values() if p == parent],
            )
            self.pool.remember_beginning([block_id], parent, text)
            if 2 * len(text) >= self.size and not any(t[: len(text)] == text for t in texts):
                self.offer(self.pool._blocks[block_id].node.number, parent, text, block_id)
        writer.table.free()

    @stateful.rule()
    def reset(self):
        self.pool.reset_prefix_cache()
        self.remembered.clear()

    @stateful.precondition(lambda self: self.writers and not self.away)
    @stateful.rule(data=st.data())
    def leave(self, data):
        count = data.draw(st.integers(1, len(self.writers)))
        tables = [writer.table for writer in self.writers[:count]]
        if num_distinct(tables) <= self.host.num_free:
            self.move(tables, self.host)
            self.away, self.writers = self.writers[:count], self.writers[count:]

    @stateful.precondition(lambda self: self.away)
    @stateful.rule()
    def come_back(self):
        tables = [writer.table for writer in self.away]
        if num_distinct(tables) <= self.pool.num_free:
            self.move(tables, self.pool)
            self.writers, self.away = self.writers + self.away, []

    def move(self, tables, to):
        old, source = [list(table.block_ids[0]) for table in tables], tables[0].pool
        moved = move(tables, to)
        assert len(dict(moved)) == len(moved) == num_distinct(tables)
        assert [[dict(moved)[block_id] for block_id in ids] for ids in old] == [t.block_ids[0] for t in tables]
        self.copy(moved, source, to)
        if to is self.pool:
            self.lose([block_id for _, block_id in moved])

    @stateful.invariant()
    def everything_reads_back(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants(writer.table.block_ids for writer in self.writers)
        self.host.check_invariants(writer.table.block_ids for writer in self.away)
        for writer in self.writers + self.away:
            memory, content = self.memory[writer.table.pool], writer.content
            for i in range(len(content)):
                assert memory[slot(writer.table, i)] == (writer.salt, content[: i + 1])
        offered = {block_id: tokens for _, tokens, block_id in self.remembered.values() if block_id is not None}
        assert len(offered) == sum(block_id is not None for _, _, block_id in self.remembered.values())
        assert self.remembered.keys() == self.pool.tree.nodes.keys()
        for block_id in range(self.pool.num_blocks):
            assert self.pool.is_cached(block_id) == (block_id in offered)
            if block_id in offered:
                count = len(offered[block_id])
                _, text = self.memory[self.pool][block_id * self.size + count - 1]
                assert text[-count:] == offered[block_id], "the cache offers what the block doesn't hold"


TestTablesAgainstContent = TablesAgainstContent.TestCase
TestTablesAgainstContent.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.deep
def test_tables_against_content_many_times():
    stateful.run_state_machine_as_test(
        TablesAgainstContent, settings=settings(max_examples=1000, stateful_step_count=40, deadline=None)
    )


def _overlooked_salt(patch):
    match = BlockPool.match
    patch.setattr(BlockPool, "match", lambda pool, tokens, salt="": match(pool, tokens))


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(_overlooked_salt, marks=pytest.mark.deep),
        *(BUGS[name] for name in ("leak", "double free", "missed copy-on-write")),
    ],
)
def test_it_finds_a_planted_bug(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        stateful.run_state_machine_as_test(
            TablesAgainstContent,
            settings=settings(max_examples=1000, phases=[Phase.generate], database=None, report_multiple_bugs=False),
        )


def test_append_copies_the_second_of_two_blocks_if_only_that_is_shared():
    pool = BlockPool(8, 4)
    table, other = BlockTable(pool), BlockTable(pool)
    assert table.append(0, 8) == []
    first, second = table.block_ids[0]
    other.share([[second]])
    assert table.append(2, 6) == [(second, table.block_ids[0][1])]
    assert table.block_ids[0][0] == first and other.block_ids[0] == [second] != table.block_ids[0][1:]
