"""Exact schedulers compute a token of an output in one way only, and offer none to prompts."""

import pytest

from tests.core import traffic


@pytest.mark.parametrize("exact", [False, True])
def test_the_prefix_cache_has_tokens_of_outputs_only_if_bits_may_change(exact):
    scheduler, runner = traffic.make(blocks=64, tokens=32, exact=exact)
    first = traffic.add(scheduler, 0, [1, 2, 3, 4, 5, 6], max_tokens=14)
    traffic.drain(scheduler, runner)
    text = first.sequences[0].tokens
    next_turn = traffic.add(scheduler, 1, [*text, 7, 8, 9], max_tokens=2)
    again = traffic.add(scheduler, 2, [1, 2, 3, 4, 5, 6, 9], max_tokens=2)
    traffic.drain(scheduler, runner)
    found = next_turn.sequences[0].num_cached_tokens
    assert found <= 6 if exact else found == len(text) - 1
    assert again.sequences[0].num_cached_tokens > 0, "tokens of prompts are kept"


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_of_outputs_are_computed_again_one_by_one_as_far_as_there_is_room(exact):
    scheduler, runner = traffic.make(blocks=64, tokens=32, seqs=6, cache=False, exact=exact)
    request = traffic.add(scheduler, 0, [1, 2, 3], max_tokens=14)
    for _ in range(11):
        traffic.step(scheduler, runner)
    assert request.sequences[0].num_output_tokens == 11
    scheduler.recover()
    runner.recover()
    counts = []
    while request.sequences[0].num_output_tokens == 11:
        counts.append(traffic.step(scheduler, runner).counts)
    # The prompt and five tokens, then six.
    assert counts == ([[3, 1, 1, 1, 1, 1], [1] * 6] if exact else [[14]])
    traffic.drain(scheduler, runner)
    traffic.assert_as_alone(request)
