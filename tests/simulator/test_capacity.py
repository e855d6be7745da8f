"""The search for the most users, and its start."""

import pytest

from jpaged.bench.workload import Lengths, Workload
from jpaged.simulator import capacity
from jpaged.simulator.capacity import best, estimate, search
from jpaged.simulator.deployment import MAX_USERS, Deployment
from jpaged.simulator.gpu import GPUS
from jpaged.simulator.load import LatencyLimits, Load, Traffic
from jpaged.simulator.shape import SHAPES

LIMITS = LatencyLimits()
H100 = Deployment(GPUS["h100"], SHAPES["llama-3-8b"], max_model_len=8192)
OPT = Deployment(GPUS["a100-40gb"], SHAPES["opt-13b"], max_model_len=2048)
SHAREGPT = Traffic(Workload().lengths())


def load(users, good):
    return Load(users, 1.0, 1.0, 0.1, 0.1 if good else 9.0, 0.01, 0.01, 0.01, 1.0, 0.5, 0.0, 0.0)


@pytest.mark.parametrize("capacity_", [0, 1, 2, 3, 5, 12, 100, 777, 4095, 4096, 9999])
def test_search_finds_the_capacity_from_any_start(capacity_, monkeypatch):
    monkeypatch.setattr(capacity, "load_of_users", lambda deployment, traffic, users: load(users, users <= capacity_))
    for start in (1, 2, 3, 50, 700, 4095, 4096, 100_000):
        loads = list(search(H100, SHAREGPT, LIMITS, start))
        users = [each.users for each in loads]
        assert min(users) >= 1 and max(users) <= MAX_USERS and len(set(users)) == len(users) <= 16
        found, wanted = best(loads, LIMITS), min(capacity_, MAX_USERS)
        if not wanted:
            assert found is None
        else:
            assert found.users <= wanted <= found.users + max(1, found.users // 10) - (wanted < MAX_USERS)


def test_search_is_short_from_a_good_start(monkeypatch):
    monkeypatch.setattr(capacity, "load_of_users", lambda deployment, traffic, users: load(users, users <= 500))
    for start in range(400, 600, 10):
        assert len(list(search(H100, SHAREGPT, LIMITS, start))) <= 4


def test_estimate_by_hand():
    """Tokens fill the pool, or a step takes the whole limit."""
    traffic = Traffic([Lengths(1000, 200)])
    by_memory = OPT.pool_tokens / (1100 + 16)
    assert estimate(OPT, traffic, LatencyLimits(1.0, 10.0)) == round(0.85 * int(by_memory))
    one = OPT.cost
    assert estimate(OPT, traffic, LatencyLimits(1.0, one.launch_s)) == 1
    thinking = estimate(OPT, Traffic(traffic.lengths, think_s=60.0), LatencyLimits(1.0, 10.0))
    assert thinking > 3 * estimate(OPT, traffic, LatencyLimits(1.0, 10.0))


def test_estimate_counts_a_cached_prefix_once():
    shared = Traffic([Lengths(100, 100, 0, 1000)])
    uncached = Deployment(GPUS["a100-40gb"], SHAPES["opt-13b"], max_model_len=2048, enable_prefix_caching=False)
    limits = LatencyLimits(1.0, 10.0)
    assert estimate(OPT, shared, limits) > 4 * estimate(uncached, shared, limits)


def test_search_starts_at_the_estimate():
    limits = LatencyLimits(1.0, 0.1)
    traffic = Traffic([Lengths(60, 30)])
    loads = list(search(OPT, traffic, limits))
    found = best(loads, limits)
    assert loads[0].users == estimate(OPT, traffic, limits)
    assert len(loads) <= 6 and loads[0].users / 2 < found.users < loads[0].users * 2
    worse = min(each.users for each in loads if not each.within(limits))
    assert found.users < worse <= found.users + max(1, found.users // 10)


def test_best_of_nothing_is_nothing():
    assert best([], LIMITS) is None and best([load(1, False)], LIMITS) is None
    assert best([load(1, True), load(8, True), load(9, False)], LIMITS).users == 8
