"""Layouts of KV pools for tests."""

from jpaged.config import ModelConfig
from jpaged.runtime.kv_cache import KVCache
from pallas_kernels import select


def cache_of(model: ModelConfig, block_size: int, dtype: str) -> KVCache:
    """The reference's layout, whose head dim is the model's."""
    kernels = select(
        "reference", platform="cpu", device_kind="cpu", compute_capability=None, dtype="float32",
        head_dim=model.head_dim, num_heads=model.num_attention_heads, num_kv_heads=model.num_key_value_heads,
        block_size=block_size,
    )  # fmt: skip
    return KVCache.of(model, block_size, dtype, kernels)
