"""Bad words by their index, against a search through all of them."""

from hypothesis import given
from hypothesis import strategies as st

from jpaged.core.bad_words import BadWords

WORD = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(words=st.lists(WORD, max_size=30), tokens=st.lists(st.integers(0, 2), max_size=8), data=st.data())
def test_bad_words_forbid_what_a_search_finds(words, tokens, data):
    num_output_tokens = data.draw(st.integers(0, len(tokens)))
    output = tuple(tokens[len(tokens) - num_output_tokens :])
    bad_words = BadWords(words)
    found = {w[-1] for w in words if len(w) > 1 and len(output) >= len(w) - 1 and output[-len(w) + 1 :] == w[:-1]}
    assert bad_words.next_tokens(tokens, num_output_tokens) == found
    assert bad_words.single_tokens == sorted({word[0] for word in words if len(word) == 1})
    assert bool(bad_words) == bool(words)


def test_one_prefix_gives_the_same_object_each_time():
    """Masks are made once for each."""
    bad_words = BadWords([(1, 2), (1, 3), (4, 1, 5)])
    after_one = bad_words.next_tokens([1], 1)
    assert after_one == {2, 3} and bad_words.next_tokens([9, 1], 2) is after_one
    assert bad_words.next_tokens([4, 1], 2) == {2, 3, 5}
