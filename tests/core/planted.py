"""Bugs to plant, which the allocator's tests must find."""

import dataclasses

from jpaged.core.adapter_slots import AdapterSlots
from jpaged.core.block_pool import GONE, BlockPool
from jpaged.core.block_table import BlockTable
from jpaged.core.commit import Commit
from jpaged.core.memory import Memory
from jpaged.core.rows import Rows
from jpaged.core.scheduler import Scheduler


def _leak(patch):
    free = BlockTable.free

    def forgetful(table):
        table.block_ids[0][-1:] = [GONE] * len(table.block_ids[0][-1:])
        free(table)

    patch.setattr(BlockTable, "free", forgetful)


def _double_free(patch):
    free = BlockTable.free

    def twice(table):
        shared = [block_id for block_id in table.held if table.pool.ref_count(block_id) > 1]
        free(table)
        for block_id in shared[:1]:
            table.pool.free(block_id)

    patch.setattr(BlockTable, "free", twice)


def _missed_copy_on_write(patch):
    append, ref_count = BlockTable.append, BlockPool.ref_count

    def blind(table, start, end):
        with patch.context() as within:
            within.setattr(BlockPool, "ref_count", lambda pool, block_id: min(1, ref_count(pool, block_id)))
            return append(table, start, end)

    patch.setattr(BlockTable, "append", blind)


def _stale_cache(patch):
    """A block that is written stays in the prefix cache."""
    patch.setattr(BlockPool, "forget", lambda pool, block_id: None)


def _lost_row(patch):
    def lose(rows, sequence):
        sequence.row = None

    patch.setattr(Rows, "release", lose)


def _missed_swap(patch):
    schedule = Scheduler.schedule

    def deaf(scheduler, *drafts):
        plan = schedule(scheduler, *drafts)
        if plan is None or not plan.swap_in[1:]:
            return plan
        scheduler._in_flight[-1].plan = deafened = dataclasses.replace(plan, swap_in=plan.swap_in[:1])
        return deafened

    patch.setattr(Scheduler, "schedule", deaf)


def _early_release(patch):
    """The blocks of a sequence that ends are free while a step in flight still writes them."""
    release = Memory.release

    def hasty(memory, sequence):
        if sequence.in_flight:
            memory.leaving.add(sequence)
            sequence.table.free()
        else:
            release(memory, sequence)

    patch.setattr(Memory, "release", hasty)


def _stale_epoch(patch):
    """Blocks computed with old parameters are cached after a reset of the prefix cache."""
    reset = BlockPool.reset_prefix_cache

    def forgetful(pool):
        epoch = pool.epoch
        reset(pool)
        pool.epoch = epoch

    patch.setattr(BlockPool, "reset_prefix_cache", forgetful)


def _unwritten_offer(patch):
    """An ended sequence offers its last token, whose KV was never computed."""
    remember = Memory.remember

    def eager(memory, sequence, num_computed_tokens, *, ended=False):
        room = len(sequence.table) * memory.pool.block_size
        remember(memory, sequence, min(num_computed_tokens + ended, room), ended=ended)

    patch.setattr(Memory, "remember", eager)


def _kept_position(patch):
    """The next step goes on after a draft that was not kept."""
    settle = Commit._settle

    def forgetful(commit, sequence, drafts):
        computed = sequence.num_computed_tokens
        result = settle(commit, sequence, drafts)
        sequence.num_computed_tokens = min(computed, sequence.num_tokens)
        return result

    patch.setattr(Commit, "_settle", forgetful)


def _silent_host(patch):
    """The runner is not told after which of the drafts the sequence goes on."""
    choose = Rows.choose
    patch.setattr(Rows, "choose", lambda rows, s: None if s.drafter and not s.request.unforked else choose(rows, s))


def _credulous(patch):
    """The tokens after a wrong draft are kept."""
    run = Commit.run

    def trusting(commit, step, result):
        samples = list(result.samples)
        for index, token in step.plan.drafts:
            samples[index - 1] = samples[index - 1]._replace(token=token)
        return run(commit, step, result._replace(samples=samples))

    patch.setattr(Commit, "run", trusting)


def _unwritten_draft(patch):
    """The blocks of drafts are taken, and the runner does not learn of them."""
    change = Rows.change

    def short(rows, sequence, first, stop):
        change(rows, sequence, first, min(stop, first + 1))

    patch.setattr(Rows, "change", short)


def _taken_slot(patch):
    """A slot is given to another adapter while a running sequence has its own there."""
    take = AdapterSlots.take

    def rob(slots, adapter):
        if adapter is not None and adapter not in slots._slots and not slots._free:
            slots._users.clear()
        return take(slots, adapter)

    patch.setattr(AdapterSlots, "has_room", lambda slots, adapter: True)
    patch.setattr(AdapterSlots, "take", rob)


def _early_slot(patch):
    """A slot is free when a request is preempted or ends in one of its branches, though others go on."""
    release = AdapterSlots.release

    def hasty(slots, adapter):
        release(slots, adapter)
        slots._users.pop(adapter, None)

    patch.setattr(AdapterSlots, "release", hasty)


def _missed_load(patch):
    """A plan forgets an adapter that its rows need."""
    loads = AdapterSlots.loads
    patch.setattr(AdapterSlots, "loads", lambda slots: loads(slots)[1:])


ADAPTER_BUGS = {"taken slot": _taken_slot, "early slot": _early_slot, "missed load": _missed_load}
DRAFT_BUGS = {
    "kept position": _kept_position,
    "silent host": _silent_host,
    "credulous": _credulous,
    "unwritten draft": _unwritten_draft,
}
BUGS = {
    "leak": _leak,
    "double free": _double_free,
    "missed copy-on-write": _missed_copy_on_write,
    "stale cache": _stale_cache,
    "lost row": _lost_row,
    "missed swap": _missed_swap,
    "early release": _early_release,
    "stale epoch": _stale_epoch,
    "unwritten offer": _unwritten_offer,
}
