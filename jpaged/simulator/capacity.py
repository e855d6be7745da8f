"""Capacity of GPUs: the users that a deployment holds within limits of latency, by simulation."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from jpaged.bench.workload import Lengths
from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.scheduler import HEADROOM, Scheduler
from jpaged.simulator.cost import Roofline, StepCost
from jpaged.simulator.engine import VOCAB_SIZE, VirtualEngine, drive
from jpaged.simulator.gpu import Gpu
from jpaged.simulator.shape import ModelShape
from jpaged.simulator.traffic import Schedule, Users, calls_of

TEMPORARIES_BYTES = 2 * 2**30  # of each GPU: the largest step's, and CUDA's own
MAX_USERS = 4096
LEAST_CALLS, CALLS_PER_USER = 200, 3


@dataclass(frozen=True)
class Deployment:
    """Model on GPUs, with the settings of its engine.

    Attributes:
        max_num_seqs: None: one for each user, at most `MAX_USERS`.
        costs: measured costs of a step; None: the roofline of the GPUs.
    """

    gpu: Gpu
    shape: ModelShape
    num_gpus: int = 1
    kv_dtype_bytes: int = 2
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    costs: StepCost | None = None

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.shape.num_heads % self.num_gpus:
            raise ValueError(
                f"tensor_parallel_size: must divide the {self.shape.num_heads} heads of {self.shape.name}, "
                f"not {self.num_gpus}"
            )
        if self.pool_tokens < self.max_model_len:
            raise ValueError(
                f"gpu: {self.num_gpus} x {self.gpu.name} have no room for {self.shape.name} "
                f"({2 * self.shape.num_params / 2**30:.1f} GiB) and the KV of one sequence of {self.max_model_len} "
                "tokens: use more GPUs (--tensor-parallel-size) or a smaller --max-model-len"
            )

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that fit into the memory beside the parameters."""
        per_gpu = self.gpu.memory_bytes * self.gpu_memory_utilization - TEMPORARIES_BYTES
        left = per_gpu * self.num_gpus - 2 * self.shape.num_params
        return max(0, math.floor(left / self.shape.kv_bytes(self.kv_dtype_bytes)))

    @property
    def cost(self) -> StepCost:
        """Cost model of a step."""
        return self.costs or Roofline(self.gpu, self.shape, self.num_gpus, kv_dtype_bytes=self.kv_dtype_bytes)

    def engine(self, users: int) -> VirtualEngine:
        """Return a new engine with empty memory."""
        limits = Limits(
            self.max_model_len, self.max_num_seqs or min(users, MAX_USERS),
            self.max_num_batched_tokens, self.block_size,
        )  # fmt: skip
        pool = BlockPool(
            self.pool_tokens // self.block_size, self.block_size, enable_prefix_caching=self.enable_prefix_caching
        )
        scheduler = Scheduler(pool, limits, vocab_size=VOCAB_SIZE, preemption="recompute", headroom=HEADROOM)
        return VirtualEngine(scheduler, self.cost)


class Load(NamedTuple):
    """Measurement of one load. Latencies are in seconds.

    Attributes:
        users: users, or None for a request rate.
        ttft, ttft_p99: median and 99th percentile of the time to first token.
        tpot, tpot_p99: the same of the time per further token of output.
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
    """Lengths of requests, which repeat as often as necessary with texts of their own, and the users' habit.

    Attributes:
        think_s: seconds from an answer to the same user's next request.
    """

    lengths: Sequence[Lengths]
    think_s: float = 0.0

    def repeated(self, count: int) -> list[Lengths]:
        """Return lengths of `count` requests."""
        return list(itertools.islice(itertools.cycle(self.lengths), count))


def load_of_users(deployment: Deployment, traffic: Traffic, users: int) -> Load:
    """Return the measurement of a number of users; the beginning and the end of the run do not count."""
    calls = calls_of(traffic.repeated(max(LEAST_CALLS, CALLS_PER_USER * users)))
    return _measure(deployment, Users(calls, users, traffic.think_s), users)


def load_of_rate(deployment: Deployment, traffic: Traffic, arrivals: Sequence[float]) -> Load:
    """Return the measurement of requests that arrive at given times."""
    return _measure(deployment, Schedule(calls_of(traffic.repeated(len(arrivals)), arrivals)), None)


def _measure(deployment: Deployment, source: Users | Schedule, users: int | None) -> Load:
    engine = deployment.engine(users or MAX_USERS)
    states: list[tuple[float, int, float]] = []  # time, running requests and share of used blocks after each step

    def record(scheduler: Scheduler) -> None:
        pool = scheduler.pool
        states.append((engine.now, len(scheduler.running), pool.num_used / pool.num_blocks))

    served = drive(engine, source, on_step=record)
    start = sorted(each.end for each in served)[len(served) // CALLS_PER_USER]
    stop = max(each.call.arrival for each in served)
    inside = [each for each in served if start <= each.call.arrival <= stop] or served
    ended = [each for each in served if start <= each.end <= stop] or served
    seconds = max(stop - start, 1e-9)
    during = [state for state in states if start <= state[0] <= stop] or states
    ttft = sorted(each.first - each.call.arrival for each in inside)
    tpot = sorted((each.end - each.first) / max(1, each.call.output - 1) for each in inside)
    scheduler = engine.scheduler
    return Load(
        users, len(ended) / seconds, sum(each.call.output for each in ended) / seconds,
        percentile(ttft, 0.5), percentile(ttft, 0.99), percentile(tpot, 0.5), percentile(tpot, 0.99),
        fmean(each.normalised for each in inside), fmean(state[1] for state in during),
        fmean(state[2] for state in during),
        scheduler.num_preemptions / len(served), scheduler.prefix_hits / max(1, scheduler.prefix_queries),
    )  # fmt: skip


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of sorted values lies."""
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]


def search(deployment: Deployment, traffic: Traffic, limits: LatencyLimits, start: int | None = None) -> Iterator[Load]:
    """Yield the loads of a search for the most users within the limits, which is right to a tenth.

    Args:
        start: a number of users near the answer; None: unknown.
    """
    good, bad, users, factor = 0, MAX_USERS + 1, start or 1, 2 if start else 4
    while good < users < bad:
        load = load_of_users(deployment, traffic, users)
        yield load
        good, bad = (users, bad) if load.within(limits) else (good, users)
        if bad > MAX_USERS:
            users = min(MAX_USERS, factor * users)
        elif not good:
            users = users // factor
        else:
            users = round(math.sqrt(good * bad)) if bad - good > max(1, good // 10) else good


def best(loads: Sequence[Load], limits: LatencyLimits) -> Load | None:
    """Return the load with the most users within the limits; None if one user is too many."""
    return max((load for load in loads if load.within(limits)), key=lambda load: load.users or 0, default=None)
