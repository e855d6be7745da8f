"""Time of a step of each shape, and its consequences: further shapes, the size of chunks, and of shared steps."""

import hashlib
import itertools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jpaged.runtime.batch import Bucket
from jpaged.runtime.compilation_cache import private_folder

logger = logging.getLogger(__name__)

StepCosts = Mapping[Bucket, float]  # seconds, on empty contexts

# A shape between two others is worth its compilation if the larger one takes more than STEEP times the time of the
# smaller one, and more than LONG_S seconds.
STEEP, LONG_S = 1.5, 0.02
# Seconds in which a CPU schedules, decodes and sends one token of a stream, about as measured by
# `benchmarks/engine/isolation.py`.
CPU_TOKEN_S = 150e-6


def further_shapes(costs: StepCosts) -> StepCosts:
    """Return the shapes halfway between two neighbours of the ladders if the larger one is much more expensive.

    Their costs are assumed to be halfway, too.
    """
    ladders: dict[int | None, list[Bucket]] = {}
    for bucket in sorted(costs):
        ladders.setdefault(None if bucket.decode else bucket.num_seqs, []).append(bucket)
    further = {}
    for rungs in ladders.values():
        for low, high in itertools.pairwise(rungs):
            middle = (low.num_tokens + high.num_tokens) // 2
            if costs[high] > max(LONG_S, STEEP * costs[low]) and low.num_tokens < middle:
                rung = Bucket(middle, middle if high.decode else high.num_seqs, high.decode)
                further[rung] = (costs[low] + costs[high]) / 2
    return further


def tokens_beside_decodes(costs: StepCosts, max_cost: float, *, padded: bool = True) -> int:
    """Return the maximum number of tokens for steps in which sequences decode.

    The number is at least twice the number of sequences, if a step has that room. The tokens of decodes then leave room
    for prompts.

    Args:
        max_cost: maximum cost of such a step, in decode steps.
        padded: whether a step costs as much as its whole shape, so that the number is that of a shape. Otherwise costs
            between two shapes are interpolated.
    """
    costs = {**costs, **further_shapes(costs)} if padded else costs
    decode = max(bucket for bucket in costs if bucket.decode)
    mixed = sorted(bucket for bucket in costs if not bucket.decode and bucket.num_seqs == decode.num_seqs)
    shapes, seconds = [bucket.num_tokens for bucket in mixed], [costs[bucket] for bucket in mixed]
    sizes = shapes if padded else range(shapes[0], shapes[-1] + 1)
    roomy = [size for size in sizes if size >= 2 * decode.num_seqs] or sizes[-1:]
    cheap = [size for size in roomy if np.interp(size, shapes, seconds) <= max_cost * costs[decode]]
    return cheap[-1] if cheap else roomy[0]


def step_overhead(costs: StepCosts, platform: str) -> float:
    """Return the cost of a step without its tokens, in tokens that cost as much; inf if unknown or tokens cost nothing.

    The costs are fitted by a line, with equal relative errors for short and long steps. On a CPU the
    time that the host spends on a token is added. Beside a GPU this work overlaps with that of the device.
    """
    tokens, seconds = [bucket.num_tokens for bucket in costs], np.array([*costs.values()])
    if len(set(tokens)) <= 1:
        return math.inf
    slope, start = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    slope = max(slope, 0.0) + (CPU_TOKEN_S if platform == "cpu" else 0.0)
    return max(0.0, float(start / slope)) if slope > 0 else math.inf


def stored_costs(
    folder: Path, key: str, buckets: Iterable[Bucket], measure: Callable[[Bucket], float],
    agree: Callable[[Sequence[float]], Sequence[float]] = lambda seconds: seconds,
) -> StepCosts:  # fmt: skip
    """Return the costs of all shapes from a file, or else measure them and write it.

    Args:
        folder: it is used if it is a `private_folder`.
        key: identifies everything that the costs depend on.
        agree: return the seconds of the process whose costs hold for all processes that share the device mesh. They
            measure together, if that process has no file.
    """
    usable = private_folder(folder)
    path = usable and usable / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    wanted = tuple(buckets)
    stored = _read(path, key) if path else {}
    known = stored.keys() == set(wanted)
    seconds = agree([stored[bucket] if known else 0.0 for bucket in wanted])
    if all(seconds):
        return dict(zip(wanted, seconds, strict=True))
    costs = dict(zip(wanted, agree([measure(bucket) for bucket in wanted]), strict=True))
    if path:
        _write(path, key, costs)
    return costs


def _read(path: Path, key: str) -> dict[Bucket, float]:
    """Return the costs in a file; none if the file is missing, broken, or has another key."""
    try:
        content = json.loads(path.read_text())
        costs = {Bucket(int(t), int(s), bool(d)): float(seconds) for t, s, d, seconds in content["seconds"]}
        return costs if content["key"] == key and all(seconds > 0 for seconds in costs.values()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, key: str, costs: StepCosts) -> None:
    content = {"key": key, "seconds": [[*bucket, seconds] for bucket, seconds in costs.items()]}
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("the costs of steps are not stored: %s", error)
