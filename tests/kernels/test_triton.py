"""Guarantees of the Pallas-Triton kernels beyond the ops' definition, and compilers' figures without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shared import deviceless
from benchmarks.shared.gpus import A100, H200, Gpu
from pallas_kernels import Chains, checks, triton
from pallas_kernels.triton import attention
from pallas_kernels.tuning import TritonDecode, TritonRagged
from tests.kernels import cases, gpu_compiler
from tests.kernels.implementations import TRITON, ops_of
from tests.kernels.triton_interpreter import interpreted

F32_OPTIONS = {
    "fp8": dict(fp8=True, group=2),
    "window, capped": dict(window=40, soft_cap=2.0, group=3),
    "head dim 80": dict(head_dim=80, pool_head_dim=128),
}


@pytest.mark.parametrize(
    ("options", "q_lens"),
    [
        pytest.param(
            options, q_lens, id=f"{kind}-{name}",
            marks=[] if (name == "window, capped") == (kind == "ragged") else [pytest.mark.deep],
        )
        for name, options in F32_OPTIONS.items() for kind, q_lens in (("decode", None), ("ragged", [0, 1, 2, 40]))
    ],
)  # fmt: skip
def test_float32_with_options(options, q_lens):
    batch = cases.make_batch([0, 1, 17, 150], q_lens=q_lens, dtype=jnp.float32, return_lse=True, **options)
    op = TRITON.paged_decode_attention if q_lens is None else TRITON.ragged_paged_attention
    batch.check(batch.run(op))


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.deep), 200])
def test_more_splits_than_are_merged_at_once(window):
    contexts = [700, 0, 33, 32 * attention.COMBINED, 31]
    batch = cases.make_batch(contexts, num_kv_heads=1, group=2, window=window, return_lse=True)
    op = interpreted(ops_of(triton, decode=TritonDecode(tile=16, split=32)).paged_decode_attention)
    batch.check(batch.run(op))


def test_a_tile_of_rows_that_a_group_does_not_fill():
    batch = cases.make_batch([60, 5], q_lens=[40, 5], padding_rows=7, num_kv_heads=2, group=5)
    op = interpreted(ops_of(triton, ragged=TritonRagged(rows=32, tile=16)).ragged_paged_attention)
    batch.check(batch.run(op))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_number_of_fp8_is_widened_exactly(dtype):
    byte = np.arange(256, dtype=np.uint8)
    byte = byte[byte & 0x7F != 0x7F]  # NaN
    expected = jax.lax.bitcast_convert_type(jnp.asarray(byte), checks.FP8).astype(jnp.float32)
    wide = attention._widened(jnp.asarray(byte), dtype).astype(jnp.float32) * attention.FP8_UNIT
    np.testing.assert_array_equal(wide, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_blocks_of_any_shape_are_copied(dtype):
    pool = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 7, 111)), dtype)
    sources, destinations = jnp.array([0, 1, 2, 99], jnp.int32), jnp.array([1, 2, 0, -1], jnp.int32)
    out = TRITON.copy_blocks(pool, sources, destinations)
    np.testing.assert_array_equal(out.astype(jnp.float32), pool[jnp.array([2, 0, 1, 3, 4])].astype(jnp.float32))


def test_a_pool_whose_offsets_would_overflow_is_refused():
    """Where elements are single bytes, between 2^31 and 2^32 of them."""
    copy = functools.partial(jax.eval_shape, TRITON.copy_blocks)
    copies = jax.ShapeDtypeStruct((1,), jnp.int32)
    for blocks, dtype in ((2**15, checks.FP8), (2**16 + 1, checks.FP8), (2**16, jnp.bfloat16)):
        copy(jax.ShapeDtypeStruct((blocks, 8, 64, 128), dtype), copies, copies)
    with pytest.raises(NotImplementedError, match=r"Pallas-Triton kernels: uint8\[32769, 65536\] has 2147549184 elem"):
        copy(jax.ShapeDtypeStruct((2**15 + 1, 8, 64, 128), checks.FP8), copies, copies)


REGISTERS_PER_SM = 65_536
LEAST_SHARED_MEMORY = 101_376  # that a thread block can have on any GPU from Ampere on (99 KiB, compute capability 8.6)
DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "fp8": (jnp.bfloat16, checks.FP8),
    "float32": (jnp.float32, jnp.float32),
}
S = jax.ShapeDtypeStruct
needs_compilers = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))


@functools.lru_cache(maxsize=3)
def compiled(device: Gpu, head_dim: int, dtype, pool_dtype) -> gpu_compiler.Compiled:
    """All ops of a model with 8 KV heads in one function, its pools donated, at the default tiles."""
    t, s, w, n, k = 512, 16, 512, 32, 8
    q, kv, pool = S((t, n, head_dim), dtype), S((t, k, head_dim), dtype), S((4096, k, 16, head_dim), pool_dtype)
    angles, scales = S((t, head_dim // 2), jnp.float32), S((k,), jnp.float32)
    ints = {name: S(shape, jnp.int32) for name, shape in dict(t=(t,), s=(s,), s1=(s + 1,), sw=(s, w), c=(4,)).items()}

    def ops(q, k, v, pools, batch, angles, scales):
        fp8 = dict(zip(("k_scale_k", "v_scale_k"), scales)) if pool_dtype == checks.FP8 else {}
        tables, contexts, cu = batch["sw"], batch["s"], batch["s1"]
        pools = [ops_of(triton).copy_blocks(pool, batch["c"], batch["c"] + 1) for pool in pools]
        pools = ops_of(triton).write_kv(*pools, k, v, batch["t"], **dict(zip(("cos_t", "sin_t"), angles)), **fp8)
        options = dict(scale=head_dim**-0.5, window=4096, soft_cap=30.0, **fp8)
        o = ops_of(triton).ragged_paged_attention(q, *pools, tables, contexts, cu, **options)
        return pools, o, ops_of(triton).paged_decode_attention(q[:s], *pools, tables, contexts, **options)

    args = q, kv, kv, (pool, pool), ints, (angles, angles), (scales, scales)
    return gpu_compiler.compile_for(device, ops, *args, donate_argnums=3)


# The usual tier has each head dim and each dtype, but not all of these together.
FITS = [
    pytest.param(
        device, head_dim, name, id=f"{device.kind}-{head_dim}-{name}",
        marks=[] if device is A100 and (i, j) == (1, 1) else pytest.mark.deep,
    )
    for device in (A100, H200)
    for i, head_dim in enumerate(checks.HEAD_DIMS)
    for j, name in enumerate(DTYPES)
]  # fmt: skip


@needs_compilers
@pytest.mark.parametrize(("device", "head_dim", "dtype"), FITS)
def test_kernels_fit(device, head_dim, dtype):
    kernels = compiled(device, head_dim, *DTYPES[dtype]).kernels
    assert kernels.keys() == {"copy_blocks", "kv_write", "paged_decode", "paged_decode_combine", "ragged_paged"}
    for name, figures in kernels.items():
        assert figures.spill_bytes == 0, (name, figures)
        assert figures.registers * figures.threads <= REGISTERS_PER_SM, (name, figures)
        assert figures.shared_memory <= LEAST_SHARED_MEMORY, (name, figures)
    for name in ("paged_decode", "ragged_paged"):
        assert kernels[name].mma or kernels[name].wgmma, f"{name} makes no use of tensor cores"


@needs_compilers
@pytest.mark.parametrize(  # compiled for the test above
    ("head_dim", "name"),
    [
        pytest.param(*each, marks=[] if i == 1 else pytest.mark.deep)
        for i, each in enumerate(zip(checks.HEAD_DIMS, DTYPES))
    ],
)
def test_donated_pools_are_changed_in_place(head_dim, name):
    """An fp8 pool that is seen as bytes too."""
    dtypes, pool = DTYPES[name], (4096, 8, 16, head_dim)
    pool_bytes = 4096 * 8 * 16 * head_dim * jnp.dtype(dtypes[1]).itemsize
    result = compiled(A100, head_dim, *dtypes)
    assert result.aliased_bytes == 2 * pool_bytes
    assert result.copies_of(pool, dtypes[1]) == result.copies_of(pool, jnp.uint8) == 0
    assert result.temp_bytes < pool_bytes / 10


def delta_rule_args(num_sequences: int, head_dim: int, dtype) -> tuple:
    """512 tokens of a layer with 16 heads of keys and 32 of values."""
    qk, v, numbers = S((512, 16, head_dim), dtype), S((512, 32, head_dim), dtype), S((512, 32), jnp.float32)
    ints = {n: S((n,), jnp.int32) for n in (num_sequences, num_sequences + 1)}
    chains = Chains(ints[num_sequences + 1], ints[num_sequences], ints[num_sequences])
    return qk, qk, v, numbers, numbers, S((300, 32, head_dim, head_dim), jnp.float32), chains


# The usual tier has the size of Qwen3-Next and Qwen 3.5.
@needs_compilers
@pytest.mark.parametrize(
    ("device", "head_dim", "dtype"),
    [
        pytest.param(
            device,
            head_dim,
            dtype,
            marks=[] if (device, head_dim, dtype) == (A100, 128, jnp.bfloat16) else pytest.mark.deep,
        )
        for device in (A100, H200)
        for head_dim in (64, 128, 256)
        for dtype in (jnp.bfloat16, jnp.float32)
    ],
)
def test_the_delta_rule_keeps_its_states_in_registers_and_pages_in_place(device, head_dim, dtype):
    args = delta_rule_args(16, head_dim, dtype)
    result = gpu_compiler.compile_for(device, ops_of(triton).delta_rule, *args, donate_argnums=5)
    [(name, figures)] = result.kernels.items()
    assert (name, figures.threads, figures.spill_bytes) == ("delta_rule", 32, 0), figures
    assert figures.shared_memory <= 1024, figures  # of sums, not of states
    pages = args[5]
    assert result.aliased_bytes == 4 * pages.size and result.copies_of(pages.shape, pages.dtype) == 0
    assert result.temp_bytes == 0
