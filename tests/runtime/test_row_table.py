"""The host's copy of rows, and batches made of it by hand."""

import jax
import numpy as np

from jpaged.config import Limits
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.plan import Admitted, Chosen, Entry, Scheduled, StepPlan
from jpaged.runtime.batch import Buckets, Layout, make_batch
from jpaged.runtime.row_table import RowTable
from jpaged.runtime.sampling_row import COLUMNS, ROW, ROW_WORDS
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
    return Admitted(row, tokens, len(tokens), params, seed, ((3, 5),), **options)


def tokens_at(rows: RowTable, *places: tuple[int, int]) -> list[int]:
    found = rows.tokens_at(*np.array(places, np.int32).T)
    assert found.dtype == np.int32
    return found.tolist()


def seeds(sampling: np.ndarray) -> list[int]:
    return [high << 32 | low for high, low in sampling["seeds"].tolist()]


def test_everything_is_int32():
    rows = table(admission(1))
    assert {array.dtype for array in (rows.tokens[0], rows.tokens[1], rows.block_tables, rows.num_top)} == {
        np.dtype("i4")
    }
    assert rows.targets(1, 0, 2).dtype == rows.num_prompt_tokens.dtype == np.int32
    assert rows.sampling_words.shape == (4, ROW_WORDS) and np.shares_memory(rows.sampling_words, rows.sampling)


def test_the_token_after_the_known_ones_is_the_rows_last_sample():
    rows = table(admission(1), admission(2, tokens=(4,)))
    assert tokens_at(rows, (1, 0), (1, 2), (1, 3), (2, 0), (2, 1)) == [7, 9, -2, 4, -3]
    rows.apply(StepPlan(chosen=(Chosen(1, 11, 0),)))
    assert tokens_at(rows, (1, 3), (2, 1)) == [11, -3]
    rows.consume(np.array([1]))
    assert tokens_at(rows, (1, 4)) == [-2]


def test_a_copied_row_has_the_tokens_of_its_source_and_samples_of_its_own():
    rows = table(admission(1, num_top=2))
    rows.apply(StepPlan(row_copies=((1, 3),), entries=(Entry(3, 0, 1, 6),)))
    assert tokens_at(rows, (3, 0), (3, 2), (3, 3)) == [7, 9, -4]
    assert rows.block_tables[0, [1, 3], :2].tolist() == [[3, 5], [3, 6]] and rows.num_top[3] == 2
    assert [slots.tolist() for slots in rows.slots(np.array([3, 3]), np.array([1, 6]))] == [[13, 26]]


def test_lists_are_as_long_as_was_asked_for():
    rows = table(
        admission(0), admission(1, SamplingParams(prompt_logprobs=3), num_top=0, num_scored=0),
        admission(2, SamplingParams(prompt_logprobs=0), num_top=5, num_scored=1),
    )  # fmt: skip
    assert rows.num_top.tolist()[:3] == [-1, 0, 5] and rows.prompt_top[:3] == [-1, 3, 0]
    assert rows.sampling["num_top"][:3].tolist() == [0, 1, 5]
    assert [rows.targets(row, 0, 3).tolist() for row in range(3)] == [[-1] * 3, [8, 9, -1], [-1, 9, -1]]


def test_a_row_has_the_seed_of_its_last_token_that_the_host_has_chosen():
    seed = 2**40 + 5
    rows = table(admission(0, seed=seed), admission(1, seed=seed))
    rows.apply(StepPlan(chosen=(Chosen(1, 1, seed + 1),)))
    assert seeds(rows.sampling[:2]) == [seed, seed + 1]


def test_beams_and_greedy_rows_have_no_filters():
    filtered = dict(top_p=0.5, top_k=3, min_p=0.1)
    cold, warm = (SamplingParams(temperature=temperature, **filtered) for temperature in (1e-6, 1.0))
    rows = table(admission(0, cold), admission(1, warm), admission(2, BeamSearchParams(beam_width=2, max_tokens=3)))
    assert rows.settings[:3].tolist() == [Settings.GREEDY, Settings.FILTERED, Settings.ANY]
    for name in ("temperature", *filtered):
        neutral = COLUMNS[name].neutral
        assert (rows.sampling[name][:3] != neutral).tolist() == [False, True, False], name


def test_a_copied_row_has_the_settings_of_its_source():
    rows = table(admission(1, SamplingParams(min_p=0.25)))
    rows.apply(StepPlan(row_copies=((1, 3),)))
    assert rows.settings.tolist() == [0, Settings.FILTERED, 0, Settings.FILTERED]
    assert rows.sampling["min_p"].tolist() == [0, 0.25, 0, 0.25] and rows.sampling["rows"].tolist() == [-1, 1, -1, 3]


def test_branches_add_to_the_seeds_of_their_own_row():
    """Also across the lower half of the seed."""
    first = 2**32 - 1
    rows = table(admission(0, seed=first), admission(1, seed=50), admission(2, seed=9))
    plan = StepPlan((Scheduled(0, 0, 3, 2), Scheduled(1, 0, 3, 1), Scheduled(2, 0, 3, 1)))
    made = make_batch(plan, rows, BUCKETS, LAYOUTS)
    assert seeds(made.batch.samples.view(ROW)[:4, 0]) == [first, first + 1, 50, 9]


def test_a_batch_lies_in_its_buffer_and_has_no_masks_unless_the_plan_has():
    rows = table(admission(0), admission(1))
    made = make_batch(StepPlan((Scheduled(0, 0, 3, 1), Scheduled(1, 0, 3, 1))), rows, BUCKETS, LAYOUTS)
    assert all(np.shares_memory(array, made.buffer) for array in jax.tree.leaves(made.batch))
    assert made.batch.work == () and made.settings is Settings.DRAWN
    assert made.mask_of.tolist() == [-1, -1]


def test_a_row_without_a_sample_keeps_the_token_that_the_host_has_chosen():
    rows = table(admission(0))
    rows.apply(StepPlan(chosen=(Chosen(0, 11, 0),)))
    make_batch(StepPlan((Scheduled(0, 0, 3, 0),)), rows, BUCKETS, LAYOUTS)
    assert tokens_at(rows, (0, 3)) == [11]
    make_batch(StepPlan((Scheduled(0, 3, 1, 1),)), rows, BUCKETS, LAYOUTS)
    assert tokens_at(rows, (0, 4)) == [-1]
