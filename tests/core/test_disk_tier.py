"""Files of the prefix cache: names of texts, reading within the bound of a step, writing and deletion."""

import pytest

from jpaged.core.disk_tier import DiskTier
from jpaged.core.plan import Sample, StepResult
from tests.core.traffic import add, dispatch, drain, fetch, make, schedule, step

SIZE = 4
FIRST, SECOND, THIRD = (list(range(i, i + 12)) for i in (1, 20, 33))  # three blocks each


def told(scheduler, runner, name, prompt, **options):
    """Run a request alone, and return the number of its tokens that came from the prefix cache."""
    params = add(scheduler, "params", prompt, max_tokens=1).params
    scheduler.abort("params")
    request = scheduler.add(name, prompt, params, seed=0, **options)
    drain(scheduler, runner)
    return request.sequences[0].num_cached_tokens


def small(**options):
    """Return a scheduler whose device and host hold one prompt of three blocks each, with files."""
    return make(**{"blocks": 3, "size": SIZE, "tokens": 32, "host": 3, "files": 100} | options)


def restarted(scheduler, runner):
    """Save all blocks on the device, and lose everything but the files."""
    runner.save_blocks(scheduler.disk.unsaved())
    runner.save(*scheduler.disk.take())
    scheduler.recover()
    runner.recover()


def test_what_the_host_forgets_returns_from_files():
    scheduler, runner = small()
    for name, prompt in zip("abc", (FIRST, SECOND, THIRD)):
        assert told(scheduler, runner, name, prompt) == 0
    assert len(runner.files) == 6 and scheduler.disk.num_read == 0
    assert told(scheduler, runner, "d", FIRST) == 8 and scheduler.disk.num_read == 2


def test_a_restart_keeps_the_hits():
    scheduler, runner = small(blocks=12, host=12)
    for name, prompt in zip("abc", (FIRST, [*FIRST[:4], *SECOND], THIRD)):
        told(scheduler, runner, name, prompt)
    assert not runner.files, "nothing was evicted"
    restarted(scheduler, runner)
    assert len(runner.files) == 3 + 3 + 3 and scheduler.pool.tree.nodes == {}
    assert [told(scheduler, runner, name, each) for name, each in zip("def", (FIRST, [*FIRST[:4], *SECOND], THIRD))] \
        == [8, 12, 8]  # fmt: skip
    assert scheduler.disk.unsaved() == [], "all of them have files"


def test_salts_and_adapters_have_no_common_files():
    scheduler, runner = small(blocks=12, host=12, adapters=1)
    for name, options in zip("abc", ({}, {"cache_salt": "x"}, {"adapter": 7})):
        told(scheduler, runner, name, FIRST, **options)
    restarted(scheduler, runner)
    assert len(runner.files) == 6, "numbers of adapters are those of one engine"
    cached = [
        told(scheduler, runner, name, FIRST, **options)
        for name, options in zip("defg", ({"cache_salt": "y"}, {"adapter": 7}, {"cache_salt": "x"}, {}))
    ]
    assert cached == [0, 0, 8, 8]


def test_the_least_recently_used_files_are_deleted():
    scheduler, runner = small(files=4)
    for name, prompt in zip("abcd", (FIRST, SECOND, THIRD, SECOND)):
        told(scheduler, runner, name, prompt)
    assert len(runner.files) == 4
    assert told(scheduler, runner, "e", FIRST) == 0


def test_a_lost_file_ends_the_prefix_there():
    scheduler, runner = small(blocks=12, host=12)
    told(scheduler, runner, "a", FIRST)
    names = [name for _, name in scheduler.disk.unsaved()]
    scheduler.disk._names.clear()
    restarted(scheduler, runner)
    del runner.files[names[1]]  # blocks are freed from the end on
    assert told(scheduler, runner, "b", FIRST) == 4
    assert names[1] not in scheduler.disk._names and scheduler.host_pool.num_used == 0


@pytest.mark.parametrize("token_s, cached", [(0.0, 8), (0.5, 8), (0.1, 0)])
def test_files_are_read_only_if_that_takes_less_than_the_computation(token_s, cached):
    """Reading takes 0.5 seconds a file, which is known after the first one."""
    scheduler, runner = small(blocks=12, host=12)
    told(scheduler, runner, "a", FIRST)
    told(scheduler, runner, "b", SECOND)
    restarted(scheduler, runner)
    told(scheduler, runner, "c", SECOND)
    scheduler.disk.token_s = token_s
    assert told(scheduler, runner, "d", FIRST) == cached


