"""The arrays of a step, slot by slot, and the ladder of shapes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.config import MAX_DRAFTS, Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Admitted, Sample, Scheduled, StepPlan, StepResult
from jpaged.core.planned_step import PlannedStep
from jpaged.core.scheduler import Scheduler
from jpaged.runtime.batch import Bucket, Buckets, Layout, ladder, make_batch
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_row import ROW
from jpaged.runtime.step import sampling_of
from jpaged.structured.masks import Masks
from tests.support.fake_runner import slot

LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=24)


class Lab:
    """A scheduler, and a table of rows that its plans change.

    Attributes:
        plan, bucket, batch: of the last step; `samples` are its sampling rows, and `sampling` is their form on the
            device.
    """

    def __init__(self, limits: Limits = LIMITS, **options):
        self.scheduler = Scheduler(BlockPool(16, 4), limits, vocab_size=100, **options)
        self.rows, self.buckets = RowTable(limits.max_num_seqs, 8, 4), Buckets(limits)
        self.layouts = {bucket: Layout(bucket, 8) for bucket in self.buckets.all}

    def add(self, name, prompt, params=None, seed=0, **options):
        return self.scheduler.add(name, prompt, params or SamplingParams(), seed=seed, **options)

    def schedule(self):
        self.plan = self.scheduler.schedule()
        self.rows.apply(self.plan)
        self.made = make_batch(self.plan, self.rows, self.buckets, self.layouts)
        self.bucket, self.batch = self.made.bucket, self.made.batch
        self.samples = self.batch.samples.view(ROW)[:, 0]
        self.sampling = sampling_of(jnp.asarray(self.batch.samples), None)
        return self.batch

    def commit(self, *tokens, prompt=()):
        samples = [Sample(token, -1.0) for token in tokens]
        known = {0: [Sample(token, -1.0) for token in prompt]} if prompt else {}
        self.scheduler.commit(self.plan, StepResult(samples, known))

    def tables(self):
        return [self.scheduler.rows[scheduled.row].table for scheduled in self.plan.rows]


def test_ladder():
    assert ladder(2, 16, 2) == (2, 4, 8, 16)
    assert ladder(1, 9, 2) == (1, 2, 3, 5, 9)
    assert ladder(1, 1, 2) == (1,)
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
    assert bucket in buckets.all and len(set(buckets.all)) == len(buckets.all) <= 27
    assert bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
    assert bucket.decode == (num_tokens == num_seqs)
    if bucket.decode:
        assert bucket.num_seqs < 2 * num_seqs
    else:
        assert bucket.num_tokens < max(64, 2 * num_tokens)


@pytest.mark.parametrize("seqs, decode", [(64, [8, 16, 32, 64]), (9, [9]), (4, [4])])
def test_no_decode_step_is_smaller_than_one_that_costs_as_much(seqs, decode):
    buckets = Buckets(Limits(10**6, seqs, 256), least=8)
    assert [bucket.num_seqs for bucket in buckets.decode] == decode
    assert buckets.fit(1, 1, True).num_seqs == decode[0]


@pytest.mark.parametrize(
    "seqs, tokens, decode, mixed",
    [
        (1, 1, [1], [(16, 1)]),
        (8, 64, [1, 2, 4, 8], [(32, 8), (64, 8)]),
        (9, 100, [1, 2, 3, 5, 9], [(50, 9), (100, 9)]),
        (17, 256, [1, 2, 3, 5, 9, 17], [(t, s) for t in (32, 64, 128, 256) for s in (16, 17)]),
        (16, 2048, [1, 2, 4, 8, 16], [(t, 16) for t in (32, 64, 128, 256, 512, 1024, 2048)]),
    ],
)
def test_the_ladders(seqs, tokens, decode, mixed):
    buckets = Buckets(Limits(10**6, seqs, tokens))
    assert buckets.decode == tuple(Bucket(s, s, True) for s in decode)
    assert buckets.mixed == tuple(Bucket(t, s, False) for t, s in mixed)


@pytest.mark.parametrize(
    "seqs, tokens, decode, mixed",
    [
        (1, 1, [1], [(16, 1)]),
        (8, 64, [1, 2, 8], [(64, 8)]),
        (17, 256, [1, 2, 5, 17], [(t, s) for t in (64, 128, 256) for s in (16, 17)]),
        (64, 64, [1, 4, 16, 64], [(64, 16), (64, 64)]),
    ],
)
def test_the_ladders_where_padding_costs_little(seqs, tokens, decode, mixed):
    buckets = Buckets(Limits(10**6, seqs, tokens), padded=False)
    assert buckets.decode == tuple(Bucket(s, s, True) for s in decode)
    assert buckets.mixed == tuple(Bucket(t, s, False) for t, s in mixed)


def test_the_smallest_shape_that_exists_serves_a_step():
    buckets = Buckets(Limits(10**6, 8, 128), padded=False)
    buckets.keep(buckets.mixed[-1:])
    assert buckets.all == (largest := Bucket(128, 8, False),)
    assert buckets.fit(1, 1, True) == buckets.fit(8, 8, True) == buckets.fit(3, 1, False) == largest
    buckets.add([two := Bucket(2, 2, True)])
    assert buckets.fit(2, 2, True) == two and buckets.fit(3, 3, True) == largest


def test_shapes_between_those_of_the_ladders():
    buckets = Buckets(Limits(10**6, 8, 64))
    buckets.add([Bucket(48, 8, False), Bucket(6, 6, True)])
    assert buckets.decode == tuple(Bucket(s, s, True) for s in (1, 2, 4, 6, 8))
    assert buckets.mixed == tuple(Bucket(t, 8, False) for t in (32, 48, 64))
    assert set(buckets.all) == {*buckets.decode, *buckets.mixed} and len(buckets.all) == 8
    assert buckets.fit(40, 3, False).num_tokens == 48 and buckets.fit(5, 5, True).num_tokens == 6


def test_a_mixed_batch():
    lab = Lab()
    lab.add("a", [1, 2, 3, 4, 5], SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1), seed=2**33 + 5)
    lab.add("b", [6], SamplingParams(temperature=1e-7), seed=-1)
    lab.schedule()
    lab.commit(50, 51)
    lab.add("c", list(range(10, 19)), seed=-1)
    batch = lab.schedule()
    assert lab.bucket == Bucket(24, 4, False)
    a, b, c = lab.tables()
    row_a, row_b, row_c = (scheduled.row for scheduled in lab.plan.rows)
    assert batch.tokens.tolist() == [-1 - row_a, -1 - row_b, *range(10, 19)] + [0] * 13
    assert batch.positions.tolist() == [5, 1, *range(9)] + [0] * 13
    assert batch.slot_mapping[0].tolist() == [slot(a, 5), slot(b, 1), *(slot(c, i) for i in range(9))] + [-1] * 13
    assert batch.context_lens.tolist() == [6, 2, 9, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 11, 11]
    assert [batch.block_tables[0][i, : len(t.block_ids[0])].tolist() for i, t in enumerate((a, b, c))] == [
        t.block_ids[0] for t in (a, b, c)
    ]
    sampling, samples = lab.sampling, lab.samples
    assert batch.sampled_from.tolist() == [0, 1, 10, 0] and samples["rows"].tolist() == [row_a, row_b, row_c, -1]
    assert sampling.positions[:3].tolist() == [6, 2, 9]
    assert samples["temperature"].tolist() == [0.5, 0.0, 1.0, 0.0] and samples["top_k"].tolist() == [7, 0, 0, 0]
    np.testing.assert_allclose(samples["top_p"], [0.9, 1, 1, 1])
    np.testing.assert_allclose(samples["min_p"], [0.1, 0, 0, 0])
    assert sampling.seeds.tolist() == [[2, 5], *[[2**32 - 1, 2**32 - 1]] * 2, [0, 0]]
    assert not any(samples[name].any() for name in ("stateful", "beam", "num_top", "masked"))


def test_the_device_reads_what_the_host_wrote():
    """Each setting in its column, with its dtype."""
    lab = Lab()
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, presence_penalty=0.5, frequency_penalty=-1.0,
        repetition_penalty=1.5, logprobs=3,
    )  # fmt: skip
    lab.add("a", [1, 2, 3], params, seed=2**33 + 5)
    lab.schedule()
    first = {name: np.asarray(x)[0].tolist() for name, x in lab.sampling._asdict().items() if x is not None}
    row = lab.plan.rows[0].row
    assert first == {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "seeds": [2, 5], "positions": 3,
        "presence": 0.5, "frequency": -1.0, "repetition": 1.5, "rows": row, "stateful": True,
        "beam": False, "masked": False, "num_top": 3, "num_prompt_tokens": 3, "last_tokens": 3,
        "num_drafts": 0, "drafts": [-1] * MAX_DRAFTS,
    }  # fmt: skip
    padding = {name: np.asarray(x)[1].tolist() for name, x in lab.sampling._asdict().items() if x is not None}
    assert padding["rows"] == -1 and padding["temperature"] == 0 and padding["repetition"] == padding["top_p"] == 1
    assert not (padding["stateful"] or padding["masked"] or padding["beam"] or padding["num_top"])


def test_several_samples_of_one_prompt():
    lab = Lab()
    lab.add("a", [1, 2, 3], SamplingParams(n=3, logprobs=0), seed=2**64 - 1)
    lab.add("b", [4], BeamSearchParams(beam_width=1, stop_token_ids=[7, 8]))
    batch = lab.schedule()
    assert lab.bucket == Bucket(24, 4, False)
    assert batch.sampled_from.tolist() == [2, 2, 2, 3] and lab.sampling.positions.tolist() == [3, 3, 3, 1]
    assert lab.sampling.seeds[:3].tolist() == [[2**32 - 1, 2**32 - 1], [0, 0], [0, 1]]
    assert lab.samples["num_top"].tolist() == [1, 1, 1, 3], "a beam brings one that goes on beside two that may end it"
    assert lab.made.num_top.tolist() == [0, 0, 0, 3]
    assert lab.samples["beam"].tolist() == [0, 0, 0, 1]


def test_a_prompt_row_is_never_a_decode_row():
    """Its chunk depends on the other requests, and its bits must not."""
    lab = Lab()
    lab.add("a", [1], SamplingParams(n=3, max_tokens=4))
    batch = lab.schedule()
    assert lab.bucket == Bucket(24, 4, False) and batch.sampled_from.tolist() == [0] * 4 and not batch.decodes.any()
    lab.commit(8, 8, 9)
    batch = lab.schedule()
    assert lab.bucket == Bucket(4, 4, True) and batch.decodes.tolist() == [1, 1, 1, 0]
    assert batch.tokens.tolist() == [8, 8, 9, 0], "the host has chosen which branch continues with which sample"
    lab.commit(1, 1, 1)
    batch = lab.schedule()
    assert batch.tokens.tolist() == [*(-1 - scheduled.row for scheduled in lab.plan.rows), 0]


def test_decode_rows_of_a_mixed_step():
    lab = Lab()
    lab.add("a", [1, 2], SamplingParams(max_tokens=4))
    lab.schedule()
    lab.commit(8)
    lab.add("b", [3], SamplingParams(max_tokens=4))
    lab.add("c", [4, 5], SamplingParams(max_tokens=4))
    batch = lab.schedule()
    assert not lab.bucket.decode and batch.decodes.tolist() == [1, 0, 0, 0]


def test_after_a_preemption_known_tokens_come_from_the_host():
    """Also one that is a decode row in the middle of the output."""
    lab = Lab(Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=4))
    request = lab.add("a", [1, 2, 3], SamplingParams(max_tokens=9))
    for token in (11, 12, 13, 14, 15):
        lab.schedule()
        lab.commit(token)
    lab.scheduler.recover()
    seen = []
    for _ in range(2):
        batch = lab.schedule()
        seen += batch.tokens[: lab.plan.num_tokens].tolist()
        lab.commit(*[16] * sum(scheduled.num_samples for scheduled in lab.plan.rows))
    assert seen == [1, 2, 3, 11, 12, 13, 14, 15]
    lab.schedule()
    assert lab.batch.tokens[0] == -1 - request.sequences[0].row
    lab.scheduler.recover()
    lab.scheduler.limits = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=3)
    for expected in ([1, 2, 3], [11, 12, 13], [14, 15, 16]):
        assert lab.schedule().tokens[:3].tolist() == expected
        lab.commit(*[17] * sum(scheduled.num_samples for scheduled in lab.plan.rows))


def test_one_known_token_is_a_decode_row():
    lab = Lab()
    lab.add("a", [1, 2, 3], SamplingParams(max_tokens=9))
    for token in (11, 12):
        lab.schedule()
        lab.commit(token)
    lab.scheduler.recover()
    for limit, expected in ((4, [1, 2, 3, 11]), (1, [12])):
        lab.scheduler.limits = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=limit)
        batch = lab.schedule()
        assert batch.tokens[: len(expected)].tolist() == expected
        lab.commit(*[13] * sum(scheduled.num_samples for scheduled in lab.plan.rows))
    assert batch.decodes[0] == 1


def test_state_masks_and_targets():
    lab = Lab(eos_token_ids=[2])
    params = SamplingParams(
        prompt_logprobs=2, min_tokens=2, stop_token_ids=[40], presence_penalty=0.5, frequency_penalty=-1.0,
        repetition_penalty=1.5,
    )  # fmt: skip
    lab.add("a", [1, 2, 3], params, bad_words=((7,), (8, 9)))
    prompt = [2, 3]
    for is_output, forbidden, targets in ((False, {2, 40}, [2, 3]), (True, {2, 40, 9}, []), (True, {9}, [])):
        batch = lab.schedule()
        assert lab.bucket.decode == (not targets)
        assert batch.targets[batch.targets >= 0].tolist() == targets
        assert (lab.sampling.positions[0] > 3) == is_output, "the token that it takes in is counted if that is output"
        assert lab.samples["stateful"][0] and lab.samples["masked"].tolist() == [1] + [0] * (len(lab.samples) - 1)
        assert lab.plan.masked == ((lab.plan.rows[0].row, forbidden),) and lab.made.mask_of.tolist() == [0]
        lab.commit(8, prompt=prompt)
        prompt = []


def test_targets_stand_at_the_rows_before_their_tokens():
    lab = Lab()
    asked, unasked = SamplingParams(prompt_logprobs=0), SamplingParams()
    for name, prompt, params in (
        ("a", [1, 2], unasked),
        ("b", [3, 4, 5], asked),
        ("c", [6], unasked),
        ("d", [7, 8], asked),
    ):
        lab.add(name, prompt, params)
    assert lab.schedule().targets.tolist() == [-1, -1, 4, 5, -1, -1, 8, *[-1] * 17]


def test_targets_that_have_a_logprob_are_not_wanted_again():
    lab = Lab(Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=16))
    lab.add("a", [1, 2, 3, 4, 5], SamplingParams(prompt_logprobs=0))
    lab.scheduler.limits = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=3)
    assert lab.schedule().targets[:3].tolist() == [2, 3, 4]
    lab.commit(prompt=[2, 3, 4])
    scheduler = lab.scheduler
    PlannedStep(scheduler.queues, scheduler.memory, True, [scheduler.running.first]).preempt_last()
    assert lab.schedule().targets[:3].tolist() == [-1] * 3
    lab.commit()
    assert lab.schedule().targets[:2].tolist() == [5, -1]


def test_every_branch_draws_with_its_own_seed():
    lab = Lab()
    lab.add("a", [1], SamplingParams(n=3, max_tokens=4), seed=5)
    lab.schedule()
    lab.commit(8, 8, 8)
    lab.schedule()
    assert lab.sampling.seeds.tolist() == [[0, 5], [0, 6], [0, 7], [0, 0]]


@pytest.mark.parametrize("top_k, expected", [(-1, 0), (100, 100), (2**31 - 1, 2**31 - 1), (2**31, 0)])
def test_top_k_beyond_int32_keeps_every_token(top_k, expected):
    lab = Lab()
    lab.add("a", [1], SamplingParams(temperature=1e-5, top_k=top_k))
    lab.schedule()
    assert lab.samples["top_k"][0] == expected
    assert lab.samples["temperature"][0] == np.float32(1e-5), "it is drawn, not greedy"


class Writer:
    """Writes constraints that are sets of allowed tokens."""

    calls = 0

    def write(self, pairs, bits):
        self.calls += 1
        for allowed, row in pairs:
            bits[row] = 0
            for token in allowed:
                bits[row, token // 32] |= np.uint32(1 << token % 32)


def test_masks():
    masks, late = Masks(97), frozenset([40])
    writer = Writer()
    masks._write = writer.write
    rows = [(None, late), ({5, 96}, frozenset()), ({40}, late), ({7, 40}, late), (None, late)]
    bits = masks.write(rows)
    assert writer.calls == 1
    allowed = [{t for t in range(128) if row[t // 32] >> (t % 32) & 1} for row in bits]
    assert allowed[0] == allowed[4] == {*range(97)} - {40} and allowed[1] == {5, 96}
    assert allowed[2:4] == [{40}, {7}], "a text that is complete ends, however short, and one that may go on does"


@pytest.mark.parametrize("vocab_size, num_words", [(31, 1), (32, 1), (33, 2), (64, 2)])
def test_masks_of_bans_alone_have_a_bit_for_each_token(vocab_size, num_words):
    """Each row has its own bans, several of which may lie in one word."""
    bans = [frozenset({0, 5, vocab_size - 1}), frozenset({7}), frozenset()]
    bits = Masks(vocab_size).write((None, banned) for banned in bans)
    assert bits.shape == (3, num_words) and bits.dtype == np.uint32
    for row, banned in zip(bits, bans):
        allowed = {token for token in range(32 * num_words) if row[token // 32] >> (token % 32) & 1}
        assert allowed == set(range(vocab_size)) - banned


def test_masks_of_branches_alone():
    """Neither of the row before them, nor of the one after them."""
    lab = Lab(Limits(32, 6, 24))
    late = {"min_tokens": 2, "stop_token_ids": [40], "max_tokens": 3}
    for name, params in (("before", {}), ("pair", {"n": 2, **late}), ("after", {}), ("last", late)):
        lab.add(name, [1], SamplingParams(**params))
    lab.schedule()
    assert lab.samples["masked"].tolist() == [0, 1, 1, 0, 1, 0] and lab.made.mask_of.tolist() == [-1, 0, 0, -1, 1]
    assert [row for row, _ in lab.plan.masked] == [lab.plan.rows[1].row, lab.plan.rows[3].row]


@pytest.mark.parametrize("bucket", Buckets(LIMITS).all)
def test_a_layout_unpacks_what_it_packs(bucket):
    layout = Layout(bucket, 8)
    buffer, batch = layout.empty()
    assert buffer.dtype == np.int32 and all(np.shares_memory(array, buffer) for array in jax.tree.leaves(batch))
    assert len(batch.tokens) == bucket.num_tokens and len(batch.context_lens) == bucket.num_seqs
    for i, array in enumerate(jax.tree.leaves(batch)):
        array[...] = i
    found = [np.unique(array).tolist() for array in jax.tree.leaves(layout.unpack(buffer))]
    assert found == [[i] for i in range(len(jax.tree.leaves(batch)))]
    assert (layout.empty()[1].targets == -1).all(), "padding is not written over"


def test_each_array_starts_at_a_multiple_of_256_bytes():
    """Mosaic's runtime refuses others."""
    layout = Layout(Bucket(64, 7, False), 3, lists_of_two_windows)
    buffer, batch = layout.empty()
    starts = [array.ctypes.data - buffer.ctypes.data for array in jax.tree.leaves(batch)]
    assert not any(start % 256 for start in starts) and len(set(starts)) == len(starts) == 15


