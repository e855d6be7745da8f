"""Unsupported arguments of the ops, and their errors: the given and the allowed values. No kernel runs."""

import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import pallas_kernels
from pallas_kernels import compute_capability, mosaic, select, triton
from tests.kernels import cases
from tests.kernels.implementations import ops_of

MODEL = dict(dtype="bfloat16", head_dim=128, num_heads=32, num_kv_heads=4, block_size=16)
H200 = dict(platform="gpu", device_kind="NVIDIA H200", compute_capability=9.0)
A100 = dict(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability=8.0)
B200 = dict(platform="gpu", device_kind="NVIDIA B200", compute_capability=10.0)
CPU = dict(platform="cpu", device_kind="cpu", compute_capability=None)


class TestShapes:
    def test_attention(self):
        batch = cases.make_batch([12, 3], q_lens=[1, 1])
        q, pools = batch.q, (batch.k_pool, batch.v_pool)
        tables, contexts, cu = batch.block_tables, batch.context_lens, batch.cu_q_lens

        def decode(q=q, pools=pools, tables=tables, contexts=contexts, scale=1.0, **options):
            pallas_kernels.paged_decode_attention(q, *pools, tables, contexts, scale=scale, **options)

        with pytest.raises(ValueError, match=r"q has 3 rows, expected .* 2 rows of block_tables_sw"):
            decode(q=jnp.zeros((3, 2, 64), jnp.bfloat16))
        with pytest.raises(ValueError, match=r"q is float16\[2, 2, 64\], expected bfloat16\[2, 2, 64\]"):
            decode(q=q.astype(jnp.float16))
        with pytest.raises(ValueError, match=r"q has 3 heads, expected a multiple of the pools' 2 KV heads"):
            decode(q=jnp.zeros((2, 3, 64), jnp.bfloat16))
        with pytest.raises(ValueError, match=r"q has head dim 65, expected 1 to the pools' 64"):
            decode(q=jnp.zeros((2, 2, 65), jnp.bfloat16))
        with pytest.raises(ValueError, match=r"context_lens_s is int32\[1\], expected int32\[2\]"):
            decode(contexts=contexts[:1])
        with pytest.raises(ValueError, match=r"block_tables_sw is float32\[2, 1\], expected int32\[2, 1\]"):
            decode(tables=tables.astype(jnp.float32))
        with pytest.raises(ValueError, match=r"soft_cap must be a finite number above 0, not 0"):
            decode(soft_cap=0.0)
        for scale in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=r"scale must be a finite number above 0"):
                decode(scale=scale)
        with pytest.raises(ValueError, match=r"window must be a whole number of tokens from 1, not 0"):
            decode(window=0)
        with pytest.raises(ValueError, match=r"k_scale_k is for pools of float8_e4m3fn, these are bfloat16"):
            decode(k_scale_k=jnp.ones(2))
        fp8 = tuple(pool.astype(jnp.float8_e4m3fn) for pool in pools)
        with pytest.raises(ValueError, match=r"v_scale_k is missing: a pool of float8_e4m3fn needs a scale"):
            decode(pools=fp8, k_scale_k=jnp.ones(2))
        with pytest.raises(ValueError, match=r"k_scale_k is float32\[3\], expected float32\[2\]"):
            decode(pools=fp8, k_scale_k=jnp.ones(3), v_scale_k=jnp.ones(2))
        with pytest.raises(ValueError, match=r"cu_q_lens_s1 is int32\[2\], expected int32\[3\]"):
            pallas_kernels.ragged_paged_attention(q, *pools, tables, contexts, cu[1:], scale=1.0)
        with pytest.raises(ValueError, match=r"decode_s is int32\[2\], expected bool\[2\]"):
            pallas_kernels.ragged_paged_attention(q, *pools, tables, contexts, cu, scale=1.0, decode_s=contexts)
        with pytest.raises(ValueError, match=r"v_pool is .*, expected bfloat16"):
            pallas_kernels.ragged_paged_attention(q, pools[0], pools[1][1:], tables, contexts, cu, scale=1.0)

    def test_write(self):
        write = cases.make_write(rotated=True)
        pools, k, v, slots = write.args[:2], *write.args[2:]
        with pytest.raises(ValueError, match=r"v_tkh is bfloat16\[7, 2, 64\], expected bfloat16\[7, 2, 128\]"):
            pallas_kernels.write_kv(*pools, k, v[..., :64], slots)
        with pytest.raises(ValueError, match=r"slot_mapping_t is int32\[6\], expected int32\[7\]"):
            pallas_kernels.write_kv(*pools, k, v, slots[1:])
        with pytest.raises(ValueError, match=r"cos_t and sin_t must be given together"):
            pallas_kernels.write_kv(*pools, k, v, slots, cos_t=write.options["cos_t"])
        with pytest.raises(ValueError, match=r"sin_t is float32\[7, 32\], expected float32\[7, 64\]"):
            pallas_kernels.write_kv(
                *pools, k, v, slots, cos_t=write.options["cos_t"], sin_t=write.options["sin_t"][:, :32]
            )  # fmt: skip

    def test_copy(self):
        pool = jnp.zeros((4, 2, 16, 64), jnp.bfloat16)
        with pytest.raises(ValueError, match=r"destinations_c is int32\[3\], expected int32\[2\]"):
            pallas_kernels.copy_blocks(pool, jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32))

    def test_a_table_of_too_many_tokens(self):
        batch = cases.make_batch([12], block_size=16, width=8193)
        with pytest.raises(NotImplementedError, match=r"8193 blocks of 16 = 131088 tokens, supported are 131072"):
            pallas_kernels.paged_decode_attention(*batch.args, scale=1.0)


