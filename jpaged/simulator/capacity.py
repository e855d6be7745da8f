"""Capacity of a deployment: the most users within limits of latency, by a search over simulated loads."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from statistics import fmean

from jpaged.simulator.cost import StepLoad
from jpaged.simulator.deployment import MAX_USERS, Deployment
from jpaged.simulator.load import LatencyLimits, Load, Traffic, load_of_users

FACTOR = 1.2  # between the first loads of a search; a bisection of it ends the search


def search(deployment: Deployment, traffic: Traffic, limits: LatencyLimits, start: int | None = None) -> Iterator[Load]:
    """Yield the loads of a search for the most users within the limits, which is right to a tenth.

    Args:
        start: a number of users near the answer; None: take `estimate`.
    """
    good, bad = 0, MAX_USERS + 1
    factors = itertools.chain([FACTOR], (FACTOR ** (2**i) for i in itertools.count()))
    users = max(1, min(MAX_USERS, start or estimate(deployment, traffic, limits)))
    while good < users < bad:
        load = load_of_users(deployment, traffic, users)
        yield load
        good, bad = (users, bad) if load.within(limits) else (good, users)
        if bad > MAX_USERS:
            users = min(MAX_USERS, max(users + 1, round(users * next(factors))))
        elif not good:
            users = min(users - 1, max(1, round(users / next(factors))))
        else:
            users = round(math.sqrt(good * bad)) if bad - good > max(1, good // 10) else good


def estimate(deployment: Deployment, traffic: Traffic, limits: LatencyLimits) -> int:
    """Return a number of users near the capacity.

    Their KV fits into the pool, and a step of average size into the limit of the time per token.
    """
    outputs = sum(each.output for each in traffic.lengths)
    new = sum(each.prompt for each in traffic.lengths)
    shared = sum(each.prefix_tokens for each in traffic.lengths)
    held = sum(each.output * (each.prompt + each.output / 2) for each in traffic.lengths) / outputs
    read = held + sum(each.output * each.prefix_tokens for each in traffic.lengths) / outputs
    if not deployment.enable_prefix_caching:
        new, held = new + shared, read

    def seconds(users: int) -> float:
        tokens, context = round(users * (1 + new / outputs)), round(users * read)
        return deployment.cost.seconds(StepLoad(users, tokens, users, context, context))

    users = bisect_left(range(1, MAX_USERS + 1), True, key=lambda users: seconds(users) > limits.tpot)
    users = max(1, min(users, math.floor(deployment.pool_tokens / deployment.tokens_held(held))))
    thinking = traffic.think_s / (fmean(each.output for each in traffic.lengths) * seconds(users))
    return max(1, min(MAX_USERS, round(0.85 * users * (1 + thinking))))


def best(loads: Sequence[Load], limits: LatencyLimits) -> Load | None:
    """Return the load with the most users within the limits; None if one user is too many."""
    return max((load for load in loads if load.within(limits)), key=lambda load: load.users or 0, default=None)
