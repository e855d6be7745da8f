"""The KV pool: the size of its blocks, and its arrays."""

import dataclasses

import jax
import jax.numpy as jnp

from jpaged.config import ModelConfig
from tests.runtime.caches import cache_of

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
    device = jax.devices()[0]
    pool = dataclasses.replace(cache_of(LLAMA, 8, "bfloat16"), head_dim=128).allocate(5, device)
    assert len(pool) == 2 * LLAMA.num_hidden_layers and len({id(array) for array in pool}) == len(pool)
    for array in pool:
        assert (array.shape, array.dtype) == ((5, 2, 8, 128), jnp.bfloat16) and not array.any()
        assert array.devices() == {device} and array.committed
