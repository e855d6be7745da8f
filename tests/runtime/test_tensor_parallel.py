"""The parts of a step that are divided among devices, against the same parts on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.models.config import ModelConfig
from jpaged.runtime import tensor_parallel
from jpaged.runtime.placement import ALL, GROUP, KV, Placement
from jpaged.runtime.sampler import Sampled, SampleOptions
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.tensor_parallel import divide_kernels, sample_divided, whole_logits
from pallas_kernels import select, select_for
from tests.runtime.test_sampler import Row, logits_of, pack

NUM_TOP = 5
# Seven rows, which four devices can't divide; no two of them alike.
ROWS = [Row(temperature=i / 8, position=3 * i, output=(i, 9), pending=True, num_top=i) for i in range(7)]


def placement_of(vocab_size: int, num_devices: int = 4) -> Placement:
    """With two KV heads, so that four devices have both axes."""
    return Placement.on(jax.devices()[:num_devices], config_of(vocab_size))


def config_of(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture
def quick_sample(monkeypatch):
    """A function in place of `sample` that soon compiles and reads whole rows."""

    def sample(logits, state, sampling, options):
        values, tokens = jax.lax.top_k(logits + state.output_counts[sampling.rows], options.num_top)
        return Sampled(sampling.positions, values[:, 0] + sampling.temperature, sampling.num_top, tokens, -values)

    monkeypatch.setattr(tensor_parallel, "sample", sample)


@pytest.mark.parametrize("settings", [Settings.ANY, Settings.DRAWN])
@pytest.mark.parametrize("vocab_size, num_devices", [(96, 4), (97, 4), (96, 1)])
def test_divided_samples_are_those_of_one_device(quick_sample, vocab_size, num_devices, settings):
    """Of a vocabulary that the devices can divide, and of one that they can't. Tokens are counted for `ANY` only."""
    placement, logits = placement_of(vocab_size, num_devices), logits_of(3, len(ROWS), vocab_size=vocab_size)
    assert placement.splits_vocab == (vocab_size == 96 and num_devices == 4)
    state, sampling = pack(ROWS, vocab_size)
    run = lambda *args: sample_divided(*args, SampleOptions(NUM_TOP, settings=settings), placement)
    sampled, after = jax.jit(run)(logits, state, sampling)
    counts = state.output_counts.copy()
    if settings is Settings.ANY:
        counts[sampling.rows, sampling.last_tokens] += 1
    np.testing.assert_array_equal(after.output_counts, counts)
    values = logits + counts[sampling.rows].astype(np.float32)
    best = np.argsort(-values, axis=1, kind="stable")[:, :NUM_TOP]
    best_values = np.take_along_axis(values, best, axis=1)
    expected = sampling.positions, best_values[:, 0] + sampling.temperature, sampling.num_top, best, -best_values
    for array, other, kind in zip(sampled, expected, "ifiif", strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.dtype.kind == kind


@pytest.mark.parametrize("vocab_size", [96, 97])
def test_whole_logits_are_on_every_device(vocab_size):
    placement, logits = placement_of(vocab_size), logits_of(5, 3, vocab_size=vocab_size)
    spec = jax.P(None, ALL) if placement.splits_vocab else jax.P()
    found = whole_logits(jax.device_put(logits, jax.NamedSharding(placement.mesh, spec)), placement)
    assert [shard.data.shape for shard in found.addressable_shards] == [(3, vocab_size)] * 4
    np.testing.assert_array_equal(found, logits)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), jnp.float32)


def kernels():
    """The reference for fp8 pools. Its results also tell `work` and `decode_s`, which change none of them."""
    found = select(
        "reference", platform="cpu", device_kind="cpu", compute_capability=None, dtype="float32", head_dim=16,
        num_heads=4, num_kv_heads=2, block_size=4, pool_dtype="float8_e4m3fn",
    )  # fmt: skip
    whole = found.implementation

    def decode(*args):
        return jax.tree.map(lambda x: x + args[-1].work, whole.paged_decode_attention(*args))

    def ragged(*args):
        *_, decode_s, options = args
        return jax.tree.map(lambda x: x + options.work * decode_s[1], whole.ragged_paged_attention(*args))

    implementation = whole._replace(paged_decode_attention=decode, ragged_paged_attention=ragged)
    return replace(found, implementation=implementation)


def test_divided_kernels_recur_with_the_kernel_of_the_device():
    whole = select_for(jax.devices()[0], config_of(96), dtype="float32", block_size=16)
    divided = divide_kernels(whole, placement_of(96))
    assert divided.implementation.delta_rule.__wrapped__ is whole.implementation.delta_rule


def test_divided_kernels_compute_what_whole_ones_do():
    """Each head has its own scales, and keys have others than values."""
    placement, whole = placement_of(96), kernels()
    assert placement.mesh.shape == {KV: 2, GROUP: 2}
    scales = dict(k_scale_k=jnp.array([0.5, 0.25]), v_scale_k=jnp.array([2.0, 1.0]))
    q, k, v = normal(1, 6, 4, 16), normal(2, 6, 2, 16), normal(3, 6, 2, 16)
    angles = dict(cos_t=jnp.cos(normal(4, 6, 8)), sin_t=jnp.sin(normal(4, 6, 8)))
    pools = [normal(seed, 5, 2, 4, 16).astype(jnp.float8_e4m3fn) for seed in (5, 6)]
    tables, lens, slots = jnp.array([[3, 1], [2, 4]]), jnp.array([7, 5]), jnp.array([4, 5, -1, 17, 6, 0])
    further = dict(scale=0.3, window=6, soft_cap=2.0, return_lse=True, work=jnp.float32(0.125), **scales)

    def run(kernels):
        k_pool, v_pool, turned = kernels.write_kv(*pools, k, v, slots, q_tnh=q, **angles, **scales)
        copied = kernels.copy_blocks(k_pool, jnp.array([1, 0]), jnp.array([3, -1]))
        batch = copied, v_pool, tables, lens
        decoded = kernels.paged_decode_attention(q[:2], *batch, **further)
        flags = jnp.array([False, True])
        ragged = kernels.ragged_paged_attention(q, *batch, jnp.array([0, 1, 6]), decode_s=flags, **further)
        return k_pool, v_pool, turned, copied, decoded, ragged

    divided = divide_kernels(whole, placement)
    found, expected = jax.jit(lambda: run(divided))(), jax.jit(lambda: run(whole))()
    for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.float32(array), np.float32(other), rtol=1e-5, atol=1e-6)
