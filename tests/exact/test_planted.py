"""Faults of the kinds that would let a schedule show in a result: each is found by comparing bits. Most are deep."""

import itertools

import pytest

from jpaged.core.memory import Memory
from jpaged.runtime import batch, block_store, device_rows, row_table, runner, step
from jpaged.runtime.sampling_row import ROW
from pallas_kernels import reference, rows
from tests.exact.cases import Case
from tests.exact.conftest import SMALL, small_subject
from tests.exact.schedules import Schedule
from tests.exact.test_schedules import of_few_blocks

pytestmark = pytest.mark.slow

USUAL = Schedule(**SMALL)
CHUNKS = Schedule(7, 7, caches=False)


DRAFTS = USUAL._replace(seqs=4, speculative_config={"method": "suffix", "num_speculative_tokens": 1})


def changing_batches(monkeypatch, change):
    """Let `change(made, plan, rows)` spoil each batch; one that returns a value replaces it."""
    make = batch.make_batch

    def spoiled(plan, table, *args):
        made = make(plan, table, *args)
        return change(made, plan) or made

    monkeypatch.setattr(runner, "make_batch", spoiled)


def kinds_of(numbers: list[int]) -> set[int]:
    return {number % 8 for number in numbers}


@pytest.mark.deep  # test_schedules.py has more schedules
def test_without_a_fault_nothing_differs(llama):
    assert llama.differing(USUAL) == llama.differing(CHUNKS) == llama.differing(DRAFTS, times=2) == []


def test_a_neighbour_s_seed_is_found(llama, monkeypatch):
    def roll(made, plan):
        words = made.batch.samples.view(ROW)[:, 0]
        n = sum(scheduled.num_samples for scheduled in plan.rows)
        words["seeds"][:n] = words["seeds"][:n].take(range(-1, n - 1), axis=0)

    changing_batches(monkeypatch, roll)
    assert len(llama.differing(USUAL)) > 5


def test_a_mask_of_another_row_is_found(llama, monkeypatch):
    def swap(made, plan):
        masked = made.mask_of >= 0
        made.mask_of[masked] = made.mask_of[masked][::-1].copy()

    changing_batches(monkeypatch, swap)
    assert kinds_of(llama.differing(USUAL)) >= {6}  # structured outputs


def test_a_wrong_boundary_of_a_chunk_is_found(llama, monkeypatch):
    """The first token of a later chunk takes the position of the token before it."""

    def shift(made, plan):
        for i, (_, start, count, _) in enumerate(plan.rows):
            if start and count > 1:
                made.batch.positions[made.batch.cu_q_lens[i]] -= 1

    changing_batches(monkeypatch, shift)
    assert llama.differing(CHUNKS)


@pytest.mark.deep
def test_a_context_that_lacks_the_chunk_before_is_found(llama, monkeypatch):
    """Attention to the last token of a chunk's predecessor goes to another block."""

    def lose(made, plan):
        for i, (_, start, count, _) in enumerate(plan.rows):
            if start >= 8 and count > 1:
                made.batch.block_tables[0][i, 0] = made.batch.block_tables[0][i, 1]

    changing_batches(monkeypatch, lose)
    assert llama.differing(CHUNKS)


@pytest.mark.deep
def test_prompt_logprobs_that_stop_at_a_chunk_are_found(llama, monkeypatch):
    """The last token of a chunk is scored by the first token of the next one."""
    targets = row_table.RowTable.targets

    def shifted(table, row, start, stop):
        found = targets(table, row, start, stop).copy()
        if start and len(found) > 1:
            found[0] = found[1]
        return found

    monkeypatch.setattr(row_table.RowTable, "targets", shifted)
    assert kinds_of(llama.differing(CHUNKS)) & {0, 4, 7}


@pytest.mark.deep
def test_a_decode_token_in_the_order_of_a_prompt_s_is_found(llama, monkeypatch):
    """Beside a prompt only: a step of decode tokens alone has no other order."""

    def join(made, plan):
        if not made.bucket.decode:
            made.batch.decodes[:] = 0

    changing_batches(monkeypatch, join)
    assert llama.differing(CHUNKS)


