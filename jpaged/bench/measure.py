"""Latencies of each request, and their summary.

Latencies of a request, by the client's clock:

  time to first token     from sending the request to the first text of the response
  inter-token latency     each gap between two chunks of text; a chunk's tokens share one
                          gap, because the client does not know their number
  time per output token   from the first text to the last, over the tokens after the first
  end-to-end latency      from sending the request to the end of the response
  normalised latency      end-to-end latency over output tokens, as in the PagedAttention paper
  sent later than due     delay by a busy client or by --concurrency; only with a rate

Chunks that are read at once have gaps of 0 between them. Token counts are those of the server's usage, which every
request asks for, or the number of chunks if the server returns none. Failed requests count only as failures.
Throughputs are over the time from the first request sent to the last one ended. Goodput counts the requests within all
of its limits.
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
    """Times and token counts of one request. Times are in seconds, all by one clock.

    Attributes:
        due: time at which the request was due.
        chunks: time at which each chunk of text was read.
        prompt_tokens, output_tokens: counts of the server; None if it returns none.
        failure: kind of the failure that ended the request.
        detail: message of the server or the network.
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
        """Number of output tokens."""
        return len(self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token; None without text."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        """Time per output token; None for less than two tokens."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.chunks and self.tokens > 1 else None

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.ended - self.sent

    @property
    def normalised(self) -> float | None:
        """Normalised latency; None without tokens."""
        return self.e2el / self.tokens if self.tokens else None

    @property
    def delay(self) -> float:
        """Seconds between the due time and the sending of the request."""
        return self.sent - self.due


class Spread(NamedTuple):
    """Distribution of values."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


LATENCIES = ("ttft", "itl", "tpot", "e2el", "normalised", "delay")
LIMITED = ("ttft", "tpot", "e2el")  # latencies that goodput may limit


@dataclass(frozen=True)
class Measurement:
    """Summary of all requests of a run.

    Attributes:
        duration: seconds.
        request_throughput, output_throughput, total_throughput: requests, output tokens, and prompt and output tokens,
            each per second.
        goodput: requests per second within the limits; None without limits.
        counted: number of requests whose output tokens the server counted.
        latencies: seconds, by the names of LATENCIES; None without a value.
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


def spread(values: Sequence[float]) -> Spread | None:
    """Return the distribution of values; None if there are none."""
    if not values:
        return None
    median, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Spread(statistics.fmean(values), median, p90, p99, max(values))


def latencies(name: str, records: Iterable[Record]) -> list[float]:
    """Return the latencies of a name of LATENCIES, in seconds; several of each request if it is itl."""
    if name == "itl":
        return [gap for record in records for gap in record.gaps]
    return [value for record in records if (value := getattr(record, name)) is not None]


def measure(records: Sequence[Record], limits: Mapping[str, float] | None = None) -> Measurement:
    """Return the summary of at least one record.

    Args:
        limits: maximum latencies of a good request in seconds, by the names of LIMITED.
    """
    done = [record for record in records if record.failure is None]
    duration = max(record.ended for record in records) - min(record.sent for record in records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    output_tokens = sum(record.tokens for record in done)
    # A missing latency, such as a one-token response's time per token, is within any limit.
    bounds = (limits or {}).items()
    good = sum(all((getattr(record, name) or 0.0) <= limit for name, limit in bounds) for record in done)

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
        goodput=per_second(good) if limits else None,
        latencies={name: spread(latencies(name, done)) for name in LATENCIES},
    )