@pytest.mark.parametrize("ops", [triton, mosaic], ids=["triton", "mosaic"])
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(), None),
        (dict(dtype="float16", pool_dtype="float16", num_heads=4), None),
        (dict(pool_dtype="float8_e4m3fn", head_dim=80), None),
        (dict(dtype="float64", pool_dtype="float64"), "dtype float64 is not supported, only"),
        (dict(pool_dtype="float16"), "pools of float16 are not supported, only bfloat16 or float8_e4m3fn"),
        (dict(head_dim=257), "head dim 257 is not supported, only 1 to 256"),
        (dict(block_size=24), "block size 24 is not supported, only 8, 16, 32, 64 or 128"),
        (dict(num_heads=68), "68 query heads over 4 KV heads are not supported, only .* from 1 to 16"),
        (dict(num_heads=6), "6 query heads over 4 KV heads are not supported"),
        (dict(num_heads=0), "0 query heads over 4 KV heads are not supported"),
        (dict(num_kv_heads=2**17, num_heads=2**17), "131072 KV heads are not supported, only 1 to"),
    ],
)
def test_unsupported(ops, changed, reason):
    said = ops.unsupported(**(MODEL | dict(pool_dtype="bfloat16") | changed))
    assert said is None if reason is None else re.search(reason, said)


@pytest.mark.parametrize(("ops", "name"), [(ops_of(triton), "Pallas-Triton"), (ops_of(mosaic), "Mosaic GPU")])
def test_an_op_refuses_what_is_unsupported(ops, name):
    batch = cases.make_batch([12], head_dim=32)
    with pytest.raises(NotImplementedError, match=f"{name} kernels: pools of head dim 32 are not supported, only"):
        ops.paged_decode_attention(*batch.args, scale=1.0)
    batch = cases.make_batch([12], block_size=4)
    with pytest.raises(NotImplementedError, match=f"{name} kernels: block size 4 is not supported, only 8"):
        ops.ragged_paged_attention(*batch.args, jnp.array([0, 1], jnp.int32), scale=1.0)


def test_mosaic_has_no_float32():
    """The tensor cores would round it to 10 bits."""
    said = mosaic.unsupported(**(MODEL | dict(dtype="float32", pool_dtype="float32")))
    assert said == "dtype float32 is not supported, only bfloat16 or float16"


