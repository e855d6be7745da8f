"""The sequences' rows on the device against a numpy copy, and that nothing copies the whole of them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.core.params import SamplingParams
from jpaged.core.plan import Admitted
from jpaged.runtime.device_rows import SamplingState, copy_rows, count_tokens, empty_state, host_row, write_row

R, V = 5, 37
FUNCTIONS = {f: jax.jit(f) for f in (write_row, copy_rows, count_tokens)}


def random_rows(rng: np.random.Generator, *shape: int) -> SamplingState:
    return SamplingState(
        rng.integers(0, 9, shape).astype(np.int32),
        rng.integers(0, 2, shape).astype(bool),
        rng.normal(0, 1, shape).astype(np.float32),
        rng.integers(-1, 9, shape).astype(np.int32),
    )


def assert_same(got: SamplingState, expected: SamplingState) -> None:
    for name, a, b in zip(SamplingState._fields, got, expected):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_an_empty_state_is_zeros():
    state = empty_state(R, V, jax.devices()[0])
    assert_same(state, SamplingState(*(np.zeros((R, V), dtype) for dtype in (np.int32, bool, np.float32, np.int32))))


@pytest.mark.parametrize("row", range(-1, R))
def test_write_row_writes_that_row_alone(row):
    rng = np.random.default_rng(row + 1)
    before, values = random_rows(rng, R, V), random_rows(rng, V)
    expected = SamplingState(*(array.copy() for array in before))
    if row >= 0:
        for array, value in zip(expected, values):
            array[row] = value
    assert_same(FUNCTIONS[write_row](before, np.int32(row), tuple(values)), expected)


@settings(max_examples=60)
@given(st.permutations(range(R)), st.lists(st.integers(-1, R - 1), min_size=R, max_size=R), st.sets(st.integers(0, R)))
def test_copy_rows_reads_every_source_before_it_writes(destinations, sources, padding):
    destinations = [-1 if i in padding else d for i, d in enumerate(destinations)]
    before = random_rows(np.random.default_rng(0), R, V)
    expected = SamplingState(*(array.copy() for array in before))
    for source, destination in zip(sources, destinations):
        if source >= 0 and destination >= 0:
            for old, new in zip(before, expected):
                new[destination] = old[source]
    assert_same(FUNCTIONS[copy_rows](before, np.int32(sources), np.int32(destinations)), expected)


def test_count_tokens_counts_each_and_no_padding():
    before = random_rows(np.random.default_rng(0), R, V)
    rows, tokens = np.int32([0, 4, 4, 4, -1, 2]), np.int32([3, V - 1, V - 1, 0, 3, -1])
    counts = before.output_counts.copy()
    for row, token in [(0, 3), (4, V - 1), (4, V - 1), (4, 0)]:
        counts[row, token] += 1
    assert_same(FUNCTIONS[count_tokens](before, rows, tokens), before._replace(output_counts=counts))


def test_padding_writes_nothing_where_there_are_more_rows_than_tokens():
    before = random_rows(np.random.default_rng(0), 7, 3)
    padding = {
        write_row: (np.int32(-1), tuple(random_rows(np.random.default_rng(1), 3))),
        copy_rows: (np.int32([0, -1]), np.int32([-1, 4])),
        count_tokens: (np.int32([-1, 4]), np.int32([2, -1])),
    }
    for function, arguments in padding.items():
        assert_same(FUNCTIONS[function](before, *arguments), before)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_donated_state_is_changed_in_place(function):
    num_rows, vocab_size = 64, 1000
    state = empty_state(num_rows, vocab_size)
    arguments = {
        write_row: (np.int32(1), tuple(array[0] for array in state)),
        copy_rows: (np.zeros(4, np.int32), np.zeros(4, np.int32)),
        count_tokens: (np.zeros(4, np.int32), np.zeros(4, np.int32)),
    }[function]
    memory = jax.jit(function, donate_argnums=0).lower(state, *arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(array.nbytes for array in state)
    assert memory.temp_size_in_bytes < num_rows * vocab_size  # the smallest of the arrays


def test_the_row_of_a_sequence():
    """The last token of its output is not counted."""
    params = SamplingParams(
        logit_bias={0: 1.5, 4: -100, 5: 3, 6: 2}, allowed_token_ids=(0, 4, 6, 7), logprob_token_ids=(7, 2)
    )
    admitted = Admitted(0, (1, 1, 3, 2, 7, 2, 5), 3, params, 0, ((),), banned=(6,))
    counts, in_prompt, bias, listed = host_row(admitted, 8)
    inf = np.inf
    assert (counts.dtype, in_prompt.dtype, bias.dtype) == (np.int32, np.bool, np.float32)
    assert counts.tolist() == [0, 0, 2, 0, 0, 0, 0, 1]
    assert in_prompt.tolist() == [False, True, False, True, False, False, False, False]
    assert bias.tolist() == [1.5, -inf, -inf, -inf, -100, -inf, -inf, 0]
    assert listed.dtype == np.int32 and listed.tolist() == [7, 2, -1, -1, -1, -1, -1, -1]


def test_the_row_of_a_sequence_that_asks_for_nothing():
    admitted = Admitted(0, (), 0, SamplingParams(), 0, ((),))
    counts, in_prompt, bias, listed = host_row(admitted, 4)
    assert counts.shape == in_prompt.shape == bias.shape == (4,) and listed.tolist() == [-1] * 4
    assert len(host_row(admitted, 1000)[-1]) == 128
    assert not counts.any() and not in_prompt.any() and not bias.any()