def test_a_stale_block_of_a_cached_prefix_is_found(llama, monkeypatch):
    """A hit takes the right number of blocks, two of them in the wrong order."""
    share = Memory.share_prefixes

    def stale(memory, request):
        share(memory, request)
        for sequence in request.live:
            ids = sequence.table.block_ids
            if sequence.num_computed_tokens >= 16:
                ids[0], ids[1] = ids[1], ids[0]

    monkeypatch.setattr(Memory, "share_prefixes", stale)
    assert llama.differing(USUAL._replace(caches=False)) == []
    assert llama.differing(USUAL)


@pytest.mark.deep
def test_a_swapped_block_that_does_not_return_is_found(llama, monkeypatch):
    apply = block_store.BlockStore.apply

    def forget(store, plan):
        moved = plan.swap_in
        shifted = tuple((moved[(i + 1) % len(moved)][0], to) for i, (_, to) in enumerate(moved))
        values = {name: getattr(plan, name) for name in plan.__slots__}
        apply(store, type(plan)(**values | {"swap_in": shifted}))

    monkeypatch.setattr(block_store.BlockStore, "apply", forget)
    assert llama.differing(USUAL) == []
    assert llama.differing(of_few_blocks(USUAL, "swap"))


def _places_before(made, plan):
    """Draw after a draft with the random bits of the place before it."""
    made.batch.samples.view(ROW)["positions"][_samples_of_drafts(plan)] -= 1


def _masks_before(made, plan):
    """Give a draft's sample the mask of the place before it."""
    at = _samples_of_drafts(plan)
    made.mask_of[at] = made.mask_of[[i - 1 for i in at]]


def _prompt_order(made, plan):
    """Attend a draft in the order of a prompt, in steps that have one."""
    if not made.bucket.decode:
        made.batch.decodes[[index for index, _ in plan.drafts]] = 0


def _counted_at_once(made, plan):
    """Count drafts as tokens of the output, before they are kept."""
    made.batch.samples.view(ROW)["num_drafts"] = 0


def _samples_of_drafts(plan):
    before = [0, *itertools.accumulate(scheduled.num_samples for scheduled in plan.rows)]
    return [before[index] for index, _ in plan.drafts]


SPOILED = (_places_before, _masks_before, _prompt_order, _counted_at_once)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(spoil, id=spoil.__name__, marks=[] if spoil is _counted_at_once else [pytest.mark.deep])
        for spoil in SPOILED
    ],
)
def test_a_draft_that_is_not_computed_as_the_token_would_be_is_found(llama, monkeypatch, spoil):
    changing_batches(monkeypatch, spoil)
    assert llama.differing(DRAFTS, times=2)


def test_counts_of_another_request_are_found(llama, monkeypatch):
    """Every second request with penalties keeps the state of its row's last owner."""
    written = []
    write = device_rows.DeviceRows._write_row

    def write_late(rows, admitted):
        if len(written) % 2 == 0:
            write(rows, admitted)
        written.append(admitted)

    monkeypatch.setattr(device_rows.DeviceRows, "_write_row", write_late)
    assert kinds_of(llama.differing(USUAL, times=2)) & {3, 7}


@pytest.mark.deep  # tests/kernels/test_rows.py finds other orders in the usual tier
@pytest.mark.parametrize("fault", ["sums", "products"])
def test_another_order_for_another_number_of_rows_is_found(fault, monkeypatch, tmp_path):
    """With the reference; the compiled kernels have sums and products of their own."""
    if fault == "sums":
        monkeypatch.setattr(step, "ROW_ORDER", {})
    else:
        monkeypatch.setattr(rows, "product", reference.product)
        monkeypatch.setattr(step, "_of_rows", lambda wanted_t, op, *args, **options: op(*args, **options))
    subject = small_subject(Case("llama", kernels="reference"), tmp_path, (1, 8, 64, 128))
    assert subject.differing(USUAL)
