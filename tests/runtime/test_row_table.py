"""The host's copy of rows, and batches made of it by hand."""

import numpy as np

from jpaged.config import Limits
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Admitted, Chosen, Entry, Scheduled, StepPlan
from jpaged.runtime.batch import Buckets, Layout, make_batch
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_settings import Settings

LIMITS = Limits(32, 4, 16)
BUCKETS = Buckets(LIMITS)
LAYOUTS = {bucket: Layout(bucket, 8) for bucket in BUCKETS.all}
DRAWN = SamplingParams(temperature=1.0)


def table(*admitted: Admitted) -> RowTable:
    rows = RowTable(4, 8, 4)
    rows.apply(StepPlan(admitted=admitted))
    return rows


def admission(row: int, params=DRAWN, *, tokens=(7, 8, 9), seed=0, **options) -> Admitted:
    return Admitted(row, tokens, len(tokens), params, seed, (3, 5), **options)


def tokens_at(rows: RowTable, *places: tuple[int, int]) -> list[int]:
    found = rows.tokens_at(*np.array(places, np.int32).T)
    assert found.dtype == np.int32
    return found.tolist()


def seeds(scalars: np.ndarray) -> list[int]:
    return [int(high) << 32 | int(low) for high, low in zip(scalars["seed_high"], scalars["seed_low"])]


def test_everything_is_int32():
    rows = table(admission(1))
    assert {array.dtype for array in (rows.tokens[0], rows.tokens[1], rows.block_tables, rows.num_top)} == {
        np.dtype("i4")
    }
    assert rows.targets(1, 0, 2).dtype == rows.num_prompt_tokens.dtype == np.int32
    assert rows.scalar_bits.shape[0] == 4 and np.shares_memory(rows.scalar_bits, rows.scalars)


def test_the_token_after_the_known_ones_is_the_rows_last_sample():
    rows = table(admission(1), admission(2, tokens=(4,)))
    assert tokens_at(rows, (1, 0), (1, 2), (1, 3), (2, 0), (2, 1)) == [7, 9, -2, 4, -3]
    rows.apply(StepPlan(chosen=(Chosen(1, 11, 0),)))
    assert tokens_at(rows, (1, 3), (2, 1)) == [11, -3]
    rows.consume(np.array([1]))
    assert tokens_at(rows, (1, 4)) == [-2]


def test_a_copied_row_has_the_tokens_of_its_source_and_samples_of_its_own():
    rows = table(admission(1, num_top=2))
    rows.apply(StepPlan(row_copies=((1, 3),), entries=(Entry(3, 1, 6),)))
    assert tokens_at(rows, (3, 0), (3, 2), (3, 3)) == [7, 9, -4]
    assert rows.block_tables[[1, 3], :2].tolist() == [[3, 5], [3, 6]] and rows.num_top[3] == 2
    assert rows.slots(np.array([3, 3]), np.array([1, 6])).tolist() == [13, 26]


def test_lists_are_as_long_as_was_asked_for():
    rows = table(
        admission(0), admission(1, SamplingParams(prompt_logprobs=3), num_top=0, num_scored=0),
        admission(2, SamplingParams(prompt_logprobs=0), num_top=5, num_scored=1),
    )  # fmt: skip
    assert rows.num_top.tolist()[:3] == [-1, 0, 5] and rows.prompt_top[:3] == [-1, 3, 0]
    assert rows.scalars["num_top"][:3].tolist() == [0, 1, 5]
    assert [rows.targets(row, 0, 3).tolist() for row in range(3)] == [[-1] * 3, [8, 9, -1], [-1, 9, -1]]


def test_only_drawn_rows_have_seeds():
    seed = 2**40 + 5
    greedy, beams = SamplingParams(temperature=0), BeamSearchParams(beam_width=2)
    rows = table(admission(0, greedy, seed=seed), admission(1, seed=seed), admission(2, beams, seed=seed))
    rows.apply(StepPlan(chosen=(Chosen(0, 1, seed), Chosen(1, 1, seed + 1), Chosen(2, 1, seed))))
    assert seeds(rows.scalars[:3]) == [0, seed + 1, 0]


def test_branches_add_to_the_seeds_of_their_own_row():
    """Also across the lower half of the seed, and not where tokens are not drawn."""
    first, greedy = 2**32 - 1, SamplingParams(temperature=0)
    rows = table(admission(0, seed=first), admission(1, seed=50), admission(2, greedy, seed=9))
    plan = StepPlan((Scheduled(0, 0, 3, 2), Scheduled(1, 0, 3, 1), Scheduled(2, 0, 3, 1)))
    made = make_batch(plan, rows, BUCKETS, LAYOUTS)
    scalars = made.batch.scalars.view(rows.scalars.dtype)[:4, 0]
    assert seeds(scalars) == [first, first + 1, 50, 0]


def test_a_batch_lies_in_its_buffer_and_has_no_masks_unless_the_plan_has():
    rows = table(admission(0), admission(1))
    made = make_batch(StepPlan((Scheduled(0, 0, 3, 1), Scheduled(1, 0, 3, 1))), rows, BUCKETS, LAYOUTS)
    assert all(np.shares_memory(array, made.buffer) for array in made.batch[:-1])
    assert made.batch.work == () and made.settings is Settings.DRAWN
    assert made.mask_of.tolist() == [-1, -1]


def test_a_row_without_a_sample_keeps_the_token_that_the_host_has_chosen():
    rows = table(admission(0))
    rows.apply(StepPlan(chosen=(Chosen(0, 11, 0),)))
    make_batch(StepPlan((Scheduled(0, 0, 3, 0),)), rows, BUCKETS, LAYOUTS)
    assert tokens_at(rows, (0, 3)) == [11]
    make_batch(StepPlan((Scheduled(0, 3, 1, 1),)), rows, BUCKETS, LAYOUTS)
    assert tokens_at(rows, (0, 4)) == [-1]
