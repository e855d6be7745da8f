"""What holds for the reference ops beyond what every implementation must do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from tests.kernels import cases
from tests.kernels.implementations import REFERENCE

decode, ragged = REFERENCE.paged_decode_attention, REFERENCE.ragged_paged_attention


def test_float32():
    """In float32, what is left of the difference is the order of the sums."""
    case = dict(contexts=[1, 17, 300], group=2, dtype=jnp.float32)
    for batch, op in ((cases.make_batch(**case), decode), (cases.make_batch(**case, q_lens=[1, 2, 40]), ragged)):
        np.testing.assert_allclose(batch.run(op), batch.expected(), atol=1e-5)


def test_decode_is_ragged_with_one_row_each():
    contexts = [1, 16, 17, 200]
    single, packed = cases.make_batch(contexts), cases.make_batch(contexts, q_lens=[1] * len(contexts))
    np.testing.assert_array_equal(single.run(decode), packed.run(ragged))


@pytest.mark.parametrize("alone", [1, 3])
def test_output_does_not_depend_on_neighbours(alone):
    batch = cases.make_batch([40, 17, 0, 300], group=2)
    row = slice(alone, alone + 1)
    small = dict(q=batch.q[row], block_tables=batch.block_tables[row], context_lens=batch.context_lens[row])
    np.testing.assert_array_equal(batch.run(decode)[row], cases.replace(batch, **small).run(decode))


def test_copy_blocks_reads_all_before_it_writes():
    pool = jnp.arange(4.0)[:, None] * jnp.ones((4, 2))
    swapped = reference.copy_blocks(pool, jnp.array([0, 1, 3]), jnp.array([1, 0, -1]))
    np.testing.assert_array_equal(swapped[:, 0], [1, 0, 2, 3])


class TestTheChecks:
    """They are only worth something if they can fail."""

    def test_an_uncleared_tail_of_v_is_nan(self):
        """0 * NaN is NaN: masking the scores alone is not enough."""
        batch = cases.make_batch([12])
        k, v = (pool[batch.block_tables[0, :1], 0].reshape(-1, 64) for pool in (batch.k_pool, batch.v_pool))
        scores = jnp.where(jnp.arange(len(k)) < 12, batch.q[0, 0] @ k.T, -jnp.inf)
        assert np.isnan(jax.nn.softmax(scores) @ v).all()

    def test_a_wrong_slot_is_noticed(self):
        write = cases.make_write()
        written = functools.partial(reference.write_kv, *write.args[:4])
        with pytest.raises(AssertionError):
            write.check(*written(jnp.where(write.slot_mapping < 0, -1, (write.slot_mapping + 1) % 48)))
