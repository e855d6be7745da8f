"""Files of certified outputs: a line of JSON for each request."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jpaged.core.certificate import Certificate
from jpaged.core.params import shown
from jpaged.core.request import CompletionOutput, RequestOutput

FIELDS = ("index", "text", "token_ids", "finish_reason", "stop_reason", "versions")  # of an output, as it is


def save(outputs: Iterable[RequestOutput], path: str | os.PathLike[str]) -> None:
    """Write outputs with their certificates to a file, which `load` and `jpaged verify` read.

    Lists of logprobs are not written: the certificates have the bits of those of the tokens.
    """
    with Path(path).open("w") as file:
        for request in outputs:
            completions = [
                {name: getattr(one, name) for name in FIELDS}
                | {"certificate": one.certificate and one.certificate.as_json()}
                for one in request.outputs
            ]
            identity = {name: getattr(request, name) for name in ("request_id", "prompt", "prompt_token_ids")}
            file.write(json.dumps(identity | {"outputs": completions}) + "\n")


def load(path: str | os.PathLike[str]) -> list[RequestOutput]:
    """Return the outputs of a file.

    A line holds a request as `save` writes it, or a response of the server to a request with `certificate` and
    `return_token_ids`.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is neither; the message has its number and the field.
    """
    outputs: list[RequestOutput] = []
    with Path(path).open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    outputs += _read(json.loads(line))
                except (ValueError, TypeError, RecursionError) as error:
                    raise ValueError(f"{path}: line {number}: {error}") from None
    return outputs


def _read(record: Any) -> Iterator[RequestOutput]:
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object, not {shown(record)}")
    if "choices" not in record:
        yield _request(record, record.get("request_id"), _field(record, "outputs", list))
        return
    for choice in _field(record, "choices", list):
        holder = choice if isinstance(choice, dict) and choice.get("prompt_token_ids") else record
        yield _request(holder, record.get("id"), [choice])


def _request(holder: dict[str, Any], request_id: Any, outputs: list[Any]) -> RequestOutput:
    """Return a request with the prompt of an object."""
    return RequestOutput(
        str(request_id), holder.get("prompt"), _tokens(holder, "prompt_token_ids"), [_output(one) for one in outputs]
    )


def _output(record: Any) -> CompletionOutput:
    if not isinstance(record, dict):
        raise ValueError(f"an output must be a JSON object, not {shown(record)}")
    certificate, ended = record.get("certificate"), record.get("finish_reason")
    return CompletionOutput(
        _field(record, "index", int), record.get("text") or "", _tokens(record, "token_ids"), 0.0, None,
        "stop" if ended == "tool_calls" else ended, record.get("stop_reason"), record.get("versions") or [],
        None if certificate is None else Certificate.from_json(certificate),
    )  # fmt: skip


def _tokens(record: dict[str, Any], name: str) -> list[int]:
    tokens: list[int] = _field(record, name, list)
    if not all(type(token) is int for token in tokens):
        raise ValueError(f"{name}: must be token ids, not {shown(tokens)}")
    return tokens


def _field(record: dict[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name}: must be {'a list' if kind is list else 'a whole number'}, not {shown(value)}")
    return value