def test_beside_other_requests_files_are_read_in_parts():
    scheduler, runner = make(blocks=40, size=SIZE, tokens=8, host=40, files=100, length=80)
    long, other = [*range(40), 1, 3], [7, 9]
    told(scheduler, runner, "a", long)
    told(scheduler, runner, "b", other)
    restarted(scheduler, runner)
    scheduler.disk.token_s, scheduler.disk.read_s = 0.2, 0.5  # 8 tokens take 1.6 seconds: three files
    running = add(scheduler, "other", other, max_tokens=30)
    step(scheduler, runner)
    waiting = add(scheduler, "again", long, max_tokens=1)
    counts = []
    while waiting in scheduler.waiting:
        before = scheduler.disk.num_read
        assert step(scheduler, runner).plan.rows, "the other request goes on"
        counts.append(scheduler.disk.num_read - before)
    assert counts == [3, 3, 3, 1] and waiting.sequences[0].num_cached_tokens == 40
    drain(scheduler, runner)
    assert running.finished


def test_requests_that_start_together_find_their_files():
    scheduler, runner = small(blocks=12, host=12, seqs=3)
    for name, prompt in zip("abc", (FIRST, SECOND, THIRD)):
        told(scheduler, runner, name, prompt)
    restarted(scheduler, runner)
    requests = [add(scheduler, name, prompt, max_tokens=1) for name, prompt in zip("def", (FIRST, SECOND, THIRD))]
    assert len(step(scheduler, runner).plan.rows) == 3
    assert [request.sequences[0].num_cached_tokens for request in requests] == [8, 8, 8]


def test_files_need_no_place_on_the_host():
    scheduler, runner = small(blocks=12, host=2)
    told(scheduler, runner, "a", [*FIRST, *SECOND])
    restarted(scheduler, runner)
    assert told(scheduler, runner, "b", [*FIRST, *SECOND]) == 20
    assert scheduler.disk.num_read == 5 and scheduler.host_pool.tree.num_copies == 0


def test_files_are_read_for_a_request_that_can_start():
    scheduler, runner = small(blocks=12, host=2)
    told(scheduler, runner, "a", FIRST)
    restarted(scheduler, runner)
    taken = [scheduler.pool.allocate() for _ in range(10)]
    request = add(scheduler, "b", FIRST, max_tokens=1)
    assert list(scheduler.wanted_files()) == [] and scheduler.pool.num_free == 2
    for block_id in taken:
        scheduler.pool.free(block_id)
    drain(scheduler, runner)
    assert request.sequences[0].num_cached_tokens == 8


def test_failed_parameters_leave_no_files():
    scheduler, runner = small(blocks=12, host=12)
    told(scheduler, runner, "a", FIRST)
    nodes = list(scheduler.pool.tree.nodes)
    restarted(scheduler, runner)
    told(scheduler, runner, "b", FIRST)
    for number in [number for number in scheduler.pool.tree.nodes if number not in nodes]:
        scheduler.memory.forget_node(number)
    runner.save(*scheduler.disk.take())
    assert not runner.files


def test_the_prefix_of_a_request_with_invalid_logits_leaves_no_files():
    scheduler, runner = small(blocks=12, host=12)
    told(scheduler, runner, "a", FIRST[:9])
    runner.save_blocks(scheduler.disk.unsaved())  # there are no copies on the host
    request = add(scheduler, "b", FIRST, max_tokens=1)
    plan = schedule(scheduler)
    dispatch(scheduler, runner, plan).result()
    scheduler.commit(plan, StepResult([Sample(0, float("nan"))]))
    runner.save(*scheduler.disk.take())
    assert request.finished and request.sequences[0].num_cached_tokens == 8
    assert not runner.files


def test_a_name_depends_on_the_salt_and_on_every_token_before_its_end():
    names = set()
    for salt, prompt in (("", FIRST), ("x", FIRST), ("", [0, *FIRST[1:]]), ("", [*FIRST[:8], *SECOND[:4]])):
        scheduler, runner = small(blocks=12, host=12)
        told(scheduler, runner, "a", prompt, cache_salt=salt)
        names.update(name for _, name in scheduler.disk.unsaved())
    assert len(names) == 4 * 3 - 2


def test_requests_that_need_logprobs_of_their_prompt_read_nothing():
    scheduler, runner = small(blocks=12, host=12)
    told(scheduler, runner, "a", FIRST)
    restarted(scheduler, runner)
    add(scheduler, "b", FIRST, max_tokens=1, prompt_logprobs=0)
    fetch(scheduler, runner)
    assert scheduler.disk.num_read == 0
    drain(scheduler, runner)


def test_a_scheduler_without_files_wants_none():
    scheduler, _ = make(host=4)
    add(scheduler, "a", FIRST, max_tokens=1)
    assert scheduler.disk is None and list(scheduler.wanted_files()) == []
    assert isinstance(small()[0].disk, DiskTier)
