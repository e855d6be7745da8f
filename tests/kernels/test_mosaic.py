"""What the Mosaic GPU kernels promise beyond the ops' definition; and that what is planted in them is found."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import decode as decode_module
from pallas_kernels.mosaic import ragged as ragged_module
from pallas_kernels.mosaic import ring
from tests.kernels import cases
from tests.kernels.implementations import MOSAIC
from tests.kernels.mosaic_interpreter import interpreted

decode, ragged = MOSAIC.paged_decode_attention, MOSAIC.ragged_paged_attention


@pytest.mark.parametrize("num_sms", [1, 4])
def test_where_a_split_is_computed_changes_nothing(num_sms):
    """To the bit: any number of thread blocks."""
    batch = cases.make_batch([100, 0, 1030], num_kv_heads=1, group=2)
    op = interpreted(mosaic.paged_decode_attention, num_sms=num_sms)
    np.testing.assert_array_equal(batch.run(op), batch.run(decode))


@pytest.mark.parametrize("window", [None, 1, 100, 512, 5000])
def test_splits_cover_what_each_query_sees(window):
    """Every split in order, none that is empty, up to the longest context; against a plain loop."""
    split, tile, max_splits = 512, 64, 256
    lens = [0, 131_072, 1, 511, 512, 513, 0, 70_001, 1024]
    expected, first_splits = [], [0]
    for s, n in enumerate(lens):
        seen = max(0, n - window) if window else 0
        expected += [
            (s, max(u * split, seen // tile * tile), min((u + 1) * split, n), seen)
            for u in range(max_splits)
            if u * split < n and (u + 1) * split > seen
        ]
        first_splits.append(len(expected))
    work_i4, count, split_s1 = decode_module._splits(jnp.array(lens), max_splits, split, tile, window)
    assert int(count[0]) == len(expected) and split_s1.tolist() == first_splits
    np.testing.assert_array_equal(work_i4[: len(expected)], expected)


@pytest.mark.parametrize("q_lens", [None, [1, 5, 130]], ids=["decode", "ragged"])
def test_keys_in_one_piece_give_the_same(q_lens):
    """To the bit: paging changes where keys are read from, and nothing else."""
    contexts = [1, 64, 140]
    batch = cases.make_batch(contexts, q_lens=q_lens, num_kv_heads=2, group=2)
    k_sklh, v_sklh = np.full((2, len(contexts), 2, 256, 64), np.nan)
    for s, (k, v) in enumerate(batch.dense):
        k_sklh[s, :, : len(k)], v_sklh[s, :, : len(v)] = k.swapaxes(0, 1), v.swapaxes(0, 1)
    in_one_piece = [jnp.asarray(x, jnp.bfloat16) for x in (k_sklh, v_sklh)]
    op = mosaic.contiguous_decode_attention if q_lens is None else mosaic.contiguous_ragged_attention
    out = interpreted(op)(batch.q, *in_one_piece, *batch.args[4:], **batch.options)
    paged = batch.run(decode if q_lens is None else ragged)
    np.testing.assert_array_equal(np.asarray(out, np.float64), paged)


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

        def hasty_fill(self, tiles, tokens, filled, blocks, copy, k_pool_ref, v_pool_ref, v_column, copies):
            stages = self.k.shape[0]

            @pl.loop(0, tiles)
            def fill_stage(i):
                stage = lax.rem(filled + i, stages)
                copy(blocks(i), k_pool_ref, self.k.at[stage], 0, self.k_full.at[stage])
                copy(blocks(i), v_pool_ref, self.v.at[stage], v_column, self.v_full.at[stage])

        monkeypatch.setattr(ring.KVRing, "_fill", hasty_fill)
        batch = cases.make_batch([512], q_lens=q_lens, num_kv_heads=1)
        with pytest.raises(Exception, match=r"RACE DETECTED|completed|Barrier|barrier"):
            batch.run(decode if q_lens is None else ragged)

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_split_that_ends_one_token_off_is_noticed(self, monkeypatch, off):
        splits = decode_module._splits

        def wrong(*args):
            work_i4, *rest = splits(*args)
            return work_i4.at[:, 2].add(off), *rest

        monkeypatch.setattr(decode_module, "_splits", wrong)
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
