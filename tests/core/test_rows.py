"""Rows, and the differences that each plan tells of them."""

import pytest

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import Chosen, Entry
from jpaged.core.request import Request, Sequence
from jpaged.core.rows import Rows
from jpaged.core.scheduler import Scheduler

LIMITS = Limits(64, 4, 64)


def running(*params: SamplingParams, words: tuple[tuple[int, ...], ...] = ()) -> list[Sequence]:
    """Return sequences with three tokens in blocks of two, without a row."""
    scheduler = Scheduler(BlockPool(32, 2), LIMITS, vocab_size=50)
    requests: list[Request] = [
        scheduler.add(str(i), [7, 8, 9], each, seed=i, bad_words=words) for i, each in enumerate(params)
    ]
    sequences = [request.sequences[0] for request in requests]
    for sequence in sequences:
        sequence.table.append(0, 3)
    return sequences


def test_an_admitted_sequence_is_told_with_all_of_its_state():
    rows = Rows(4)
    (sequence,) = running(SamplingParams(logprobs=2, prompt_logprobs=1), words=((5,), (3,), (1, 2)))
    rows.admit(sequence)
    (told,) = rows.differences()["admitted"]
    assert told.row == sequence.row and rows[told.row] is sequence and len(rows.free) == 3
    assert told.token_ids == (7, 8, 9) and told.num_prompt_tokens == 3
    assert told.block_ids == (tuple(sequence.table.block_ids[0]),) and len(sequence.table) == 2
    assert (told.seed, told.num_top, told.num_scored, told.banned) == (0, 2, 0, (3, 5))
    assert rows.differences()["admitted"] == ()


def test_only_the_entries_that_change_are_told():
    rows = Rows(4)
    (sequence,) = running(SamplingParams())
    rows.admit(sequence)
    rows.differences()
    rows.change(sequence, 1, 2)
    assert rows.differences()["entries"] == (Entry(sequence.row, 0, 1, sequence.table.block_ids[0][1]),)


@pytest.mark.parametrize("change", ["admitted", "row_copies", "chosen", "entries"])
def test_nothing_is_told_of_a_row_that_is_released_before_the_plan(change):
    rows = Rows(4)
    stays, other = running(SamplingParams(), SamplingParams())
    rows.admit(stays)
    rows.admit(other)
    if change != "admitted":
        rows.differences()
    if change == "row_copies":
        rows.release(other)
        rows.fork(stays, other)
    if change == "chosen":
        rows.choose(stays)
        rows.choose(other)
    if change == "entries":
        rows.change(stays, 0, 1)
        rows.change(other, 0, 1)
    row = other.row
    rows.release(other)
    told = rows.differences()
    assert told["released_rows"] == (row,) and other.row is None and len(rows.free) == 3
    expected = {
        "admitted": (stays.row,) if change == "admitted" else (), "row_copies": (),
        "chosen": (Chosen(stays.row, 9, 0),) if change == "chosen" else (),
        "entries": (Entry(stays.row, 0, 0, stays.table.block_ids[0][0]),) if change == "entries" else (),
    }  # fmt: skip
    assert {name: told[name] for name in expected} | {"admitted": tuple(a.row for a in told["admitted"])} == expected


def test_a_fork_copies_the_row_that_it_comes_from():
    rows = Rows(4)
    parent, child = running(SamplingParams(), SamplingParams())
    rows.admit(parent)
    rows.fork(parent, child)
    assert rows.differences()["row_copies"] == ((parent.row, child.row),) and parent.row != child.row
