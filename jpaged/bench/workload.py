"""Workloads of a server: lengths of prompts and outputs from distributions, or requests from a file; and arrivals."""

import functools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from jpaged.setting import check, setting

LONGEST = 1536  # maximum tokens of a prompt and of an output in the datasets


class Dataset(NamedTuple):
    """Lengths of requests, in tokens: log-normal distributions that are cut at a maximum.

    Attributes:
        prompt, output: means after the cut.
        spread: standard deviation before the cut, in means.
    """

    prompt: float
    output: float
    spread: float = 1.0

    def lengths(
        self, count: int, *, most: tuple[int, int] = (LONGEST, LONGEST), seed: int = 0
    ) -> list[tuple[int, int]]:
        """Return (prompt, output) tokens of each request, at most `most` tokens."""
        rng, sigma = random.Random(seed), math.sqrt(math.log(1 + self.spread**2))
        mus = [_location(mean, sigma, limit) for mean, limit in zip((self.prompt, self.output), most)]

        def draw(mu: float, limit: int) -> int:
            return max(1, min(limit, round(rng.lognormvariate(mu, sigma))))

        return [(draw(mus[0], most[0]), draw(mus[1], most[1])) for _ in range(count)]


def _location(mean: float, sigma: float, limit: float) -> float:
    """Return the parameter mu of the log-normal distribution that has this mean once it is cut at a limit."""
    if not sigma or mean >= limit:
        return math.log(mean)
    normal = NormalDist()

    def cut_mean(mu: float) -> float:
        z = (math.log(limit) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * normal.cdf(z - sigma) + limit * (1 - normal.cdf(z))

    low, high = math.log(mean) - sigma**2 / 2, math.log(limit) + 8 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


# The paper (PagedAttention, arXiv:2309.06180) gives these means. The spread of ShareGPT's outputs follows from its
# figures for Orca (Max). Its pool of 15.7K tokens holds 7 reservations of 2,048 tokens; tokens fill 20.4 % of it, and
# will fill 13.3 % more. A running request therefore has 457 tokens on average, and 755 at its end. If the length o of
# an output does not depend on the prompt, then E[o^2] / E[o] = 755 - 161 = 594 of the 755 tokens are output. A standard
# deviation of 1.0 means with a cut at 1,536 tokens has this ratio.
DATASETS = {"Alpaca": Dataset(19.31, 58.45), "ShareGPT": Dataset(161.31, 337.99)}


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return the time at which each request is due, in seconds after the first request.

    Args:
        rate: average requests per second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, smaller values give bursts,
            larger ones more even gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    due = [0.0]
    while len(due) < count:
        due.append(due[-1] + rng.gammavariate(burstiness, 1 / (rate * burstiness)))
    return due[:count]


class Lengths(NamedTuple):
    """Tokens of one request: `prefix_tokens` that all requests with that `prefix` share, then `prompt` further ones."""

    prompt: int
    output: int
    prefix: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True)
class Job:
    """One request."""

    content: str | list[int] | list[dict[str, Any]]  # a text, token ids, or the messages of a conversation
    max_tokens: int | None = None
    answer: str | None = None  # in a file; it sets the length of the output


KINDS = ("sharegpt", "alpaca", "random", "shared-prefix", "file")
_setting = functools.partial(setting, group="workload")
_tokens = functools.partial(_setting, low=1, unit="TOKENS")