class TestSelect:
    @pytest.mark.parametrize(
        ("device", "changed", "name", "reason", "head_dim"),
        [
            (H200, {}, "mosaic", "the device is a NVIDIA H200", 128),
            (H200, dict(head_dim=80), "mosaic", "the device is", 128),
            (H200, dict(pool_dtype="float8_e4m3fn"), "mosaic", "the device is", 128),
            (H200, dict(dtype="float32"), "triton", "not mosaic: dtype float32 is not supported", 128),
            (H200, dict(block_size=256), "reference", "not triton: block size 256 is not supported", 128),
            (A100, dict(head_dim=64), "triton", r"not mosaic: .* need a Hopper GPU .* A100-SXM4-80GB \(8.0\)", 64),
            (B200, {}, "triton", "not mosaic: .* need a Hopper GPU", 128),
            (CPU, dict(head_dim=80), "cpu", r"the device is a cpu \(cpu\)", 80),
            (CPU, dict(head_dim=40), "cpu", r"the device is a cpu \(cpu\)", 48),
            (CPU, dict(dtype="float64", head_dim=40), "reference", "not cpu: dtype float64 is not supported", 40),
            (dict(platform="tpu", device_kind="TPU", compute_capability=None), {}, "reference", r"a TPU \(tpu\)", 128),
        ],
    )
    def test_auto(self, device, changed, name, reason, head_dim):
        kernels = select(**device, **(MODEL | changed))
        assert (kernels.name, kernels.head_dim) == (name, head_dim) and re.search(reason, kernels.reason)

    @pytest.mark.parametrize("name", ["reference", "triton", "mosaic"])
    def test_a_setting_forces_one(self, name):
        kernels = select(name, **H200, **MODEL)
        assert (kernels.name, kernels.reason) == (name, "asked for")

    def test_one_that_cannot_run_is_refused(self):
        with pytest.raises(NotImplementedError, match=r"'mosaic': Mosaic GPU kernels need .* a cpu \(cpu\)"):
            select("mosaic", **CPU, **MODEL)
        with pytest.raises(NotImplementedError, match=r"'cpu': CPU kernels need a CPU, this is a NVIDIA H200 \(9.0\)"):
            select("cpu", **H200, **MODEL)
        with pytest.raises(NotImplementedError, match=r"'triton': block size 256 is not supported"):
            select("triton", **H200, **(MODEL | dict(block_size=256)))
        with pytest.raises(ValueError, match="kernels must be one of auto, reference, mosaic, triton, cpu, not 'cuda'"):
            select("cuda", **H200, **MODEL)

    def test_a_device_and_a_config_are_enough(self):
        h200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
        config = dict(num_attention_heads=32, num_key_value_heads=4, hidden_size=2560, torch_dtype="bfloat16")
        kernels = pallas_kernels.select_for(h200, config)
        assert (kernels.name, kernels.head_dim) == ("mosaic", 128)  # of 80
        for dtype in ("float32", jnp.float32, "torch.float32"):
            model = types.SimpleNamespace(**config | dict(dtype=dtype, head_dim=64))
            assert pallas_kernels.select_for(h200, model).name == "triton"
        fp8 = pallas_kernels.select_for(h200, config, dtype="float16", pool_dtype="float8_e4m3fn", block_size=32)
        assert fp8.name == "mosaic"
        assert pallas_kernels.select_for(jax.devices()[0], config, name="reference", debug=True).debug
        with pytest.raises(NotImplementedError, match="'mosaic': block size 5 is not supported"):
            pallas_kernels.select_for(h200, config, name="mosaic", block_size=5)
        with pytest.raises(NotImplementedError, match=r"^int8_rows: is for CPUs, not for gpu$"):
            pallas_kernels.select_for(h200, config, int8_rows=True)

    @pytest.mark.parametrize(
        "missing, message",
        [
            ("num_attention_heads", "^model: has no num_attention_heads$"),
            ("hidden_size", "^model: has no hidden_size$"),
            ("dtype", "^model: has no dtype or torch_dtype$"),
        ],
    )
    def test_a_field_that_the_config_lacks_is_named(self, missing, message):
        config = dict(num_attention_heads=32, hidden_size=2560, dtype="bfloat16")
        with pytest.raises(ValueError, match=message):
            pallas_kernels.select_for(jax.devices()[0], config | {missing: None})

    @pytest.mark.parametrize("reported, found", [("9.0", 9.0), (8.6, 8.6), (None, None), ("gfx942", None)])
    def test_compute_capability_is_a_number_where_the_device_is_nvidias(self, reported, found):
        assert compute_capability(types.SimpleNamespace(compute_capability=reported)) == found
        assert compute_capability(types.SimpleNamespace()) is None


