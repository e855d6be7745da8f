"""Scheduler and allocator attacked by hypothesis: any requests, aborts, evictions and resets in any order, also between
a step's scheduling and its commit, with up to two steps in flight, in pools so small that requests take each other's
blocks all the time."""

import math
from collections import Counter, deque

import hypothesis.stateful as stateful
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st

from jpaged.core.commands import UpdateParams
from tests.core import traffic
from tests.core.planted import ADAPTER_BUGS, BUGS, DRAFT_BUGS

pytestmark = pytest.mark.slow

EOS = frozenset([0])


class Traffic(stateful.RuleBasedStateMachine):
    """A rule is one call of the engine's. The fake runner checks what every step reads."""

    mode: str
    seen: Counter[str]

    @stateful.initialize(
        blocks=st.integers(2, 10),
        size=st.sampled_from([1, 2, 4]),
        seqs=st.integers(1, 4),
        tokens=st.integers(4, 12),
        host=st.sampled_from([0, 3, 12]),
        cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        cost=st.integers(0, 4),
        beside=st.integers(1, 12),
        headroom=st.sampled_from([0, 0, 5]),
        tenants=st.sampled_from([[None], ["a", "b"], ["a", "b", None]]),
        overhead=st.sampled_from([0, 2.5, math.inf]),
        drafts=st.sampled_from([0, 1, 3]),
        method=st.sampled_from(["ngram", "draft_model"]),
        exact=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None, 3), (5,), (None, 2, 7), (4, 1)]),
        pages=st.sampled_from([0, 0, 1, 2, 3]),
        adapters=st.sampled_from([0, 1, 2]),
    )
    def start(
        self, blocks, size, seqs, tokens, host, cache, policy, cost, beside, headroom, tenants, overhead, drafts,
        method, exact, windows, pages, adapters,
    ):  # fmt: skip
        self.scheduler, self.runner = traffic.make(
            blocks * len(windows), size, seqs=seqs, tokens=tokens, length=24, host=host, cache=cache, eos=EOS,
            policy=policy, preemption=self.mode, block_swap_cost=cost, tokens_beside_decodes=max(seqs, beside),
            headroom=headroom, step_overhead=overhead, drafts=drafts, method=method, exact=exact, windows=windows,
            pages=pages * seqs, adapters=adapters,
        )  # fmt: skip
        self.tenants, self.method = tenants, method
        self.requests = []
        self.in_flight = deque()

    @stateful.rule(rng=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def add(self, rng, count):
        for _ in range(count):
            prompt, params, options = traffic.draw(rng, self.scheduler)
            name = str(len(self.requests))
            options["tenant"] = rng.choice(self.tenants)
            if self.scheduler.rows.adapters.size:
                options["adapter"] = rng.choice([None, 0, 1, 2, 3])
            self.requests.append(self.scheduler.add(name, prompt, params, seed=rng.randrange(9), **options))

    @stateful.precondition(lambda self: len(self.in_flight) < 2)
    @stateful.rule()
    def schedule(self):
        plan = traffic.schedule(self.scheduler)
        if plan is not None:
            self.seen["two steps in flight"] += bool(self.in_flight)
            self.in_flight.append((plan, self.runner.dispatch(plan)))

    @stateful.precondition(lambda self: self.in_flight)
    @stateful.rule()
    def commit(self):
        plan, pending = self.in_flight.popleft()
        self.scheduler.commit(plan, pending.result())

    @stateful.precondition(lambda self: len(self.in_flight) < 2)
    @stateful.rule(late=st.booleans())
    def fail(self, late):
        """A step raises, before or after the runner has done its part, and all KV is lost."""
        plan = traffic.schedule(self.scheduler)
        if late and plan is not None:
            self.runner.dispatch(plan)
        self.in_flight.clear()
        self.scheduler.recover()
        self.runner.recover()

    @stateful.rule()
    def update(self):
        """Other parameters come, which know nothing of the KV of the old ones."""
        self.in_flight.clear()
        self.scheduler.recover()
        self.runner.control(UpdateParams(None))

    @stateful.rule()
    def hold(self):
        """Requests that have not started wait, or no longer."""
        self.scheduler.holds_new = not self.scheduler.holds_new
        self.seen["some held back"] += self.scheduler.holds_new and any(not r.admitted for r in self.scheduler.waiting)

    @stateful.rule(count=st.integers(2, 6))
    def steps(self, count):
        for _ in range(count):
            self.schedule() if len(self.in_flight) < 2 else self.commit()

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data())
    def abort(self, data):
        at = data.draw(st.integers(0, len(self.requests) - 1))
        self.seen["abort in a step"] += bool(self.in_flight) and not self.requests[at].finished
        self.scheduler.abort(str(at))

    @stateful.rule()
    def reset(self):
        self.scheduler.pool.reset_prefix_cache()
        self.runner.version += 1

    @stateful.rule(count=st.integers(1, 3))
    def evict(self, count):
        """Somebody else takes blocks for a moment."""
        pool = self.scheduler.pool
        taken = [pool.allocate(group=i % len(pool.windows)) for i in range(min(count, pool.num_free))]
        taken += [pool.allocate_page() for _ in range(min(count, pool.num_free_pages))]
        for block_id in taken:
            pool.free(block_id)

    @stateful.invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.commit()
        started = [request for request in self.requests if request.admitted]
        while self.scheduler.holds_new and self.scheduler.has_started:
            traffic.step(self.scheduler, self.runner)
            assert [request for request in self.requests if request.admitted] == started
        self.scheduler.holds_new = False
        traffic.drain(self.scheduler, self.runner)
        for request in self.requests:
            traffic.assert_as_alone(request, EOS)
        self.seen["preemption"] += self.scheduler.num_preemptions
        self.seen["swap"] += self.scheduler.num_swapped_blocks
        self.seen["adapter replaced"] += self.runner.num_replaced
        self.seen["copy"] += self.runner.num_copies
        self.seen["draft kept"] += self.scheduler.num_kept
        self.seen["draft of a model kept"] += self.scheduler.num_kept if self.method == "draft_model" else 0
        self.seen["draft dropped"] += self.scheduler.num_drafts - self.scheduler.num_kept


