"""Measures of timelines that were written by hand."""

import statistics

import pytest

from jpaged.bench.measure import Record, Spread, measure, spread

# Sent at 10, first text at 10.5, four chunks that hold six tokens, ended at 12.
SLOW = Record(due=9.75, sent=10.0, chunks=[10.5, 11.0, 11.0, 11.75], ended=12.0, prompt_tokens=7, output_tokens=6)
# Nobody counted its tokens.
FAST = Record(due=11.0, sent=11.0, chunks=[11.25, 11.5], ended=11.5)
# A single token.
SHORT = Record(due=11.0, sent=11.0, chunks=[12.5], ended=13.0, prompt_tokens=3, output_tokens=1)
# It said nothing, and that was all right.
SILENT = Record(due=12.0, sent=12.0, ended=12.25, prompt_tokens=2, output_tokens=0)
BROKEN = Record(due=12.0, sent=12.0, chunks=[12.5], ended=15.0, failure="broken stream", detail="gone")
REFUSED = Record(due=12.0, sent=12.0, ended=12.0, failure="HTTP 503", detail="busy")


def test_one_request():
    assert SLOW.ttft == 0.5 and SLOW.e2el == 2.0 and SLOW.delay == 0.25
    assert SLOW.gaps == [0.5, 0.0, 0.75]
    assert SLOW.tpot == 0.25  # 1.25 seconds for the five tokens after the first
    assert SLOW.normalised == pytest.approx(1 / 3)
    assert FAST.tokens == 2 and FAST.tpot == 0.25 and FAST.normalised == 0.25
    assert SHORT.tpot is None and SHORT.gaps == [] and SHORT.normalised == 2.0
    assert SILENT.ttft is SILENT.tpot is SILENT.normalised is None


def test_all_of_them():
    found = measure([SLOW, FAST, SHORT, SILENT, BROKEN, REFUSED])
    assert found.requests == 6 and found.completed == 4 and found.counted == 3
    assert found.failures == {"broken stream": 1, "HTTP 503": 1}
    assert found.duration == 5.0  # from SLOW's start to BROKEN's end
    assert found.prompt_tokens == 12 and found.output_tokens == 9 and found.chunks == 7
    assert found.request_throughput == 4 / 5
    assert found.output_throughput == 9 / 5 and found.total_throughput == 21 / 5
    assert found.goodput is None
    assert found.latencies["ttft"].mean == pytest.approx((0.5 + 0.25 + 1.5) / 3)  # BROKEN's is not among them
    assert found.latencies["itl"].max == 0.75 and found.latencies["itl"].mean == pytest.approx(1.5 / 4)
    assert found.latencies["tpot"] == Spread(0.25, 0.25, 0.25, 0.25, 0.25)
    assert found.latencies["e2el"].median == pytest.approx((0.5 + 2.0) / 2)
    assert found.latencies["normalised"].mean == pytest.approx((1 / 3 + 0.25 + 2.0) / 3)
    assert found.latencies["delay"].max == 0.25


@pytest.mark.parametrize(
    "limits, good", [({"ttft": 0.5}, 3), ({"ttft": 0.4}, 2), ({"ttft": 0.5, "e2el": 1.0}, 2), ({"tpot": 0.2}, 2)]
)
def test_goodput_counts_what_is_within_all_limits(limits, good):
    assert measure([SLOW, FAST, SHORT, SILENT, BROKEN], limits).goodput == good / 5


def test_nothing_but_failures():
    found = measure([REFUSED])
    assert found.completed == 0 and found.request_throughput == 0 and set(found.latencies.values()) == {None}


def test_spread_of_values_has_the_usual_percentiles():
    values = [float(x * x) for x in range(37)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert spread(values[::-1])[1:] == pytest.approx((cuts[49], cuts[89], cuts[98], 36.0**2))
    assert spread([4.0]) == Spread(4.0, 4.0, 4.0, 4.0, 4.0)
    assert spread([3.0, 1.0]) == Spread(2.0, 2.0, pytest.approx(2.8), pytest.approx(2.98), 3.0)
    assert spread([]) is None
