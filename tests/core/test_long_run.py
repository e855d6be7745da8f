"""The engine for as long as a server runs: tens of thousands of requests of every kind, some of them aborted.

python -m tests.core.test_long_run [requests seed]
"""

import hashlib
import random
import sys
import time
from collections import Counter, defaultdict

import pytest

from jpaged.core.plan import StepPlan
from jpaged.core.queue import RequestQueue
from jpaged.core.request import FinishReason, Request
from jpaged.engine.engine import Engine
from tests.core import traffic
from tests.core.planted import BUGS
from tests.support.fake_runner import FakeRunner

EOS = frozenset([0])
MAX_OUTSTANDING = 12


class Witness:
    """A runner that sees every plan: keeps a digest of them all, and whom those since the last look have served: at
    which step first."""

    def __init__(self, runner: FakeRunner):
        self.runner = runner
        self.trace = hashlib.blake2b(digest_size=8)
        self.served: dict[Request, int] = {}

    def dispatch(self, plan: StepPlan, make_masks=None):
        self.trace.update(repr(plan).encode())
        rows = self.runner.scheduler.rows
        for scheduled in plan.rows:
            self.served.setdefault(rows[scheduled.row].request, self.runner.num_steps)
        return self.runner.dispatch(plan)

    def recover(self) -> None:
        self.runner.recover()


def run(num_requests: int, seed: int, max_in_flight: int = 2) -> tuple[str, Counter[str]]:
    """Serve so many requests, and return a digest of all plans, and counts of events."""
    rng = random.Random(seed)
    scheduler, runner = traffic.make(
        blocks=16, size=4, seqs=6, tokens=32, length=40, eos=EOS, host=24, block_swap_cost=2.0
    )
    witness = Witness(runner)
    engine = Engine(scheduler, witness, seed=seed, max_in_flight=max_in_flight)
    outstanding: list[Request] = []
    unserved: dict[Request, tuple[int, int]] = {}  # when it came, and how many steps it may wait
    told: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    latest = -1
    counts: Counter[str] = Counter()
    while counts["requests"] < num_requests or outstanding:
        while counts["requests"] < num_requests and len(outstanding) < MAX_OUTSTANDING and rng.random() < 0.8:
            prompt, params, options = traffic.draw(rng, scheduler, longest=16)
            request = engine.add(str(counts["requests"]), prompt, params, **options)
            # It waits for those before it alone, and the first of them takes a step of its own in every step, or in
            # every second one where two overlap.
            unserved[request] = runner.num_steps, max_in_flight * sum(map(traffic.most_steps, outstanding))
            outstanding.append(request)
            counts["requests"] += 1
        if outstanding and rng.random() < 0.02:
            engine.abort(rng.choice(outstanding).request_id)
        if rng.random() < 0.01:
            scheduler.pool.reset_prefix_cache()
            runner.version += 1
        for delta in engine.step().deltas:
            told[delta.request_id][delta.index] += delta.token_ids
        served, witness.served = witness.served, {}
        for request in [request for request in served if request in unserved]:
            came, bound = unserved.pop(request)
            waited = served[request] - came
            assert waited <= bound, f"{request.request_id} waited {waited} steps, not at most {bound}"
            counts["longest wait"] = max(counts["longest wait"], waited)
            assert latest < int(request.request_id), f"{latest} overtook {request.request_id}"
            latest = int(request.request_id)
        for request in [request for request in outstanding if request.finished]:
            outstanding.remove(request)
            unserved.pop(request, None)
            traffic.assert_as_alone(request, EOS)
            outputs = told.pop(request.request_id, {})
            if any(sequence.finish_reason == FinishReason.ABORT for sequence in request.sequences):
                counts["aborted"] += 1
            else:
                assert outputs == {i: s.output_token_ids for i, s in enumerate(request.outputs)}
        if runner.num_steps % 20 == 0:
            scheduler.check_invariants()
    traffic.assert_nothing_leaked(scheduler)
    assert not told and not unserved
    counts["steps"], counts["copies"] = runner.num_steps, runner.num_copies
    counts["preemptions"], counts["swapped blocks"] = scheduler.num_preemptions, scheduler.num_swapped_blocks
    counts["prefix hits"] = scheduler.prefix_hits
    return witness.trace.hexdigest(), counts


@pytest.mark.parametrize("requests", [320, pytest.param(20_000, marks=pytest.mark.deep)])
def test_thousands_of_requests_leave_nothing_behind_and_none_waits_for_ever(requests):
    _, counts = run(requests, seed=0)
    print(dict(counts))
    assert counts["aborted"] > requests / 200
    assert counts["preemptions"] > requests / 20 and counts["swapped blocks"] > requests / 20


def test_the_same_seed_decides_the_same():
    first = run(70, seed=1)
    assert first == run(70, seed=1) != run(70, seed=2)
    assert run(70, seed=1, max_in_flight=1) != first


SLOW_BUGS = {"stale cache", "stale epoch"}


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.deep] if bug in SLOW_BUGS else []) for bug in BUGS]
)
def test_it_finds_a_planted_bug(bug, monkeypatch):
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # there is no row left before anybody counts them
        for seed in range(2):
            run(500, seed)


def test_it_finds_a_request_that_is_overtaken(monkeypatch):
    monkeypatch.setattr(RequestQueue, "first", property(lambda queue: list(queue)[-1]))
    with pytest.raises(AssertionError, match="overtook"):
        run(500, seed=0)


if __name__ == "__main__":
    start = time.time()
    print(*run(*map(int, sys.argv[1:] or (20_000, 0))), f"{time.time() - start:.0f} s")
