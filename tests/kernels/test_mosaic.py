"""What the Mosaic GPU kernels promise beyond the ops' definition, and what they refuse."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from tests.kernels import cases
from tests.kernels.implementations import MOSAIC, interpreted

decode, ragged = MOSAIC.paged_decode_attention, MOSAIC.ragged_paged_attention


def test_decode_does_not_depend_on_neighbours():
    """To the bit, over a split boundary, in a table of another width."""
    batch = cases.make_batch([100, 0, 577], num_kv_heads=1, group=2, width=64)
    small = cases.replace(
        batch, q=batch.q[2:], block_tables=batch.block_tables[2:, :40], context_lens=batch.context_lens[2:]
    )
    np.testing.assert_array_equal(small.run(decode)[0], batch.run(decode)[2])


def test_ragged_depends_neither_on_neighbours_nor_on_chunks():
    """To the bit: the last rows of a prompt, in one piece among others and as a chunk alone."""
    batch = cases.make_batch([9, 90], q_lens=[9, 90], num_kv_heads=1, group=2)
    chunk = cases.replace(
        batch,
        q=batch.q[-25:],
        block_tables=batch.block_tables[1:],
        context_lens=batch.context_lens[1:],
        cu_q_lens=jnp.array([0, 25], jnp.int32),
    )
    np.testing.assert_array_equal(chunk.run(ragged), batch.run(ragged)[-25:])


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


class TestRefusals:
    """Each says what was given and what is allowed. No kernel runs."""

    def test_shapes_that_do_not_fit(self):
        batch = cases.make_batch([12, 3], q_lens=[1, 1])
        pools = batch.k_pool, batch.v_pool
        tables, contexts, cu = batch.block_tables, batch.context_lens, batch.cu_q_lens
        with pytest.raises(ValueError, match=r"q_snh has 3 rows, expected .* 2 rows of block_tables_sw"):
            mosaic.paged_decode_attention(jnp.zeros((3, 2, 64), jnp.bfloat16), *pools, tables, contexts, scale=1.0)
        with pytest.raises(ValueError, match=r"q is float16\[2, 2, 64\], expected bfloat16\[2, 2, 64\]"):
            mosaic.paged_decode_attention(batch.q.astype(jnp.float16), *pools, tables, contexts, scale=1.0)
        with pytest.raises(ValueError, match=r"q has 3 heads, expected a multiple of the pools' 2 KV heads"):
            mosaic.paged_decode_attention(jnp.zeros((2, 3, 64), jnp.bfloat16), *pools, tables, contexts, scale=1.0)
        with pytest.raises(ValueError, match=r"context_lens_s is int32\[1\], expected int32\[2\]"):
            mosaic.paged_decode_attention(batch.q, *pools, tables, contexts[:1], scale=1.0)
        with pytest.raises(ValueError, match=r"block_tables_sw is float32\[2, 1\], expected int32\[2, 1\]"):
            mosaic.paged_decode_attention(batch.q, *pools, tables.astype(jnp.float32), contexts, scale=1.0)
        with pytest.raises(ValueError, match=r"cu_q_lens_s1 is int32\[2\], expected int32\[3\]"):
            mosaic.ragged_paged_attention(batch.q, *pools, tables, contexts, cu[1:], scale=1.0)
        with pytest.raises(ValueError, match=r"v_pool is .*, expected bfloat16"):
            mosaic.ragged_paged_attention(batch.q, pools[0], pools[1][1:], tables, contexts, cu, scale=1.0)
        with pytest.raises(ValueError, match=r"k_tkh is bfloat16\[2, 2, 32\], expected bfloat16\[2, 2, 64\]"):
            mosaic.write_kv(*pools, batch.q[..., :32], batch.q, contexts)

    def test_a_table_of_too_many_tokens(self):
        batch = cases.make_batch([12], block_size=16, width=8193)
        with pytest.raises(NotImplementedError, match=r"8193 x 16 = 131088 tokens .* at most 131072"):
            mosaic.paged_decode_attention(*batch.args, scale=1.0)

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            (dict(), None),
            (dict(dtype="float16", num_heads=4), None),
            (dict(dtype="float32"), "dtype float32 is not supported, only bfloat16 or float16"),
            (dict(head_dim=96), "head dim 96 is not supported, only 64, 128 or 256"),
            (dict(block_size=24), "block size 24 is not supported, only 8, 16, 32, 64 or 128"),
            (dict(num_heads=68), "68 query heads over 4 KV heads are not supported, only .* from 1 to 16"),
            (dict(num_heads=6), "6 query heads over 4 KV heads are not supported"),
            (dict(num_heads=0), "0 query heads over 4 KV heads are not supported"),
            (dict(num_kv_heads=256, num_heads=256), "256 KV heads are not supported, only 1 to 128"),
        ],
    )
    def test_unsupported(self, changed, reason):
        model = dict(dtype=jnp.bfloat16, head_dim=128, block_size=16, num_heads=32, num_kv_heads=4) | changed
        said = mosaic.unsupported(**model)
        assert said is None if reason is None else re.search(reason, said)

    def test_an_op_refuses_what_is_unsupported(self):
        batch = cases.make_batch([12], head_dim=32)
        with pytest.raises(NotImplementedError, match="Mosaic GPU kernels: head dim 32 is not supported"):
            mosaic.paged_decode_attention(*batch.args, scale=1.0)
