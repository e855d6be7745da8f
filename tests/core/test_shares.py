"""Tenants share steps, rows and blocks: what one does costs another at most as much again as its own work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.shares import divide
from tests.core.traffic import assert_as_alone, assert_nothing_leaked, drain, make, step

OVERHEAD = 4


def add(scheduler, name, prompt, *, tenant, priority=0, **params):
    params = SamplingParams(**params)
    return scheduler.add(name, prompt, params, seed=0, client=tenant, tenant=tenant, priority=priority)


class Clock:
    """Runs steps, and counts their cost: all of it, and the largest."""

    def __init__(self, overhead=OVERHEAD, **options):
        self.overhead = overhead
        self.scheduler, self.runner = make(step_overhead=overhead, **options)
        self.now = self.largest = 0

    def add(self, tenant, prompt, **params):
        name = f"{tenant}{len(self.scheduler.requests)} at {self.now}"
        return add(self.scheduler, name, prompt, tenant=tenant, **params)

    def step(self):
        done = step(self.scheduler, self.runner)
        cost = self.overhead + done.plan.num_tokens
        self.now, self.largest = self.now + cost, max(self.largest, cost)
        return done

    def times(self, requests):
        """Run until some requests have ended; return the cost up to the first token of all, and up to the end."""
        start, first = self.now, None
        while not all(request.finished for request in requests):
            self.step()
            if first is None and all(request.sequences[0].num_output_tokens for request in requests):
                first = self.now - start
        return first, self.now - start


# For each load its requests (number, tokens of a prompt, tokens of an output), and the sizes of rows and blocks.
LOADS = {
    "decodes": ((150, 2, 90), {"seqs": 200, "blocks": 2000}),
    "long prompts": ((20, 200, 5), {"seqs": 200, "blocks": 3000}),
    "rows": ((60, 2, 60), {"seqs": 40, "blocks": 1000}),
    "blocks": ((30, 30, 60), {"seqs": 200, "blocks": 200}),
}
WORKS = {"decode": [(20, 5)], "one token": [(1, 1)], "prompt": [(150, 3)], "several": [(9, 6)] * 5}


# The usual tier has each load, each work and each mode.
@pytest.mark.parametrize(
    "load, work, mode",
    [
        pytest.param(load, work, mode, marks=[] if i == j and (i % 2 == 0) == (mode == "swap") else [pytest.mark.deep])
        for i, load in enumerate(LOADS) for j, work in enumerate(WORKS) for mode in ("recompute", "swap")
    ],
)  # fmt: skip
def test_a_tenant_waits_twice_as_long_as_alone_and_a_step_whatever_another_one_does(load, work, mode):
    (number, length, tokens), sizes = LOADS[load]
    options = {"tokens": 256, "length": 512, "host": 200, "preemption": mode, "cache": False, **sizes}
    alone = Clock(**options)
    wanted = alone.times([alone.add("b", [1] * n, max_tokens=m) for n, m in WORKS[work]])
    clock = Clock(**options)
    others = [clock.add("a", [2] * length, max_tokens=tokens) for _ in range(number)]
    for _ in range(12):
        clock.step()
    requests = [clock.add("b", [1] * n, max_tokens=m) for n, m in WORKS[work]]
    found = clock.times(requests)
    assert all(time <= 2 * time_alone + clock.largest for time, time_alone in zip(found, wanted))
    assert any(not other.finished for other in others)
    for request in requests:
        assert_as_alone(request)


@pytest.mark.parametrize(
    "load, rivals",
    [
        pytest.param(load, rivals, marks=[] if (i % 2 == 0) == (rivals == "bc") else [pytest.mark.deep])
        for i, load in enumerate(LOADS) for rivals in ("b", "bc")
    ],
)  # fmt: skip
def test_a_tenant_with_much_work_takes_no_longer_than_alone_for_each_tenant(load, rivals):
    """Its rivals always have a request or two, so that they take what they can."""
    (number, length, tokens), sizes = LOADS[load]
    options = {"tokens": 256, "length": 512, "cache": False, **sizes}

    def start(clock):
        return [clock.add("a", [2] * length, max_tokens=min(tokens, 9)) for _ in range(number)]

    alone, clock = Clock(**options), Clock(**options)
    (_, wanted), requests = alone.times(start(alone)), start(clock)
    while not all(request.finished for request in requests):
        for rival in rivals:
            if clock.scheduler.waiting.count(rival) + clock.scheduler.running.count(rival) < 2:
                clock.add(rival, [1] * 30, max_tokens=7)
        clock.step()
    assert clock.now <= (1 + len(rivals)) * wanted + clock.largest
    drain(clock.scheduler, clock.runner)


@pytest.mark.parametrize("kind", ["beams", "samples"])
def test_branches_that_advance_together_are_paid_for_later(kind):
    """Each step of all beams costs more than a tenant's share, so they advance in a part of the steps."""
    clock = Clock(seqs=40, tokens=64, blocks=400, length=64)
    params = BeamSearchParams(beam_width=20, max_tokens=9, ignore_eos=True)
    if kind == "samples":
        params = SamplingParams(n=20, max_tokens=9)
    many = [clock.scheduler.add(f"a{i}", [3 + i, 4], params, seed=0, tenant="a") for i in range(2)]
    while not many[0].sequences[-1].num_output_tokens > 1:
        clock.step()
    _, total = clock.times([clock.add("b", [1] * 9, max_tokens=40)])
    assert total <= 2 * (OVERHEAD + 9 + 39 * (OVERHEAD + 1)) + clock.largest
    assert any(not request.finished for request in many)
    drain(clock.scheduler, clock.runner)
    assert not clock.scheduler.queues.owed, "alone, a tenant owes nothing"
    for request in many:
        assert_as_alone(request)


