"""Groups of layers by their windows, and the blocks that they hold."""

import math

import pytest

from jpaged.core.block_pool import GONE, BlockPool
from jpaged.core.block_table import BlockTable
from jpaged.core.groups import MOST_GROUPS, group_layers, most_held
from jpaged.core.params import SamplingParams
from tests.core.traffic import drain, make, step

GEMMA_3_27B = [None if layer % 6 == 5 else 1024 for layer in range(62)]


@pytest.mark.parametrize(
    "windows, size, groups",
    [
        ([None] * 32, 32, {None: 1}),
        ([4096] * 32, 32, {4096: 1}),
        ([128, None] * 12, 12, {None: 1, 128: 1}),
        ([1024 if layer % 6 < 5 else None for layer in range(48)], 8, {None: 1, 1024: 5}),
        (GEMMA_3_27B, 10, {None: 1, 1024: 6}),
        ([512] * 3 + [None] * 40, 8, {None: 5, 512: 1}),
        ([2**20, None], 2, {None: 1}),
    ],
)
def test_layers_of_a_window_form_groups_of_equal_size(windows, size, groups):
    found = group_layers(windows, 32_768)
    assert found.size == size and {each: found.windows.count(each) for each in found.windows} == groups
    assert len(found.windows) <= MOST_GROUPS and len(set(found.places)) == len(windows)
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert found.windows[group] == (window if window is not None and window < 32_768 else None)
        assert 0 <= place < size


def test_many_kinds_of_layers_are_all_served():
    found = group_layers([window for window in range(1, 21)], 100)
    assert found.size == 1 and len(found.windows) == 20


def test_a_sequence_holds_what_its_windows_see():
    scheduler, runner = make(blocks=90, size=4, tokens=8, length=100, windows=(None, 9, 9))
    request = scheduler.add("a", [1, 2] * 20, SamplingParams(max_tokens=40), seed=0)
    while not request.finished:
        step(scheduler, runner)
        if request.finished:
            break
        (sequence,) = request.live
        full, *windowed = (len(ids) - first for ids, first in zip(sequence.table.block_ids, sequence.table.first))
        assert full == len(sequence.table)
        assert all(count <= 9 // 4 + 2 + 8 // 4 for count in windowed), "of a chunk and the window before it"
        if sequence.num_output_tokens > 1:
            assert all(count <= 9 // 4 + 2 for count in windowed)
    assert scheduler.pool.num_used == 0


def test_the_longest_request_of_a_pool_is_longer_with_windows():
    lengths = [
        make(blocks=30, size=4, tokens=4, length=1000, windows=windows)[0].capacity.max_sequence_len()
        for windows in ((None,), (None, None, None), (None, 9, 9), (9,))
    ]
    assert lengths == [121, 41, 81, 1000] and most_held((None, 9), 4, 8) == (None, 5)
    scheduler, runner = make(blocks=30, size=4, tokens=4, length=1000, windows=(None, 9, 9))
    scheduler.add("a", [1] * 30, SamplingParams(max_tokens=81 - 30), seed=0)
    drain(scheduler, runner)


@pytest.fixture
def chain():
    """Return a pool with a text of six blocks of two tokens, in groups that see all tokens and five, and the text."""
    pool = BlockPool(13, 2, windows=(None, 5))
    table, text = BlockTable(pool), list(range(12))
    table.append(0, 12)
    node = ""
    for index in range(6):
        node = pool.remember([ids[index] for ids in table.block_ids], node, text[2 * index : 2 * index + 2])
    table.free()
    return pool, text


def test_a_prefix_is_a_hit_if_each_group_has_what_the_next_token_sees(chain):
    pool, text = chain
    whole = pool.match(text)
    assert whole.num_tokens == 12 and whole.block_ids[1][:4] == [GONE] * 4 and len(whole.block_ids[1]) == 6
    pool.forget(whole.block_ids[1][4])
    assert pool.match(text).num_tokens == 8, "positions 4 to 7 of the window are there"
    pool.forget(pool.match(text[:8]).block_ids[1][2])
    assert pool.match(text) == pool.match(text[:4]) != pool.match(text[:2])
    pool.check_invariants([])


def test_a_node_that_lost_a_block_takes_another_one(chain):
    pool, text = chain
    whole = pool.match(text)
    pool.forget(whole.block_ids[1][5])
    assert pool.match(text).num_tokens < 12
    block_id = pool.allocate(group=1)
    assert pool.remember([GONE, block_id], whole.nodes[4], text[10:]) == whole.nodes[5]
    assert pool.match(text) == whole._replace(block_ids=[whole.block_ids[0], [*whole.block_ids[1][:5], block_id]])
    pool.check_invariants([[[], [block_id]]])


def test_the_cache_forgets_blocks_of_invalid_numbers_that_a_window_has_passed():
    scheduler, runner = make(blocks=40, size=2, tokens=4, length=40, windows=(5,))
    request = scheduler.add("a", list(range(1, 21)), SamplingParams(max_tokens=9), seed=0)
    while not request.sequences[0].num_output_tokens:
        step(scheduler, runner)
    assert scheduler.pool.tree.nodes and request.live[0].table.first[0] > 4
    plan = scheduler.schedule()
    result = runner.step(plan)
    scheduler.commit(plan, result._replace(samples=[sample._replace(logprob=math.nan) for sample in result.samples]))
    assert request.finished and not scheduler.pool.tree.nodes
    scheduler.check_invariants()
