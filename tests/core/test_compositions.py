"""Requests have the same results in every composition of events as alone, and a fault in any composition is found."""

from collections import Counter

import pytest

from jpaged.core.request import RequestFault
from tests.core import chance
from tests.core.compositions import FAULTS

pytestmark = pytest.mark.slow

SEEDS = 180
PARTS = (
    "chunk", "prefix hit", "partial block", "fork", "beams", "swap", "recompute", "overlap", "right drafts",
    "wrong drafts", "past outputs", "update", "abort", "salt", "window", "groups", "state", "tier", "disk",
)  # fmt: skip


# Of so many runs that each takes a part of a second or more; others of the faults have their parts.
RARE = {
    "prefix hit, partial block, end", "prefix hit, update", "partial block, swap", "fork, recompute", "beams, swap",
    "beams, overlap", "swap, abort", "recompute, overlap", "window, swap", "groups, swap", "tier, partial block, copy",
    "disk, update", "disk, groups", "disk, eviction", "state, wrong drafts", "state, right drafts",
    "state, fork, beams", "past outputs, update", "past outputs, abort",
}  # fmt: skip


@pytest.mark.parametrize("count", [18, pytest.param(2000, marks=pytest.mark.deep)])
def test_whatever_comes_together_changes_no_output(count):
    seen = Counter()
    for seed in range(count):
        seen += chance.run(seed)
    wanted = {"preemptions", "swapped", "hits", "copies", "kept", "dropped", "past", "evicted", "returned", "fetched"}
    assert {name for name, number in seen.items() if number >= count // 3} >= wanted, seen


def test_every_part_of_a_schedule_is_in_some_composition_with_a_fault():
    assert len(FAULTS) >= 20 and all("," in name for name in FAULTS)
    assert all(any(part in name for name in FAULTS.keys() - RARE) for part in PARTS)


@pytest.mark.parametrize(
    "composition", [pytest.param(name, marks=[pytest.mark.deep] if name in RARE else []) for name in FAULTS]
)
def test_a_fault_of_a_composition_is_found(composition, monkeypatch):
    """By a check, or because the faulty state can't be read."""
    FAULTS[composition](monkeypatch)
    with pytest.raises((AssertionError, LookupError, RequestFault)):
        for seed in chance.seeds(composition, SEEDS):
            chance.run(seed)
