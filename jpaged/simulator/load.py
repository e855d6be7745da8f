"""Loads of a deployment: users or a request rate, and the latencies that they see."""

import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from jpaged.bench.workload import Lengths
from jpaged.simulator.cost import StepLoad
from jpaged.simulator.deployment import MAX_USERS, Deployment
from jpaged.simulator.engine import Served, StepRecord, drive_steps
from jpaged.simulator.traffic import Call, Schedule, Users, calls_of

MEASURED = 200  # least number of measured requests
SETTLING_S = 1e-6  # duration of a step before the beginning


class Load(NamedTuple):
    """Measurement of one load. Latencies are in seconds, means are over time.

    Attributes:
        users: users, or None for a request rate.
        tokens_per_s: sampled tokens per second.
        ttft, ttft_p99: median and 99th percentile of the time to first token.
        tpot, tpot_p99: median and 99th percentile of the time per further token of output.
        normalised: mean latency per token of output, of the requests that ended.
        running: mean number of running requests.
        kv_used: mean share of the KV blocks in use.
        preemptions: preemptions per request.
        cached: share of the prompts' tokens from the prefix cache.
    """

    users: int | None
    requests_per_s: float
    tokens_per_s: float
    ttft: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    normalised: float
    running: float
    kv_used: float
    preemptions: float
    cached: float

    def within(self, limits: "LatencyLimits") -> bool:
        """Return whether 99 % of the requests are within the limits."""
        return self.ttft_p99 <= limits.ttft and self.tpot_p99 <= limits.tpot


class LatencyLimits(NamedTuple):
    """Limits of the 99th percentiles of time to first token and of time per output token, in seconds."""

    ttft: float = 1.0
    tpot: float = 0.05


@dataclass(frozen=True)
class Traffic:
    """Lengths of requests, which repeat as often as necessary with new texts, and the time that users think.

    Attributes:
        think_s: seconds from an answer to the same user's next request.
    """

    lengths: Sequence[Lengths]
    think_s: float = 0.0

    def repeated(self, count: int) -> list[Lengths]:
        """Return lengths of `count` requests."""
        return list(itertools.islice(itertools.cycle(self.lengths), count))

    def underway(self, users: int) -> list[Lengths]:
        """Return the requests of users at one moment, the oldest first; the prompt contains the tokens so far.

        Equally spaced tokens of all outputs are the next ones: a long output is met more often than a short one.
        """
        ends = list(itertools.accumulate(each.output for each in self.lengths))
        aged = []
        for i in range(users):
            token = (2 * i + 1) * ends[-1] // (2 * users)
            at = bisect_left(ends, token + 1)
            aged.append((self.lengths[at].output - (ends[at] - token), self.lengths[at]))
        aged.sort(key=lambda pair: -pair[0])
        return [each._replace(prompt=each.prompt + age, output=each.output - age) for age, each in aged]


