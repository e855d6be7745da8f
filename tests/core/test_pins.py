"""Pinned prefixes are evicted after all others, for their time and within their share, and make no request wait."""

import pytest

from jpaged.core.params import InvalidParameter
from tests.core.traffic import add, drain, make, step

SIZE = 4
FIRST, SECOND, THIRD = (list(range(i, i + 12)) for i in (1, 20, 33))  # three blocks each


def told(scheduler, runner, name, prompt, now=0.0, **options):
    """Run a request alone at a time, and return the number of its tokens that came from the prefix cache."""
    scheduler.advance(now)
    params = add(scheduler, "params", prompt, max_tokens=1).params
    scheduler.abort("params")
    request = scheduler.add(name, prompt, params, seed=0, **options)
    drain(scheduler, runner)
    return request.sequences[0].num_cached_tokens


def order(pool):
    """Return the texts of the free blocks in the order of their eviction."""
    return [block.node.tokens[0] if block.node else None for block in pool._free]


def small(**options):
    return make(**{"blocks": 6, "size": SIZE, "tokens": 32} | options)


def test_pinned_blocks_are_evicted_last():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST, pin_s=10)
    told(scheduler, runner, "b", SECOND)
    assert order(scheduler.pool) == [28, 24, 20, 9, 5, 1] and scheduler.memory.pins.count == 3
    told(scheduler, runner, "c", THIRD)
    assert told(scheduler, runner, "d", FIRST) == 11
    assert told(scheduler, runner, "e", SECOND) == 0


def test_a_pin_ends_with_its_time_and_the_longest_one_holds():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST, pin_s=10)
    told(scheduler, runner, "b", FIRST, now=1.0, pin_s=2)
    told(scheduler, runner, "c", SECOND, now=9.9)
    assert order(scheduler.pool)[-1] == 1 and scheduler.memory.pins.count == 3
    told(scheduler, runner, "d", SECOND, now=10.0)
    assert scheduler.memory.pins.count == 0
    told(scheduler, runner, "e", THIRD, now=10.0)
    told(scheduler, runner, "f", [7, 9] * 6, now=10.0)
    assert told(scheduler, runner, "g", FIRST, now=10.0) == 0


def test_a_use_renews_a_pin():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST, pin_s=10)
    told(scheduler, runner, "b", FIRST, now=8.0, pin_s=10)
    scheduler.advance(17.0)
    assert scheduler.memory.pins.count == 3
    scheduler.advance(18.0)
    assert scheduler.memory.pins.count == 0


def test_the_pins_of_a_tenant_are_limited_and_the_oldest_give_way_from_their_ends():
    scheduler, runner = small(blocks=10, pinned_share=0.4)
    told(scheduler, runner, "a", FIRST, pin_s=10, tenant="x")
    told(scheduler, runner, "b", SECOND, pin_s=10, tenant="y")
    told(scheduler, runner, "c", THIRD, pin_s=10, tenant="x")
    pins = scheduler.memory.pins
    assert [[node.tokens[0] for node in pinned] for pinned in pins._until.values()] == [[1, 41, 37, 33], [28, 24, 20]]
    told(scheduler, runner, "d", [*FIRST, *SECOND], pin_s=10, tenant="z")
    assert [node.tokens[0] for node in pins._until["z"]] == [20, 9, 5, 1], "the beginning of a long text"


def test_a_pool_full_of_pins_serves_every_request():
    scheduler, runner = small(pinned_share=1.0)
    told(scheduler, runner, "a", FIRST, pin_s=10)
    told(scheduler, runner, "b", SECOND, pin_s=10)
    assert scheduler.pool.num_free == 6
    assert told(scheduler, runner, "c", [*THIRD, *FIRST]) == 0
    scheduler.check_invariants()


def test_a_share_of_nothing_pins_nothing():
    scheduler, runner = small(pinned_share=0.0)
    told(scheduler, runner, "a", FIRST, pin_s=10)
    assert scheduler.memory.pins.count == 0


def test_a_text_with_pins_of_two_tenants_is_pinned_until_both_have_ended():
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST, pin_s=5, tenant="x")
    told(scheduler, runner, "b", FIRST, pin_s=10, tenant="y")
    scheduler.advance(5.0)
    told(scheduler, runner, "c", SECOND, now=5.0)
    assert order(scheduler.pool) == [28, 24, 20, 9, 5, 1]
    scheduler.advance(10.0)
    assert scheduler.memory.pins.count == 0


def test_copies_on_the_host_are_pinned_too():
    scheduler, runner = small(blocks=3, host=6)
    told(scheduler, runner, "a", FIRST, pin_s=100)
    for name, prompt in zip("bcdef", (SECOND, THIRD, SECOND, THIRD, [7, 9] * 6)):
        told(scheduler, runner, name, prompt)
    assert told(scheduler, runner, "g", FIRST) == 8


@pytest.mark.parametrize("forget", ["reset", "recover"])
def test_a_reset_and_a_restart_end_pins(forget):
    scheduler, runner = small()
    told(scheduler, runner, "a", FIRST, pin_s=10)
    if forget == "reset":
        scheduler.pool.reset_prefix_cache()
        runner.version += 1
    else:
        scheduler.recover()
    told(scheduler, runner, "b", SECOND, pin_s=1)
    assert told(scheduler, runner, "c", FIRST, pin_s=1) == 0
    scheduler.advance(11.0)
    assert scheduler.memory.pins.count == 0
    scheduler.check_invariants()


def test_a_failed_request_pins_nothing():
    scheduler, runner = small()
    params = add(scheduler, "params", FIRST, max_tokens=4).params
    scheduler.abort("params")
    scheduler.add("a", FIRST, params, seed=0, pin_s=10)
    step(scheduler, runner)
    scheduler.recover(expelled=list(scheduler.requests.values()))
    assert scheduler.memory.pins.count == 0


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_an_impossible_time_is_rejected(seconds):
    scheduler, _ = small()
    with pytest.raises(InvalidParameter, match=r"pin_s.*must be a finite number of seconds, at least 0"):
        scheduler.add("a", FIRST, add(scheduler, "b", FIRST, max_tokens=1).params, seed=0, pin_s=seconds)
