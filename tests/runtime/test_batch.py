"""The arrays of a step, slot by slot, and the ladder of shapes."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.request import Sample, SequenceResult
from jpaged.core.scheduler import Scheduler
from jpaged.runtime.batch import Bucket, Buckets, empty_batch, ladder, make_batch
from jpaged.runtime.masks import Masks

LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=24)


def test_ladder():
    assert ladder(2, 16, 2) == (2, 4, 8, 16)
    assert ladder(16, 100, 4) == (25, 100)
    assert ladder(16, 2048, 4) == (32, 128, 512, 2048)
    assert ladder(16, 16, 4) == (16,)


@given(st.integers(1, 300), st.integers(1, 5000), st.data())
def test_every_step_fits_a_shape_and_wastes_little(seqs, tokens, data):
    tokens = max(seqs, tokens)
    buckets = Buckets(Limits(10**6, seqs, tokens))
    num_seqs = data.draw(st.integers(1, seqs))
    num_tokens = data.draw(st.integers(num_seqs, tokens))
    bucket = buckets.fit(num_tokens, num_seqs, num_tokens == num_seqs)
    assert bucket in buckets.all and len(set(buckets.all)) == len(buckets.all) <= 24
    assert bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
    assert bucket.decode == (num_tokens == num_seqs)
    if bucket.decode:
        assert bucket.num_seqs < max(3, 2 * num_seqs)
    else:
        assert bucket.num_tokens < max(64, 4 * num_tokens)


@pytest.mark.parametrize(
    "seqs, tokens, decode, mixed",
    [
        (1, 1, [2], [(16, 1)]),
        (8, 64, [2, 4, 8], [(16, 8), (64, 8)]),
        (9, 100, [2, 3, 5, 9], [(25, 8), (25, 9), (100, 8), (100, 9)]),
    ],
)
def test_the_ladders(seqs, tokens, decode, mixed):
    buckets = Buckets(Limits(10**6, seqs, tokens))
    assert buckets.decode == tuple(Bucket(s, s, True) for s in decode)
    assert buckets.mixed == tuple(Bucket(t, s, False) for t, s in mixed)


def test_no_shape_has_a_single_row():
    assert min(b.num_tokens for b in Buckets(Limits(8, 1, 1)).all) >= 2


def test_a_mixed_batch():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1), seed=2**33 + 5)
    scheduler.add("b", [6], SamplingParams(temperature=1e-7), seed=-1)
    scheduler.update(scheduler.schedule(), [SequenceResult([Sample(token, 0.0)]) for token in (50, 51)])
    scheduler.add("c", list(range(10, 19)), SamplingParams(), seed=-1)
    bucket, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert bucket == Bucket(24, 4, False)
    a, b, c = (r.sequences[0].table for r in scheduler.running)
    assert batch.tokens.tolist() == [50, 51, *range(10, 19)] + [0] * 13
    assert batch.positions.tolist() == [5, 1, *range(9)] + [0] * 13
    assert batch.slot_mapping.tolist() == [a.slot(5), b.slot(1), *(c.slot(i) for i in range(9))] + [-1] * 13
    assert batch.context_lens.tolist() == [6, 2, 9, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 11, 11]
    assert [batch.block_tables[i, : len(t.block_ids)].tolist() for i, t in enumerate((a, b, c))] == [
        t.block_ids for t in (a, b, c)
    ]
    assert batch.sampled_from.tolist() == [0, 1, 10, 0]
    sampling = batch.sampling
    assert sampling.positions.tolist() == [6, 2, 9, 0]
    assert sampling.temperature.tolist() == [0.5, 0.0, 1.0, 0.0] and sampling.top_k.tolist() == [7, 0, 0, 0]
    np.testing.assert_allclose(sampling.top_p, [0.9, 1, 1, 1])
    np.testing.assert_allclose(sampling.min_p, [0.1, 0, 0, 0])
    assert sampling.seeds.tolist() == [[2, 5], [0, 0], [2**32 - 1, 2**32 - 1], [0, 0]]
    assert not (sampling.stateful.any() or sampling.masked.any() or sampling.beam.any() or sampling.num_top.any())


def test_several_samples_of_one_prompt():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1, 2, 3], SamplingParams(n=3, logprobs=0), seed=2**64 - 1)
    scheduler.add("b", [4], BeamSearchParams(beam_width=1, stop_token_ids=[7, 8]), seed=0)
    bucket, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert bucket == Bucket(24, 4, False)
    assert batch.sampled_from.tolist() == [2, 2, 2, 3] and batch.sampling.positions.tolist() == [3, 3, 3, 1]
    assert batch.sampling.seeds[:3].tolist() == [[2**32 - 1, 2**32 - 1], [0, 0], [0, 1]]
    assert batch.sampling.num_top.tolist() == [1, 1, 1, 3], "a beam brings one that goes on beside two that may end it"
    assert batch.sampling.beam.tolist() == [False, False, False, True]


def test_a_prompt_row_is_never_a_decode_row():
    """Its chunk depends on the other requests, and its bits must not."""
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1], SamplingParams(n=3, max_tokens=4), seed=0)
    decision = scheduler.schedule()
    bucket, batch = make_batch(decision, Buckets(LIMITS), 4, 8, 100)
    assert bucket == Bucket(24, 4, False) and batch.sampled_from.tolist() == [0] * 4 and not batch.decodes.any()
    scheduler.update(decision, [SequenceResult([Sample(8, -1.0)] * 3)])
    bucket, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert bucket == Bucket(4, 4, True) and batch.decodes.tolist() == [True] * 3 + [False]


def test_decode_rows_of_a_mixed_step():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1, 2], SamplingParams(max_tokens=4), seed=0)
    scheduler.update(scheduler.schedule(), [SequenceResult([Sample(8, -1.0)])])
    scheduler.add("b", [3], SamplingParams(max_tokens=4), seed=0)
    scheduler.add("c", [4, 5], SamplingParams(max_tokens=4), seed=0)
    bucket, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert not bucket.decode and batch.decodes.tolist() == [True, False, False, False]


def test_state_masks_and_targets():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100, eos_token_ids=[2])
    params = SamplingParams(
        prompt_logprobs=2, min_tokens=2, stop_token_ids=[40], presence_penalty=0.5, frequency_penalty=-1.0,
        repetition_penalty=1.5,
    )  # fmt: skip
    scheduler.add("a", [1, 2, 3], params, seed=0, bad_words=((7,), (8, 9)))
    results = [SequenceResult([Sample(8, -1.0)], [Sample(2, -1.0), Sample(3, -1.0)])]
    for counted, forbidden, targets in ((-1, {2, 40}, [2, 3]), (8, {2, 40, 9}, []), (8, {9}, [])):
        decision = scheduler.schedule()
        bucket, batch = make_batch(decision, Buckets(LIMITS), 4, 8, 100)
        assert bucket.decode == (not targets)
        sampling = Masks(100).apply(decision, batch.sampling)
        assert batch.targets[batch.targets >= 0].tolist() == targets
        assert (sampling.counted[0], sampling.stateful[0], sampling.masked[0]) == (counted, True, True)
        assert sampling.rows[0] == scheduler.running.first.sequences[0].row
        assert (sampling.presence[0], sampling.frequency[0], sampling.repetition[0]) == (0.5, -1.0, 1.5)
        allowed = [t for t in range(128) if sampling.allowed_bits[0, t // 32] >> (t % 32) & 1]
        assert allowed == sorted(set(range(100)) - forbidden)
        scheduler.update(decision, results)
        results = [SequenceResult([Sample(8, -1.0)])]


def test_targets_stand_at_the_rows_before_their_tokens():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    asked, unasked = SamplingParams(prompt_logprobs=0), SamplingParams()
    for name, prompt, params in (
        ("a", [1, 2], unasked),
        ("b", [3, 4, 5], asked),
        ("c", [6], unasked),
        ("d", [7, 8], asked),
    ):
        scheduler.add(name, prompt, params, seed=0)
    _, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert batch.targets.tolist() == [-1, -1, 4, 5, -1, -1, 8, *[-1] * 17]


def test_every_branch_draws_with_its_own_seed():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1], SamplingParams(n=3, max_tokens=4), seed=5)
    scheduler.update(scheduler.schedule(), [SequenceResult([Sample(8, -1.0)] * 3)])
    _, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert batch.sampling.seeds.tolist() == [[0, 5], [0, 6], [0, 7], [0, 0]]


@pytest.mark.parametrize("top_k, expected", [(-1, 0), (100, 100), (2**31 - 1, 2**31 - 1), (2**31, 0)])
def test_top_k_beyond_int32_keeps_every_token(top_k, expected):
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=100)
    scheduler.add("a", [1], SamplingParams(temperature=1e-5, top_k=top_k), seed=0)
    _, batch = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    assert batch.sampling.top_k[0] == expected
    assert batch.sampling.temperature[0] == np.float32(1e-5), "it is drawn, not greedy"


def test_dtypes_are_those_of_the_fields():
    batch = empty_batch(Buckets(LIMITS).all[0], 8, 100)
    kinds = {name: array.dtype for name, array in batch._asdict().items() if name != "sampling"}
    assert kinds.pop("decodes") == np.bool and set(kinds.values()) == {np.dtype(np.int32)}
    assert (batch.targets == -1).all()


class Writer:
    """Writes constraints that are sets of allowed tokens."""

    def write(self, pairs, bits):
        for allowed, row in pairs:
            bits[row] = 0
            for token in allowed:
                bits[row, token // 32] |= np.uint32(1 << token % 32)


def test_masks_of_several_samples():
    scheduler = Scheduler(BlockPool(16, 4), Limits(32, 6, 24), vocab_size=97)
    late = {"min_tokens": 2, "stop_token_ids": [40], "max_tokens": 3}
    constraints = {"free": None, "pair": None, "word": {5, 96}, "complete": {40}, "either": {7, 40}}
    for name, params in (("free", {}), ("pair", {"n": 2, **late}), ("word", {}), ("complete", late), ("either", late)):
        request = scheduler.add(name, [1], SamplingParams(**params), seed=0)
        request.sequences[0].constraint = constraints[name]
    decision, masks = scheduler.schedule(), Masks(97)
    _, batch = make_batch(decision, Buckets(Limits(32, 6, 24)), 4, 8, 97)
    masks._writer = Writer()
    sampling = masks.apply(decision, batch.sampling)
    assert sampling.masked.tolist() == [False, True, True, True, True, True]
    allowed = [{t for t in range(128) if row[t // 32] >> (t % 32) & 1} for row in sampling.allowed_bits[1:]]
    assert allowed[:2] == [{*range(97)} - {40}] * 2 and allowed[2] == {5, 96}
    assert allowed[3:] == [{40}, {7}], "a text that is complete ends, however short, and one that may go on does"


def test_masks_of_branches_alone():
    """Neither of the row before them, nor of the one after them."""
    scheduler = Scheduler(BlockPool(16, 4), Limits(32, 6, 24), vocab_size=97)
    late = {"min_tokens": 2, "stop_token_ids": [40], "max_tokens": 3}
    for name, params in (("before", {}), ("pair", {"n": 2, **late}), ("after", {})):
        scheduler.add(name, [1], SamplingParams(**params), seed=0)
    decision = scheduler.schedule()
    _, batch = make_batch(decision, Buckets(Limits(32, 6, 24)), 4, 8, 97)
    masked = Masks(97).apply(decision, batch.sampling).masked
    assert masked.tolist() == [False, True, True, False, False, False]


def test_masks_without_anything_forbidden_leave_the_sampling_as_it_is():
    scheduler = Scheduler(BlockPool(16, 4), LIMITS, vocab_size=97)
    scheduler.add("a", [1], SamplingParams(), seed=0)
    decision = scheduler.schedule()
    _, batch = make_batch(decision, Buckets(LIMITS), 4, 8, 97)
    assert Masks(97).apply(decision, batch.sampling) is batch.sampling


@pytest.mark.parametrize("bucket", Buckets(LIMITS).all)
def test_dtypes_do_not_depend_on_the_content(bucket):
    """Otherwise a step would compile again."""
    scheduler = Scheduler(BlockPool(64, 4), LIMITS, vocab_size=100)
    for i in range(4):
        scheduler.add(str(i), [1] * (1 + i), SamplingParams(seed=2**63), seed=2**63)
    _, full = make_batch(scheduler.schedule(), Buckets(LIMITS), 4, 8, 100)
    empty = empty_batch(bucket, 8, 100)
    assert [x.dtype for x in jax.tree.leaves(full)] == [x.dtype for x in jax.tree.leaves(empty)]
    assert len(empty.tokens) == bucket.num_tokens and len(empty.context_lens) == bucket.num_seqs
