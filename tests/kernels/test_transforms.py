"""The ops with NumPy's arrays, with values out of range, and under jax's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from pallas_kernels import Weight, cpu, merge_attention, mosaic, reference, rotate
from tests.kernels import cases
from tests.kernels.implementations import jitted, ops_of

REFERENCE, CPU = ops_of(reference), ops_of(cpu)
both = pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "cpu"])
kinds = pytest.mark.parametrize("q_lens", [None, [1, 20]], ids=["decode", "ragged"])
pairs = pytest.mark.parametrize(
    "ops, q_lens",
    [
        pytest.param(REFERENCE, None, id="decode-reference"), pytest.param(CPU, [1, 20], id="ragged-cpu"),
        pytest.param(REFERENCE, [1, 20], id="ragged-reference", marks=pytest.mark.deep),
        pytest.param(CPU, None, id="decode-cpu", marks=pytest.mark.deep),
    ],
)  # fmt: skip
FLOAT32 = dict(dtype=jnp.float32, group=2)


def attention(ops, q_lens):
    return ops.paged_decode_attention if q_lens is None else ops.ragged_paged_attention


def on_cpu(*arrays):
    return jax.tree.map(np.asarray, arrays)


class TestNumPy:
    """As constants of a jitted function, which are NumPy's while it is traced."""

    @pairs
    def test_attention(self, ops, q_lens):
        batch = cases.make_batch([70, 20], q_lens=q_lens, fp8=True)
        options = batch.options | {name: np.asarray(batch.options[name]) for name in ("k_scale_k", "v_scale_k")}
        args = on_cpu(*batch.args)
        batch.check(np.asarray(jax.jit(lambda: attention(ops, q_lens)(*args, **options))(), np.float64))

    def test_writes_and_copies(self):
        write = cases.make_write(rotated=True, group=2)
        args, options = on_cpu(*write.args), jax.tree.map(np.asarray, write.options)
        write.check(*jax.jit(lambda: REFERENCE.write_kv(*args, **options))())
        pool = np.arange(12).reshape(3, 4)
        copied = REFERENCE.copy_blocks(pool, np.array([0, 1]), np.array([2, -1]))
        np.testing.assert_array_equal(copied, pool[[0, 1, 0]])


@pairs
def test_a_block_outside_the_pool_is_its_nearest(ops, q_lens):
    batch = cases.make_batch([70, 20], q_lens=q_lens, **FLOAT32)  # 7 blocks and 3 free ones
    batch = cases.replace(batch, k_pool=np.nan_to_num(batch.k_pool), v_pool=np.nan_to_num(batch.v_pool))
    op = jax.jit(lambda *args: attention(ops, q_lens)(*args, **batch.options))

    def with_block(block: int):
        tables = batch.block_tables.copy()
        tables[1, 1] = block
        return op(*cases.replace(batch, block_tables=tables).args)

    for wrong, nearest in ((-1, 0), (-(2**31), 0), (10, 9), (2**31 - 1, 9)):
        np.testing.assert_array_equal(with_block(wrong), with_block(nearest))


@pytest.mark.parametrize("context_lens", [[70, 2**31 - 1], [-5, 20]])
@pytest.mark.parametrize("cu_q_lens", [None, [0, 1, 2**31 - 1], [-9, 1, 21], [30, 31, 32], [0, 9, 4]])
def test_lengths_out_of_range_stay_within_the_arrays(context_lens, cu_q_lens):
    """Memory outside would be that of another array, or none of the process's, which ends it."""
    batch = cases.make_batch([70, 20], q_lens=cu_q_lens and [1, 20], **FLOAT32)
    rows = [] if cu_q_lens is None else [np.array(cu_q_lens, np.int32)]
    args = (*batch.args[:4], np.array(context_lens, np.int32), *rows)
    assert jitted(attention(CPU, cu_q_lens))(*args, **batch.options).shape == batch.q.shape


@pairs
def test_vmap(ops, q_lens):
    batches = [cases.make_batch([70, 20], q_lens=q_lens, seed=seed, **FLOAT32) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *(tuple(batch.args) for batch in batches))
    out = jax.jit(jax.vmap(lambda *args: attention(ops, q_lens)(*args, **batches[0].options)))(*stacked)
    for batch, found in zip(batches, out):
        batch.check(np.asarray(found, np.float64))


def test_vmap_of_a_product():
    x_bti, weight = jnp.ones((3, 4, 64)), Weight(jnp.ones((8, 64)))
    found = jax.vmap(ops_of(cpu).product, in_axes=(0, None))(x_bti, weight)
    np.testing.assert_array_equal(found, jnp.full((3, 4, 8), 64.0))


