"""Faults that show in one composition of events of a schedule. The runs of `chance` must find them."""

from jpaged.core import disk_tier, memory, planned_step, prefix_tree, text_key
from jpaged.core.block_pool import BlockPool
from jpaged.core.block_table import BlockTable
from jpaged.core.commit import Commit
from jpaged.core.disk_tier import DiskTier
from jpaged.core.host_tier import HostTier
from jpaged.core.memory import Memory
from jpaged.core.past_outputs import PastOutputs
from jpaged.core.plan import NO_STATE, NOWHERE
from jpaged.core.planned_step import PlannedStep
from jpaged.core.prefix_tree import PrefixTree
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.rows import Rows
from jpaged.core.scheduler import Scheduler
from tests.core import planted, reader


def _after(patch, owner, name, change):
    """Let `change(result, *args)` follow each call of a function."""
    inner = getattr(owner, name)

    def changed(*args, **options):
        result = inner(*args, **options)
        change(result, *args)
        return result

    patch.setattr(owner, name, changed)


def _skipped_token(patch):
    def skip(_, memory, request):
        for sequence in request.live:
            if 0 < sequence.num_computed_tokens < len(sequence.table) * memory.pool.block_size:
                sequence.num_computed_tokens += 1

    _after(patch, Memory, "share_prefixes", skip)


def _steady_prompt(patch):
    def settle(_, step, sequence, count):
        if sequence.num_computed_tokens < sequence.num_prompt_tokens - 1:
            sequence.steady_until = sequence.num_prompt_tokens - 1

    _after(patch, PlannedStep, "_add", settle)


def _longer_beginning(patch):
    length = prefix_tree.common_length
    patch.setattr(prefix_tree, "common_length", lambda a, b: min(length(a, b) + 1, len(a), len(b)))


def _common_nodes(patch):
    def share(child, memory, sequence, index):
        child.nodes = sequence.nodes

    _after(patch, Memory, "fork", share)


def _rounded_leader(patch):
    def round_up(has_started, memory, sequence):
        if has_started:
            room = len(sequence.table) * memory.pool.block_size
            sequence.num_computed_tokens = min(room, sequence.num_tokens - 1)

    _after(patch, Memory, "follow", round_up)


def _impatient_branch(patch):
    follow = Memory.follow

    def hasty(memory, sequence):
        if sequence.leader is not None:
            leader, shared = sequence.leader
            sequence.leader = leader, min(shared, leader.num_computed_tokens + 1)
        return follow(memory, sequence)

    patch.setattr(Memory, "follow", hasty)


def _longer_leader(patch):
    length = memory.common_length
    patch.setattr(memory, "common_length", lambda a, b: min(length(a, b) + 1, len(a), len(b)))


def _move_without(patch, module, method):
    """Let the moves of a module skip a method of the pool."""
    move = module.move

    def careless(tables, to):
        with patch.context() as within:
            within.setattr(BlockPool, method, lambda pool, block: None)
            return move(tables, to)

    patch.setattr(module, "move", careless)


def _uncounted_move(patch):
    _move_without(patch, memory, "share")


def _remembered_destination(patch):
    _move_without(patch, planned_step, "_forget")


def _whole_blocks(patch):
    def round_up(_, step, request):
        for sequence in request.live:
            room = len(sequence.table) * step.memory.pool.block_size
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, min(room, sequence.num_tokens - 1))

    _after(patch, PlannedStep, "resume", round_up)


def _exchanged_beams(patch):
    def exchange(_, step, request):
        if request.beam and len(request.live) > 1:
            first, second = request.live[:2]
            first.table, second.table = second.table, first.table

    _after(patch, PlannedStep, "resume", exchange)


def _hasty_preemption(mode):
    def plant(patch):
        def force(_, step, *args, **options):
            step.may_preempt |= step.memory.preemption == mode

        _after(patch, PlannedStep, "__init__", force)

    return plant


def _scored_again(patch):
    def forget(_, rows, sequence):
        admitted = rows._admitted[sequence.row]
        if admitted.num_scored is not None:
            object.__setattr__(admitted, "num_scored", 0)

    _after(patch, Rows, "admit", forget)


def _unasked_host(patch):
    waits = Request.waits.fget
    patch.setattr(Request, "waits", property(lambda request: request.beam is None and waits(request)))


def _early_branches(patch):
    patch.setattr(Request, "waits", property(lambda request: request._host_bound))


def _dropped_beam(patch):
    release = Memory.release
    patch.setattr(Memory, "release", lambda memory, s: release(memory, s) if s.finish_reason else None)


