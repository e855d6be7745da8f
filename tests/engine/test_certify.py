"""Certificates of an engine: which parameters have computed a request, and which outputs get a certificate."""

from types import SimpleNamespace

import pytest

from jpaged import BeamSearchParams, SamplingParams
from jpaged.core.plan import Sample
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.engine.certify import begin, certify, follow

CERTIFIED = SamplingParams(certificate=True, max_tokens=4)


class Runner:
    """A runner whose fingerprint is the name of its parameters."""

    def __init__(self, name="first"):
        self.name, self.numerics = name, {"dtype": "float32"}

    def fingerprint(self, adapter=None):
        return self.name


@pytest.fixture
def runner():
    return Runner()


def request_of(params=CERTIFIED, *samples, seed=2**64 - 1, index=1):
    request = Request("r", [1, 2], params, seed, 4)
    sequence = Sequence(request, [1, 2], SimpleNamespace(), index)
    request.sequences.append(sequence)
    for sample in samples:
        sequence.append(sample)
    return request


def test_a_request_without_certificates_costs_nothing():
    request = request_of(SamplingParams(), Sample(5, -1.0))
    request.sequences[0].finish_reason = FinishReason.STOP
    begin(request, None)
    follow([request], None, "keep")
    certify(request.sequences[0], None)
    assert request.fingerprints == () and request.sequences[0].certificate is None


@pytest.mark.parametrize(
    "in_flight, admitted, drawn, found",
    [
        ("keep", False, 0, ("second",)), ("keep", True, 0, ("first", "second")), ("keep", True, 1, ("first", "second")),
        ("recompute", True, 0, ("second",)), ("recompute", True, 1, ("first", "second")),
        ("wait", False, 0, ("second",)),
    ],
)  # fmt: skip
def test_a_request_depends_on_the_parameters_of_its_kv_and_its_tokens(runner, in_flight, admitted, drawn, found):
    """Parameters that were kept for a request's KV count, although none of its tokens was drawn from them."""
    request = request_of(CERTIFIED, *[Sample(5, -1.0)] * drawn)
    begin(request, runner)
    request.admitted = admitted
    follow([request], Runner("second"), in_flight)
    assert request.fingerprints == found


def test_a_request_that_waits_without_parameters_depends_on_the_next_ones():
    request = request_of()
    begin(request, Runner(None))
    assert request.fingerprints == ()
    follow([request], Runner("second"), "recompute")
    assert request.fingerprints == ("second",)


@pytest.mark.parametrize("reason", FinishReason)
def test_outputs_get_a_certificate_unless_an_abort_or_an_error_ended_them(runner, reason):
    request = request_of(CERTIFIED, Sample(5, -1.0), Sample(6, -0.5, version=2))
    (sequence,) = request.sequences
    begin(request, runner)
    certify(sequence, runner)
    assert sequence.certificate is None, "it goes on"
    sequence.finish_reason = reason
    certify(sequence, runner)
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert sequence.certificate is None
        return
    found = sequence.certificate
    assert found.changed([1, 2], [5, 6]) == [] and found.logprobs == "bf800000bf000000"
    assert found.versions == ((0, 1), (2, 1)) and found.parameters == ("first",) and found.numerics == runner.numerics
    assert found.seed == 0, "the request's seed plus the index, of 64 bits"
    assert found.params == SamplingParams(max_tokens=4)


def test_beams_have_the_seed_of_their_search(runner):
    request = request_of(BeamSearchParams(beam_width=2, certificate=True), Sample(5, -1.0), seed=0)
    request.sequences[0].finish_reason = FinishReason.LENGTH
    certify(request.sequences[0], runner)
    assert request.sequences[0].certificate.seed == 0
