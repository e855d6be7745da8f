"""Blocks on the host: they return as they left, to any place, in transfers of few sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config import ModelConfig
from jpaged.runtime.kv_cache import gather, scatter
from jpaged.runtime.swap import TRANSFERS, HostBlocks
from tests.runtime.caches import placement_of

LAYERS, BLOCKS, SHAPE = 3, 150, (2, 4, 8)
LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


@pytest.fixture
def host() -> HostBlocks:
    return HostBlocks(placement_of(LLAMA), gather, scatter, 1)


def content(block: int, layer: int) -> int:
    return 1 + block + BLOCKS * layer


def full_pool() -> list[jax.Array]:
    """Arrays [P, K, B, H], each block of which holds a number of its own."""
    return [
        jnp.broadcast_to(content(np.arange(BLOCKS), layer)[:, None, None, None], (BLOCKS, *SHAPE)).astype(jnp.float32)
        for layer in range(2 * LAYERS)
    ]


def empty_pool() -> list[jax.Array]:
    return [jnp.zeros((BLOCKS, *SHAPE), jnp.float32) for _ in range(2 * LAYERS)]


def assert_holds(pool: list[jax.Array], expected: dict[int, int]) -> None:
    """Assert that block b of a pool equals block expected[b] of a full pool, and that all others are zero."""
    for layer, array in enumerate(pool):
        numbers = np.asarray([content(expected[b], layer) if b in expected else 0 for b in range(BLOCKS)])
        np.testing.assert_array_equal(array, np.broadcast_to(numbers[:, None, None, None], array.shape))


@pytest.mark.parametrize("count", [1, 4, 5, 16, 17, 64, 65, 68, 130])
def test_blocks_return_as_they_left(host, count):
    pool = full_pool()
    host.swap_out(pool, [(BLOCKS - 1 - i, 1000 + i) for i in range(count)])
    assert len(host) == count
    assert_holds(pool, {b: b for b in range(BLOCKS)})
    returned = host.swap_in(empty_pool(), [(1000 + i, i) for i in range(count)])
    assert_holds(returned, {i: BLOCKS - 1 - i for i in range(count)})
    again = host.swap_in(empty_pool(), [(1000 + i, i + 1) for i in range(count)])
    assert_holds(again, {i + 1: BLOCKS - 1 - i for i in range(count)})
    assert len(host) == count, "copies stay until their ids are given to others"


@pytest.mark.parametrize("count", [1, *(size + more for size in TRANSFERS for more in (0, 1))])
def test_a_transfer_is_the_smallest_that_holds_its_blocks(host, count, monkeypatch):
    sizes, gathered = [], host._gather
    monkeypatch.setattr(host, "_gather", lambda pool, ids: (sizes.append(len(ids)), gathered(pool, ids))[1])
    host.swap_out(full_pool(), [(i, i) for i in range(count)])
    last = min(size for size in TRANSFERS if size >= (count - 1) % TRANSFERS[-1] + 1)
    assert sizes == [TRANSFERS[-1]] * ((count - 1) // TRANSFERS[-1]) + [last]


def test_blocks_of_several_requests_return_in_any_order(host):
    pool = full_pool()
    for first in (0, 10, 20):
        host.swap_out(pool, [(first + i, first + i) for i in range(6)])
    pool = host.swap_in(empty_pool(), [(first + i, 40 + first + i) for first in (20, 0) for i in reversed(range(6))])
    assert_holds(pool, {40 + first + i: first + i for first in (0, 20) for i in range(6)})
    assert_holds(host.swap_in(pool, [(10 + i, i) for i in range(6)]), {
        **{40 + first + i: first + i for first in (0, 20) for i in range(6)}, **{i: 10 + i for i in range(6)},
    })  # fmt: skip


def test_an_id_that_is_given_to_another_block_holds_that_one(host):
    pool = full_pool()
    host.swap_out(pool, [(1, 5), (2, 6)])
    host.swap_out(pool, [(4, 6)])
    assert len(host) == 2
    assert_holds(host.swap_in(empty_pool(), [(6, 0), (5, 1)]), {0: 4, 1: 1})


def test_large_blocks_move_in_small_transfers_on_a_cpu():
    host = HostBlocks(placement_of(LLAMA), gather, scatter, 2**21)
    assert host.transfers == TRANSFERS[:2]
    host.swap_out(full_pool(), [(i, i) for i in range(21)])
    assert_holds(host.swap_in(empty_pool(), [(i, i + 1) for i in range(21)]), {i + 1: i for i in range(21)})
    assert HostBlocks(placement_of(LLAMA), gather, scatter, 2**30).transfers == TRANSFERS[:1]


def test_the_pool_is_donated_and_the_blocks_lie_in_pinned_memory(host):
    device = jax.devices()[0]
    pool = full_pool()
    host.swap_out(pool, [(1, 5)])
    kind = device.default_memory().kind if device.platform == "cpu" else "pinned_host"
    (block,) = host._blocks.values()
    assert block.sharding.memory_kind == kind and block.shape == (2 * LAYERS, *SHAPE)
    assert not any(array.is_deleted() for array in pool)
    returned = host.swap_in(pool, [(5, 1)])
    assert all(array.is_deleted() for array in pool)
    assert {array.sharding.memory_kind for array in returned} == {device.default_memory().kind}
