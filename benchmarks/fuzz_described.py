"""Requests made of the server's own description: such as it allows, and such as it forbids. schemathesis makes them."""

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode, checks
from schemathesis.errors import FailureGroup

if TYPE_CHECKING:
    from benchmarks.fuzz import Tally

CHECKS = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
TIMEOUT = 30.0  # seconds without a byte of the answer are a hang
ROUND = 60  # examples of one operation in a row
GENERATIONS = ("/v1/completions", "/v1/chat/completions")


def attack(url: str, seed: int, tally: "Tally") -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    rng = random.Random(seed)
    with requests.Session() as session:
        for round_seed in _rounds(seed):
            for operation in operations:
                examples = ROUND if operation.path in GENERATIONS else ROUND // 10
                modes = [GenerationMode.POSITIVE]
                if operation.body:  # whatever a path may hold is text, as it should be
                    modes.append(GenerationMode.NEGATIVE)
                for mode in modes:
                    _attack_operation(operation, mode, examples, round_seed, rng, session, tally)
                    if tally.full:
                        return


def _rounds(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(64)


def _attack_operation(
    operation: Any, mode: GenerationMode, examples: int, seed: int, rng: random.Random, session: Any, tally: "Tally"
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate], derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        if not tally.full:
            if mode is GenerationMode.POSITIVE:
                case.body = _thinned(case.body, rng)
            case.body = _shortened(case.body, rng)
            _call(case, session, tally)

    call()


def _thinned(body: Any, rng: random.Random) -> Any:
    """Mostly with a few of its fields: one that has them all has a wrong one among them, and goes no further."""
    if not isinstance(body, dict) or rng.random() < 0.2:
        return body
    needed = [name for name in body if name in ("prompt", "messages", "tokens")]
    others = [name for name in body if name not in needed]
    kept = set(rng.sample(others, min(len(others), rng.randrange(4))))
    return {name: value for name, value in body.items() if name in needed or name in kept}


def _shortened(body: Any, rng: random.Random) -> Any:
    """Mostly with few tokens to generate, where the request leaves their number open."""
    if not isinstance(body, dict) or rng.random() < 0.1 or not body.keys() & {"prompt", "messages"}:
        return body
    if body.keys() & {"max_tokens", "max_completion_tokens", "add_special_tokens", "return_token_strs"}:
        return body
    return body | {"max_tokens": rng.randint(1, 8)}


def _call(case: schemathesis.Case, session: Any, tally: "Tally") -> None:
    start, problem = time.monotonic(), None
    try:
        response = case.call(session=session, timeout=TIMEOUT)
        outcome: int | str = response.status_code
    except (requests.RequestException, TimeoutError) as error:
        tally.add("no answer", time.monotonic() - start, case.as_curl_command(), repr(error))
        return
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as failures:
        problem = "; ".join(f"{each.title} {each.message}"[:300] for each in failures.exceptions)
    request = case.as_curl_command() if problem or response.status_code >= 500 else ""
    tally.add(outcome, time.monotonic() - start, request, problem)
