"""The requests of benchmarks/engine/neighbours.py are at their limits, and its report names the slow cases."""

import json
from dataclasses import fields

import pytest

from benchmarks.engine import neighbours
from benchmarks.shared.results import Report
from jpaged.core.params import InvalidParameter, SamplingParams
from jpaged.serving.errors import ApiError
from jpaged.serving.parse import parse
from jpaged.serving.protocol import ChatRequest, CompletionRequest

ENVIRONMENT = {
    "device_kind": "cpu", "platform": "cpu", "versions": {}, "date": "2026-11-22", "commit": None, "tiny": False,
}  # fmt: skip
PARAMETERS = neighbours.parameters()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_at_their_limits_are_accepted(name):
    for body in PARAMETERS[name]:
        parse(CompletionRequest, json.dumps({"prompt": "a"} | body).encode()).params({})


def test_one_more_than_a_limit_is_refused():
    _, body = PARAMETERS["bad_words"]
    assert len(set(body["bad_words"])) == len(body["bad_words"])
    for name, more in (("bad_words", "one more"), ("stop_token_ids", 1000), ("stop", "one more")):
        _, body = PARAMETERS[name]
        assert name in {field.name for field in fields(SamplingParams)}
        with pytest.raises(InvalidParameter, match=f"{name}: must be"):
            SamplingParams(**{name: [*body[name], more]})


def test_large_requests_are_well_formed():
    """All but one, whose size is in the fields that it should not have."""
    models = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
    for name, (path, body) in neighbours.large_requests().items():
        data = json.dumps(body).encode()
        assert len(data) < 2**20 + 16 * neighbours.MAX_MODEL_LEN, "the server would not read it"
        if path in models and name != "unknown fields":
            parse(models[path], data)
    with pytest.raises(ApiError, match="unknown or wrong"):
        parse(CompletionRequest, json.dumps(neighbours.large_requests()["unknown fields"][1]).encode())


def test_pauses_are_those_within_the_time():
    probe = neighbours.Probe(session=None)
    probe.streams = [[0.0, 1.0, 1.5], [1.6, 1.7, 3.0]]
    assert probe.pauses(0.5, 2.0) == pytest.approx([0.5, 0.1])


def test_report_names_what_exceeds_its_limit(tmp_path):
    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    report.add(experiment="pause", case="slow", least_ms=51.0, beside_ms=60.0, alone_ms=5.0)
    report.add(experiment="pause", case="fast", least_ms=49.0, beside_ms=60.0, alone_ms=5.0)
    report.add(experiment="step", case="dear", ratio=1.21, least_ratio=1.1)
    report.add(experiment="step", case="cheap", ratio=1.19, least_ratio=1.3)
    assert neighbours.above(report.rows) == ["slow", "dear"]
    neighbours.publish(report)
    text = (tmp_path / "report.md").read_text()
    assert all(f"| {row['case']} |" in text for row in report.rows)