class Lists(NamedTuple):
    lens_s: np.ndarray
    rows: tuple[np.ndarray, ...]


def lists_of_two_windows(batch, decode, table_width):
    return tuple(Lists(batch.context_lens + i, (batch.decodes,)) for i in range(2))


def test_lists_of_work_are_those_of_the_lengths():
    buckets = Buckets(LIMITS)
    layouts = {bucket: Layout(bucket, 8, lists_of_two_windows) for bucket in buckets.all}
    rows = RowTable(4, 8, 4)
    params = SamplingParams(temperature=0)
    rows.apply(
        StepPlan(admitted=(Admitted(0, (5, 6, 7), 3, params, 0, ((1,),)), Admitted(1, (8, 9), 1, params, 0, ((2,),))))
    )
    made = make_batch(StepPlan((Scheduled(0, 0, 3, 1), Scheduled(1, 1, 1, 1))), rows, buckets, layouts)
    for i, lists in enumerate(layouts[made.bucket].unpack(made.buffer).work):
        assert isinstance(lists, Lists) and lists.lens_s[:2].tolist() == [3 + i, 2 + i]
        assert lists.rows[0][:2].tolist() == [0, 1] and not (lists.lens_s[2:] - i).any()


@pytest.mark.parametrize("decode", [True, False])
def test_tables_of_a_window_are_sent_as_far_as_its_queries_see(decode):
    bucket, width, size, windows = Bucket(4, 4, decode), 64, 4, (None, 9, 2)
    layout = Layout(bucket, width, windows=windows, block_size=size)
    rows = RowTable(4, width, size, len(windows))
    ids = np.random.default_rng(0).integers(1, 1000, (3, 4, width))
    starts, counts = (0, 7, 130, 251), (1, 1, 1, 1) if decode else (4, 0, 0, 0)
    used = [(row, start, count) for row, (start, count) in enumerate(zip(starts, counts)) if count]
    rows.apply(StepPlan(admitted=tuple(
        Admitted(row, tuple(range(start + count)), start, SamplingParams(temperature=0), 0,
                 tuple(tuple(table[row, : -(-(start + count) // size)].tolist()) for table in ids))
        for row, start, count in used
    )))  # fmt: skip
    plan = StepPlan(tuple(Scheduled(row, start, count, 1) for row, start, count in used))
    buckets = Buckets(Limits(width * size, 4, 4, size))
    buckets.keep([bucket, Bucket(4, 4, False)])
    made = make_batch(plan, rows, buckets, {bucket: layout})
    sent = [table.shape[1] for table in made.batch.block_tables]
    assert sent[0] == width and max(sent[1:]) < 8 and made.buffer.size < 2 * Layout(bucket, width).size
    whole = jax.jit(lambda buffer: layout.whole_tables(layout.unpack(buffer)))(made.buffer)
    for group, window in enumerate(windows):
        table = np.asarray(whole.block_tables[group])
        assert table.shape == (4, width)
        for row, start, count in used:
            first = 0 if window is None else max(0, start - max(window, size + 1) + 1) // size
            seen = slice(first, -(-(start + count) // size))
            assert table[row, seen].tolist() == ids[group, row, seen].tolist()