def _last_branch(patch):
    patch.setattr(Request, "finished", property(lambda request: any(s.finish_reason for s in request.sequences)))


def _blocks_on_host(patch):
    release = Memory.release

    def forgetful(memory, sequence):
        if sequence.table.pool is not memory.host_pool:
            release(memory, sequence)

    patch.setattr(Memory, "release", forgetful)


def _arrivals_are_lost(patch):
    """A block that returns from the host is part of the prefix cache, and its content stays there."""
    take = HostTier.take
    patch.setattr(HostTier, "take", lambda tier: take(tier)._replace(back=[]))


def _places_are_given_away(patch):
    """A place of the host that a move of the step reads is given to another block in the same step."""
    patch.setattr(HostTier, "hold", lambda tier, block_ids: None)


def _copies_of_old_parameters(patch):
    """An update forgets the blocks on the device, and not their copies."""
    clear = PrefixTree.clear

    def half(tree):
        kept = [(node, list(node.copies)) for node in tree.nodes.values() if any(node.copies)]
        parents, children = dict(tree.nodes), dict(tree.children)
        clear(tree)
        if kept:
            tree.nodes.update(parents)
            tree.children.update(children)
            for node in tree.nodes.values():
                node.blocks = [None] * tree.num_kinds
            for node, copies in kept:
                for copy in copies:
                    if copy:
                        copy.node = node
                        tree.num_copies += 1

    patch.setattr(PrefixTree, "clear", half)


def _arriving_block_is_copied(patch):
    """The beginning of a block is shared and copied in the step in which the block returns from the host."""
    _after(patch, HostTier, "__init__", lambda _, tier, *args: setattr(tier.device, "arriving", ()))


def _wrong_group_returns(patch):
    keep = HostTier._keep

    def careless(tier, block):
        node, group = block.node, block.group
        keep(tier, block)
        copy = node.copies[group]
        other = next((i for i, each in enumerate(node.copies) if each is None and i != group), None)
        if copy is not None and other is not None and group < len(tier.device.windows) and not tier.device.num_pages:
            node.copies[group], node.copies[other], copy.group = None, copy, other

    patch.setattr(HostTier, "_keep", careless)


def _file_of_another_salt(patch):
    for module in (text_key, disk_tier, reader):
        patch.setattr(module, "first_key", lambda salt: bytes(32))


def _files_of_old_parameters(patch):
    """An update forgets all blocks, and not their files."""
    patch.setattr(DiskTier, "clear", lambda tier: None)


def _files_of_one_group(patch):
    """The blocks of all groups have one file."""
    name_of = DiskTier.name_of
    patch.setattr(DiskTier, "name_of", lambda tier, node, kind: name_of(tier, node, 0))


def _files_stay_unread(patch):
    take = HostTier.take
    patch.setattr(HostTier, "take", lambda tier: take(tier)._replace(from_files=[]))


def _unwritten_block_goes_to_the_host(patch):
    """A block whose file was read for the next step is evicted before, and copied to the host."""
    keep = HostTier._keep

    def careless(tier, block):
        if tier._back.get(block.block_id, 0) is None:
            del tier._back[block.block_id]
        keep(tier, block)

    patch.setattr(HostTier, "_keep", careless)


def _state_stays_on_the_host(patch):
    take = HostTier.take

    def careless(tier):
        moves = take(tier)
        return moves._replace(back=[pair for pair in moves.back if pair[0] >= 0])

    patch.setattr(HostTier, "take", careless)


def _late_choice(patch):
    release = Rows.release

    def keep(rows, sequence):
        row = sequence.row
        chosen = rows._chosen.get(row)
        release(rows, sequence)
        if chosen is not None:
            rows._chosen[row] = chosen

    patch.setattr(Rows, "release", keep)


def _host_kept(patch):
    clear = Memory.clear

    def half(memory, requests):
        host, memory.host_pool = memory.host_pool, None
        clear(memory, requests)
        memory.host_pool = host

    patch.setattr(Memory, "clear", half)


def _still_pending(patch):
    clear = Memory.clear

    def keep(memory, requests):
        requests = list(requests)
        pending = [(s, s.pending) for request in requests for s in request.live]
        clear(memory, requests)
        for sequence, count in pending:
            sequence.pending = count

    patch.setattr(Memory, "clear", keep)


def _other_salt(patch):
    match = BlockPool.match

    def curious(pool, tokens, salt=""):
        return max((match(pool, tokens, each) for each in ("", "a")), key=lambda found: found.num_tokens)

    patch.setattr(BlockPool, "match", curious)


