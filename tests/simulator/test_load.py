"""Measurements of loads: by hand for steps of equal duration, and laws that hold for all."""

from dataclasses import replace
from itertools import pairwise

import pytest

from jpaged.bench.workload import Lengths, Workload, arrivals
from jpaged.simulator.deployment import Deployment
from jpaged.simulator.gpu import GPUS
from jpaged.simulator.load import (
    LatencyLimits,
    Load,
    Traffic,
    _move_prefixes_ahead,
    load_of_rate,
    load_of_trace,
    load_of_users,
    percentile,
)
from jpaged.simulator.shape import SHAPES
from jpaged.simulator.traffic import calls_of
from tests.simulator.constant import Constant

ROOFLINE = Deployment(GPUS["a100-40gb"], SHAPES["opt-13b"], max_model_len=2048)
STEPS = replace(ROOFLINE, costs=Constant(0.01))  # of 10 ms
EQUAL = Traffic([Lengths(16, 10)])  # answers of 0.1 s


def test_percentile_is_the_nearest_rank():
    hundred = list(range(1, 101))
    assert [percentile(hundred, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert [percentile([1, 2, 3], share) for share in (0.01, 0.5, 0.99)] == [1, 2, 3]
    assert all(percentile(range(1, n + 1), 0.99) == -(-99 * n // 100) for n in range(1, 2000))
    assert percentile([], 0.5) == 0.0


def test_limits_hold_for_99_percent():
    load = Load(1, 1.0, 1.0, 0.1, 1.0, 0.1, 0.05, 0.1, 1.0, 0.5, 0.0, 0.0)
    assert load.within(LatencyLimits(1.0, 0.05))
    assert not load.within(LatencyLimits(0.99, 0.05)) and not load.within(LatencyLimits(1.0, 0.049))


def test_users_underway_are_met_in_proportion_to_their_outputs():
    """The outputs have 2 and 6 tokens: of four users, one is in the first and three are in the second."""
    traffic = Traffic([Lengths(10, 2), Lengths(5, 6)])
    assert traffic.underway(4) == [Lengths(10, 1), Lengths(8, 3), Lengths(11, 1), Lengths(6, 5)]
    assert all(each.output >= 1 for each in traffic.underway(1000))
    assert len(traffic.repeated(5)) == 5 and traffic.repeated(3)[2] == Lengths(10, 2)


def test_users_with_steps_of_equal_duration_by_hand():
    load = load_of_users(STEPS, EQUAL, 8)
    assert load.users == 8 and load.running == pytest.approx(8) and load.preemptions == load.cached == 0
    assert load.requests_per_s == pytest.approx(80, rel=0.05) and load.tokens_per_s == pytest.approx(800)
    assert [load.ttft, load.ttft_p99, load.tpot, load.tpot_p99] == pytest.approx(4 * [0.01])
    assert load.normalised == pytest.approx(0.01)
    blocks = [16 / 16 + (step > 0) for step in range(10)]  # of a request, in each of its steps
    assert load.kv_used == pytest.approx(8 * sum(blocks) / 10 / (STEPS.pool_tokens // 16), rel=0.02)


def test_time_without_requests_counts_for_means():
    """An answer of 0.1 s, and 0.9 s without a request."""
    load = load_of_users(STEPS, replace(EQUAL, think_s=0.9), 1)
    assert load.running == pytest.approx(0.1, rel=0.02) and load.requests_per_s == pytest.approx(1, rel=0.02)
    assert load.tokens_per_s == pytest.approx(10, rel=0.02)


def test_more_users_than_sequences_wait():
    """Four of eight users run: half of the time of a request is spent in the queue."""
    load = load_of_users(replace(STEPS, max_num_seqs=4), EQUAL, 8)
    assert load.running == pytest.approx(4) and load.requests_per_s == pytest.approx(40, rel=0.05)
    assert load.ttft == pytest.approx(0.11, rel=0.1) and load.tpot == pytest.approx(0.01)


@pytest.mark.parametrize("users", [4, 16])
def test_littles_law_holds_in_a_closed_loop(users):
    """Users that do not think are always in the system: their number is throughput times mean latency."""
    lengths = [Lengths(20 + 13 * i % 50, 5 + 7 * i % 30) for i in range(50)]
    load = load_of_users(ROOFLINE, Traffic(lengths), users)
    mean_output = sum(each.output for each in lengths) / len(lengths)
    assert load.running == pytest.approx(users, rel=0.02)
    assert load.requests_per_s * mean_output == pytest.approx(load.tokens_per_s, rel=0.03)
    step = users / load.tokens_per_s  # each running request samples one token in it
    assert load.tpot == pytest.approx(step, rel=0.1)
    assert load.running == pytest.approx(load.requests_per_s * mean_output * step, rel=0.03)


def test_measurements_are_deterministic():
    traffic = Traffic(Workload("random", input_len=100, output_len=20, num_prompts=20).lengths())
    assert load_of_users(ROOFLINE, traffic, 3) == load_of_users(ROOFLINE, traffic, 3)


def test_more_users_are_slower():
    loads = [load_of_users(ROOFLINE, Traffic([Lengths(100, 20)]), users) for users in (1, 4, 16)]
    for few, many in pairwise(loads):
        assert few.tpot < many.tpot and few.tokens_per_s < many.tokens_per_s and few.kv_used < many.kv_used


def test_shared_prefixes_are_cached():
    work = Workload("shared-prefix", input_len=64, output_len=8, prefix_len=192, num_prefixes=3)
    load = load_of_users(STEPS, Traffic(work.lengths()), 8)
    assert load.cached == pytest.approx(192 / 256)
    assert load_of_users(replace(STEPS, enable_prefix_caching=False), Traffic(work.lengths()), 8).cached == 0


def test_a_shared_prefix_is_held_once():
    """64 blocks of the prefix, and two to nine of each user; with a prefix for each, the pool would be too small."""
    traffic = Traffic([Lengths(16, 128, 0, 1024)])
    load, num_blocks = load_of_users(STEPS, traffic, 16), STEPS.pool_tokens // 16
    assert num_blocks < 16 * 64 and load.running == pytest.approx(16) and not load.preemptions
    assert 64 + 16 * 4 < load.kv_used * num_blocks < 64 + 16 * 7


def test_one_request_of_each_prefix_comes_first():
    def of(*prefixes):
        return [Lengths(i, 1, prefix, 8 * (prefix >= 0)) for i, prefix in enumerate(prefixes)]

    lengths = of(3, -1, 3, 5, 5)
    assert _move_prefixes_ahead(lengths) == 2
    assert [each.prompt for each in lengths] == [0, 3, 1, 2, 4]
    lengths = of(-1, -1, -1)
    assert _move_prefixes_ahead(lengths) == 3 and lengths == of(-1, -1, -1)


def test_prompts_are_computed_in_chunks():
    """512 tokens in steps of 64, one of which is the decode token of the other user."""
    load = load_of_users(replace(STEPS, max_num_batched_tokens=64), Traffic([Lengths(512, 50)]), 2)
    assert load.ttft == pytest.approx(0.09) and load.tpot == pytest.approx(0.01)


def test_rate_below_the_capacity_is_served():
    load = load_of_rate(STEPS, EQUAL, [0.1 * i for i in range(100)])
    assert load.users is None and load.requests_per_s == pytest.approx(10, rel=0.05)
    assert load.ttft_p99 <= 0.0201 and load.tpot == pytest.approx(0.01)
    assert load.running == pytest.approx(1, rel=0.1)


def test_rate_above_the_capacity_is_cut_to_it():
    """Two sequences of 0.1 s each: 20 requests per second."""
    load = load_of_rate(replace(STEPS, max_num_seqs=2), EQUAL, arrivals(200, 1000.0))
    assert load.requests_per_s == pytest.approx(20, rel=0.4) and load.ttft > 4
    assert load.tokens_per_s == pytest.approx(200, rel=0.01) and load.running == pytest.approx(2)


def test_trace_of_requests_at_once_counts_as_a_whole():
    load = load_of_trace(STEPS, calls_of([Lengths(16, 10)] * 5))
    assert load.requests_per_s == pytest.approx(50) and load.tokens_per_s == pytest.approx(500)


def test_outputs_of_one_token_have_no_time_per_token():
    load = load_of_trace(STEPS, calls_of([Lengths(16, 1)] * 3 + [Lengths(16, 3)]))
    assert load.tpot == load.tpot_p99 == pytest.approx(0.01)