def test_no_step_is_limited_where_tokens_cost_nothing():
    clock = Clock(seqs=40, tokens=64, blocks=400)
    clock.scheduler.step_overhead = math.inf
    for _ in range(30):
        clock.add("a", [2] * 2, max_tokens=9)
    clock.step()
    clock.add("b", [1], max_tokens=3)
    assert clock.step().plan.num_tokens == 31


def test_rows_that_are_left_out_of_a_step_come_first_in_the_next():
    clock = Clock(overhead=2, seqs=8, tokens=32, cache=False)
    requests = [clock.add("a", [2], max_tokens=9) for _ in range(7)]
    clock.step()
    clock.add("b", [1], max_tokens=9)
    served = [[r for r in clock.step().served if r in requests] for _ in range(7)]
    assert [len(each) for each in served] == [3] * 7
    for request in requests:
        steps = [number for number, each in enumerate(served) if request in each]
        assert len(steps) == 3 and steps[0] < 3 and max(steps[1] - steps[0], steps[2] - steps[1]) <= 3


def test_a_prompt_keeps_its_turn_for_a_chunk_and_no_longer():
    """Its tenant's decodes wait for a chunk, and it waits for one token of each of them."""
    clock = Clock(overhead=2, seqs=8, tokens=16, tokens_beside_decodes=8, length=128, blocks=100, cache=False)
    decodes = [clock.add("a", [2], max_tokens=30) for _ in range(3)]
    clock.step()
    prompt = clock.add("a", [2] * 80, max_tokens=2)
    clock.step()
    clock.add("b", [1], max_tokens=90)
    waits = [0]
    while not prompt.finished and not any(decode.finished for decode in decodes):
        waits.append(0 if decodes[0] in clock.step().served else waits[-1] + 1)
    assert 2 <= max(waits) <= 4 and prompt.finished