def _old_outputs(patch):
    forget = PastOutputs._forget_all

    def keep(outputs):
        if hasattr(outputs, "_stream"):
            outputs._epoch = outputs._pool.epoch
        else:
            forget(outputs)

    patch.setattr(PastOutputs, "_forget_all", keep)


def _outputs_across_an_update(patch):
    add = PastOutputs.add
    patch.setattr(PastOutputs, "add", lambda outputs, salt, _, *text: add(outputs, salt, outputs.epoch, *text))


def _outputs_of_all(patch):
    add, following = PastOutputs.add, PastOutputs.following
    patch.setattr(PastOutputs, "add", lambda outputs, salt, *rest: add(outputs, "", *rest))
    patch.setattr(PastOutputs, "following", lambda outputs, salt, *rest: following(outputs, "", *rest))


def _aborted_output(patch):
    def remember(_, scheduler, sequence, reason, *rest):
        if reason == FinishReason.ABORT and sequence.drafter is not None:
            sequence.drafter.end(sequence.tokens, sequence.num_prompt_tokens)

    _after(patch, Scheduler, "finish", remember)


def _seed_of_request(patch):
    def forget(_, commit, sequence, drafts):
        chosen = commit.memory.rows._chosen
        if sequence.row in chosen:
            chosen[sequence.row] = chosen[sequence.row]._replace(seed=sequence.request.seed)

    _after(patch, Commit, "_settle", forget)


def _overlapping_drafts(patch):
    patch.setattr(Sequence, "waits", property(lambda sequence: sequence.request.waits))


def _early_window(patch):
    first_seen = BlockPool.first_seen
    patch.setattr(BlockPool, "first_seen", lambda pool, group, position: first_seen(pool, group, position + 1))


def _hit_without_window(patch):
    match, first_seen = BlockPool.match, BlockPool.first_seen

    def hopeful(pool, tokens, salt=""):
        with patch.context() as within:
            within.setattr(
                BlockPool, "first_seen", lambda pool, group, at: first_seen(pool, group, at + pool.block_size)
            )
            return match(pool, tokens, salt)

    patch.setattr(BlockPool, "match", hopeful)


def _window_of_drafts(patch):
    leave = Memory.leave
    patch.setattr(Memory, "leave", lambda memory, s, position: leave(memory, s, max(position, s.num_computed_tokens)))


def _forgotten_gap(patch):
    def fill(_, table, block_ids):
        table.first = [0] * len(table.first)

    _after(patch, BlockTable, "share", fill)


def _closed_gap(patch):
    move = planned_step.move

    def close(tables, to):
        tables = list(tables)
        moved = move(tables, to)
        for table in tables:
            for group, (ids, first) in enumerate(zip(table.block_ids, table.first)):
                del ids[:first]
                ids += [ids[-1]] * first if ids else []
                table.first[group] = 0
        return moved

    patch.setattr(planned_step, "move", close)


def _hasty_leader(patch):
    patch.setattr(Memory, "leads_to", lambda memory, sequence: None)


def _kept_entry(patch):
    def leave(table, position):
        for group, held in enumerate(table.block_ids):
            for index in range(min(table.pool.first_seen(group, position), len(table))):
                table.pool.free(held[index])

    patch.setattr(BlockTable, "leave", leave)


def _fewer_blocks(patch):
    def shrink(_, pool, *args, **options):
        pool.most_held = tuple(most and 2 for most in pool.most_held)

    _after(patch, BlockPool, "__init__", shrink)


def _copy_of_one_group(patch):
    append = BlockTable.append

    def first_only(table, start, end):
        copies = append(table, start, end)
        return copies and [pair for pair in copies if pair[1] in table.block_ids[0]]

    patch.setattr(BlockTable, "append", first_only)


def _exchanged_groups(patch):
    def exchange(_, step, request):
        for sequence in request.live:
            table = sequence.table
            table.block_ids, table.first = table.block_ids[::-1], table.first[::-1]

    _after(patch, PlannedStep, "resume", exchange)


def _entries_of_one_group(patch):
    change = Rows.change

    def first_only(rows, sequence, first, stop):
        change(rows, sequence, first, stop)
        changed = rows._entries[sequence.row]
        changed[:] = [entry for entry in changed if entry.group == 0]

    patch.setattr(Rows, "change", first_only)


def _lost_path(patch):
    """A node without blocks goes, though others follow it."""

    def forget(tree, block):
        if block.node is not None:
            node, block.node = block.node, None
            node.of(copies=block.is_copy)[block.group] = None
            tree.num_copies -= block.is_copy
            if not node.held:
                tree.children[node.parent].remove(node)
                del tree.nodes[node.number]

    patch.setattr(PrefixTree, "detach", forget)


