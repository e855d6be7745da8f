"""Guarantees of the Mosaic GPU kernels beyond the ops' definition, and the discovery of planted errors."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import ragged as ragged_module
from pallas_kernels.mosaic import ring, work
from tests.kernels import cases
from tests.kernels.implementations import MOSAIC, ops_of
from tests.kernels.mosaic_interpreter import interpreted

decode, ragged = MOSAIC.paged_decode_attention, MOSAIC.ragged_paged_attention


@pytest.mark.deep
@pytest.mark.parametrize("num_sms", [1, 4])
def test_where_a_split_is_computed_changes_nothing(num_sms):
    """To the bit: any number of thread blocks."""
    batch = cases.make_batch([100, 0, 1030], num_kv_heads=1, group=2)
    op = interpreted(ops_of(mosaic).paged_decode_attention, num_sms=num_sms)
    np.testing.assert_array_equal(batch.run(op), batch.run(decode))


@pytest.mark.deep
class TestTheChecks:
    """They are only worth something if they can fail."""

    def test_reading_past_the_table_raises(self):
        """The longest sequence of every case fills its table row: what reads on after its context leaves the table."""
        batch = cases.make_batch([16], num_kv_heads=1)
        with pytest.raises(Exception, match="Out-of-bounds read"):
            cases.replace(batch, context_lens=batch.context_lens + 1).run(decode)

    def test_a_race_is_noticed_in_a_kernel_that_is_not_the_last(self):
        def racy(x):
            def kernel(x_ref, o_ref, smem):
                smem[...] = jnp.full((128,), lax.axis_index("wg"), jnp.float32)  # both warpgroups, unordered
                plgpu.commit_smem()
                pl.when(lax.axis_index("wg") == 0)(lambda: plgpu.copy_smem_to_gmem(smem, o_ref))
                plgpu.wait_smem_to_gmem(0)

            def calm(x_ref, o_ref):
                o_ref[...] = x_ref[...]

            shape = jax.ShapeDtypeStruct((128,), jnp.float32)
            smem = [plgpu.SMEM((128,), jnp.float32)]
            x = plgpu.kernel(kernel, out_type=shape, num_threads=2, thread_name="wg", scratch_types=smem)(x)
            return plgpu.kernel(calm, out_type=shape)(x)

        with pytest.raises(Exception, match="RACE DETECTED"):  # from jax 0.12 on the interpreter raises by itself
            interpreted(racy)(jnp.zeros(128))

    @pytest.mark.parametrize("q_lens", [None, [1]], ids=["decode", "ragged"])
    def test_a_ring_that_does_not_wait_for_room_is_noticed(self, monkeypatch, q_lens):
        """A race in the kernels themselves: tiles are overwritten while they are computed on."""

        hasty = types.SimpleNamespace(**{**vars(plgpu), "barrier_wait": lambda barrier: None})
        monkeypatch.setattr(ring, "plgpu", hasty)
        batch = cases.make_batch([512], q_lens=q_lens, num_kv_heads=1)
        with pytest.raises(Exception, match=r"RACE DETECTED|completed|Barrier|barrier"):
            batch.run(decode if q_lens is None else ragged)

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_split_that_ends_one_token_off_is_noticed(self, monkeypatch, off):
        make_splits = work.make_splits

        def wrong(*args, **options):
            splits = make_splits(*args, **options)
            return splits._replace(work_i4=splits.work_i4.at[:, 2].add(off))

        monkeypatch.setattr(work, "make_splits", wrong)
        batch = cases.make_batch([20], num_kv_heads=1)
        with pytest.raises(AssertionError):
            batch.check(batch.run(decode))

    def test_a_mask_that_is_one_token_off_is_noticed(self, monkeypatch):
        """Every row sees the token after its own."""

        def iota(dtype, shape, dimension, layout=None):
            return plgpu.broadcasted_iota(dtype, shape, dimension, layout=layout) - (shape[0] != ring.WGMMA_ROWS)

        shifted = types.SimpleNamespace(**{**vars(plgpu), "broadcasted_iota": iota})
        monkeypatch.setattr(ragged_module, "plgpu", shifted)
        batch = cases.make_batch([200], q_lens=[30], num_kv_heads=1)
        with pytest.raises(AssertionError):
            batch.check(batch.run(ragged))
