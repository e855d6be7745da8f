"""Slots of adapters, and the requests that pass one which waits for a slot."""

import pytest

from jpaged.config import Limits
from jpaged.core.adapter_slots import MOST_PASSED, AdapterSlots
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import SamplingParams
from jpaged.core.plan import NO_SLOT, Sample, StepResult
from jpaged.core.scheduler import Scheduler
from jpaged.core.text_key import salt_with, split_salt


def assert_slots(slots: AdapterSlots, *, used: int) -> None:
    assert len(slots._users) == used
    slots.check_invariants(slots._users.elements())


class TestSlots:
    def test_the_least_recently_used_adapter_leaves(self):
        slots = AdapterSlots(2)
        places = {adapter: slots.take(adapter) for adapter in (5, 6)}
        assert slots.loads() == ((5, places[5]), (6, places[6]))
        slots.release(6)
        slots.release(5)
        assert slots.take(5) == places[5]
        assert slots.take(7) == places[6]
        assert slots.loads() == ((7, places[6]),)
        assert not slots.has_room(6)
        assert slots.has_room(5)
        assert slots.has_room(None)
        assert slots.take(None) == NO_SLOT
        slots.release(7)
        assert slots.has_room(6)
        slots.check_invariants([5])

    def test_a_load_that_no_plan_has_taken_is_dropped_with_its_adapter(self):
        slots = AdapterSlots(1)
        slots.take(1)
        slots.release(1)
        slots.forget(1)
        assert slots.loads() == ()
        slots.take(2)
        slots.release(2)
        slots.take(3)
        assert slots.loads() == ((3, 0),)

    @pytest.mark.parametrize("fault", ["user", "slot", "size"])
    def test_invariants_find_faults(self, fault):
        slots = AdapterSlots(2)
        slots.take(1)
        slots.check_invariants([1, None])
        if fault == "user":
            slots._users[1] += 1
        elif fault == "slot":
            slots._free.append(slots._slots.pop(1))
        else:
            slots._free.append(slots._free[0])
        with pytest.raises(AssertionError):
            slots.check_invariants([1])


def test_salts_differ():
    pairs = [(None, ""), (None, "5\0x"), (5, "x"), (5, ""), (None, "\0x"), (None, "x"), (None, "5\0")]
    assert len({salt_with(*pair) for pair in pairs}) == len(pairs)
    assert salt_with(None, "x") == "x"
    assert all(split_salt(salt_with(*pair)) == pair for pair in pairs)


def scheduler(num_adapters: int, rows: int = 4) -> Scheduler:
    return Scheduler(BlockPool(64, 4), Limits(32, rows, 16, 4), vocab_size=10, num_adapters=num_adapters)


def add(of: Scheduler, name: str, adapter: int | None, tokens: int = 4):
    return of.add(name, [1, 2], SamplingParams(max_tokens=tokens, ignore_eos=True), seed=0, adapter=adapter)


def run(of: Scheduler) -> list[list[str]]:
    """The names of the running requests in each step, until all have ended."""
    steps = []
    while of.has_work:
        plan = of.schedule()
        assert plan is not None
        steps.append([request.request_id for request in of.running])
        of.commit(plan, StepResult([Sample(1, 0.0)] * sum(each.num_samples for each in plan.rows)))
        of.check_invariants()
    return steps


class TestScheduling:
    def test_plans_load_adapters_before_their_rows(self):
        of = scheduler(2)
        for name, adapter in (("a", 7), ("b", None), ("c", 8), ("d", 7)):
            add(of, name, adapter)
        plan = of.schedule()
        slots = {admitted.row: admitted.adapter_slot for admitted in plan.admitted}
        of_names = {request.request_id: slots[request.sequences[0].row] for request in of.running}
        assert of_names["a"] == of_names["d"] != of_names["c"]
        assert of_names["b"] == NO_SLOT
        assert set(plan.adapters) == {(7, of_names["a"]), (8, of_names["c"])}

    def test_requests_pass_one_that_waits_for_a_slot(self):
        of = scheduler(1)
        for name, adapter in (("a", 7), ("b", 8), ("c", 7), ("d", None), ("e", 9)):
            add(of, name, adapter)
        steps = run(of)
        assert steps[0] == ["a", "c", "d"]
        assert [each for each in steps if "b" in each]
        assert not any({"a", "b"} <= {*each} or {"b", "e"} <= {*each} for each in steps)
        first = {name: next(i for i, each in enumerate(steps) if name in each) for name in "abcde"}
        assert first["b"] < first["e"]

    def test_no_request_is_passed_for_ever(self):
        of = scheduler(1)
        add(of, "first", 7, tokens=3)
        waiting = add(of, "waiting", 8)
        number = 0
        while not waiting.admitted:
            while len(of.waiting) < 4:
                add(of, str(number := number + 1), 7, tokens=3 + number % 4)
            plan = of.schedule()
            of.commit(plan, StepResult([Sample(1, 0.0)] * sum(each.num_samples for each in plan.rows)))
            assert number < MOST_PASSED + 10
        assert number > MOST_PASSED - 10

    def test_forks_hold_the_slot_until_the_last_one_ends(self):
        of = scheduler(1)
        of.add("a", [1, 2], SamplingParams(max_tokens=4, n=3, ignore_eos=True), seed=0, adapter=7)
        add(of, "b", 8)
        steps = run(of)
        assert not any({"a", "b"} <= {*each} for each in steps)
        assert of.rows.adapters.take(8) == 0
        assert not of.rows.adapters.loads()
