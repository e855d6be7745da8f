"""Evicted blocks of the prefix cache on the host: they go there, return when their text is wanted, and cost little."""

import pytest

from jpaged.core.host_tier import LEAST_MOVED, HostTier
from tests.core.traffic import add, drain, make, step

SIZE = 4
FIRST, SECOND = list(range(1, 25)), list(range(25, 49))  # six blocks each


def told(scheduler, runner, name, prompt, **params):
    """Run a request alone, and return the number of its tokens that came from the prefix cache."""
    request = add(scheduler, name, prompt, max_tokens=1, **params)
    drain(scheduler, runner)
    return request.sequences[0].num_cached_tokens


def small(**options):
    """Return a scheduler whose pool holds one prompt of six blocks, and a runner."""
    return make(**{"blocks": 6, "size": SIZE, "tokens": 32, "host": 20} | options)


def test_an_evicted_prefix_returns_from_the_host():
    scheduler, runner = small()
    tier = scheduler.memory.tier
    assert told(scheduler, runner, "a", FIRST) == 0
    assert told(scheduler, runner, "b", SECOND) == 0 and tier.num_out == 6 and tier.num_back == 0
    assert told(scheduler, runner, "c", FIRST) == 20 and tier.num_back == 5
    assert scheduler.prefix_hits == 20
    assert told(scheduler, runner, "d", SECOND) == 20
    evicted = tier.num_out
    assert told(scheduler, runner, "e", FIRST) == 20 and tier.num_out <= evicted + 1, "the copies are still there"


def test_without_room_on_the_host_or_a_pool_of_copies_an_evicted_prefix_is_lost():
    for options in ({"host": 0}, {"tier": False}, {"cache": False}):
        scheduler, runner = small(**options)
        assert [told(scheduler, runner, name, each) for name, each in zip("abc", (FIRST, SECOND, FIRST))] == [0, 0, 0]


def test_the_host_forgets_what_is_least_recently_used():
    scheduler, runner = small(host=8)
    prompts = FIRST, SECOND, FIRST[::-1], SECOND
    assert [told(scheduler, runner, name, each) for name, each in zip("abcd", prompts)] == [0, 0, 0, 20]
    assert told(scheduler, runner, "e", FIRST) == 0


@pytest.mark.parametrize("cost", [0.0, 3.9, 4.0])
def test_blocks_move_only_if_both_ways_cost_less_than_their_tokens(cost):
    scheduler, runner = small(block_swap_cost=cost)
    cached = [told(scheduler, runner, name, each) for name, each in zip("abc", (FIRST, SECOND, FIRST))]
    assert cached == ([0, 0, 20] if cost < SIZE else [0, 0, 0])
    assert bool(scheduler.memory.tier.num_out) == (cost < SIZE)


@pytest.mark.parametrize("cost, keeps_all", [(0.08, True), (0.09, False)])
def test_where_moves_delay_steps_costly_ones_are_for_texts_that_came_again_or_are_pinned(cost, keeps_all):
    scheduler, runner = small(block_swap_cost=cost, moves_overlap=False)
    tier = scheduler.memory.tier
    cached = [told(scheduler, runner, name, each) for name, each in zip("abc", (FIRST, SECOND, FIRST))]
    assert cached == [0, 0, 20 if keeps_all else 0] and tier.keeps_all == keeps_all
    told(scheduler, runner, "d", FIRST)
    told(scheduler, runner, "e", SECOND)
    assert told(scheduler, runner, "f", FIRST) == 20, "it was found before it was evicted"
    params = add(scheduler, "params", SECOND, max_tokens=1).params
    scheduler.abort("params")
    scheduler.add("g", SECOND, params, seed=0, pin_s=10.0)
    drain(scheduler, runner)
    for name, prompt in zip("hi", (FIRST[::-1], FIRST[1:])):
        told(scheduler, runner, name, prompt)
    assert told(scheduler, runner, "j", SECOND) == 20