@kinds
def test_mosaic_refuses_vmap(q_lens):
    batch = cases.make_batch([70, 20], q_lens=q_lens)
    op = lambda q: attention(ops_of(mosaic), q_lens)(q, *batch.args[1:], **batch.options)
    with pytest.raises(
        NotImplementedError, match=r"_attention in Mosaic does not support jax\.vmap: use jax\.lax\.map"
    ):
        jax.make_jaxpr(jax.vmap(op))(batch.q[None])


class TestShardMap:
    """With `check_vma`, as is its default."""

    mesh = property(lambda self: jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]))

    @pairs
    def test_heads(self, ops, q_lens):
        batch = cases.make_batch([70, 20], q_lens=q_lens, fp8=True, **FLOAT32)
        heads, names = P(None, "x"), ("k_scale_k", "v_scale_k")
        options = {name: value for name, value in batch.options.items() if name not in names}

        def op(k_scale_k, v_scale_k, *args):
            return attention(ops, q_lens)(*args, **options, k_scale_k=k_scale_k, v_scale_k=v_scale_k)

        specs = (P("x"), P("x"), heads, heads, heads, *[P()] * (len(batch.args) - 3))
        divided = jax.jit(jax.shard_map(op, mesh=self.mesh, in_specs=specs, out_specs=heads))
        batch.check(np.asarray(divided(*(batch.options[name] for name in names), *batch.args), np.float64))

    @both
    def test_sequences(self, ops):
        batch = cases.make_batch([70, 20, 5, 130], **FLOAT32)
        op = lambda *args: ops.paged_decode_attention(*args, **batch.options)
        specs = (P("x"), P(), P(), P("x"), P("x"))
        divided = jax.jit(jax.shard_map(op, mesh=self.mesh, in_specs=specs, out_specs=P("x")))
        batch.check(np.asarray(divided(*batch.args), np.float64))

    def test_writes(self):
        write, heads = cases.make_write(), P(None, "x")
        specs = (*[heads] * 4, P())
        divided = jax.shard_map(REFERENCE.write_kv, mesh=self.mesh, in_specs=specs, out_specs=heads)
        write.check(*jax.jit(divided)(*write.args))


class TestDerivatives:
    @both
    @pytest.mark.parametrize("op", ["paged_decode_attention", "ragged_paged_attention", "write_kv", "copy_blocks"])
    def test_the_ops_refuse_them(self, ops, op):
        batch = cases.make_batch([9, 4], q_lens=[9, 4] if op.startswith("ragged") else None, **FLOAT32)
        args, options = {
            "write_kv": (cases.make_write(dtype=jnp.float32).args, {}),
            "copy_blocks": ((batch.k_pool, jnp.array([0]), jnp.array([1])), {}),
        }.get(op, (batch.args, batch.options))
        call = lambda x: jax.tree.leaves(getattr(ops, op)(x, *args[1:], **options))[0].sum()
        for differentiate in (jax.grad(call), lambda x: jax.jvp(call, (x,), (x,))):
            with pytest.raises(NotImplementedError, match=f"^{op} has no derivative: .* jax.lax.stop_gradient"):
                differentiate(args[0])

    @both
    def test_stopped_gradients_are_none(self, ops):
        batch = cases.make_batch([9], **FLOAT32)
        attend = jax.jit(lambda q: ops.paged_decode_attention(q, *batch.args[1:], scale=1.0))
        loss = lambda q: (q * attend(jax.lax.stop_gradient(q))).sum()
        np.testing.assert_array_equal(jax.grad(loss)(batch.q), attend(batch.q))

    def test_merging_and_rotating_have_them(self):
        rng = np.random.default_rng(0)
        o_a, o_b = jnp.asarray(rng.standard_normal((2, 5, 2, 8)), jnp.float32)
        lse_a, lse_b = jnp.asarray(rng.standard_normal((2, 5, 2)), jnp.float32)
        check_grads(jax.jit(merge_attention), (o_a, lse_a, o_b, lse_b), order=1, modes=("rev",), rtol=0.05)
        # A part without keys leaves the other as it is, also in the derivative.
        merged = lambda *args: (merge_attention(*args)[0] ** 2).sum()
        without = jax.grad(merged, argnums=(0, 2))(o_a, lse_a, o_b, jnp.full_like(lse_b, -jnp.inf))
        np.testing.assert_array_equal(without, (2 * o_a, jnp.zeros_like(o_b)))
        cos_t, sin_t = (function(lse_a[:, :1] * jnp.ones(4)) for function in (jnp.cos, jnp.sin))
        (back,) = jax.vjp(lambda x: rotate(x, cos_t, sin_t), o_a)[1](o_b)
        np.testing.assert_allclose(back, rotate(o_b, cos_t, -sin_t), rtol=1e-6)