def attack(mode: str, **options) -> Counter[str]:
    Attack = type("Attack", (Traffic,), {"mode": mode, "seen": Counter()})
    options |= {"stateful_step_count": 40, "deadline": None, "report_multiple_bugs": False}
    stateful.run_state_machine_as_test(Attack, settings=settings(**options))
    return Attack.seen


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.deep) for mode in ("recompute", "swap")), "auto"]
)
def test_whatever_happens_every_request_gives_what_it_gives_alone(mode):
    wanted = {"copy", "preemption", "abort in a step", "two steps in flight", "some held back"}
    wanted |= {"adapter replaced", "draft kept", "draft dropped", "draft of a model kept"}
    wanted |= {"swap"} if mode != "recompute" else set()
    seen = Counter[str]()
    for examples in (40, 40, 40, 40, 80, 160, 320, 640):  # chance may leave some out
        seen += attack(mode, max_examples=examples)
        if wanted <= (+seen).keys():
            break
    assert wanted <= (+seen).keys() and (mode != "recompute" or not seen["swap"])


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.deep] if bug == "kept position" else []) for bug in DRAFT_BUGS]
)
def test_it_finds_a_planted_bug_of_drafts(bug, monkeypatch):
    DRAFT_BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        attack("swap", max_examples=300, phases=[Phase.generate], database=None)


@pytest.mark.parametrize("bug", ADAPTER_BUGS)
def test_it_finds_a_planted_bug_of_adapters(bug, monkeypatch):
    ADAPTER_BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        attack("recompute", max_examples=300, phases=[Phase.generate], database=None)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS)
def test_it_finds_a_planted_bug(bug, monkeypatch):
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, LookupError)):  # the rest is drained as far as possible after a bug
        attack("swap", max_examples=3000, phases=[Phase.generate], database=None)
