"""The shapes of steps."""

import jax
import numpy as np
import pytest

from jpaged.config import Limits
from jpaged.models.config import ModelConfig
from jpaged.runtime.batch import NO_ROW, Bucket, Buckets, Shapes
from jpaged.runtime.sampling_row import ROW
from tests.runtime.caches import placement_of

V = 97  # four words of masks
LLAMA = ModelConfig(
    vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture
def shapes() -> Shapes:
    return Shapes(Buckets(LIMITS), 8, V, placement_of(LLAMA))


def test_every_bucket_has_a_layout_and_masks_of_its_samples(shapes):
    assert shapes.layouts.keys() == set(shapes.buckets.all)
    assert shapes.no_bits.keys() == {bucket.num_seqs for bucket in shapes.buckets.all} == {1, 2, 4}
    for size, bits in shapes.no_bits.items():
        assert (bits.shape, bits.dtype, bits.devices()) == ((size, 4), np.uint32, {jax.devices()[0]})
        assert bits.committed and not bits.any()


def test_shapes_between_others_are_added(shapes):
    added = (Bucket(3, 3, True), Bucket(24, 4, False))
    shapes.add(added)
    assert set(added) < shapes.layouts.keys() == set(shapes.buckets.all)
    assert shapes.no_bits.keys() == {1, 2, 3, 4} and shapes.no_bits[3].shape == (3, 4)
    assert [shapes.buckets.fit(n, n, True).num_tokens for n in (2, 3, 4)] == [2, 3, 4]
    assert [shapes.buckets.fit(n, 1, False).num_tokens for n in (16, 24, 25)] == [24, 24, 32]
    assert len(shapes.layouts[added[0]].empty()[1].context_lens) == 3


@pytest.mark.parametrize("bucket, num_tokens", [(Bucket(4, 4, True), 3), (Bucket(32, 4, False), 9)])
def test_padding_may_compute_some_tokens_and_writes_nothing(shapes, bucket, num_tokens):
    buffer, layout = shapes.padding(bucket, num_tokens), shapes.layouts[bucket]
    batch, empty = layout.unpack(np.asarray(buffer)), layout.empty()[1]
    num_samples = min(num_tokens, 4)
    assert batch.num_tokens == num_tokens and batch.sampled_from.tolist() == [*range(num_samples)] + [0] * (
        4 - num_samples
    )
    rows = batch.samples.view(ROW)["rows"][:, 0].tolist()
    assert rows == [NO_ROW] * num_samples + [-1] * (4 - num_samples)
    assert (batch.slot_mapping[0] == -1).all()
    for name in ("tokens", "positions", "context_lens", "cu_q_lens", "decodes"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(empty, name))


def test_padding_may_be_a_sequence_with_drafts_on_a_context(shapes):
    bucket = Bucket(4, 4, True)
    batch = shapes.layouts[bucket].unpack(np.asarray(shapes.padding(bucket, 3, context=5)))
    assert batch.positions.tolist() == [5, 6, 7, 0] and batch.context_lens.tolist() == [6, 7, 8, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 3, 3] and batch.decodes.tolist() == [1, 1, 1, 0]
    assert not batch.block_tables[0].any() and (batch.slot_mapping[0] == -1).all(), "it writes nothing"


def test_padding_is_an_empty_batch(shapes):
    for bucket in shapes.buckets.all:
        buffer = shapes.padding(bucket)
        np.testing.assert_array_equal(buffer, shapes.layouts[bucket].empty()[0])
        assert buffer.devices() == {jax.devices()[0]} and buffer.committed
