"""Pairs as padded arrays, and arrays that a step has lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.runtime.placement import padded, usable


@pytest.mark.parametrize("count, size", [(0, 2), (1, 2), (2, 2), (3, 8), (8, 8)])
def test_pairs_are_padded_with_minus_one_to_the_next_size(count, size):
    pairs = [(10 + i, 20 + i) for i in range(count)]
    sources, destinations = padded(pairs, (2, 8))
    for array, first in ((sources, 10), (destinations, 20)):
        np.testing.assert_array_equal(array, [*range(first, first + count), *[-1] * (size - count)])
        assert array.dtype == np.int32


def test_arrays_are_usable_until_one_is_deleted():
    arrays = [jnp.zeros(3), jnp.ones(3)]
    assert usable(arrays) and usable(iter(())) and usable(array for array in arrays)
    arrays[1].delete()
    assert not usable(arrays)


def test_the_result_of_a_computation_that_failed_is_not_usable():
    class Failed:
        def block_until_ready(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: a fault")

    assert not usable([jnp.zeros(3), Failed()])
