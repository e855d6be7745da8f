"""Measurements of each request, and their summary.

Of one request, by the client's clock:

  time to first token     from sending it to the first text that comes back
  inter-token latency     every gap between two chunks of text; what several tokens
                          in one chunk share, for nobody here knows how many they are
  time per output token   from the first text to the last, over the tokens after the first
  end-to-end latency      from sending it to the end of the answer
  normalised latency      end-to-end latency over output tokens: the PagedAttention paper's
  sent later than due     by a busy client, or by --concurrency; only with a rate

Chunks that are read at once have gaps of 0 between them. Tokens are counted by the server, whose usage every request
asks for, or, where it tells none, by chunks. Only requests that succeeded count, but for the failures. Throughputs are
over the time from the first request sent to the last one ended. Goodput counts requests within all of its limits.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np


@dataclass
class Record:
    """One request. Times are in seconds, all by one clock.

    Attributes:
        due: when it was to be sent.
        chunks: when each chunk of text was read.
        prompt_tokens, output_tokens: as the server counts them; None where it does not say.
        failure: the kind of failure that ended it.
        detail: the message of the server or the network.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None
    detail: str | None = None

    @property
    def tokens(self) -> int:
        """Of the output."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.chunks and self.tokens > 1 else None

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def normalised(self) -> float | None:
        return self.e2el / self.tokens if self.tokens else None

    @property
    def delay(self) -> float:
        """How much later it was sent than it was due."""
        return self.sent - self.due


class Spread(NamedTuple):
    """How values are distributed."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


LATENCIES = ("ttft", "itl", "tpot", "e2el", "normalised", "delay")
LIMITED = ("ttft", "tpot", "e2el")  # latencies that goodput may limit


@dataclass(frozen=True)
class Measurement:
    """Of all requests of a run.

    Attributes:
        duration: seconds.
        request_throughput, output_throughput, total_throughput: requests, output tokens, and tokens in and out, each
            per second.
        goodput: requests per second within the limits; None if there are none.
        counted: of how many requests the server counted the output's tokens.
        latencies: seconds, by the names of LATENCIES; None if there is no value.
    """

    requests: int
    completed: int
    failures: dict[str, int]
    duration: float
    prompt_tokens: int
    output_tokens: int
    chunks: int
    counted: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: float | None
    latencies: dict[str, Spread | None]


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the distribution of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    median, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Spread(statistics.fmean(known), median, p90, p99, max(known))


def measure(records: Sequence[Record], limits: Mapping[str, float] | None = None) -> Measurement:
    """Of at least one record. `limits` are a good request's longest latencies in seconds, by the names of LIMITED."""
    done = [record for record in records if record.failure is None]
    duration = max(record.ended for record in records) - min(record.sent for record in records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    output_tokens = sum(record.tokens for record in done)
    latencies = {
        name: spread(getattr(record, name) for record in done) for name in LATENCIES if name != "itl"
    } | {"itl": spread(gap for record in done for gap in record.gaps)}  # fmt: skip

    def per_second(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    return Measurement(
        requests=len(records),
        completed=len(done),
        failures=dict(Counter(record.failure for record in records if record.failure)),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunks=sum(len(record.chunks) for record in done),
        counted=sum(record.output_tokens is not None for record in done),
        request_throughput=per_second(len(done)),
        output_throughput=per_second(output_tokens),
        total_throughput=per_second(prompt_tokens + output_tokens),
        goodput=per_second(sum(_good(record, limits) for record in done)) if limits else None,
        latencies={name: latencies[name] for name in LATENCIES},
    )


def _good(record: Record, limits: Mapping[str, float]) -> bool:
    """A latency that there is none of, as a one-token answer's time per token, is within any limit."""
    return all((getattr(record, name) or 0.0) <= limit for name, limit in limits.items())
