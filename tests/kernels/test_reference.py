"""Guarantees of the reference ops beyond those of every implementation."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels import cases
from tests.kernels.implementations import REFERENCE

decode, ragged = REFERENCE.paged_decode_attention, REFERENCE.ragged_paged_attention


def test_decode_is_ragged_with_one_row_each():
    contexts = [1, 16, 17, 200]
    single, packed = cases.make_batch(contexts), cases.make_batch(contexts, q_lens=[1] * len(contexts))
    np.testing.assert_array_equal(single.run(decode), packed.run(ragged))


def test_an_uncleared_tail_of_v_would_be_nan():
    """0 * NaN is NaN: masking the scores alone is not enough, and unused slots of NaN show it."""
    batch = cases.make_batch([12])
    k, v = (pool[batch.block_tables[0, :1], 0].reshape(-1, 64) for pool in (batch.k_pool, batch.v_pool))
    scores = jnp.where(jnp.arange(len(k)) < 12, batch.q[0, 0] @ k.T, -jnp.inf)
    assert np.isnan(jax.nn.softmax(scores) @ v).all()
