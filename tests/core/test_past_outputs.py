"""The search in past outputs against a search in each of them, and their limits."""

import random

import pytest

from jpaged.config import Speculation
from jpaged.core.block_pool import BlockPool
from jpaged.core.drafts import NOTHING, Drafter, Lookup
from jpaged.core.past_outputs import INDEXED_AT_ONCE, Past, PastOutputs
from jpaged.core.request import FinishReason
from tests.core import traffic

LONGEST = 6


def settings(**changed) -> Speculation:
    return Speculation(**dict(num_tokens=8, longest=LONGEST, shortest=2, outputs=50) | changed)


def outputs_of(*texts, salt="", start=0, **changed) -> PastOutputs:
    outputs = PastOutputs(settings(**changed), BlockPool(1, 1))
    for text in texts:
        outputs.add(salt, outputs.epoch, text, start)
    return outputs


def matches(text: list[int], start: int, wanted: list[int]) -> list[tuple[int, int]]:
    """The places of an output after at least two of the wanted tokens, each after its number of equal tokens."""
    found = []
    for place in range(start, len(text)):
        most = min(LONGEST, place, len(wanted))
        equal = next((n for n in range(most) if text[place - 1 - n] != wanted[-1 - n]), most)
        if equal >= 2:
            found.append((equal, place))
    return found


def test_it_finds_what_a_search_in_each_output_finds():
    rng, seen = random.Random(0), 0
    for _ in range(60):
        outputs, texts = outputs_of(outputs=8), []
        for _ in range(rng.randint(1, 12)):
            start = rng.randint(0, 4)
            text = [rng.randrange(3) for _ in range(start + rng.randint(1, 12))]
            outputs.add("", outputs.epoch, text, start)
            texts = [*texts, (text, start)][-8:]
        for _ in range(10):
            wanted = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            found = outputs.following("", wanted, 4)
            every = [(*match, text) for text, start in texts for match in matches(text, start, wanted)]
            if not every:
                assert found == NOTHING
                continue
            assert found.matched == max(every)[0]
            following = [text[place : place + 4] for equal, place, text in every if equal == found.matched]
            assert any(text[: len(found.tokens)] == found.tokens for text in following)
            seen += len(found.tokens) > 1
    assert seen > 100


def test_the_most_frequent_token_comes_next_and_the_latest_of_equal_ones():
    assert outputs_of([1, 2, 3], [1, 2, 4], [1, 2, 3]).following("", [1, 2], 1).tokens == [3]
    assert outputs_of([1, 2, 3], [1, 2, 4]).following("", [1, 2], 1).tokens == [4]
    assert outputs_of([1, 2, 3, 5], [1, 2, 4], [1, 2, 3, 6, 7]).following("", [1, 2], 9).tokens == [3, 6, 7]
    assert outputs_of([1, 2], [0, 1, 2]).following("", [1, 2], 9) == NOTHING, "nothing follows"


def test_an_unlikely_token_is_no_draft():
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 7, 7]]
    assert outputs_of(*texts, least_share=0.5).following("", [1, 2], 9).tokens == [3]
    assert outputs_of(*texts, least_share=0.8).following("", [1, 2], 9).tokens == []
    assert outputs_of(*texts).following("", [1, 2], 9).tokens == [3, 6]


def test_a_match_may_begin_in_the_prompt_and_crosses_no_output():
    outputs = outputs_of([8, 9, 1, 2], start=2)
    assert outputs.following("", [5, 8, 9], 9) == ([1, 2], 2), "the first tokens of the output"
    assert outputs.following("", [9, 1], 9) == ([2], 2)
    assert outputs_of([8, 9, 7, 1, 2], start=3).following("", [8, 9], 9) == NOTHING, "tokens of the prompt"
    assert outputs_of([1, 2], [3, 4]).following("", [1, 2], 9).tokens == []


def test_no_other_salt_is_read():
    outputs = outputs_of([1, 2, 3], salt="a")
    outputs.add("b", outputs.epoch, [1, 2, 4], 0)
    found = [outputs.following(salt, [1, 2], 9).tokens for salt in ("a", "b", "")]
    assert found == [[3], [4], []]