class TestDebug:
    """Values are looked at where they exist, and under checkify where they are traced."""

    kernels = select("reference", debug=True, **CPU, **(MODEL | dict(head_dim=64)))
    traced = staticmethod(
        checkify.checkify(jax.jit(lambda *args: TestDebug.kernels.ragged_paged_attention(*args, scale=1.0)))
    )

    @pytest.fixture
    def batch(self):
        return cases.make_batch([12, 40], q_lens=[3, 5])  # 4 blocks and 3 that nobody owns

    def test_what_is_right_passes(self, batch):
        batch.check(batch.run(self.kernels.ragged_paged_attention))
        write = cases.make_write()
        write.check(*self.kernels.write_kv(*write.args))
        self.kernels.copy_blocks(write.k_pool, jnp.array([0, 99]), jnp.array([1, -1]))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (dict(block_tables=jnp.array([[1, 0, 0], [3, 7, 4]])), r"block_tables_sw\[1, 1\] is 7, allowed are 0 to 6"),
            (dict(block_tables=jnp.array([[-1, 0, 0], [3, 5, 4]])), r"block_tables_sw\[0, 0\] is -1, allowed are 0 to"),
            (dict(context_lens=jnp.array([12, 49])), r"context_lens_s\[1\] is 49, allowed are 0 to 48: a table of 3"),
            (dict(context_lens=jnp.array([2, 40])), r"sequence 0 has more rows than its context_lens_s of 2"),
            (dict(cu_q_lens=jnp.array([0, 5, 3])), r"cu_q_lens_s1 must start at 0 and never fall"),
            (dict(cu_q_lens=jnp.array([0, 3, 9])), r"cu_q_lens_s1\[2\] is 9, allowed are 0 to 8: 8 rows of q"),
        ],
    )
    def test_attention(self, batch, changed, message):
        wrong = cases.replace(batch, **changed)
        with pytest.raises(ValueError, match=message):
            wrong.run(self.kernels.ragged_paged_attention)
        error, _ = self.traced(*wrong.args)
        with pytest.raises(ValueError, match=message):
            error.throw()

    def test_slots_and_copies(self):
        write = cases.make_write()
        with pytest.raises(ValueError, match=r"slot_mapping_t\[2\] is 48, allowed are -1 to 47: a pool of 3 blocks"):
            self.kernels.write_kv(*write.args[:4], jnp.array([-1, 5, 48, -1, 1, 2, 3]))
        with pytest.raises(ValueError, match="slot_mapping_t: slot 5 is written by two tokens"):
            self.kernels.write_kv(*write.args[:4], jnp.array([-1, 5, 7, -1, 1, 2, 5]))
        with pytest.raises(ValueError, match=r"sources_c\[0\] is 3, allowed are 0 to 2: a pool of 3 blocks"):
            self.kernels.copy_blocks(write.k_pool, jnp.array([3]), jnp.array([1]))
        with pytest.raises(ValueError, match=r"destinations_c\[0\] is -2, allowed are -1 to 2"):
            self.kernels.copy_blocks(write.k_pool, jnp.array([1]), jnp.array([-2]))
