"""The KV blocks of an engine: the order of their moves, donation, and recovery."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.plan import StepPlan
from jpaged.models.config import ModelConfig
from jpaged.runtime.block_store import BlockStore
from jpaged.runtime.swap import TRANSFERS
from tests.runtime.caches import cache_of, placement_of

LLAMA = ModelConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
)  # fmt: skip


def numbered(num_host_blocks: int = 4, copy_sizes: tuple[int, ...] = (2, 8)) -> BlockStore:
    """Return a store of four blocks, each full of its own number."""
    store = BlockStore(cache_of(LLAMA, 8, "float32"), copy_sizes, placement_of(LLAMA))
    store.allocate(4, num_host_blocks, "seats")
    store.pool = [
        jax.device_put(jnp.full(x.shape, jnp.arange(4.0)[:, None, None, None]), x.sharding) for x in store.pool
    ]
    return store


def numbers(store: BlockStore) -> list[float]:
    """Return the number that fills each block, alike in all layers."""
    first = [float(number) for number in store.pool[0][:, 0, 0, 0]]
    for array in store.pool:
        np.testing.assert_array_equal(array, np.broadcast_to(np.reshape(first, (-1, 1, 1, 1)), array.shape))
    return first


def test_a_step_swaps_out_then_copies_then_swaps_in():
    """A block that the host takes in is overwritten by a copy, whose source is overwritten from the host."""
    store = numbered()
    store.apply(StepPlan(swap_out=((2, 5),)))
    store.apply(StepPlan(swap_out=((1, 6),), block_copies=((0, 1),), swap_in=((5, 0),)))
    assert numbers(store) == [2, 0, 2, 3]
    store.apply(StepPlan(swap_in=((6, 3),)))
    assert numbers(store) == [2, 0, 2, 1]


def test_the_pool_begins_empty_on_its_device():
    store = BlockStore(cache_of(LLAMA, 8, "float32"), (2, 8), placement_of(LLAMA))
    store.allocate(4, 4, "seats")
    assert numbers(store) == [0, 0, 0, 0]
    assert all(x.devices() == {jax.devices()[0]} and x.committed for x in store.pool)


def test_each_request_is_swapped_out():
    store = numbered()
    store.apply(StepPlan(swap_out=((0, 1), (3, 2))))
    store.apply(StepPlan(swap_in=((2, 0), (1, 3))))
    assert numbers(store) == [3, 1, 2, 0]


def test_a_copy_takes_the_pool_donated_and_nothing_else_does():
    store = numbered()
    before = store.pool
    store.apply(StepPlan())
    store.apply(StepPlan(swap_out=((2, 5),)))
    assert store.pool is before and not any(array.is_deleted() for array in before)
    store.apply(StepPlan(block_copies=((0, 1), (2, 3), (1, 0))))
    assert numbers(store) == [1, 0, 2, 2]
    assert all(array.is_deleted() for array in before)


def test_the_warm_up_makes_every_swap_and_moves_nothing(monkeypatch):
    store, swapped = numbered(), []
    there_and_back = store.swap_round_trip
    monkeypatch.setattr(store, "swap_round_trip", lambda size: (swapped.append(size), there_and_back(size))[1])
    store.warm_up()
    assert numbers(store) == [0, 1, 2, 3]
    assert tuple(swapped) == TRANSFERS and len(store.host) == 0


def test_the_warm_up_compiles_every_size_of_a_copy():
    """The sizes are of this test alone, for jax shares the executables of equal shapes."""
    store = numbered(copy_sizes=(3, 6))
    store.warm_up()
    size = store._copy._cache_size()
    store.apply(StepPlan(block_copies=((0, 0),)))
    store.apply(StepPlan(block_copies=((0, 0),) * 4))
    assert store._copy._cache_size() == size


def test_without_blocks_on_the_host_no_swap_is_compiled(monkeypatch):
    store = numbered(num_host_blocks=0)
    monkeypatch.delattr(BlockStore, "swap_round_trip")
    store.warm_up()


@pytest.mark.parametrize("count", [1, 5])
def test_block_0_swaps_there_and_back(count):
    store = numbered()
    assert store.swap_round_trip(count) is store.pool
    assert numbers(store) == [0, 1, 2, 3]


def test_recovery_allocates_the_pool_only_if_it_is_lost():
    store = numbered()
    store.apply(StepPlan(swap_out=((2, 5),)))
    store.recover()
    assert numbers(store) == [0, 1, 2, 3] and len(store.host) == 0
    pool = store.pool
    pool[1].delete()
    store.recover()
    assert numbers(store) == [0, 0, 0, 0]
    assert all(array.is_deleted() for array in pool), "the new pool may need the memory of the old one"
    assert [(x.shape, x.dtype, x.devices(), x.committed) for x in store.pool] == [
        (store.cache.shape(4), jnp.float32, {jax.devices()[0]}, True)
    ] * (2 * LLAMA.num_hidden_layers)
    store.apply(StepPlan(swap_out=((2, 5),), swap_in=((5, 0),)))


def test_exhaustion_names_the_setting_and_the_pool():
    store, error = numbered(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nat a buffer")
    words = (
        "seats: no memory is left with a KV pool of 4 blocks (0.00 GiB); use less (RESOURCE_EXHAUSTED: Out of memory)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$") as caught, store.exhaustion():
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: a fault"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, numbered().exhaustion():
        raise error
    assert caught.value is error
