"""Values that travel between the ingress and a replica."""

from collections.abc import Hashable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jpaged.serving.codec import JsonObject, dumps, loads


class Forwarded:
    """Request for a replica.

    Attributes:
        path: path of an endpoint with an operation.
        body: body of the HTTP request.
        client: identity for the fair use of the queue; None: every request is a client of its own.
        prefix: beginning of the prompt, for the router. It stays in the ingress.
    """

    def __init__(self, path: str, body: bytes, client: str | None = None, prefix: "Prefix | None" = None):
        self.path, self.body, self.client, self.prefix = path, body, client, prefix

    def __reduce__(self) -> tuple[Any, ...]:
        return Forwarded, (self.path, self.body, self.client)


class Head(NamedTuple):
    """Beginning of a response; the parts of its body follow."""

    status: int
    headers: dict[str, str]


class Description(NamedTuple):
    """Description of a served model: the response of `/v1/models`, and the maximum bytes of a request."""

    models: JsonObject
    max_body_size: int


class Prefix(NamedTuple):
    """Prompt as the prefix table compares it: only prompts with equal salts have common prefixes."""

    prompt: str | bytes | Sequence[int]
    salt: Hashable


def prefix_of(body: bytes) -> Prefix | None:
    """Return the prompt of a request for the router; None if there is none.

    It need not be what the model sees: of several prompts it is the first, and of a conversation the JSON of its tools
    and messages, which begins as that of the previous turn does.
    """
    try:
        values = loads(body.decode())
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    salt = values.get("cache_salt") if isinstance(values.get("cache_salt"), str) else ""
    if values.get("messages"):
        return Prefix(dumps([values.get("tools"), values["messages"]]), salt)
    prompt = values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
        return Prefix(prompt, salt)
    return None


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Return metrics in Prometheus's text format, by their replicas' ids, as one text with a label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels=sample.labels | {"replica": replica}) for sample in family.samples
            ]
    return generate_latest(cast(Collector, SimpleNamespace(collect=families.values)))
