"""Requests made of the server's own description: such as it allows, and such as it forbids. schemathesis makes them."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode, checks
from schemathesis.errors import FailureGroup

from tests.attack.fuzz_target import BACKOFF, TIMEOUT, Tally, Target, ends_in_shortage, has_tokens, shortage

CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
ROUND = 60  # examples of one operation in a row
GENERATIONS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
)  # fmt: skip
NEEDED = ("prompt", "messages", "tokens", "input", "model", "max_tokens", "query", "items", "label_token_ids")


def attack(target: Target, seed: int, count: int, tally: Tally) -> None:
    """Send `count` requests, one after the other."""
    with requests.Session() as session:
        client = _Client(target, session, random.Random(seed), tally, count)
        schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json", verify=client.verify)
        operations = [result.ok() for result in schema.get_all_operations()]
        for round_seed in _rounds(seed):
            for operation in operations:
                examples = ROUND if operation.path in GENERATIONS else ROUND // 10
                modes = [GenerationMode.POSITIVE]
                if operation.body:  # every value in a path is text, as it should be
                    modes.append(GenerationMode.NEGATIVE)
                for mode in modes:
                    _attack_operation(operation, mode, examples, round_seed, client)
                    if client.left == 0:
                        return


def _rounds(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(64)


def _attack_operation(operation: Any, mode: GenerationMode, examples: int, seed: int, client: "_Client") -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate], derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        if client.left:
            if mode is GenerationMode.POSITIVE:
                case.body = _thinned(case.body, client.rng)
            case.body = _shortened(case.body, client.rng)
            client.call(case)

    call()


def _thinned(body: Any, rng: random.Random) -> Any:
    """Mostly with a few of its fields: one that has them all has a wrong one among them, and goes no further."""
    if not isinstance(body, dict) or rng.random() < 0.2:
        return body
    needed = [name for name in body if name in NEEDED]
    others = [name for name in body if name not in needed]
    kept = set(rng.sample(others, min(len(others), rng.randrange(4))))
    return {name: value for name, value in body.items() if name in needed or name in kept}


def _shortened(body: Any, rng: random.Random) -> Any:
    """Mostly with few tokens to generate, where the request leaves their number open."""
    if not isinstance(body, dict) or rng.random() < 0.1 or not body.keys() & {"prompt", "messages", "input"}:
        return body
    if "input" in body:
        return {"max_output_tokens": rng.randint(1, 8)} | body
    if body.keys() & {"max_tokens", "max_completion_tokens", "add_special_tokens", "return_token_strs"}:
        return body
    return body | {"max_tokens": rng.randint(1, 8)}


@dataclass
class _Client:
    """One client; `left` requests are still to be sent."""

    target: Target
    session: requests.Session
    rng: random.Random
    tally: Tally
    left: int
    verify: str | bool = field(init=False)

    def __post_init__(self) -> None:
        self.verify = str(self.target.certificate) if self.target.certificate else True

    def call(self, case: schemathesis.Case) -> None:
        start, problem = time.monotonic(), None
        self.left -= 1
        headers = self.target.authorization(self.rng)
        try:
            response = case.call(session=self.session, timeout=TIMEOUT, verify=self.verify, headers=headers)
        except (requests.RequestException, TimeoutError) as error:
            self.tally.add("no answer", time.monotonic() - start, case.as_curl_command(), repr(error))
            return
        status, data = response.status_code, response.content
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as failures:
            problem = "; ".join(f"{each.title} {each.message}"[:300] for each in failures.exceptions)
        problem = problem or shortage(status, data)
        request = case.as_curl_command() if problem else ""
        streamed = response.headers.get("Content-Type", "").startswith("text/event-stream")
        generated = status == 200 and has_tokens(streamed, data) and not ends_in_shortage(data)
        self.tally.add(status, time.monotonic() - start, request, problem, generated=generated)
        if status == 503:
            time.sleep(BACKOFF)