def test_a_new_epoch_forgets_everything_and_what_began_before():
    pool = BlockPool(1, 1)
    outputs = PastOutputs(settings(), pool)
    before = Past(outputs, "", outputs.epoch)
    before.end([1, 2, 3], 0)
    assert before.following([1, 2], 1).tokens == [3]
    pool.reset_prefix_cache()
    assert before.following([1, 2], 1) == NOTHING and outputs.num_tokens == 0
    before.end([1, 2, 4], 0)
    assert outputs.num_tokens == 0
    Past(outputs, "", outputs.epoch).end([1, 2, 5], 0)
    assert before.following([1, 2], 1).tokens == [5]


def test_the_oldest_outputs_are_forgotten_first_and_leave_nothing():
    few = outputs_of(*([10 * i, 1, 2, i] for i in range(5)), outputs=2)
    assert [few.following("", [10 * i, 1, 2], 1).matched for i in range(5)] == [2, 2, 2, 3, 3]
    pool, rng = BlockPool(1, 1), random.Random(1)
    outputs = PastOutputs(settings(outputs=10**6), pool, max_tokens=100)
    for _ in range(300):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        outputs.add("", outputs.epoch, text, rng.randrange(len(text)))
        assert outputs.num_tokens <= 100
        if rng.random() < 0.5:
            outputs.following("", [1, 2], 3)
        places = [place for places in outputs._places.values() for place in places]
        assert len(places) == len(set(places)) and all(outputs._outputs[0].start <= place for place in places)
    outputs.add("", outputs.epoch, list(range(200)), 0)
    assert outputs.num_tokens == 0 and not outputs._places, "longer than all that is kept"


def test_a_long_output_is_indexed_in_several_searches():
    outputs = outputs_of([*range(2 * INDEXED_AT_ONCE + 20)])
    last = [2 * INDEXED_AT_ONCE + 1, 2 * INDEXED_AT_ONCE + 2]
    assert [outputs.following("", last, 1).matched for _ in range(3)] == [0, 0, 6 - 4]
    assert outputs.following("", [*range(9)], 2) == ([9, 10], LONGEST)


def test_the_longest_match_of_all_proposers_is_taken_and_one_token_for_each_that_is_equal():
    past = outputs_of([6, 1, 2, 3, 4, 5])
    found = lambda tokens, **changed: (
        Drafter(settings(**changed), [Lookup(LONGEST, 2), Past(past, "", past.epoch)]).offer(tokens, (), 9).tokens
    )
    assert found([6, 1, 2], factor=1.0) == [3, 4, 5]
    assert found([0, 1, 2], factor=1.0) == [3, 4], "two are equal"
    assert found([0, 1, 2], factor=0.5) == [3]
    assert found([1, 2, 8, 0, 1, 2])[:3] == [8, 0, 1], "the own text where both are as long"
    assert found([6, 1, 2, 8, 6, 1, 2])[:3] == [8, 6, 1]
    assert found([0, 1, 2, 8, 6, 1, 2]) == [3, 4, 5]


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_complete_output_is_remembered(ends_by_itself):
    scheduler, runner = traffic.make(drafts=3, method="suffix")
    request = traffic.add(scheduler, 0, [1, 2, 3], max_tokens=6)
    for _ in range(3):
        traffic.step(scheduler, runner)
    if not ends_by_itself:
        scheduler.abort("0")
    while scheduler.has_work:
        traffic.step(scheduler, runner)
    reason = FinishReason.LENGTH if ends_by_itself else FinishReason.ABORT
    assert request.sequences[0].finish_reason == reason
    before = runner.num_steps
    again = traffic.add(scheduler, 1, [1, 2, 3], max_tokens=6)
    traffic.drain(scheduler, runner)
    traffic.assert_as_alone(again)
    assert (scheduler.num_from_past > 0) == ends_by_itself == (runner.num_steps - before < 6)
