"""Comparison of certified outputs with a second computation of them."""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import batched, zip_longest
from typing import Any, NamedTuple

from jpaged.core.certificate import Certificate, bits_of, runs_of
from jpaged.core.params import InvalidParameter, Params
from jpaged.core.request import CompletionOutput, RequestOutput

GIVEN = ("numerics", "parameters", "prompt_token_ids", "params", "seed")  # parts that a replay starts from
CHANGED = "does not fit the hash; it was changed after the output was certified"

Job = tuple[list[int], Params]  # a prompt and its parameters


@dataclass(frozen=True)
class Replay:
    """Result of the replay of one output.

    Attributes:
        request_id, index: the output.
        equal: whether the replay has the same tokens, bits of logprobs and finish reason, and the hash fits.
        field: "token" or "logprob", or the name of another field that differs or makes a replay impossible; None if
            `equal`.
        position: index of the first output token that differs in itself or in its logprob; None for other fields.
        reason: the difference in words, with both values.
        replayed: whether the output could be computed again.
    """

    request_id: str
    index: int
    equal: bool
    field: str | None = None
    position: int | None = None
    reason: str = ""
    replayed: bool = True

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        place = "" if self.position is None else f" {self.position}"
        return f"{'' if self.replayed else 'not replayed, '}{self.field}{place}: {self.reason}"


class Identity(NamedTuple):
    """Numerics and fingerprint of the parameters of the engine that replays."""

    numerics: Mapping[str, str | int]
    fingerprint: str | None


def replay(
    outputs: Iterable[RequestOutput],
    identity: Identity,
    check: Callable[[list[int], Params], object],
    generate: Callable[[Iterable[Job]], list[RequestOutput]],
) -> list[Replay]:
    """Compute outputs again and compare them, in their order.

    Args:
        check: raise InvalidParameter if the engine can't serve a prompt with some parameters.
        generate: compute prompts, each with its parameters.
    """
    each = [_Certified(request, output) for request in outputs for output in request.outputs]
    results = {one: result for one in each if (result := one.refusal(identity))}
    jobs: dict[Any, Job] = {}
    for one in each:
        if one not in results:
            prompt, params = one.request.prompt_token_ids, one.certificate.request_params
            try:
                check(prompt, params)
                jobs[one.job_key] = prompt, params
            except InvalidParameter as error:
                results[one] = one.result(error.field, str(error).removeprefix(f"{error.field}: "), replayed=False)
    again = dict(zip(jobs, generate(jobs.values()) if jobs else ()))
    return [results.get(one) or one.compare(again[one.job_key]) for one in each]


@dataclass(frozen=True, eq=False)
class _Certified:
    """Output to replay, and its request."""

    request: RequestOutput
    output: CompletionOutput

    @property
    def certificate(self) -> Certificate:
        assert self.output.certificate is not None, "an output without a certificate is refused"
        return self.output.certificate

    @property
    def job_key(self) -> Any:
        """Key of the request that computes the output again. The beams of a search have one in common."""
        return id(self.request), self.certificate.seed, repr(self.certificate.params)

    @property
    def changed(self) -> list[str]:
        """Parts that do not fit the hash."""
        output, certificate = self.output, self.certificate
        changed = certificate.changed(self.request.prompt_token_ids, output.token_ids)
        has_other_versions = output.versions and runs_of(output.versions) != tuple(certificate.versions)
        return changed or (["versions"] if has_other_versions else [])

    def result(self, field: str, reason: str, position: int | None = None, *, replayed: bool = True) -> Replay:
        """Return a result that is not "equal"."""
        return Replay(self.request.request_id, self.output.index, False, field, position, reason, replayed)

    def refusal(self, identity: Identity) -> Replay | None:
        """Return why an engine can't compute the output again; None if it may try."""
        if self.output.certificate is None:
            return self.result("certificate", "missing; set certificate=True in the parameters", replayed=False)
        certificate = self.certificate
        for name in self.changed:
            if name in GIVEN:
                return self.result(name, CHANGED, replayed=False)
        for name in {**certificate.numerics, **identity.numerics}:
            stated, here = certificate.numerics.get(name), identity.numerics.get(name)
            if stated != here:
                return self.result(name, f"{stated} in the certificate, {here} in this engine", replayed=False)
        if len(certificate.parameters) != 1:
            reason = f"were exchanged while the output was computed ({', '.join(certificate.parameters)})"
            return self.result("parameters", reason, replayed=False)
        if (stated := certificate.parameters[0]) != identity.fingerprint:
            reason = f"{stated} in the certificate, {identity.fingerprint} in this engine"
            return self.result("parameters", reason, replayed=False)
        return None

    def compare(self, request: RequestOutput) -> Replay:
        """Return the first difference from the request that has computed the output again."""
        output, again = self.output, request.outputs[self.output.index % self.certificate.params.num_outputs]
        if again.certificate is None:
            reason = f"the replay ended with {again.finish_reason} ({again.stop_reason})"
            return self.result("finish_reason", reason, replayed=False)
        if again.certificate.parameters != self.certificate.parameters:
            return self.result("parameters", "were exchanged during the replay", replayed=False)
        for position, (stated, new) in enumerate(zip_longest(_tokens(output), _tokens(again), fillvalue=_Token())):
            if stated.token != new.token:
                return self.result("token", _both(stated.token, new.token), position)
            for bits in (stated.bits, stated.listed_bits):
                if bits is not None and bits != new.bits:
                    return self.result("logprob", _both(_shown(bits), _shown(new.bits)), position)
        if output.finish_reason != again.finish_reason:
            return self.result("finish_reason", _both(output.finish_reason, again.finish_reason))
        if self.changed:
            return self.result(self.changed[0], CHANGED)
        return Replay(self.request.request_id, output.index, True)


class _Token(NamedTuple):
    """Token of an output with the bits of its logprob: those in the certificate, and those in `logprobs`, if listed."""

    token: int | None = None
    bits: str = ""
    listed_bits: str | None = None


def _tokens(output: CompletionOutput) -> Iterator[_Token]:
    assert output.certificate is not None
    bits = map("".join, batched(output.certificate.logprobs, 8))
    listed = output.logprobs or ()
    for token, of_token, by_token in zip_longest(output.token_ids, bits, listed):
        logprob = by_token.get(token) if by_token else None
        yield _Token(token, of_token or "", bits_of([logprob.logprob]) if logprob else None)


def _shown(bits: str) -> str:
    """Return a logprob and its bits."""
    return f"{struct.unpack('>f', bytes.fromhex(bits))[0]!r} ({bits})" if len(bits) == 8 else "none"


def _both(stated: object, new: object) -> str:
    """Return the two values of a difference."""
    return f"{stated} in the output, {new} in the replay"