def _stale_group(patch):
    """Only the first group forgets the content of a block that is written."""
    detach = PrefixTree.detach
    patch.setattr(PrefixTree, "detach", lambda tree, block: None if block.group else detach(tree, block))


def _remembered_once_more(patch):
    """A node takes the block of one group for another one."""
    fill = BlockPool._fill
    patch.setattr(BlockPool, "_fill", lambda pool, node, block_ids: fill(pool, node, block_ids[::-1]))


def _hit_without_state(patch):
    """The longest text with keys and values is a hit, and its state is that of a beginning."""
    match = BlockPool.match

    def hopeful(pool, tokens, salt=""):
        found = match(pool, tokens, salt)
        if pool.num_pages and found.num_known > found.num_tokens > 0:
            with patch.context() as within:
                within.setattr(pool, "num_pages", 0)
                found = match(pool, tokens, salt)._replace(page=found.page)
        return found

    patch.setattr(BlockPool, "match", hopeful)


def _state_of_wrong_drafts(patch):
    """A rejected draft stays in the state, as if a state could be cut like keys and values."""

    def rewind(table, position):
        while len(table.pages) > 1 and table.pages[-1][0] > position:
            table.pool.free(table.pages.pop(-2)[1])
            table.pages[-1] = max(position, table.pages[-2][0] + 1 if table.pages[1:] else 0), table.pages[-1][1]

    patch.setattr(BlockTable, "rewind", lambda table, at: rewind(table, at) if at >= 0 else _free_pages(table))


def _free_pages(table):
    while table.pages:
        table.pool.free(table.pages.pop()[1])


def _state_before_drafts(patch):
    """After drafts that were kept, the next step continues from the state before them."""

    def earlier(entries, table, ends, kept, num_drafts, spare):
        if num_drafts:
            (position, first), *others = table.pages[-num_drafts - 1 :]
            del table.pages[-num_drafts - 1 :]
            table.pages += [(position, others[-1][1]), *((end, page) for end, page in others[:-1]), (ends[-1], first)]

    _after(patch, BlockTable, "advance", earlier)


def _state_of_last_owner(patch):
    """A sequence begins with what its page holds from an earlier one."""

    def stale(entries, *_):
        for index, (read, written) in enumerate(entries):
            if read == NO_STATE and written != NOWHERE:
                entries[index] = written, written

    _after(patch, BlockTable, "advance", stale)


def _written_snapshot(patch):
    """A cached state goes on in its page."""
    advance = BlockTable.advance
    forget = BlockPool.forget

    def in_place(table, ends, kept, num_drafts, spare):
        with patch.context() as within:
            within.setattr(
                BlockPool, "forget", lambda pool, page: None if page >= pool.num_blocks else forget(pool, page)
            )
            return advance(table, ends, (), num_drafts, spare)

    patch.setattr(BlockTable, "advance", in_place)


def _shared_state(patch):
    patch.setattr(BlockTable, "needs_page", property(lambda table: not table.pages))


def _state_in_flight(patch):
    """A state is free while a step in flight reads it."""

    def leave(entries, table, *_):
        table.leave_pages(table.pages[-1][0])

    _after(patch, BlockTable, "advance", leave)


def _misplaced_state(patch):
    """The state is put under the text of one block less."""
    remember = BlockPool.remember_page

    def misplace(pool, page, number):
        parent = pool.tree.nodes[number].parent
        remember(pool, page, parent if isinstance(parent, int) else number)

    patch.setattr(BlockPool, "remember_page", misplace)


def _states_on_device(patch):
    """Blocks move to the host and back, and states stay where they are."""
    move = memory.move

    def careless(tables, to):
        tables = list(tables)
        pages = [(table, list(table.pages)) for table in tables]
        moved = move(tables, to)
        for table, before in pages:
            table.pages = [(position, page) for (position, _), (_, page) in zip(before, table.pages)]
        return [pair for pair in moved if pair[0] >= 0]

    patch.setattr(memory, "move", careless)


def _state_of_old_parameters(patch):
    """An update forgets blocks, and not states."""
    keeps = Memory.keeps_state

    def careless(memory, sequence, position):
        epoch, sequence.epoch = sequence.epoch, memory.pool.epoch
        kept = keeps(memory, sequence, position)
        sequence.epoch = epoch
        return kept

    patch.setattr(Memory, "keeps_state", careless)
    reset = BlockPool.reset_prefix_cache

    def forgetful(pool):
        nodes, children = dict(pool.tree.nodes), dict(pool.tree.children)
        kept = [(block, block.node) for block in pool._blocks[pool.num_blocks :] if block.node]
        reset(pool)
        if kept:
            pool.tree.nodes.update(nodes)
            pool.tree.children.update(children)
            for block, node in kept:
                block.node = node

    patch.setattr(BlockPool, "reset_prefix_cache", forgetful)


