"""Bad words by their index, against a search through all of them, and the minimum length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import Limits
from jpaged.core.bans import Bans
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.core.scheduler import Scheduler

WORD = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(words=st.lists(WORD, max_size=30), tokens=st.lists(st.integers(0, 2), max_size=8), data=st.data())
def test_bad_words_forbid_what_a_search_finds(words, tokens, data):
    num_output_tokens = data.draw(st.integers(0, len(tokens)))
    min_tokens = data.draw(st.integers(0, 4))
    output = tuple(tokens[len(tokens) - num_output_tokens :])
    bans = Bans(words, [7, 8], min_tokens)
    found = {w[-1] for w in words if len(w) > 1 and len(output) >= len(w) - 1 and output[-len(w) + 1 :] == w[:-1]}
    found |= {7, 8} if num_output_tokens < min_tokens else set()
    assert bans.next_tokens(tokens, num_output_tokens) == found
    assert bans.single_tokens == tuple(sorted({word[0] for word in words if len(word) == 1}))
    assert bans.follow_output == any(len(word) > 1 for word in words)
    assert bool(bans) == (bans.follow_output or min_tokens > 0)


def test_one_situation_gives_the_same_object_each_time():
    """Masks are made once for each."""
    bans = Bans([(1, 2), (1, 3), (4, 1, 5)], [8], 1)
    after_one = bans.next_tokens([1], 1)
    assert after_one == {2, 3} and bans.next_tokens([9, 1], 2) is after_one
    assert bans.next_tokens([4, 1], 2) == {2, 3, 5}
    assert bans.next_tokens([1], 0) is bans.next_tokens([2], 0) == {8}


def test_bad_words_and_the_minimum_length_ban_together():
    bans = Bans([(1, 2)], [8], 3)
    assert [bans.next_tokens([1] * length, length) for length in (0, 1, 2, 3)] == [{8}, {2, 8}, {2, 8}, {2}]


def test_there_is_no_minimum_length_by_default():
    assert not Bans() and not Bans([(1,)]) and Bans().next_tokens([], 0) == set()
    assert Bans(endings=[8]).next_tokens([], 0) == set()


@pytest.mark.parametrize(
    "words, min_tokens, allowed, field",
    [
        ([(1,), (2,)], 0, [1, 2], "bad_words"),
        ([(n,) for n in range(10)], 0, None, "bad_words"),
        ([], 1, [8], "min_tokens"),
        ([(3,)], 5, [3, 7, 8], "min_tokens"),
        ([(n,) for n in range(7)] + [(9,)], 1, None, "min_tokens"),
    ],
)
def test_bans_that_leave_no_token_are_refused(words, min_tokens, allowed, field):
    with pytest.raises(InvalidParameter, match=f"^{field}: "):
        Bans(words, [7, 8], min_tokens, allowed=allowed, vocab_size=10)
    Bans(words[1:], [7], 0, allowed=allowed and [*allowed, 5], vocab_size=10)


@given(
    words=st.lists(WORD, max_size=30),
    tokens=st.lists(st.integers(0, 2), max_size=4),
    allowed=st.sets(st.integers(0, 2)),
)
def test_a_situation_without_a_next_token_is_found(words, tokens, allowed):
    try:
        bans = Bans(words, allowed=allowed or None, vocab_size=3)
    except InvalidParameter:
        return
    left = (allowed or {0, 1, 2}) - set(bans.single_tokens) - bans.next_tokens(tokens, len(tokens))
    assert bans.leave_none(tokens, len(tokens)) == (not left)


def test_bad_words_that_the_model_cannot_say_and_ends_that_it_lacks_are_ignored():
    """A tokenizer may know more tokens than the model."""
    scheduler = Scheduler(BlockPool(8, 4), Limits(32, 2, 8), vocab_size=10, eos_token_ids=[9, 10, 11])
    words = [(3,), (10,), (1, 10), (10, 1), (4, 5)]
    params = SamplingParams(min_tokens=2, max_tokens=4)
    request = scheduler.add("0", [1, 2], params, seed=0, bad_words=words)
    assert request.bans.single_tokens == (3,) and request.end_tokens == {9}
    assert request.bans.next_tokens([1, 2, 1], 1) == {9}
    assert request.bans.next_tokens([1, 2, 4], 1) == {5, 9}
