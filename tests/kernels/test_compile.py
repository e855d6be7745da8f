"""The Mosaic GPU kernels compiled for an H200 without one: what ptxas and XLA say of them."""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import mosaic
from tests import deviceless

pytestmark = pytest.mark.skipif(deviceless.why_not() is not None, reason=str(deviceless.why_not()))

REGISTERS_PER_SM = 65_536
SHARED_MEMORY_PER_SM = 233_472  # a thread block takes 1 KiB of it for itself
MODELS = {  # N, K, H, dtype
    "Llama-3-8B": (32, 8, 128, jnp.bfloat16),
    "Llama-3.2-1B": (32, 8, 64, jnp.bfloat16),
    "Llama-2-7B": (32, 32, 128, jnp.float16),
    "tiny": (4, 2, 64, jnp.bfloat16),
    "head dim 256": (16, 1, 256, jnp.bfloat16),
}
CASES = [
    ("Llama-3-8B", 16),
    ("Llama-3-8B", 64),
    ("Llama-3.2-1B", 16),
    ("Llama-3.2-1B", 64),
    ("Llama-2-7B", 16),
    ("Llama-2-7B", 64),
    ("tiny", 8),
    ("head dim 256", 128),
]
S = jax.ShapeDtypeStruct


@functools.cache
def compiled(model: str, block_size: int) -> dict[str, deviceless.KernelFigures]:
    """All ops of a model in one function, their kernels by name."""
    n, k, h, dtype = MODELS[model]
    t, s, w = 512, 16, 8192 // block_size
    q, kv, pool = S((t, n, h), dtype), S((t, k, h), dtype), S((4096, k, block_size, h), dtype)
    ints = {shape: S((shape,), jnp.int32) for shape in (s, s + 1, t)}

    def ops(q, k, v, k_pool, v_pool, slots, tables, contexts, cu):
        k_pool, v_pool = mosaic.write_kv(k_pool, v_pool, k, v, slots)
        o = mosaic.ragged_paged_attention(q, k_pool, v_pool, tables, contexts, cu, scale=h**-0.5)
        return o, mosaic.paged_decode_attention(o[:s], k_pool, v_pool, tables, contexts, scale=h**-0.5), k_pool, v_pool

    args = (q, kv, kv, pool, pool, ints[t], S((s, w), jnp.int32), ints[s], ints[s + 1])
    return deviceless.compile_for_h200(ops, *args, donate_argnums=(3, 4)).kernels


@pytest.mark.parametrize(("model", "block_size"), CASES)
def test_kernels_fit(model, block_size):
    kernels = compiled(model, block_size)
    assert kernels.keys() == {"kv_write", "paged_decode", "paged_decode_combine", "ragged_paged"}
    for name, figures in kernels.items():
        assert figures.spill_bytes == 0, (name, figures)
        assert figures.registers * figures.threads <= REGISTERS_PER_SM, (name, figures)
        assert figures.shared_memory < deviceless.H200_SHARED_MEMORY, (name, figures)
        assert not figures.wgmma_serialised, (name, figures)
    assert kernels["paged_decode"].wgmma and kernels["ragged_paged"].wgmma, "no tensor cores"
    assert kernels["paged_decode"].tma and kernels["ragged_paged"].tma, "no TMA"


@pytest.mark.parametrize("model", ["Llama-3-8B", "Llama-3.2-1B"])
def test_two_decode_blocks_share_an_sm(model):
    """One computes while the other waits for memory."""
    figures = compiled(model, 16)["paged_decode"]
    assert 2 * (figures.shared_memory + 1024) <= SHARED_MEMORY_PER_SM
    assert 2 * figures.registers * figures.threads <= REGISTERS_PER_SM


def step(write_kv, k, v, slots, pools, *, order=None):
    """Four layers' KV writes, and results in `order`."""
    out = []
    for layer in range(0, len(pools), 2):
        out += write_kv(pools[layer], pools[layer + 1], k + layer, v + layer, slots)
    return out if order is None else [out[i] for i in order]


POOL, TOKENS = (4096, 8, 16, 128), (64, 8, 128)
POOL_BYTES = 4096 * 8 * 16 * 128 * 2
STEP_ARGS = (
    S(TOKENS, jnp.bfloat16),
    S(TOKENS, jnp.bfloat16),
    S(TOKENS[:1], jnp.int32),
    [S(POOL, jnp.bfloat16)] * 8,
)


def test_donated_pools_are_written_in_place():
    fn = functools.partial(step, mosaic.write_kv)
    result = deviceless.compile_for_h200(fn, *STEP_ARGS, donate_argnums=3, figures=False)
    assert result.aliased_bytes == 8 * POOL_BYTES
    assert result.copies_of(POOL, jnp.bfloat16) == 0
    assert result.temp_bytes < POOL_BYTES / 10


def test_copies_would_be_seen():
    """Results in another order than the donated arguments: XLA aliases all bytes, and copies pools all the same."""
    fn = functools.partial(step, mosaic.write_kv, order=[0, 2, 4, 6, 1, 3, 5, 7])
    result = deviceless.compile_for_h200(fn, *STEP_ARGS, donate_argnums=3, figures=False)
    assert result.aliased_bytes == 8 * POOL_BYTES
    assert result.copies_of(POOL, jnp.bfloat16) > 0
    assert result.temp_bytes >= POOL_BYTES


def test_compiling_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    x = S((1, 1, 64), jnp.bfloat16)
    pool = S((2, 1, 8, 64), jnp.bfloat16)
    result = deviceless.compile_for_h200(mosaic.write_kv, pool, pool, x, x, S((1,), jnp.int32))
    assert len(result.kernels) == 1
    assert not list(pathlib.Path(tmp_path).iterdir())
    assert not [name for name in os.environ if name.startswith("MOSAIC_GPU_DUMP")]