@dataclass(frozen=True)
class Workload:
    """Description of the requests. The same fields give the same requests."""

    kind: str = _setting("sharegpt", "source of the requests", choices=KINDS, flag="workload")
    num_prompts: int = _setting(200, "number of requests", low=1, unit="N")
    seed: int = 0
    input_len: int = _tokens(512, "prompt length for random and shared-prefix")
    output_len: int = _tokens(128, "output length for random and shared-prefix, and for lines without max_tokens")
    range_ratio: float = _setting(
        0.0, "draw lengths between (1 - R) and (1 + R) times the given length", low=0, below=1, unit="R"
    )
    prefix_len: int = _tokens(256, "length of each prefix for shared-prefix, in addition to --input-len")
    num_prefixes: int = _setting(1, "number of prefixes for shared-prefix", low=1, unit="N")
    file: Path | None = setting(None, "file with requests for --workload file", group="workload", unit="FILE")

    def __post_init__(self) -> None:
        check(self)
        if (self.kind == "file") != (self.file is not None):
            raise ValueError("file: the workload file needs one, and no other workload has one")

    def lengths(self) -> list[Lengths]:
        """Return the lengths of each request of a drawn workload."""
        if dataset := next((dataset for name, dataset in DATASETS.items() if name.lower() == self.kind), None):
            return [Lengths(*pair) for pair in dataset.lengths(self.num_prompts, seed=self.seed)]
        rng, low, high = random.Random(self.seed), 1 - self.range_ratio, 1 + self.range_ratio

        def draw(length: int) -> int:
            return max(1, rng.randint(math.floor(length * low), math.ceil(length * high)))

        drawn = [Lengths(draw(self.input_len), draw(self.output_len)) for _ in range(self.num_prompts)]
        if self.kind == "random":
            return drawn
        prefixed = enumerate(drawn)  # the prefixes in turn
        return [each._replace(prefix=i % self.num_prefixes, prefix_tokens=self.prefix_len) for i, each in prefixed]

    def jobs(self) -> list[Job]:
        """Return at most `num_prompts` requests of the file, in an order of the seed; see `read_jobs`."""
        assert self.file is not None
        jobs = read_jobs(self.file)
        random.Random(self.seed).shuffle(jobs)
        return jobs[: self.num_prompts]


def fit(drawn: Sequence[Lengths], room: int | None, least: int = 1) -> tuple[list[Lengths], int]:
    """Return lengths that fit into `room` tokens (None: any number), and the number of shortened ones.

    A prompt is shortened before its output, but not below `least` tokens.

    Raises:
        ValueError: a prefix leaves less than that.
    """
    if room is None:
        return list(drawn), 0
    fitted = []
    for each in drawn:
        if (left := room - each.prefix_tokens) <= least:
            shortest = f"a prefix of {each.prefix_tokens} tokens and the {least} of the shortest prompt"
            raise ValueError(f"{shortest} leave no room in the model's {room}")
        output = min(each.output, left - least)
        fitted.append(each._replace(output=output, prompt=min(each.prompt, left - output)))
    return fitted, sum(a != b for a, b in zip(drawn, fitted))


def read_jobs(path: Path) -> list[Job]:
    """Return the requests of a file of JSON lines, or of one JSON list.

    Conversations that don't begin with a question and its answer are left out.

    Raises:
        ValueError: the file is unreadable; the message names the place.
    """
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        items = [(f"item {i}", item) for i, item in enumerate(_parsed(path, "", text), 1)]
    else:
        lines = [(f"line {i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        items = [(place, _parsed(path, f", {place}", line)) for place, line in lines]
    jobs = [job for place, item in items if (job := _job(f"{path}, {place}", item))]
    if not jobs:
        raise ValueError(f"file: {path} holds no request")
    return jobs


def _parsed(path: Path, place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"file: {path}{place} is not JSON: {error}") from error


def _job(place: str, item: Any) -> Job | None:
    if not isinstance(item, dict):
        raise ValueError(f"file: {place} must be an object")
    if "conversations" in item:
        turns = item["conversations"][:2]
        if [turn.get("from") for turn in turns] != ["human", "gpt"] or not all(turn.get("value") for turn in turns):
            return None
        return Job(turns[0]["value"], answer=turns[1]["value"])
    content = item.get("prompt") or item.get("messages")
    if not isinstance(content, str | list) or ("prompt" in item) == ("messages" in item):
        raise ValueError(f'file: {place} must have either "prompt" or "messages"')
    max_tokens = item.get("max_tokens")
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise ValueError(f"file: {place}: max_tokens must be at least 1, not {max_tokens!r}")
    return Job(content, max_tokens)
