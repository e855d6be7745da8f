"""The arrays of a step, slot by slot, and the ladder of shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.request import SamplingParams
from jpaged.core.scheduler import Scheduler
from jpaged.runtime.batch import Bucket, Buckets, empty_batch, ladder, make_batch

LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=24)


def test_ladder():
    assert ladder(2, 16, 2) == (2, 4, 8, 16)
    assert ladder(16, 100, 4) == (16, 64, 100)
    assert ladder(16, 16, 4) == (16,)


@given(st.integers(1, 300), st.integers(1, 5000), st.data())
def test_every_step_fits_a_shape_and_wastes_little(seqs, tokens, data):
    tokens = max(seqs, tokens)
    buckets = Buckets(Limits(10**6, seqs, tokens))
    num_seqs = data.draw(st.integers(1, seqs))
    num_tokens = data.draw(st.integers(num_seqs, tokens))
    bucket = buckets.fit(num_tokens, num_seqs)
    assert bucket in buckets.all and len(set(buckets.all)) == len(buckets.all) <= 24
    assert bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
    assert bucket.decode == (num_tokens == num_seqs)
    if bucket.decode:
        assert bucket.num_seqs < max(3, 2 * num_seqs)
    else:
        assert bucket.num_tokens < max(17, 4 * num_tokens)


def test_no_shape_has_a_single_row():
    assert min(b.num_tokens for b in Buckets(Limits(8, 1, 1)).all) >= 2


def test_a_mixed_batch():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1), seed=2**33 + 5)
    scheduler.add("b", [6], SamplingParams(temperature=1e-7, top_k=-1), seed=-1)
    scheduler.update(scheduler.schedule(), [50, 51], [0.0, 0.0])
    scheduler.add("c", list(range(10, 19)), SamplingParams(), seed=0)
    bucket, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8)
    assert bucket == Bucket(16, 4, False)
    a, b, c = (r.sequences[0].table for r in scheduler.running.values())
    assert batch.tokens.tolist() == [50, 51, *range(10, 19)] + [0] * 5
    assert batch.positions.tolist() == [5, 1, *range(9)] + [0] * 5
    assert batch.slot_mapping.tolist() == [a.slot(5), b.slot(1), *(c.slot(i) for i in range(9))] + [-1] * 5
    assert batch.context_lens.tolist() == [6, 2, 9, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 11, 11]
    assert [batch.block_tables[i, : len(t.block_ids)].tolist() for i, t in enumerate((a, b, c))] == [
        t.block_ids for t in (a, b, c)
    ]
    assert batch.temperature.tolist() == [0.5, 0.0, 1.0, 0.0] and batch.top_k.tolist() == [7, 0, 0, 0]
    np.testing.assert_allclose(batch.top_p, [0.9, 1, 1, 1])
    np.testing.assert_allclose(batch.min_p, [0.1, 0, 0, 0])
    assert batch.seeds.tolist() == [[2, 5], [2**32 - 1, 2**32 - 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("bucket", Buckets(LIMITS).all)
def test_dtypes_do_not_depend_on_the_content(bucket):
    """Otherwise a step would compile again."""
    scheduler = Scheduler(BlockPool(64, 4), LIMITS, vocab_size=100)
    for i in range(4):
        scheduler.add(str(i), [1] * (1 + i), SamplingParams(seed=2**63), seed=2**63)
    _, full = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8)
    empty = empty_batch(bucket, 8)
    assert [x.dtype for x in full] == [x.dtype for x in empty]
    assert len(empty.tokens) == bucket.num_tokens and len(empty.context_lens) == bucket.num_seqs
