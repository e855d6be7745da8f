"""How many KV blocks fit into the memory of a device, and the errors of a pool that does not."""

import contextlib
import os
import re
import types

import jax
import pytest

from jpaged.config import EngineConfig, Limits
from jpaged.models.config import ModelConfig
from jpaged.runtime.batch import Bucket, Buckets, Shapes
from jpaged.runtime.lowering import Lowering
from jpaged.runtime.sampling_row import ROW_WORDS
from jpaged.start import pool as sizing
from tests.runtime.caches import cache_of, placement_of

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
        monkeypatch.setattr(sizing.os, "sysconf", found.__getitem__)

    return set_pages


def test_fitting_blocks():
    sizes = {"in_use": 20 * GIB, "temporaries": 2 * GIB, "utilization": 0.9, "bytes_per_block": 2**21}
    assert sizing.fitting_blocks(limit=100 * GIB, **sizes) == (90 - 22) * 512
    words = (
        "gpu_memory_utilization: 0.9 of 24.00 GiB leaves no memory for the KV pool after 20.00 GiB in use and 2.00 GiB "
        "of temporaries; a block takes 2.00 MiB"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        sizing.fitting_blocks(limit=24 * GIB, **sizes)


@pytest.mark.parametrize("limit, expected", [(110, 1), (119, 1), (120, 2), (109, None)])
def test_fitting_blocks_are_whole_and_at_least_one(limit, expected):
    sizes = {"in_use": 60, "temporaries": 40, "utilization": 1.0, "bytes_per_block": 10}
    if expected is None:
        with pytest.raises(ValueError, match="leaves no memory"):
            sizing.fitting_blocks(limit=limit, **sizes)
    else:
        found = sizing.fitting_blocks(limit=limit, **sizes)
        assert found == expected and isinstance(found, int)


def test_a_pool_on_a_cpu_takes_a_quarter_of_the_memory_and_at_most_4_gib(memory):
    assert sizing.cpu_num_blocks(100, 1024) == 100
    memory(1000)
    found = sizing.cpu_num_blocks(10**9, 1000)
    assert found == 1_024_000 // 1000 and isinstance(found, int)
    assert sizing.cpu_num_blocks(1, 2**60) == 1
    memory(2**30)
    assert sizing.cpu_num_blocks(10**9, 2**20) == 4096


@pytest.mark.parametrize("num_blocks", [5, 6])
def test_an_override_may_take_all_that_is_free(num_blocks):
    words = "num_gpu_blocks_override: 6 blocks take 3.00 GiB, more than the 2.50 GiB of free memory (at most 5 blocks)"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$") if num_blocks > 5 else contextlib.nullcontext():
        sizing.configured_num_blocks(EngineConfig(num_gpu_blocks_override=num_blocks), GIB // 2, 5 * GIB // 2)


def test_a_pool_in_bytes_has_the_blocks_that_fit():
    assert sizing.configured_num_blocks(EngineConfig(), 100, 1000) is None
    assert sizing.configured_num_blocks(EngineConfig(kv_cache_memory_bytes=999), 100, 1000) == 9
    with pytest.raises(ValueError, match=r"^kv_cache_memory_bytes: must be at least 100, .* not 99$"):
        sizing.configured_num_blocks(EngineConfig(kv_cache_memory_bytes=99), 100, 1000)
    with pytest.raises(ValueError, match=r"^kv_cache_memory_bytes: 11 blocks take .* \(at most 10 blocks\)$"):
        sizing.configured_num_blocks(EngineConfig(kv_cache_memory_bytes=1100), 100, 1000)


@pytest.mark.parametrize(
    "stats, expected", [({"bytes_limit": 100, "bytes_in_use": 30}, 70), ({"bytes_in_use": 30}, 5), (None, 5)]
)
def test_available_memory_is_the_least_of_all_devices_or_a_share_of_the_hosts(stats, expected, monkeypatch):
    monkeypatch.setattr(sizing, "available_host_memory", lambda: 11)
    assert sizing.available_memory([device_of({"bytes_limit": 200, "bytes_in_use": 10}), device_of(stats)]) == expected


def test_available_host_memory_is_that_of_the_machine():
    assert 2**20 < sizing.available_host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_available_host_memory_in_bytes(memory, monkeypatch, tmp_path):
    found = tmp_path / "meminfo"
    monkeypatch.setattr(sizing, "Path", lambda path: found if path == "/proc/meminfo" else None)
    memory(3)
    assert sizing.available_host_memory() == 3 * 4096  # where there is no such file
    found.write_text("MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  500 kB\nBuffers:  7 kB\n")
    assert sizing.available_host_memory() == 500 * 1024


def device_of(stats: dict[str, int] | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(memory_stats=lambda: stats)


def runner_on(devices: list[types.SimpleNamespace]) -> types.SimpleNamespace:
    """The parts of a runner with blocks of 10 bytes that the size of its pool depends on."""
    placement = types.SimpleNamespace(local_devices=devices, num_processes=1)
    return types.SimpleNamespace(placement=placement, blocks=types.SimpleNamespace(block_bytes=10))


@pytest.mark.parametrize(
    "sampling, model, expected, asked", [(40, 30, 5, [5]), (40, 40, 5, [5]), (40, 60, 3, [5]), (0, 0, 9, [9])]
)
def test_a_pool_leaves_room_on_every_device_for_the_part_of_a_step_that_needs_more(
    sampling, model, expected, asked, monkeypatch
):
    asked_for = []

    def of_model(runner: object, num_blocks: int) -> int:
        asked_for.append(num_blocks)
        return model

    monkeypatch.setattr(sizing, "sampling_temporaries", lambda runner: sampling)
    monkeypatch.setattr(sizing, "model_temporaries", of_model)
    devices = [device_of({"bytes_limit": 200, "bytes_in_use": used}) for used in (0, 10, 5)]
    assert sizing.fill_memory(runner_on(devices), 0.5, wanted=1000, moved_bytes=0) == expected
    assert asked_for == asked


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 10}])
def test_a_device_without_figures_has_a_modest_pool_and_compiles_nothing(stats, monkeypatch):
    monkeypatch.setattr(sizing, "cpu_num_blocks", lambda *args: args)
    runner = runner_on([device_of(stats)] * 2)
    assert sizing.fill_memory(runner, 0.5, wanted=7, moved_bytes=0) == (7, 20)


