"""Pages for the states of recurrent layers: hits, snapshots, entries of a plan, and the errors of requests."""

import pytest

from jpaged.core import memory
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, InvalidParameter, SamplingParams
from jpaged.core.plan import CONTINUES, NO_STATE, NOWHERE
from tests.core import traffic


def states_of(scheduler, prompt):
    """The positions of the cached states of a text."""
    pool, parent, found = scheduler.pool, "", []
    for at in range(0, len(prompt) - pool.block_size + 1, pool.block_size):
        wanted = tuple(prompt[at : at + pool.block_size])
        node = next((node for node in pool.tree.children.get(parent, ()) if node.tokens == wanted), None)
        if node is None:
            break
        found += [at + pool.block_size] * (node.blocks[-1] is not None)
        parent = node.number
    return found


def run(scheduler, runner, name, prompt, **params):
    """Run a request alone; return its output and its cached tokens."""
    request = traffic.add(scheduler, name, prompt, **params)
    traffic.drain(scheduler, runner)
    traffic.assert_as_alone(request)
    return request.sequences[0].output_token_ids, request.sequences[0].num_cached_tokens


def test_a_hit_ends_where_a_state_is():
    pool = BlockPool(4, 2, num_pages=2)
    blocks, nodes, parent = [pool.allocate() for _ in range(3)], [], ""
    for index, block_id in enumerate(blocks):
        nodes.append(parent := pool.remember([block_id], parent, [index, index]))
    text = [0, 0, 1, 1, 2, 2, 3]
    assert pool.match(text).num_tokens == 0 and pool.match(text).num_known == 6
    page = pool.allocate_page()
    pool.remember_page(page, nodes[1])
    found = pool.match(text)
    assert (found.num_tokens, found.page, found.block_ids, found.nodes) == (4, page, [blocks[:2]], nodes[:2])
    assert pool.match(text[:5]).num_tokens == 4 and pool.match(text[:3]).num_tokens == 0
    pool.check_invariants([[blocks, [page]]])
    pool.free(page)
    pool.check_invariants([[blocks, []]])
    assert pool.match(text).page == page, "a free page stays cached"
    assert [pool.allocate_page() for _ in range(3)] == [pool.num_blocks + 1, page, None]
    assert pool.match(text).num_tokens == 0, "its content is gone"
    pool.check_invariants([[blocks, [page, pool.num_blocks + 1]]])


def test_states_are_kept_at_the_end_of_a_prompt_where_texts_part_and_every_so_often():
    scheduler, runner = traffic.make(64, 4, tokens=64, length=128, pages=12)
    first, second = [7] * 26 + [1] * 16, [7] * 26 + [2] * 20
    assert run(scheduler, runner, "a", first, max_tokens=1)[1] == 0
    assert states_of(scheduler, first) == [16, 32, 40], "every 4 blocks, and the last whole block before the last token"
    assert run(scheduler, runner, "b", second, max_tokens=1)[1] == 16
    assert states_of(scheduler, second) == [16, 24, 32, 44], "24 tokens are common to both"
    assert run(scheduler, runner, "c", [7] * 26 + [3] * 8, max_tokens=1)[1] == 24
    assert run(scheduler, runner, "d", first, max_tokens=1)[1] == 40


def test_an_output_leaves_its_last_block_for_the_next_turn():
    scheduler, runner = traffic.make(64, 4, tokens=64, length=128, pages=12)
    output, _ = run(scheduler, runner, "a", [7] * 6, max_tokens=24, ignore_eos=True)
    text = [7] * 6 + output
    assert states_of(scheduler, text) == [4, 16, 28], "16 is one of every so often, 28 the last whole block"
    assert run(scheduler, runner, "b", [*text, 5, 5], max_tokens=1)[1] == 28


def test_no_output_leaves_a_state_where_it_is_computed_otherwise_than_a_prompt():
    scheduler, runner = traffic.make(64, 4, tokens=64, length=128, pages=12, exact=True)
    output, _ = run(scheduler, runner, "a", [7] * 6, max_tokens=24, ignore_eos=True)
    assert states_of(scheduler, [7] * 6 + output) == [4]


def test_a_prompt_with_states_to_keep_has_several_entries_in_one_step():
    scheduler, runner = traffic.make(64, 4, tokens=64, length=128, pages=12)
    traffic.add(scheduler, "a", [7] * 42, max_tokens=2)
    plan = traffic.schedule(scheduler)
    assert [(start, count, samples) for _, start, count, samples in plan.rows] == [
        (0, 16, 0), (16, 16, 0), (32, 8, 0), (40, 2, 1),
    ]  # fmt: skip
    (first, *others), written = zip(*plan.pages)
    assert first == NO_STATE and others == [CONTINUES] * 3 and len({*written}) == 4 and NOWHERE not in written
    scheduler.commit(plan, runner.step(plan))
    plan = traffic.schedule(scheduler)
    assert plan.pages == ((written[-1], written[-1]),), "the state goes on in its page"


def test_without_spare_pages_no_state_is_kept_and_without_rows_a_step_ends_there():
    scheduler, _ = traffic.make(64, 4, tokens=64, length=128, pages=1)
    traffic.add(scheduler, "a", [7] * 42, max_tokens=2)
    plan = traffic.schedule(scheduler)
    assert [written for _, written in plan.pages] == [NOWHERE, NOWHERE, NOWHERE, 0]
    scheduler, _ = traffic.make(64, 4, seqs=2, tokens=64, length=128, pages=8)
    traffic.add(scheduler, "a", [7] * 42, max_tokens=2)
    assert [row.num_tokens for row in traffic.schedule(scheduler).rows] == [16, 16]


def test_models_without_recurrent_layers_have_no_pages():
    scheduler, _ = traffic.make(64, 4)
    traffic.add(scheduler, "a", [7] * 42, max_tokens=2)
    plan = traffic.schedule(scheduler)
    assert len(plan.rows) == 1 and plan.pages == ()
    assert scheduler.pool.allocate_page() is None


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(n=3, max_tokens=2), "n"),
        (SamplingParams(best_of=4, max_tokens=2), "best_of"),
        (BeamSearchParams(beam_width=3, max_tokens=2), "beam_width"),
    ],
)
def test_a_request_that_needs_more_pages_than_there_are_is_refused(params, name):
    scheduler, _ = traffic.make(64, 4, pages=5)
    with pytest.raises(InvalidParameter, match=f"{name}.*sequences may need [68], and the pool has 5 pages"):
        scheduler.add("a", [1, 2], params, seed=0)
    scheduler.add("b", [1, 2], SamplingParams(n=2, max_tokens=2), seed=0)


def test_the_interval_is_whole_blocks():
    for size in (1, 16, 24, 2048):
        pool = BlockPool(4, size, num_pages=1)
        every = memory.Memory(pool, None, 4, "recompute", (0.0, 0.0))._every
        assert every >= memory.STATE_EVERY and every % size == 0 and every - size < memory.STATE_EVERY