def test_the_first_request_of_a_tenant_keeps_its_place():
    """One request holds nearly all blocks: another tenant's waits, and then takes its share from the others."""
    clock = Clock(blocks=20, size=4, seqs=8, tokens=64, length=80, cache=False)
    large = clock.add("a", [2] * 60, max_tokens=8)
    clock.step()
    small = clock.add("b", [1] * 20, max_tokens=2)
    later = clock.add("a", [2] * 2, max_tokens=2)
    assert clock.step().served == [large]
    while not large.finished:
        assert not clock.step().preempted and not later.admitted, "nobody overtakes the one that waits for room"
    while not small.finished:
        clock.step()
    drain(clock.scheduler, clock.runner)


def test_what_gave_way_does_not_come_back_before_there_is_room():
    clock = Clock(seqs=4, tokens=64, blocks=100, cache=False)
    old = [clock.add("a", [2], max_tokens=30) for _ in range(4)]
    clock.step()
    new = [clock.add("b", [1], max_tokens=20) for _ in range(3)]
    done = clock.step()
    assert done.preempted == old[:1:-1] and set(done.served) >= {*new[:2]}
    while not new[0].finished:
        done = clock.step()
        assert not done.preempted and not new[2].admitted
    drain(clock.scheduler, clock.runner)
    assert clock.scheduler.num_preemptions == 2


def test_blocks_are_taken_from_the_tenant_that_holds_most():
    clock = Clock(blocks=12, size=2, seqs=8, tokens=32, cache=False)
    many = [clock.add("a", [2] * 3, max_tokens=9) for _ in range(3)]
    few = [clock.add("b", [1, 1], max_tokens=5) for _ in range(2)]
    preempted = []
    while not all(request.finished for request in few):
        preempted += clock.step().preempted
    assert preempted and set(preempted) <= {*many[1:]}
    drain(clock.scheduler, clock.runner)


def test_tenants_that_begin_together_get_equal_numbers_of_rows():
    scheduler, runner = make(seqs=4, tokens=64, blocks=100)
    for tenant in "aaaabbbb":
        scheduler.add(f"{tenant}{len(scheduler.requests)}", [1], SamplingParams(max_tokens=9), seed=0, tenant=tenant)
    assert [request.tenant for request in step(scheduler, runner).served] == [*"aabb"]


def test_tenants_that_begin_together_get_equal_numbers_of_tokens():
    scheduler, runner = make(seqs=9, tokens=40, blocks=100)
    for tenant in "aaabbb":
        scheduler.add(
            f"{tenant}{len(scheduler.requests)}", [1] * 15, SamplingParams(max_tokens=9), seed=0, tenant=tenant
        )
    assert step(scheduler, runner).counts == [15, 5, 15, 5]


def test_what_would_exceed_a_fair_share_comes_after_what_would_not():
    clock = Clock(seqs=4, tokens=64, blocks=100)
    for _ in range(2):
        clock.add("a", [2], max_tokens=9)
    clock.step()
    third = clock.add("a", [2], max_tokens=9)
    third.rank = (0, -1, third.rank[2])
    clock.scheduler.queues.waiting = type(clock.scheduler.waiting)()
    clock.scheduler.waiting.add(third)
    new = [clock.add("b", [1], max_tokens=9) for _ in range(2)]
    assert set(new) <= set(clock.step().served) and not third.admitted


def test_the_first_request_of_a_tenant_is_not_overtaken_even_if_it_exceeds_a_fair_share():
    clock = Clock(blocks=20, size=4, seqs=8, tokens=64, length=80, cache=False)
    clock.add("b", [1] * 20, max_tokens=6)
    clock.step()
    large = clock.add("c", [2] * 60, max_tokens=2)
    later = clock.add("b", [1] * 2, max_tokens=2)
    while not large.admitted:
        clock.step()
        assert not later.admitted or large.admitted
    drain(clock.scheduler, clock.runner)


