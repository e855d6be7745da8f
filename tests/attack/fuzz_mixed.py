"""Requests that keep a server busy: valid ones of every kind with priorities, long ones that meet its time limit,
bodies above its limit, viewers of its pool."""

import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

from tests.attack import soak_mix
from tests.attack.fuzz_target import MIB, TIMEOUT, Tally, Target, call, shortage


def valid(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send a request whose answer is known but for its text."""
    case = soak_mix.case(rng)
    if "max_tokens" in case.body and case.status == 200 and rng.random() < 0.95:
        case.body["max_tokens"] = min(case.body["max_tokens"], 40)
    if rng.random() < 0.8:
        case.body["priority"] = rng.choice((0, 1, -1, 5, rng.randint(-(2**31), 2**31 - 1)))
    call(target, rng, case.path, case.body, tally, check=lambda *answer: soak_mix.problem(case, *answer))


def several_prompts(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send a request that takes many places of the queue."""
    body = {"prompt": [soak_mix.prompt(rng) for _ in range(rng.randint(2, 12))], "max_tokens": rng.randint(1, 20)}
    call(target, rng, "/v1/completions", body, tally, check=_is_200)


def endless(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send a request that the others' priority holds up for longer than an answer may take."""
    body = {"prompt": soak_mix.prompt(rng), "max_tokens": 400, "n": 2, "ignore_eos": True, "priority": 2**40,
            "stream": rng.random() < 0.5}  # fmt: skip
    call(target, rng, "/v1/completions", body, tally, check=_is_200)


def large(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send a body just below or above the limit of a megabyte, with its length or in chunks."""
    size = rng.choice((MIB // 4, MIB - 100, MIB + 100_000, 4 * MIB))
    kinds: list[Callable[[], Any]] = [
        lambda: {"prompt": "a" * size}, lambda: {"prompt": [5] * (size // 3)},
        lambda: {"prompt": "a", "stop": ["b" * 10] * (size // 14)}, lambda: {"prompt": "a", "x" * size: 1},
        lambda: {"prompt": "a", "metadata": {str(i): "" for i in range(size // 14)}},
    ]  # fmt: skip
    data = json.dumps(rng.choice(kinds)()).encode()
    start, problem = time.monotonic(), None
    outcome: int | str
    connection = target.http(TIMEOUT)
    headers = {"Content-Type": "application/json"} | target.authorization(rng)
    try:
        if rng.random() < 0.5:
            pieces = (data[i : i + 65_536] for i in range(0, len(data), 65_536))
            connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=True)
        else:
            connection.request("POST", "/v1/completions", data, headers)
        response = connection.getresponse()
        answer, outcome = response.read(), response.status
        if outcome not in (400, 401, 413) and (problem := shortage(outcome, answer)) is None and outcome < 500:
            problem = f"status {outcome}"
        if len(data) > MIB + 64_000 and outcome not in (401, 413):
            problem = f"status {outcome} for {len(data)} bytes"
    except (ConnectionError, http.client.HTTPException) as error:
        outcome = "no answer"  # a server may hang up before all of a large body has come
        if len(data) < MIB:
            problem = repr(error)
    except OSError as error:
        outcome, problem = "no answer", repr(error)
    finally:
        connection.close()
    tally.add(outcome, time.monotonic() - start, f"/v1/completions, {len(data)} bytes, {data[:80]!r}", problem)


def looks(target: Target, rng: random.Random, tally: Tally) -> None:
    """View `/live` for some frames, or ask for a number on its map or for other things that change."""
    path = rng.choice(("/live", "/live", "/live/requests/unknown", "/metrics", "/v1/models", "/health"))
    wanted = {"/live/requests/unknown": (404, 401)}.get(path, (200, 401))
    start, problem = time.monotonic(), None
    outcome: int | str
    connection = target.http(TIMEOUT)
    try:
        connection.request("GET", path, headers=target.authorization(rng))
        response = connection.getresponse()
        outcome = response.status
        frames = rng.randrange(5) if path == "/live" and outcome == 200 else None
        data = response.read() if frames is None else b"".join(response.readline() for _ in range(2 * frames))
        if outcome not in wanted:
            problem = f"status {outcome}: {data[:200]!r}"
        elif frames and not data.startswith(b"data: {"):
            problem = f"no frame: {data[:200]!r}"
    except (OSError, http.client.HTTPException) as error:
        outcome, problem = "no answer", repr(error)
    finally:
        connection.close()
    tally.add(outcome, time.monotonic() - start, f"GET {path}", problem)


def _is_200(status: int, data: bytes) -> str | None:
    return None if status == 200 else f"HTTP {status}: {data[:300]!r}"


KINDS = {valid: 90, several_prompts: 4, endless: 1, large: 1, looks: 4}


def attack(target: Target, rng: random.Random, tally: Tally) -> None:
    """Send one request."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    kind(target, rng, tally)
