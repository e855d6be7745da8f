"""How a step calls the ops: with each layer's own arrays, and the batch's layout unchanged."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from jpaged.models.config import ModelConfig
from jpaged.runtime.batch import Bucket, Layout
from jpaged.runtime.device_rows import empty_state
from jpaged.runtime.kv_cache import KVCache
from jpaged.runtime.sampling_row import COLUMNS, NEUTRAL, ROW, ROW_WORDS
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.step import Step, forward, sampling_of
from pallas_kernels import Weight
from tests.kernels.implementations import kernels_of
from tests.runtime.caches import placement_of
from tests.support.random_model import random_model

LLAMA = ModelConfig(
    vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
)  # fmt: skip


class Ops:
    """Ops that write down their arguments. Writing to layer l adds 10 to its keys and 20 to its values."""

    def __init__(self):
        self.writes: list[tuple] = []
        self.attended: list[tuple] = []

    def kernels(self):
        decode, ragged = (functools.partial(self.attend, name) for name in ("decode", "ragged"))
        return types.SimpleNamespace(
            head_dim=LLAMA.head_dim,
            write_kv=self.write_kv,
            paged_decode_attention=decode,
            ragged_paged_attention=ragged,
        )

    def write_kv(self, k, v, k_tkh, v_tkh, slots, *, cos_t, sin_t, q_tnh):
        self.writes.append((float(k.mean()), float(v.mean()), k_tkh.shape, v_tkh.shape, slots, cos_t, sin_t))
        return k + 10, v + 20, q_tnh

    def attend(self, name, q_tnh, k, v, *layout, **options):
        self.attended.append((name, float(k.mean()), float(v.mean()), layout, options))
        return jnp.zeros_like(q_tnh)


class RecordingProducts:
    """Products of the reference that record the rows they are asked for."""

    rms_norm = staticmethod(pallas_kernels.rms_norm)

    def __init__(self):
        self.wanted = []

    def product(self, *arguments, wanted_t, **options):
        self.wanted.append(wanted_t)
        return pallas_kernels.product(*arguments, **options)

    def products(self, *arguments, wanted_t):
        self.wanted.append(wanted_t)
        return pallas_kernels.products(*arguments)


@pytest.mark.parametrize(
    "decode, targets, last",
    [(False, [], [2, 5]), (False, [3], [0, 1, 2, 3, 4, 5]), (True, [], [0, 1, 2, 3, 4, 5])],
    ids=["samples", "logprobs of a prompt", "decode"],
)
def test_products_have_no_padding_and_after_the_last_attention_only_wanted_rows(decode, targets, last):
    kernels = RecordingProducts()
    _, batch = Layout(Bucket(8, 2, decode), 2).empty()
    batch.num_tokens[...], batch.sampled_from[:], batch.targets[targets] = 6, [2, 5], 1
    model = random_model(LLAMA, "float32", seed=0)
    pool = [jnp.zeros((2, 1, 4, LLAMA.head_dim))] * 6
    forward(model, KVCache.of(LLAMA, 4, "float32", Ops().kernels()), pool, batch, decode=decode, kernels=kernels)
    seen = [np.flatnonzero(wanted_t).tolist() for wanted_t in kernels.wanted]
    assert len(seen) == 3 * 4, "q with k and v, o, gate with up, down"
    assert seen[:-3] == [[0, 1, 2, 3, 4, 5]] * 9 and seen[-3:] == [last] * 3


def test_a_product_of_other_rows_than_tokens_is_computed_whole():
    class Other(nnx.Module):
        product, attention_specs = staticmethod(pallas_kernels.product), ()

        def __call__(self, tokens, positions, attend):
            return self.product(jnp.ones((2 * len(tokens), 4)), Weight(jnp.ones((3, 4))))

    kernels = RecordingProducts()
    _, batch = Layout(Bucket(8, 2, False), 2).empty()
    forward(Other(), KVCache.of(LLAMA, 4, "float32", Ops().kernels()), [], batch, decode=False, kernels=kernels)
    assert kernels.wanted == [None]


@pytest.mark.parametrize("decode", [True, False])
def test_each_layer_writes_and_attends_to_its_own_arrays(decode):
    ops, pool = Ops(), [jnp.full((2, 1, 4, LLAMA.head_dim), float(i)) for i in range(6)]
    _, batch = Layout(Bucket(8, 4, decode), 2).empty()
    model = random_model(LLAMA, "float32", seed=0)
    x_td, returned = forward(model, KVCache.of(LLAMA, 4, "float32", ops.kernels()), pool, batch, decode=decode)
    assert x_td.shape == (8, LLAMA.hidden_size)
    assert [float(array.mean()) for array in returned] == [10, 21, 12, 23, 14, 25]
    assert [float(array.mean()) for array in pool] == [0, 1, 2, 3, 4, 5], "the list of the caller is not changed"
    assert [write[:2] for write in ops.writes] == [(0, 1), (2, 3), (4, 5)]
    for _, _, k_shape, v_shape, slots, cos_t, sin_t in ops.writes:
        assert k_shape == v_shape == (8, 1, LLAMA.head_dim) and slots is batch.slot_mapping[0]
        # At position 0.
        np.testing.assert_array_equal(cos_t, jnp.ones((8, LLAMA.head_dim // 2)))
        np.testing.assert_array_equal(sin_t, jnp.zeros((8, LLAMA.head_dim // 2)))
    assert [call[1:3] for call in ops.attended] == [(10, 21), (12, 23), (14, 25)]
    for name, _, _, layout, options in ops.attended:
        expected = [batch.block_tables[0], batch.context_lens] + ([] if decode else [batch.cu_q_lens])
        assert name == ("decode" if decode else "ragged")
        assert list(map(id, layout)) == list(map(id, expected))
        assert options.pop("scale") == 0.25  # one over the root of the head dim
        assert options.pop("window") is None and options.pop("soft_cap") is None and options.pop("work") is None
        assert options.pop("sinks_n") is None
        assert [*map(id, options.values())] == ([] if decode else [id(batch.decodes)])


@pytest.mark.parametrize("decode", [True, False])
def test_only_a_decode_step_uses_the_decode_op(decode):
    called: list[str] = []

    def attend(name, q_tnh, *_, decode_s=None, **__):
        called.append(name)
        assert (decode_s is None) == (name == "decode")
        return jnp.zeros_like(q_tnh) if decode_s is None else jnp.where(decode_s[0], jnp.nan, q_tnh)

    decode_op, ragged_op = (functools.partial(attend, name) for name in ("decode", "ragged"))
    kernels = types.SimpleNamespace(
        head_dim=LLAMA.head_dim,
        write_kv=lambda k, v, *_, q_tnh, **__: (k, v, q_tnh),
        paged_decode_attention=decode_op,
        ragged_paged_attention=ragged_op,
    )
    graphdef, params = nnx.split(random_model(LLAMA, "float32", seed=0))
    leaves, treedef = jax.tree.flatten([params])
    pool = [jnp.zeros((2, 1, 4, LLAMA.head_dim)) for _ in range(6)]
    bucket = Bucket(8, 4, decode)
    layouts = {bucket: Layout(bucket, 2)}
    buffer, batch = layouts[bucket].empty()
    batch.tokens[:3] = 5, -2, -1  # the last samples of rows 1 and 0
    batch.positions[:3] = 7, 8, 9
    batch.sampled_from[:] = 1, 0, 2, 3
    batch.decodes[:] = 0, 1, 1, 1
    step = Step(graphdef, treedef, KVCache.of(LLAMA, 4, "float32", kernels), layouts, placement_of(LLAMA))
    (x_sd, rows_sf, x_td, targets_t), pool = step.forward(leaves, pool, jnp.array([30, 31]), buffer, bucket)
    assert rows_sf.tolist() == batch.samples.tolist()
    assert targets_t is None if decode else targets_t.tolist() == batch.targets.tolist()
    assert called == ["decode" if decode else "ragged"] * 3
    assert x_sd.shape == (4, LLAMA.hidden_size) and len(pool) == 6
    assert x_td is None if decode else x_td.shape == (8, LLAMA.hidden_size) and jnp.isfinite(x_td).all()
    if not decode:
        batch.decodes[:] = 1, 0, 0, 0
        (x_sd, *_), _ = step.forward(leaves, pool, jnp.array([30, 31]), buffer, bucket)
        assert jnp.isnan(x_sd).all()


def test_every_setting_of_a_row_is_unpacked_with_its_dtype():
    rows = np.full(4, NEUTRAL)
    for i, (name, column) in enumerate(COLUMNS.items()):
        values = np.arange(4 * math.prod(column.shape)).reshape(4, *column.shape)
        rows[name] = values % 2 if column.dtype is bool else values + 10 * i
    bits = np.arange(8, dtype=np.uint32).reshape(4, 2)
    sampling = sampling_of(jnp.asarray(rows.view(np.int32).reshape(4, ROW_WORDS)), bits)
    for name, column in COLUMNS.items():
        array = getattr(sampling, name)
        assert array.tolist() == rows[name].tolist() and array.dtype == column.dtype, name
    assert sampling.allowed_bits is bits and ROW.itemsize == 4 * ROW_WORDS


def test_samples_are_the_last_tokens_of_their_rows():
    """The token before a sample is counted if it is output; a negative one is the last sample of a row."""
    graphdef, params = nnx.split(random_model(LLAMA, "float32", seed=0))
    leaves, treedef = jax.tree.flatten([params])
    cache = KVCache.of(LLAMA, 4, "float32", kernels_of(pallas_kernels.reference))
    step = Step(graphdef, treedef, cache, {}, placement_of(LLAMA))
    samples = np.full(4, NEUTRAL)
    samples["rows"], samples["stateful"], samples["num_prompt_tokens"] = (0, 2, 3, -1), (1, 1, 1, 0), 4
    samples["positions"], samples["last_tokens"] = (5, 5, 4, 5), (7, -2, 8, 9)
    last_tokens, state = jnp.array([35, 36, 37, 38]), empty_state(4, LLAMA.vocab_size)
    x_sd = jnp.asarray(np.random.default_rng(0).normal(size=(4, LLAMA.hidden_size)), jnp.float32)
    bits = np.zeros((4, 2), np.uint32)
    rows_sf = samples.view(np.int32).reshape(4, ROW_WORDS)
    chosen, _, after, last = step.choose(leaves, state, last_tokens, x_sd, rows_sf, bits, Settings.ANY)
    tokens = chosen[0].tolist()
    assert last.tolist() == [tokens[0], 36, *tokens[1:3]]
    assert np.argwhere(after.output_counts).tolist() == [[0, 7], [2, 36]]
    assert last_tokens.is_deleted() and all(array.is_deleted() for array in state)