@pytest.mark.parametrize("n, preempted", [(2, 2), (3, 0)])
def test_a_tenant_gives_back_no_more_than_what_exceeds_its_fair_share(n, preempted):
    clock = Clock(seqs=4, tokens=64, blocks=100)
    for _ in range(4):
        clock.add("a", [2], max_tokens=9)
    clock.step()
    clock.add("b", [1], max_tokens=2, n=n)
    assert len(clock.step().preempted) == preempted
    drain(clock.scheduler, clock.runner)


def test_a_tenant_takes_no_more_than_its_fair_share():
    clock = Clock(seqs=6, tokens=64, blocks=100)
    for tenant in "caaaaa":
        clock.add(tenant, [2], max_tokens=9)
    clock.step()
    new = [clock.add("b", [1], max_tokens=9) for _ in range(4)]
    assert len(clock.step().preempted) == 2
    assert [request.admitted for request in new] == [True, True, False, False]


def test_room_for_a_tenant_includes_the_headroom():
    clock = Clock(blocks=24, size=4, seqs=12, tokens=64, cache=False)
    for _ in range(8):
        clock.add("a", [2] * 8, max_tokens=3)
    clock.step()
    clock.scheduler.headroom = 4
    new = clock.add("b", [1] * 8, max_tokens=2)
    done = clock.step()
    assert done.preempted and new in done.served
    drain(clock.scheduler, clock.runner)


def test_nobody_gives_way_to_a_request_that_would_not_fit_or_has_a_higher_number():
    clock = Clock(seqs=4, tokens=64, blocks=100, policy="priority")
    for _ in range(4):
        clock.add("a", [2], max_tokens=9)
    clock.step()
    clock.add("b", [1], max_tokens=2, priority=1)
    assert not clock.step().preempted
    wide = clock.add("c", [1], max_tokens=2, n=4)
    assert not clock.step().preempted and not wide.admitted
    clock.add("d", [1], max_tokens=2)
    clock.scheduler.abort(wide.request_id)
    assert len(clock.step().preempted) == 1
    drain(clock.scheduler, clock.runner)


def test_nothing_is_preempted_for_a_tenant_while_a_plan_is_in_flight():
    clock = Clock(seqs=2, tokens=16, blocks=30)
    scheduler, runner = clock.scheduler, clock.runner
    for _ in range(2):
        clock.add("a", [2], max_tokens=9)
    plan = scheduler.schedule()
    clock.add("b", [1], max_tokens=2)
    assert scheduler.schedule() is None and not scheduler.num_preemptions
    scheduler.commit(plan, runner.step(plan))
    assert scheduler.schedule() is not None and scheduler.num_preemptions == 1


def test_a_lower_number_goes_first_whatever_tenants_have_had():
    clock = Clock(seqs=8, tokens=16, blocks=100, policy="priority")
    urgent = clock.add("a", [2] * 40, max_tokens=2, priority=0)
    clock.add("b", [1] * 40, max_tokens=2, priority=1)
    while not urgent.finished:
        assert clock.step().served[0] is urgent
    drain(clock.scheduler, clock.runner)


def test_requests_of_one_tenant_are_scheduled_as_those_of_none():
    plans = []
    for tenant in (None, "a"):
        clock = Clock(overhead=0, blocks=20, tokens=8)
        for length in (3, 30, 5, 9):
            clock.add(tenant, [2] * length, max_tokens=9)
        plans.append([])
        while clock.scheduler.has_work:
            plans[-1].append(clock.step().plan)
    assert plans[0] == plans[1]
    assert_nothing_leaked(clock.scheduler)


@given(st.integers(0, 99), st.dictionaries(st.integers(), st.integers(1, 40), min_size=1))
def test_shares_are_equal_but_for_those_who_want_less(total, wants):
    shares = divide(total, wants)
    assert shares.keys() == wants.keys() and sum(shares.values()) == min(total, sum(wants.values()))
    assert all(0 <= shares[key] <= want for key, want in wants.items())
    most = max(shares.values())
    assert all(shares[key] >= most - 1 for key, want in wants.items() if shares[key] < want)
