"""The requests of a mixed load, each with a check of its answer."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Finn", "Grace", "Henry", "Jack", "Lily")
THINGS = ("a fox", "a boat", "the moon", "a red kite", "an old tree", "a sand castle", "a small dog", "the rain")
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
CHOICES = ["yes", "no", "perhaps"]
REGEX = r"[A-Z][a-z]{2,8} is \d{1,2}"

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request and its expected answer.

    Attributes:
        status: the HTTP status.
        fits: whether the text of a choice is right, if it came to its own end ("stop").
    """

    kind: str
    path: str
    body: Json
    status: int = 200
    fits: Callable[[str], bool] = field(default=lambda text: True)

    @property
    def num_choices(self) -> int:
        return self.body.get("n", 1)


def prompt(rng: random.Random) -> str:
    """One of few beginnings, which the prefix cache knows, with one of many ends."""
    return f"Once upon a time {rng.choice(NAMES)} saw {rng.choice(THINGS)} {rng.randrange(10_000)} times"


def _completion(rng: random.Random, kind: str, max_tokens: int, **fields: Any) -> Case:
    body = {"prompt": prompt(rng), "max_tokens": max_tokens, "seed": rng.randrange(2**31)} | fields
    return Case(kind, "/v1/completions", body)


def plain(rng: random.Random) -> Case:
    return _completion(rng, "plain", rng.randint(1, 60), temperature=rng.choice((0, 0.7, 1.2)), top_p=0.95)


def long(rng: random.Random) -> Case:
    """A request that outgrows its share of the pool."""
    return _completion(rng, "long", rng.randint(150, 400), ignore_eos=True)


def chat(rng: random.Random) -> Case:
    messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": prompt(rng)}]
    return Case("chat", "/v1/chat/completions", {"messages": messages, "max_tokens": rng.randint(1, 60)})


def several(rng: random.Random) -> Case:
    return _completion(rng, "n > 1", rng.randint(10, 100), n=rng.randint(2, 6), ignore_eos=True)


def beams(rng: random.Random) -> Case:
    return _completion(rng, "beams", rng.randint(5, 40), n=rng.randint(2, 4), use_beam_search=True, seed=None)


def logprobs(rng: random.Random) -> Case:
    given = {"prompt_logprobs": 2} if rng.random() < 0.5 else {}
    return _completion(rng, "logprobs", rng.randint(5, 40), logprobs=rng.randint(1, 20), **given)


def penalties(rng: random.Random) -> Case:
    fields = {"presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"7": -100}, "bad_words": ["dog"]}
    return _completion(rng, "penalties", rng.randint(5, 60), stop=["\n\n", " end"], **fields)


def _is_json(text: str) -> bool:
    return json.loads(text).keys() == {"name", "age"}


def structured(rng: random.Random) -> Case:
    wanted, fits = rng.choice((
        ({"json": SCHEMA}, _is_json),
        ({"choice": CHOICES}, lambda text: text in CHOICES),
        ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
        ({"grammar": f'start: "{rng.randrange(1000)}" /[a-f]{{1,9}}/'}, lambda text: text[0].isdigit()),
    ))  # fmt: skip
    case = _completion(rng, "structured", rng.randint(5, 60), structured_outputs=wanted)
    return Case(case.kind, case.path, case.body, fits=fits)


def refused(rng: random.Random) -> Case:
    found: list[tuple[str, Json, int]] = [
        ("/v1/completions", {"prompt": prompt(rng), "temperature": -1}, 400),
        ("/v1/completions", {"prompt": prompt(rng), "max_tokens": 10**6}, 400),
        ("/v1/completions", {"prompt": [10**9]}, 400),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "temperature": 1}, 400),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, 400),
        ("/v1/completions", {"prompt": "a" * 2 * 2**20}, 413),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/completions", {"prompt": "a", "model": "another"}, 404),
        ("/v1/nothing", {}, 404),
    ]
    path, body, status = rng.choice(found)
    return Case("refused", path, body, status)


KINDS = {
    plain: 30, long: 12, chat: 15, several: 10, beams: 6, logprobs: 8, penalties: 6, structured: 8, refused: 8,
}  # fmt: skip


def case(rng: random.Random) -> Case:
    """Any of them; about half of them stream."""
    (make,) = rng.choices(list(KINDS), list(KINDS.values()))
    made = make(rng)
    made.body["stream"] = "prompt_logprobs" not in made.body and rng.random() < 0.5
    return made


def problem(case: Case, status: int, data: bytes) -> str | None:
    """Return a fault of an answer, if it has one."""
    try:
        return _problem(case, status, data)
    except (LookupError, TypeError, ValueError) as error:
        return f"not the API's form ({error!r}): {data[:300]!r}"


def _problem(case: Case, status: int, data: bytes) -> str | None:
    if status != case.status:
        return f"HTTP {status}, not {case.status}: {data[:300]!r}"
    if status != 200:
        return None if "error" in json.loads(data) else f"no error body: {data[:300]!r}"
    if case.body["stream"]:
        *events, done, end = data.decode().split("\n\n")
        if (done, end) != ("data: [DONE]", ""):
            return f"a stream that ends in {data[-80:]!r}"
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
    else:
        parts = [json.loads(data)]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for part in parts:
        if "error" in part:
            return f"an error in a stream: {part}"
        for choice in part["choices"]:
            holder = choice.get("delta") or choice.get("message") or choice
            text = holder.get("text") or holder.get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if reason := choice.get("finish_reason"):
                reasons[choice["index"]] = reason
    if sorted(reasons) != list(range(case.num_choices)):
        return f"choices {sorted(reasons)} ended, not {case.num_choices}"
    wrong = [texts[i] for i, reason in reasons.items() if reason == "stop" and not case.fits(texts[i])]
    return f"a text that does not fit: {wrong[0]!r}" if wrong else None
