"""The KV pool: the size of its blocks, and its arrays."""

import dataclasses
import types

import jax.numpy as jnp
import pytest

from jpaged.core.groups import Groups
from jpaged.models.base import AttentionSpec
from jpaged.models.config import ModelConfig
from jpaged.runtime.kv_cache import KVCache
from tests.runtime.caches import cache_of, placement_of

GIB = 2**30
LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip


def test_block_bytes():
    # Keys and values of 3 layers: 2 heads, 16 tokens, 128 numbers of 2 bytes.
    wide = dataclasses.replace(cache_of(LLAMA, 16, "bfloat16"), head_dim=128)
    assert wide.block_bytes == 2 * 3 * 2 * 16 * 128 * 2
    assert cache_of(LLAMA, 8, "float32").block_bytes == 2 * 3 * 2 * 8 * 64 * 4
    assert cache_of(LLAMA, 8, "float8_e4m3fn").block_bytes == 2 * 3 * 2 * 8 * 64


def test_the_pool_is_zero():
    sharding = placement_of(LLAMA).pool
    pool = dataclasses.replace(cache_of(LLAMA, 8, "bfloat16"), head_dim=128).allocate(5, 0, sharding)
    assert len(pool) == 2 * LLAMA.num_hidden_layers and len({id(array) for array in pool}) == len(pool)
    for array in pool:
        assert (array.shape, array.dtype) == ((5, 2, 8, 128), jnp.bfloat16) and not array.any()
        assert array.sharding == sharding and array.committed


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_ops_are_told_scales_of_an_fp8_pool_and_angles_of_keys_that_are_to_be_rotated(dtype, decode, rotated):
    calls = {}

    def write_kv(*args, **options):
        calls["write"] = args, options
        return ("new k", "new v", "rotated q") if rotated else ("new k", "new v")

    def attend(name):
        return lambda *args, **options: calls.update({name: (args, options)}) or "attention"

    kernels = types.SimpleNamespace(
        write_kv=write_kv, paged_decode_attention=attend("decode"), ragged_paged_attention=attend("ragged")
    )
    cache = KVCache(Groups(2, (None,), ((0, 0), (0, 1))), 3, 8, 64, dtype, kernels, windows=(5, 7))
    batch = types.SimpleNamespace(
        slot_mapping=("slots",), block_tables=("tables",), context_lens="lens", cu_q_lens="starts", decodes="decodes",
        work=("lists of 5", "lists of 7"),
    )  # fmt: skip
    pool, angles = ["k0", "v0", "k1", "v1"], ("cos", "sin") if rotated else (None, None)
    spec = AttentionSpec(0.5, window=7)
    assert cache.attend(pool, 1, spec, batch, decode, ("q", "k", "v"), angles) == "attention"
    assert pool == ["k0", "v0", "new k", "new v"]
    writing, (attending, options) = calls["write"], calls["decode" if decode else "ragged"]
    assert writing[0] == ("k1", "v1", "k", "v", "slots") and len(calls) == 2
    layout = ("tables", "lens") if decode else ("tables", "lens", "starts")
    assert attending == ("rotated q" if rotated else "q", "new k", "new v", *layout)
    for given in (writing[1], options):
        scales = {name: given.pop(name) for name in ("k_scale_k", "v_scale_k") if name in given}
        assert len(scales) == (2 if "float8" in dtype else 0)
        assert all(scale.tolist() == [1, 1, 1] and scale.dtype == jnp.float32 for scale in scales.values())
    assert writing[1] == ({"cos_t": "cos", "sin_t": "sin", "q_tnh": "q"} if rotated else {})
    assert options == spec._asdict() | {"work": "lists of 7", "sinks_n": None} | (
        {} if decode else {"decode_s": "decodes"}
    )