def test_temporaries_are_those_of_the_step_that_needs_most():
    def lowered(size: int | None) -> types.SimpleNamespace:
        analysis = None if size is None else types.SimpleNamespace(temp_size_in_bytes=size)
        return types.SimpleNamespace(compile=lambda: types.SimpleNamespace(memory_analysis=lambda: analysis))

    assert sizing.temporaries(map(lowered, (3, 9, None, 5))) == 9


class Lowered:
    """A jitted function that records the arguments of `lower`."""

    def __init__(self):
        self.calls = []

    def lower(self, *args):
        self.calls.append(args)
        return "lowered", len(self.calls)


def described(form) -> tuple:
    assert form.sharding.device_set == {jax.devices()[0]}
    return form.shape, str(form.dtype)


def test_the_largest_steps_are_measured(monkeypatch):
    """One decode step and one with prompts; only the latter scores its prompts."""
    measured = []
    monkeypatch.setattr(sizing, "temporaries", lambda steps: measured.append(list(steps)) or 12345)
    placement = placement_of(LLAMA)
    step = types.SimpleNamespace(forward=Lowered(), choose=Lowered(), score=Lowered())
    shapes = Shapes(Buckets(Limits(64, 4, 32)), 8, LLAMA.vocab_size, placement)
    arguments = leaves, state, last_tokens = [object()], object(), object()
    lowering = Lowering(step, shapes, cache_of(LLAMA, 8, "float32"), placement, *arguments, (64, "bfloat16"))
    runner = types.SimpleNamespace(shapes=shapes, lowering=lambda: lowering)
    decode, mixed = Bucket(4, 4, True), Bucket(32, 4, False)

    assert sizing.model_temporaries(runner, 7) == 12345
    for bucket, (params, pool, last, buffer, shape, slots) in zip((decode, mixed), step.forward.calls, strict=True):
        assert params is leaves and last is last_tokens and shape == bucket and slots is None
        assert [described(array) for array in pool] == [((7, 2, 8, 64), "float32")] * 6
        assert described(buffer) == described(shapes.padding(bucket))

    assert sizing.sampling_temporaries(runner) == 12345
    for call in step.choose.calls:
        assert call[:3] == (leaves, state, last_tokens)
        assert list(map(described, call[3:5])) == [((4, 64), "bfloat16"), ((4, ROW_WORDS), "int32")]
        assert described(call[5]) == described(shapes.no_bits[4])
    (scored,) = step.score.calls
    assert scored[0] is leaves
    assert list(map(described, scored[1:])) == [((32, 64), "bfloat16"), ((32,), "int32")]
    assert len(step.choose.calls) == 2 and [len(steps) for steps in measured] == [2, 3]
    assert all(lowered[0] == "lowered" for steps in measured for lowered in steps)
