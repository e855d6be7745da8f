"""How long an op takes: cold caches, interleaved rounds, medians.

Many calls are unrolled in one jitted function, each on its own blocks of a pool that is larger than the cache, and each
fed by the result of the one before: XLA can neither merge two of them nor run them side by side, and the host's part
is hidden behind the device's. `JaxTimed.empty` shows how large the host's part is.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Clock = Callable[[], float]


class Timed(Protocol):
    """Something that can be timed.

    Attributes:
        calls: how many equal calls are made together, on data that rotates.
        sets: how many of a workload's sets they go through, where not all of them.
    """

    calls: int
    sets: int | None

    def compile(self) -> None:
        """Compile the timed calls without running them."""

    def seconds(self, reps: int) -> float:
        """Time of one call, over `reps` times all of them."""


class Timing(NamedTuple):
    """Seconds per call.

    Attributes:
        median, low, high: median and quartiles of all samples.
        rounds: median of each round, in order; the others' rounds lie between them.
    """

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """For a row of results, in microseconds."""
        us = lambda seconds: round(1e6 * seconds, 3)
        return {"us": us(self.median), "us_low": us(self.low), "us_high": us(self.high),
                "us_rounds": [us(seconds) for seconds in self.rounds]}  # fmt: skip


class Effort(NamedTuple):
    """How much measuring: `rounds` of `samples` each, a sample being at least `min_seconds` long."""

    rounds: int = 3
    samples: int = 5
    min_seconds: float = 0.015


TINY = Effort(samples=1, min_seconds=0.0)


def measure(timed: Mapping[str, Timed], effort: Effort) -> dict[str, Timing]:
    """Times several things in interleaved rounds (A B A B A B), so that a drift of the device meets all alike."""
    reps = {name: _reps(each, effort.min_seconds) for name, each in timed.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in timed}
    for _ in range(effort.rounds):
        for name, each in timed.items():
            rounds[name].append([each.seconds(reps[name]) for _ in range(effort.samples)])
    return {name: summarize(samples) for name, samples in rounds.items()}


def summarize(rounds: Sequence[Sequence[float]]) -> Timing:
    """A Timing of samples by round."""
    samples = [sample for each in rounds for sample in each]
    low, high = np.percentile(samples, [25, 75])
    return Timing(
        statistics.median(samples), float(low), float(high), tuple(statistics.median(each) for each in rounds)
    )


def ratio(a: Timing, b: Timing) -> float:
    """How many times as long as b a takes: the median over rounds, each compared with its neighbour."""
    return statistics.median(x / y for x, y in zip(a.rounds, b.rounds, strict=True))


def _reps(timed: Timed, min_seconds: float) -> int:
    timed.seconds(1)  # compiles, loads, fills caches
    return max(1, min(1000, round(min_seconds / max(1e-9, timed.seconds(1) * timed.calls))))


class JaxTimed:
    """`op(carry, shared, own)` -> the next carry, once for each of `owns`.

    Args:
        carry: the first call's; each further call gets the result of the one before.
        shared: arguments of every call.
        owns: each call's own arguments; the data that it reads should not be in any cache.
        donate: the carry is updated in place.
    """

    def __init__(
        self, op: Callable, carry: Any, shared: Any, owns: Sequence[Any], *, donate: bool = False,
        clock: Clock = time.perf_counter,
    ):  # fmt: skip
        self.calls = len(owns)
        self.sets: int | None = None
        self._call = jax.jit(op)  # inside another jit it is lowered once, however often it is called
        self._first, self._carry, self._shared, self._owns, self._clock = carry, carry, shared, list(owns), clock

        def chain(carry, shared, owns):
            return functools.reduce(lambda carry, own: self._call(carry, shared, own), owns, carry)

        self._chain = jax.jit(chain, donate_argnums=0 if donate else (), keep_unused=True)

    def compile(self) -> None:
        self._call.lower(self._first, self._shared, self._owns[0]).compile()
        self._chain.lower(self._carry, self._shared, self._owns).compile()

    def output(self, index: int) -> Any:
        """The result of one call on the first carry, alone; before any timing where the carry is donated."""
        return self._call(self._first, self._shared, self._owns[index])

    def seconds(self, reps: int) -> float:
        carry = self._carry
        start = self._clock()
        for _ in range(reps):
            carry = self._chain(carry, self._shared, self._owns)
        jax.block_until_ready(carry)
        elapsed = self._clock() - start
        self._carry = carry
        return elapsed / (reps * self.calls)

    def empty(self) -> "JaxTimed":
        """The same arguments for hardly any work: its time per call is the host's time of a launch."""
        return JaxTimed(lambda carry, *_: carry + 1, jnp.zeros(()), self._shared, self._owns, clock=self._clock)


class TorchTimed:
    """`calls` closures, captured as one CUDA graph; timed by CUDA events around its replays.

    Args:
        closures: one per call, each on its own data; they run in order on one stream.
        finish: turns a call's result into [rows, N, H]; not part of the time.
    """

    def __init__(self, closures: Sequence[Callable[[], Any]], finish: Callable[[Any], Any] = lambda o: o):
        import torch

        self.calls = len(closures)
        self.sets: int | None = None
        self._torch, self._closures, self._finish = torch, closures, finish
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for closure in closures[:3]:  # outside the capture: handles, workspaces and plans
                closure()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # jax has threads too
            for closure in closures:
                closure()
        torch.cuda.synchronize()

    def compile(self) -> None:
        """Do nothing: the graph is captured."""

    def output(self, index: int) -> np.ndarray:
        """The result of one call, in float32."""
        return self._finish(self._closures[index]()).float().cpu().numpy()

    def seconds(self, reps: int) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(reps):
            self._graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / (reps * self.calls)
