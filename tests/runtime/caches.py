"""Layouts and places of KV pools for tests."""

from collections.abc import Sequence

import jax

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import layer_specs
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.placement import Placement
from pallas_kernels import select


def cache_of(model: ModelConfig, block_size: int, dtype: str) -> KVCache:
    """The reference's layout, whose head dim is the model's. Windows have no groups of their own."""
    kernels = select(
        "reference", platform="cpu", device_kind="cpu", compute_capability=None, dtype="float32",
        head_dim=model.head_dim, num_heads=model.num_attention_heads, num_kv_heads=model.num_key_value_heads,
        block_size=block_size,
    )  # fmt: skip
    return KVCache.of(model, block_size, dtype, kernels, layer_specs(model) if model.variation.recurrence else ())


def placement_of(model: ModelConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """The places of a model's arrays on some devices; by default on the first."""
    return Placement.on(devices or jax.devices()[:1], model)
