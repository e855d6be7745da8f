"""The soak test of tests/attack/soak.py: some seconds of its mixed load, and its checks."""

import json
import random

import pytest

from benchmarks.shared.plots import plot_all
from benchmarks.shared.results import Report
from tests.attack.fuzz import FLAGS
from tests.attack.soak import compare, problems, publish, slope_mib_per_hour, soak
from tests.attack.soak_mix import Case, case, problem

ENVIRONMENT = {
    "device_kind": "cpu", "platform": "cpu", "versions": {"jax": "0"}, "date": "2026-11-22", "commit": None,
    "tiny": True, "model": "demo", "processor": "a processor", "cores": 2,
}  # fmt: skip


@pytest.mark.deep
async def test_mixed_load_of_some_seconds_has_no_problem(tmp_path):
    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    # The flags of the fuzzer's server, so that both take the same compiled steps.
    report.add(**await soak(report, minutes=0.1, interval=2, share=2, seed=1, flags=FLAGS))
    *rows, summary = report.rows
    assert summary["exit_status"] == 0 and not summary["tracebacks"], summary
    assert rows[-1]["failures"] == 0, rows[-1]["told"]
    assert len(rows) >= 2 and all((row["running"], row["waiting"], row["kv_usage"]) == (0, 0, 0) for row in rows)
    assert rows[-1]["requests"] > 10 and rows[-1]["frames"] > rows[0]["frames"] and rows[0]["probe_cpu_ms"] > 0
    publish(report)
    assert "## Samples" in (report.path.parent / "report.md").read_text()
    assert [path.name for path in plot_all(report.content, tmp_path)] == ["soak.png"]


def sample(minute: int, **changes) -> dict:
    row = {
        "minute": minute, "running": 0, "waiting": 0, "kv_usage": 0, "memory_mib": 700.0, "threads": 30, "files": 10,
        "children": 1, "first_token_ms": 9.0, "inter_token_ms": 2.0, "probe_cpu_ms": 70.0, "idle_after_s": 0.1,
        "core_share": 0.4, "machine_load": 1.0, "failures": 0, "preemptions": minute, "frames": 10 * minute,
        "cached_tokens": minute,
    }  # fmt: skip
    return row | changes


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, []),
        ({"threads": 31}, ["threads grew from 30 to 31"]),
        ({"files": 12}, ["files grew from 10 to 12"]),
        ({"memory_mib": 740.0}, ["memory grew from 700 to 740 MiB"]),
        ({"probe_cpu_ms": 140.0}, ["a probe took 140 ms of processor time, not 70"]),
        ({"failures": 2}, ["2 wrong answers"]),
        ({"preemptions": 0}, ["no preemptions"]),
        ({"frames": 490}, ["minute 51.0: no frames", "minute 52.0: no frames"]),
    ],
)
def test_growth_between_the_first_and_the_last_ten_minutes_is_reported(changes, told):
    rows = [sample(minute) for minute in range(51)] + [sample(minute, **changes) for minute in range(51, 61)]
    assert compare(rows)[0]["samples"] == 10
    assert problems(rows)[: len(told) or None] == told


def test_blocks_in_use_and_the_trend_of_memory_are_reported():
    rows = [sample(minute, memory_mib=700 + minute / 60, kv_usage=0.5 * (minute == 7)) for minute in range(61)]
    assert problems(rows) == ["minute 7.0: not idle 120 s after its load"]
    assert slope_mib_per_hour(rows) == pytest.approx(1.0)


WHOLE = {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]}
CHOICE = Case("structured", "/v1/completions", {"stream": False}, fits=lambda text: text == "yes")


@pytest.mark.parametrize(
    "case, status, answer, told",
    [
        (CHOICE, 200, json.dumps(WHOLE), None),
        (CHOICE, 500, "{}", "HTTP 500, not 200"),
        (CHOICE, 200, json.dumps(WHOLE).replace("yes", "no"), "does not fit"),
        (CHOICE, 200, "{}", "not the API's form"),
        (Case("n > 1", "", {"stream": False, "n": 2}), 200, json.dumps(WHOLE), "choices [0] ended, not 2"),
        (Case("refused", "", {}, 404), 404, "{}", "no error body"),
        (Case("plain", "", {"stream": True}), 200, "data: {}\n\n", "a stream that ends in"),
        (Case("plain", "", {"stream": True}), 200, 'data: {"error": 5}\n\ndata: [DONE]\n\n', "an error in a stream"),
        (Case("plain", "", {"stream": True}), 200, f"data: {json.dumps(WHOLE)}\n\ndata: [DONE]\n\n", None),
    ],
)
def test_faults_of_a_response_are_reported(case, status, answer, told):
    found = problem(case, status, answer.encode())
    assert (found is None) == (told is None) and (told or "") in (found or "")


def test_mix_depends_only_on_the_seed():
    kinds = [case(random.Random(seed)) for seed in range(100)]
    again = [case(random.Random(seed)) for seed in range(100)]
    assert [each.body for each in kinds] == [each.body for each in again] and len({each.kind for each in kinds}) > 6