def test_a_prefix_returns_only_if_that_costs_less_than_its_tokens():
    """A transfer of one block costs as much as one of a few."""
    scheduler, runner = small(block_swap_cost=2.0)
    for name, prompt in zip("ab", (FIRST[:6], SECOND)):
        told(scheduler, runner, name, prompt)
    assert LEAST_MOVED * 2.0 / 2 == SIZE and told(scheduler, runner, "c", FIRST[:6]) == 0
    told(scheduler, runner, "d", FIRST)
    assert told(scheduler, runner, "e", SECOND) == 20


def test_beside_other_requests_a_prefix_returns_within_the_budget_of_each_step():
    scheduler, runner = make(blocks=20, size=SIZE, tokens=8, host=40, seqs=2, block_swap_cost=3.0, length=80)
    long = [*list(range(40)), 1, 3]
    told(scheduler, runner, "a", long)
    told(scheduler, runner, "b", (long[::-1] * 2)[:79])
    other = add(scheduler, "other", [7, 9], max_tokens=20)
    step(scheduler, runner)
    again = add(scheduler, "again", long, max_tokens=1)
    moved = []
    while again in scheduler.waiting:
        plan = step(scheduler, runner).plan
        assert len(plan.rows) >= 1, "the other request goes on"
        moved.append(len(plan.swap_in))
    assert max(moved) <= 2 * (8 - 1) / 3.0 and len(moved) > 2 and sum(moved) <= 10
    assert again.sequences[0].num_cached_tokens == 40
    drain(scheduler, runner)
    assert other.finished


def test_alone_a_prefix_returns_at_once():
    scheduler, runner = make(blocks=20, size=SIZE, tokens=8, host=40, seqs=2, block_swap_cost=3.0, length=80)
    long = [*list(range(40)), 1, 3]
    told(scheduler, runner, "a", long)
    told(scheduler, runner, "b", (long[::-1] * 2)[:79])
    add(scheduler, "again", long, max_tokens=1)
    assert len(step(scheduler, runner).plan.swap_in) == 10


def test_nothing_returns_for_a_request_without_room():
    scheduler, runner = small(blocks=9, seqs=2)
    told(scheduler, runner, "a", FIRST)
    told(scheduler, runner, "b", SECOND)
    add(scheduler, "other", SECOND, max_tokens=8)
    step(scheduler, runner)
    again = add(scheduler, "again", FIRST, max_tokens=1)
    assert not step(scheduler, runner).plan.swap_in and again in scheduler.waiting
    drain(scheduler, runner)
    assert again.sequences[0].num_cached_tokens == 20


def test_another_salt_and_a_reset_find_no_copies():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST)
    told(scheduler, runner, "b", SECOND)
    scheduler.add("salted", FIRST, add(scheduler, "c", SECOND, max_tokens=1).params, seed=0, cache_salt="other")
    salted = scheduler.requests["salted"]
    drain(scheduler, runner)
    assert salted.sequences[0].num_cached_tokens == 0
    scheduler.pool.reset_prefix_cache()
    runner.version += 1
    assert scheduler.pool.tree.num_copies == 0 and told(scheduler, runner, "d", FIRST) == 0


def test_an_arriving_block_that_is_evicted_in_the_same_step_is_not_written():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST)
    told(scheduler, runner, "b", SECOND)
    tier, pool = scheduler.memory.tier, scheduler.pool
    found = tier.find(FIRST, "")
    assert tier.load(found, len(found.missing)) == 6
    taken = {pool.allocate() for _ in range(pool.num_free)}
    moves = tier.take()
    assert len(taken) == 6 and not moves.back
    tier.host.check_invariants([])


def test_a_place_that_a_move_reads_is_not_given_to_another_block_before_the_next_plan():
    scheduler, runner = small(host=7)
    told(scheduler, runner, "a", FIRST)
    told(scheduler, runner, "b", SECOND)
    tier = scheduler.memory.tier
    found = tier.find(FIRST, "")
    assert tier.load(found, len(found.missing)) == 6
    reads = {place for place, _ in tier.take().back}
    assert len(reads) == 6 and tier.host.num_free == 7
    assert isinstance(tier, HostTier)
