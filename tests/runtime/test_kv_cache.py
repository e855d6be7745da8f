"""The size of the KV pool, the errors of one that does not fit, and its arrays."""

import contextlib
import dataclasses
import os
import re
import types

import jax
import jax.numpy as jnp
import pytest

from jpaged.config import ModelConfig
from jpaged.runtime import kv_cache
from tests.runtime.caches import cache_of

GIB = 2**30
LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory of the host, in pages of 4,096 bytes."""

    def set_pages(count: int) -> None:
        found = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": count}
        monkeypatch.setattr(kv_cache.os, "sysconf", found.__getitem__)

    return set_pages


def test_block_bytes():
    # Keys and values of 3 layers: 2 heads, 16 tokens, 128 numbers of 2 bytes.
    wide = dataclasses.replace(cache_of(LLAMA, 16, "bfloat16"), head_dim=128)
    assert wide.block_bytes == 2 * 3 * 2 * 16 * 128 * 2
    assert cache_of(LLAMA, 8, "float32").block_bytes == 2 * 3 * 2 * 8 * 64 * 4
    assert cache_of(LLAMA, 8, "float8_e4m3fn").block_bytes == 2 * 3 * 2 * 8 * 64


def test_fitting_blocks():
    sizes = {"in_use": 20 * GIB, "temporaries": 2 * GIB, "utilization": 0.9, "bytes_per_block": 2**21}
    assert kv_cache.fitting_blocks(limit=100 * GIB, **sizes) == (90 - 22) * 512
    words = (
        "gpu_memory_utilization: 0.9 of 24.00 GiB leaves no room for the KV pool beside 20.00 GiB in use and 2.00 GiB "
        "of temporaries; a block takes 2.00 MiB"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        kv_cache.fitting_blocks(limit=24 * GIB, **sizes)


@pytest.mark.parametrize("limit, expected", [(110, 1), (119, 1), (120, 2), (109, None)])
def test_fitting_blocks_are_whole_and_at_least_one(limit, expected):
    sizes = {"in_use": 60, "temporaries": 40, "utilization": 1.0, "bytes_per_block": 10}
    if expected is None:
        with pytest.raises(ValueError, match="leaves no room"):
            kv_cache.fitting_blocks(limit=limit, **sizes)
    else:
        found = kv_cache.fitting_blocks(limit=limit, **sizes)
        assert found == expected and isinstance(found, int)


def test_a_pool_on_a_cpu_takes_a_quarter_of_the_memory_and_at_most_4_gib(memory):
    assert kv_cache.modest_blocks(100, 1024) == 100
    memory(1000)
    found = kv_cache.modest_blocks(10**9, 1000)
    assert found == 1_024_000 // 1000 and isinstance(found, int)
    assert kv_cache.modest_blocks(1, 2**60) == 1
    memory(2**30)
    assert kv_cache.modest_blocks(10**9, 2**20) == 4096


@pytest.mark.parametrize("num_blocks", [5, 6])
def test_an_override_may_take_all_that_is_free(num_blocks):
    words = (
        "num_gpu_blocks_override: 6 blocks take 3.00 GiB, more than the 2.50 GiB of memory that are free (at most 5 "
        "blocks)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$") if num_blocks > 5 else contextlib.nullcontext():
        kv_cache.check_override(num_blocks, GIB // 2, 5 * GIB // 2)


@pytest.mark.parametrize(
    "stats, expected", [({"bytes_limit": 100, "bytes_in_use": 30}, 70), ({"bytes_in_use": 30}, 5), (None, 5)]
)
def test_available_memory_is_the_devices_if_it_tells_and_else_the_hosts(stats, expected, monkeypatch):
    monkeypatch.setattr(kv_cache, "available_host_memory", lambda: 5)
    assert kv_cache.available_memory(types.SimpleNamespace(memory_stats=lambda: stats)) == expected


def test_available_host_memory_is_that_of_the_machine():
    assert 2**20 < kv_cache.available_host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_available_host_memory_in_bytes(memory, monkeypatch, tmp_path):
    found = tmp_path / "meminfo"
    monkeypatch.setattr(kv_cache, "Path", lambda path: found if path == "/proc/meminfo" else None)
    memory(3)
    assert kv_cache.available_host_memory() == 3 * 4096  # where there is no such file
    found.write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\nBuffers:  7 kB\n")
    assert kv_cache.available_host_memory() == 500 * 1024


def test_exhaustion_names_the_field_and_the_pool():
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat a buffer")
    words = "seats: no memory is left with a KV pool of 7 blocks; use less (RESOURCE_EXHAUSTED: Out of memory)"
    with (
        pytest.raises(ValueError, match=f"^{re.escape(words)}$") as caught,
        kv_cache.exhaustion_named("seats", "7 blocks"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: a fault"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, kv_cache.exhaustion_named("seats", "7 blocks"):
        raise error
    assert caught.value is error


def test_the_pool_is_zero():
    device = jax.devices()[0]
    pool = dataclasses.replace(cache_of(LLAMA, 8, "bfloat16"), head_dim=128).allocate(5, device)
    assert len(pool) == 2 * LLAMA.num_hidden_layers and len({id(array) for array in pool}) == len(pool)
    for array in pool:
        assert (array.shape, array.dtype) == ((5, 2, 8, 128), jnp.bfloat16) and not array.any()
        assert array.devices() == {device} and array.committed