def _state_of_impatient_leader(patch):
    patch.setattr(Memory, "leads_to", lambda memory, sequence: None)


def _more_pages(patch):
    patch.setattr(PlannedStep, "_lacks_pages", lambda step, tables: False)


# By composition. Those of `planted` show in one, too.
FAULTS = {
    "chunk, prefix hit": _skipped_token,
    "chunk, overlap": _steady_prompt,
    "chunk, recompute": _scored_again,
    "prefix hit, partial block": _longer_beginning,
    "prefix hit, partial block, end": planted.BUGS["unwritten offer"],
    "prefix hit, fork": _common_nodes,
    "prefix hit, swap": _remembered_destination,
    "prefix hit, update": planted.BUGS["stale epoch"],
    "prefix hit, salt": _other_salt,
    "prefix hit, copy": planted.BUGS["stale cache"],
    "partial block, fork": planted.BUGS["missed copy-on-write"],
    "partial block, swap": _whole_blocks,
    "partial block, fork, recompute": _rounded_leader,
    "fork, recompute": _impatient_branch,
    "fork, swap": _uncounted_move,
    "fork, overlap": _early_branches,
    "fork, abort": _last_branch,
    "fork, drafts": _seed_of_request,
    "beams, swap": _exchanged_beams,
    "beams, recompute": _longer_leader,
    "beams, overlap": _unasked_host,
    "beams, fork": _dropped_beam,
    "swap, overlap": _hasty_preemption("swap"),
    "swap, abort": _blocks_on_host,
    "swap, update": _host_kept,
    "swap, copies": planted.BUGS["missed swap"],
    "recompute, overlap": _hasty_preemption("recompute"),
    "overlap, abort": planted.BUGS["early release"],
    "drafts, overlap": _overlapping_drafts,
    "wrong drafts, recompute": planted.DRAFT_BUGS["kept position"],
    "wrong drafts, right drafts": planted.DRAFT_BUGS["credulous"],
    "right drafts, rows": planted.DRAFT_BUGS["silent host"],
    "right drafts, blocks": planted.DRAFT_BUGS["unwritten draft"],
    "drafts, update": _still_pending,
    "drafts, abort": _late_choice,
    "window, chunk": _early_window,
    "window, prefix hit": _hit_without_window,
    "window, wrong drafts": _window_of_drafts,
    "window, fork": _forgotten_gap,
    "window, swap": _closed_gap,
    "window, fork, recompute": _hasty_leader,
    "window, end": _kept_entry,
    "window, recompute": _fewer_blocks,
    "groups, copy": _copy_of_one_group,
    "groups, swap": _exchanged_groups,
    "groups, rows": _entries_of_one_group,
    "tier, prefix hit": _arrivals_are_lost,
    "tier, swap": _places_are_given_away,
    "tier, update": _copies_of_old_parameters,
    "tier, partial block, copy": _arriving_block_is_copied,
    "tier, groups": _wrong_group_returns,
    "tier, state": _state_stays_on_the_host,
    "disk, salt": _file_of_another_salt,
    "disk, update": _files_of_old_parameters,
    "disk, groups": _files_of_one_group,
    "disk, prefix hit": _files_stay_unread,
    "disk, eviction": _unwritten_block_goes_to_the_host,
    "groups, window, eviction": _lost_path,
    "groups, prefix hit, eviction": _stale_group,
    "groups, prefix hit": _remembered_once_more,
    "state, prefix hit": _hit_without_state,
    "state, wrong drafts": _state_of_wrong_drafts,
    "state, right drafts": _state_before_drafts,
    "state, end": _state_of_last_owner,
    "state, prefix hit, copy": _written_snapshot,
    "state, fork": _shared_state,
    "state, copy, overlap": _state_in_flight,
    "state, chunk": _misplaced_state,
    "state, swap": _states_on_device,
    "state, update": _state_of_old_parameters,
    "state, fork, recompute": _state_of_impatient_leader,
    "state, fork, beams": _more_pages,
    "past outputs, update": _old_outputs,
    "past outputs, update, overlap": _outputs_across_an_update,
    "past outputs, salt": _outputs_of_all,
    "past outputs, abort": _aborted_output,
}