def load_of_users(deployment: Deployment, traffic: Traffic, users: int) -> Load:
    """Return the measurement of a number of users in a steady state.

    At the beginning, users that do not think are in the middle of their answers. With time to think, the first two
    requests of each user do not count. The run ends while all users are active.
    """
    counted = max(MEASURED, users // 4)
    underway = [] if traffic.think_s else traffic.underway(users)
    skipped = users + users // 8 if underway else 2 * users
    total = skipped + counted + users
    fresh = traffic.repeated(total + users - len(underway))  # so that no user is left without
    heads = _move_prefixes_ahead(underway)
    settling = (1 if heads == users else 2) if underway else 0
    first = [0.0] * heads + [SETTLING_S] * (users - heads) if underway else None
    source = Users(calls_of([*underway, *fresh]), users, traffic.think_s, first)
    watch = _Watch(deployment, users, settling)
    for ended in drive_steps(watch.engine, source):
        watch.record(ended)
        if len(source.sent) >= total:
            break
    window = source.sent[skipped].arrival, watch.engine.now
    return watch.load(users, source.sent, range(skipped, skipped + counted), window)


def load_of_rate(deployment: Deployment, traffic: Traffic, arrivals: Sequence[float]) -> Load:
    """Return the measurement of requests that arrive at given times, in ascending order: see `load_of_trace`."""
    return load_of_trace(deployment, calls_of(traffic.repeated(len(arrivals)), arrivals))


def load_of_trace(deployment: Deployment, calls: Sequence[Call]) -> Load:
    """Return the measurement of the requests of a trace.

    The first and the last quarter do not count, so that the queue is neither filling nor emptying. If all arrive at
    once, the whole run counts.
    """
    calls = sorted(calls, key=lambda call: call.arrival)
    watch = _Watch(deployment, MAX_USERS)
    for ended in drive_steps(watch.engine, Schedule(calls)):
        watch.record(ended)
    quarter = len(calls) // 4 if calls[0].arrival < calls[-1].arrival else 0
    measured = range(quarter, len(calls) - quarter)
    window = calls[quarter].arrival, max(each.end for each in watch.served if each.number in measured)
    return watch.load(None, calls, measured, window)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of sorted values that a share of them does not exceed; 0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else 0.0


def _move_prefixes_ahead(lengths: list[Lengths]) -> int:
    """Move one request of each shared prefix to the front, and return the number of requests that come first.

    The other ones find the prefixes in the cache. Without prefixes, all requests come first.
    """
    heads: dict[int, int] = {}
    for i, each in enumerate(lengths):
        if each.prefix_tokens:
            heads.setdefault(each.prefix, i)
    first = set(heads.values())
    lengths[:] = [lengths[i] for i in sorted(first)] + [each for i, each in enumerate(lengths) if i not in first]
    return len(first) or len(lengths)


class _Watch:
    """Engine with a record of its steps, after those in which it settles: they take nearly no time for any tokens.

    Attributes:
        served: calls that have ended.
    """

    def __init__(self, deployment: Deployment, users: int, settling: int = 0):
        self._cost, self._settling = deployment.cost, settling
        self.engine = deployment.engine(users, self)
        self.served: list[Served] = []
        self._steps: list[tuple[float, StepRecord]] = []  # with their ends
        self._queries = self._hits = 0
        scheduler = self.engine.scheduler
        self._limits = scheduler.limits, scheduler.tokens_beside_decodes
        if settling:
            scheduler.tokens_beside_decodes = sys.maxsize
            scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=sys.maxsize)

    def seconds(self, load: StepLoad) -> float:
        """Return the duration of a step."""
        return SETTLING_S if self.engine.steps < self._settling else self._cost.seconds(load)

    def record(self, ended: Sequence[Served]) -> None:
        """Record the last step and the calls that it has ended."""
        self.served += ended
        if self.engine.steps > self._settling:
            self._steps.append((self.engine.now, self.engine.last))
        elif self.engine.steps == self._settling:
            scheduler = self.engine.scheduler
            scheduler.limits, scheduler.tokens_beside_decodes = self._limits
            self._queries, self._hits = scheduler.prefix_queries, scheduler.prefix_hits

    def load(
        self, users: int | None, calls: Sequence[Call], measured: Iterable[int], window: tuple[float, float]
    ) -> Load:
        """Return the measurement of some calls, and of the steps within a window of time.

        A request that has not ended counts with its time and its tokens so far.
        """
        engine, scheduler, (start, stop) = self.engine, self.engine.scheduler, window
        times = {each.number: (each.first, each.end, each.call.output) for each in self.served}
        ttft, tpot, normalised = [], [], []
        for i in measured:
            call = calls[i]
            if i in times:
                first, end, tokens = times[i]
            else:
                request = scheduler.requests[f"{i}.0"]
                first, end = request.metrics.first_token_ts or engine.now, engine.now
                tokens = request.sequences[0].num_output_tokens
            ttft.append(first - call.arrival)
            if tokens:
                normalised.append((end - call.arrival) / tokens)
            if tokens > 1:
                tpot.append((end - first) / (tokens - 1))
        ttft.sort()
        tpot.sort()
        seconds = stop - start
        samples = running = used = 0.0
        for end, step in self._steps:
            share = min(1.0, max(0.0, min(end, stop) - max(end - step.seconds, start)) / step.seconds)
            samples += share * step.samples
            running += share * step.seconds * step.running
            used += share * step.seconds * step.used
        return Load(
            users, sum(start < each.end <= stop for each in self.served) / seconds, samples / seconds,
            percentile(ttft, 0.5), percentile(ttft, 0.99), percentile(tpot, 0.5), percentile(tpot, 0.99),
            fmean(normalised) if normalised else 0.0, running / seconds, used / scheduler.pool.num_blocks / seconds,
            scheduler.num_preemptions / len(calls),
            (scheduler.prefix_hits - self._hits) / max(1, scheduler.prefix_queries - self._queries),
        )  # fmt: skip
