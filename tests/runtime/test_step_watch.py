"""Steps that contradict their measured costs."""

import types

import pytest

from jpaged.runtime import step_watch
from jpaged.runtime.batch import Bucket
from jpaged.runtime.step_watch import MUCH, STEPS, StepWatch

COSTS = {
    Bucket(1, 1, True): 0.1, Bucket(4, 4, True): 0.2, Bucket(32, 4, False): 1.0, Bucket(64, 4, False): 2.0,
}  # fmt: skip


@pytest.fixture
def watched(monkeypatch):
    """Lets steps take some seconds, and counts how often the costs are forgotten."""
    now, forgotten = [5.0], []
    monkeypatch.setattr(step_watch, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def run(bucket, num_tokens, seconds, times=STEPS, padded=False):
        watch = StepWatch(COSTS, lambda: forgotten.append(1), padded=padded)
        for _ in range(times):
            end = watch.begin(Bucket(*bucket), num_tokens)
            now[0] += seconds
            end()
        return len(forgotten)

    return run


@pytest.mark.parametrize(
    "bucket, num_tokens, cost",
    [((1, 1, True), 1, 0.1), ((4, 4, True), 3, 0.1), ((4, 4, True), 4, 0.2), ((64, 4, False), 63, 1.0)],
)
def test_costs_are_those_of_steps_that_are_not_larger(watched, bucket, num_tokens, cost):
    assert watched(bucket, num_tokens, 1.01 * MUCH * cost) == 0
    assert watched(bucket, num_tokens, 0.99 * MUCH * cost) == 1


def test_a_step_that_is_smaller_than_all_contradicts_nothing(watched):
    assert watched((64, 4, False), 31, 0.0) == 0
    assert watched((9, 9, False), 31, 0.0, padded=True) == 0


def test_with_padding_the_whole_shape_counts(watched):
    assert watched((64, 4, False), 3, 1.01 * MUCH * 2.0, padded=True) == 0
    assert watched((64, 4, False), 3, 0.99 * MUCH * 2.0, padded=True) == 1


def test_costs_are_forgotten_once_after_several_steps(watched, caplog):
    assert watched((1, 1, True), 1, 0.0, STEPS - 1) == 0 and not caplog.messages
    assert watched((1, 1, True), 1, 0.0, 3 * STEPS) == 1
    (message,) = caplog.messages
    assert message.endswith("the next start measures them again")
