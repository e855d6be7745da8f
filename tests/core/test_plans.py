"""What plans tell of sequences: masks and entries of block tables; up to where a sequence is steady; and what waits for
a plan in flight."""

from types import SimpleNamespace

import pytest

from jpaged.core.params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.core.traffic import make, step


def add(scheduler, name, length, params, **options):
    return scheduler.add(name, [1 + i % 5 for i in range(length)], params, seed=0, **options)


def test_only_rows_that_sample_have_masks_and_only_while_something_is_banned():
    scheduler, runner = make(tokens=8)
    add(scheduler, "a", 12, SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=[7]))
    add(scheduler, "b", 1, SamplingParams(max_tokens=4))
    plans = [step(scheduler, runner).plan for _ in range(5)]
    mask = (plans[0].rows[0].row, frozenset([7]))
    assert [plan.masked for plan in plans] == [(), (mask,), (mask,), (), ()], "a chunk of the prompt has no sample"


def test_a_constraint_always_has_a_mask():
    scheduler, runner = make()
    constrained = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a*"))
    (sequence,) = add(scheduler, "a", 3, constrained).sequences
    sequence.constraint = SimpleNamespace(take=lambda token: None)
    add(scheduler, "b", 3, SamplingParams(max_tokens=2))
    for _ in range(2):
        plan = step(scheduler, runner).plan
        assert plan.masked == ((plan.rows[0].row, frozenset()),)


@pytest.mark.parametrize(
    "length, max_tokens, expected",
    [(3, 9, [0, 4, 4, 8, 8, 8, 8]), (3, 3, [0, 4, 4]), (6, 2, [0, 7]), (4, 9, [0, 4, 8])],
)
def test_a_sequence_is_steady_to_the_end_of_its_block_or_to_its_last_token(length, max_tokens, expected):
    scheduler, runner = make(tokens=4 if length > 4 else 16)
    (sequence,) = add(scheduler, "a", length, SamplingParams(max_tokens=max_tokens)).sequences
    found = [sequence.steady_until]
    while not sequence.finish_reason and len(found) < len(expected):
        step(scheduler, runner)
        if sequence.num_output_tokens and not sequence.finish_reason:
            found.append(sequence.steady_until)
    assert found == expected[: len(found)] and len(found) >= min(3, max_tokens)


@pytest.mark.parametrize(
    "params, options",
    [
        (SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=[7]), {}),
        (SamplingParams(max_tokens=9), {"bad_words": ((1, 2),)}),
        (BeamSearchParams(max_tokens=9, beam_width=2), {}),
    ],
    ids=["minimum length", "bad words", "beams"],
)
def test_what_depends_on_its_samples_or_has_masks_is_never_steady(params, options):
    scheduler, runner = make()
    request = add(scheduler, "a", 3, params, **options)
    for _ in range(4):
        step(scheduler, runner)
        assert request.live and all(sequence.steady_until == 0 for sequence in request.live)


def test_branches_are_steady_together_in_blocks_of_their_own():
    scheduler, runner = make()
    request = add(scheduler, "a", 3, SamplingParams(max_tokens=9, n=2))
    found, entries = [], []
    for _ in range(7):
        entries.append(len(step(scheduler, runner).plan.entries))
        found.append([sequence.steady_until for sequence in request.live])
    # The block of the prompt, a copy of it for one of the two, and later two new blocks at a time.
    assert found == [[0, 0], [4, 4], [8, 8], [8, 8], [8, 8], [8, 8], [11, 11]]
    assert entries == [1, 2, 2, 0, 0, 0, 2]


def test_only_new_entries_of_a_block_table_are_told():
    scheduler, runner = make(size=8, tokens=4)
    (sequence,) = add(scheduler, "a", 15, SamplingParams(max_tokens=4)).sequences
    told = [[index for _, _, index, _ in step(scheduler, runner).plan.entries] for _ in range(6)]
    # The admission tells none: the first chunk takes the first block, the third the second.
    assert told == [[0], [], [1], [], [], [2]]
    assert len(sequence.table) == 3


def test_nobody_is_preempted_and_nothing_is_admitted_while_a_plan_is_in_flight():
    scheduler, runner = make(blocks=5, size=2, seqs=4, cache=False)
    first, second = (add(scheduler, name, 3, SamplingParams(max_tokens=6)) for name in "ab")
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [len(plan.rows) for plan in plans] == [2, 2]
    add(scheduler, "c", 1, SamplingParams(max_tokens=2))
    third = scheduler.schedule()
    rows = [row for row, *_ in third.rows] if third else []
    assert first.sequences[0].row in rows and second.sequences[0].row not in rows, "the last free block is the first's"
    assert len(rows) == 1 and len(scheduler.waiting) == 1
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0
    for plan in (*plans, third):
        assert scheduler.schedule() is None
        scheduler.commit(plan, runner.step(plan))
    assert scheduler.schedule() is not None and scheduler.num_preemptions == 1


def test_no_two_epochs_of_a_pool_are_the_same():
    scheduler, _ = make()
    pool, epochs = scheduler.pool, []
    for change in (pool.reset_prefix_cache, pool.clear, pool.reset_prefix_cache, pool.clear, pool.clear):
        epochs.append(pool.epoch)
        change()
    assert len({*epochs, pool.epoch}) == 6
