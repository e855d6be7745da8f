"""Certificates of a running engine: the parameters that compute each request, and the certificate at its end."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from jpaged.core.certificate import Certificate, bits_of, params_of_one, runs_of
from jpaged.core.commands import InFlight
from jpaged.core.request import FinishReason, Request, Sequence


class Identified(Protocol):
    """Device side whose computations can be identified.

    Raises:
        InvalidParameter: it can't be identified.
    """

    @property
    def numerics(self) -> Mapping[str, str | int]:
        """Versions, dtypes, kernels and sizes that the bits of an output depend on."""

    def fingerprint(self, adapter: int | None = None) -> str | None:
        """Return the hash of the present parameters, followed by an adapter's; None if there are no parameters."""


def begin(request: Request, runner: Identified) -> None:
    """Record the fingerprint of the present parameters in a new request, if it wants certificates."""
    if request.params.certificate:
        request.fingerprints = _present(runner, request)


def follow(requests: Iterable[Request], runner: Identified, in_flight: InFlight) -> None:
    """Remember new parameters. A request that has computed nothing with the old ones depends on the new ones only."""
    for request in requests:
        if request.params.certificate:
            computed = (sequence.num_output_tokens for sequence in request.sequences)
            depends = request.admitted if in_flight == "keep" else any(computed)
            request.fingerprints = (request.fingerprints if depends else ()) + _present(runner, request)


def certify(sequence: Sequence, runner: Identified) -> None:
    """Give an output its certificate if it has finished and its request wants one."""
    request = sequence.request
    if not request.params.certificate or sequence.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return
    unsealed = Certificate(
        numerics=dict(runner.numerics),
        parameters=request.fingerprints,
        versions=runs_of(sample.version for sample in sequence.samples),
        params=params_of_one(request.params, request.max_tokens),
        seed=sequence.seed if request.beam is None else request.seed,
        logprobs=bits_of(sample.logprob for sample in sequence.samples),
    )
    sequence.certificate = unsealed.sealed(request.prompt_token_ids, sequence.output_token_ids)


def _present(runner: Identified, request: Request) -> tuple[str, ...]:
    fingerprint = runner.fingerprint(request.adapter)
    return () if fingerprint is None else (fingerprint,)
