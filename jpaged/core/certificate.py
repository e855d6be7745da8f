"""Certificates of outputs: all that is needed to compute an output again, and a hash of it."""

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from jpaged.core.params import BeamSearchParams, Params, SamplingParams, StructuredOutputsParams, shown

CHECK_DIGITS = 8  # of the hash of each part
# Parameters of the form of an answer, without effect on the tokens of one output.
_LISTING: dict[str, Any] = {
    "logprobs": None, "prompt_logprobs": None, "truncate_prompt_tokens": None, "truncation_side": "left",
    "certificate": False,
}  # fmt: skip
_OF_ONE: dict[str, Any] = {  # those of sampling alone
    "n": 1, "best_of": None, "seed": None, "logprob_token_ids": None, "num_speculative_tokens": None,
    "kept_tokens": False, "pooling": None,
}  # fmt: skip


@dataclass(frozen=True)
class Certificate:
    """Facts that an output depends on, beside its prompt, and the bits of its logprobs, with their hash.

    Attributes:
        numerics: by name, the versions, dtypes, kernels and sizes that the bits depend on.
        parameters: fingerprint of the parameters that computed the output; several if they were exchanged meanwhile.
        versions: (number of parameter updates, number of tokens drawn after them), in the order of the tokens.
        params: parameters that the tokens depend on. Those of sampling are for one output, and without the seed.
        seed: seed of the output's samples, also if the engine drew it.
        logprobs: bits of each token's logprob as float32, in 8 hexadecimal digits.
        checks: beginning of the hash of each part. It tells which part was changed later.
        digest: hash of all parts, 16 bytes in hexadecimal digits.
    """

    numerics: Mapping[str, str | int]
    parameters: Series[str]
    versions: Series[tuple[int, int]]
    params: Params
    seed: int
    logprobs: str
    checks: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""

    def sealed(self, prompt_token_ids: Series[int], token_ids: Series[int]) -> Self:
        """Return the certificate with the hashes of an output."""
        hashes = self._hashes(prompt_token_ids, token_ids)
        checks = {name: value[:CHECK_DIGITS] for name, value in hashes.items()}
        return replace(self, checks=checks, digest=_hash(hashes))

    def changed(self, prompt_token_ids: Series[int], token_ids: Series[int]) -> list[str]:
        """Return the names of the parts whose hashes have changed."""
        sealed = self.sealed(prompt_token_ids, token_ids)
        changed = [name for name, check in sealed.checks.items() if self.checks.get(name) != check]
        return changed or ([] if sealed.digest == self.digest else ["digest"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the output."""
        return len(self.logprobs) // 8

    @property
    def request_params(self) -> Params:
        """Parameters of a request that computes the output again, and certifies it."""
        seeds: dict[str, Any] = {"seed": self.seed} if isinstance(self.params, SamplingParams) else {}
        return replace(self.params, certificate=True, **seeds)

    def as_json(self) -> dict[str, Any]:
        """Return the certificate as a JSON object. It lists the parameters that differ from their defaults."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"params": _params_as_json(self.params)}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the certificate of a JSON object.

        Raises:
            ValueError: it is not one; the message has the field.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError(f"certificate: must be an object with {', '.join(sorted(names))}, not {shown(value)}")
        for name, kind in (("seed", int), ("logprobs", str), ("digest", str), ("params", dict), ("checks", dict)):
            if not isinstance(value[name], kind):
                raise ValueError(f"certificate: {name} has the wrong type: {shown(value[name])}")
        if not (isinstance(value["numerics"], dict) and isinstance(value["parameters"], list)):
            raise ValueError("certificate: numerics must be an object, and parameters a list")
        try:
            versions = tuple((int(version), int(count)) for version, count in value["versions"])
            bytes.fromhex(value["logprobs"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"certificate: versions must be pairs, and logprobs hexadecimal digits: {error}") from None
        params = _params_from_json(value["params"])
        return cls(**value | {"params": params, "parameters": tuple(value["parameters"]), "versions": versions})

    def _hashes(self, prompt_token_ids: Series[int], token_ids: Series[int]) -> dict[str, str]:
        parts = self.as_json() | {"prompt_token_ids": prompt_token_ids, "token_ids": token_ids}
        return {name: _hash(part) for name, part in parts.items() if name not in ("checks", "digest")}


def params_of_one(params: Params, max_tokens: int) -> Params:
    """Return the parameters that the tokens of one output depend on.

    Args:
        max_tokens: the resolved number.
    """
    neutral = _LISTING | (_OF_ONE if isinstance(params, SamplingParams) else {})
    return replace(params, **neutral, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def bits_of(logprobs: Iterable[float]) -> str:
    """Return the bits of numbers as float32, in 8 hexadecimal digits each."""
    return "".join(struct.pack(">f", logprob).hex() for logprob in logprobs)


def runs_of(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return each version with the number of tokens that it drew one after the other."""
    return tuple((version, sum(1 for _ in run)) for version, run in itertools.groupby(versions))


def _hash(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _params_as_json(params: Params) -> dict[str, Any]:
    values = {each.name: value for each in fields(params) if (value := getattr(params, each.name)) != each.default}
    if (wanted := params.structured_outputs) is not None:
        spec = {each.name: getattr(wanted, each.name) for each in fields(wanted)}
        spec = {name: value for name, value in spec.items() if value not in (None, False)}
        if not isinstance(spec.get("json", ""), str):
            spec["json"] = json.dumps(spec["json"])  # the order of a schema's properties matters
        values["structured_outputs"] = spec
    return values


def _params_from_json(values: dict[str, Any]) -> Params:
    """Return the parameters of a JSON object. Raises ValueError with the field."""
    kind: type[Params] = BeamSearchParams if "beam_width" in values else SamplingParams
    if unknown := values.keys() - {each.name for each in fields(kind)}:
        raise ValueError(f"certificate: unknown parameters {', '.join(sorted(unknown))}")
    if (wanted := values.get("structured_outputs")) is not None:
        try:
            values = values | {"structured_outputs": StructuredOutputsParams(**wanted)}
        except TypeError as error:
            raise ValueError(f"certificate: structured_outputs: {error}") from None
    return kind(**values)
