"""Dispatched step, and its result once the device has computed it."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jpaged.core.plan import Sample, StepPlan, StepResult
from jpaged.core.pooling import MOST, UNIT


@dataclass(eq=False)
class PendingStep:
    """Dispatched step. Its result is copied to the host as soon as the device has it.

    Args:
        chosen: [3, S] int32, tokens, ranks and the bits of their logprobs.
        listed: [2, S, K] int32, lists of tokens and of the bits of their logprobs; fetched only if a sample wants one.
        num_top: [num_samples], number of the most likely tokens that each sample lists; -1 for neither list nor rank.
        prompt: the same arrays of the prompt's tokens; None if none is wanted.
        targets: [T], the tokens of the prompt that have a logprob, -1 for none.
        prompt_top: for each of the plan's rows, the length of the lists of its prompt's tokens.
        version: number of parameter updates before the step.
        late: array that is computed shortly before the others; None: the next step should be dispatched at once.
        end: called when the device has computed the step.
        kept: (array [S, ceil(V / 8)] uint8 of the tokens that samples are drawn from, [num_samples] whether they are
            wanted); None: none are.
        pooled: (hidden states that samples are drawn from [S, D], [num_samples] whether they are wanted); None: none
            are.
        summed: (all hidden states [T, D], the indices of the plan's rows whose sums are wanted); None: there are none.
    """

    plan: StepPlan
    chosen: jax.Array
    listed: jax.Array
    num_top: np.ndarray
    prompt: tuple[jax.Array, jax.Array] | None
    targets: np.ndarray
    prompt_top: list[int]
    version: int = 0
    late: jax.Array | None = None
    end: Callable[[], None] | None = None
    kept: tuple[jax.Array, np.ndarray] | None = None
    pooled: tuple[jax.Array, np.ndarray] | None = None
    summed: tuple[jax.Array, list[int]] | None = None

    def __post_init__(self) -> None:
        self._lists = bool((self.num_top >= 0).any())
        self._arrays = [self.chosen, *([self.listed] if self._lists else []), *(self.prompt or ())]
        for array in self._arrays:
            array.copy_to_host_async()

    def wait(self) -> None:
        """Wait until the next step should be dispatched."""
        if self.late is not None:
            self.late.block_until_ready()

    def result(self) -> StepResult:
        """Wait for the step's tokens and return its result."""
        arrays = jax.device_get(self._arrays)
        if self.end:
            self.end()
        if self._lists:
            samples = list(_samples(arrays[0], arrays[1], self.num_top.tolist(), self.version))
        else:
            tokens, _, bits = arrays[0][:, : len(self.num_top)]
            pairs, version = zip(tokens.tolist(), bits.view(np.float32).tolist()), self.version
            samples = [Sample(token, logprob, 0, (), (), version) for token, logprob in pairs]
        if self.kept is not None:
            bits, wanted = jax.device_get(self.kept[0]), self.kept[1]
            samples = [each._replace(kept=bits[s].tobytes()) if wanted[s] else each for s, each in enumerate(samples)]
        if self.pooled is not None:
            rows, wanted = jax.device_get(self.pooled[0]).astype(np.float32), self.pooled[1]
            samples = [x._replace(hidden=rows[s].tobytes()) if wanted[s] else x for s, x in enumerate(samples)]
        hidden, summed = (None, ()) if self.summed is None else (jax.device_get(self.summed[0]), self.summed[1])
        prompt_samples: dict[int, list[Sample]] = {}
        sums: dict[int, bytes] = {}
        start = 0
        for index, (_, _, count, _) in enumerate(self.plan.rows if self.prompt else ()):
            at = start + np.flatnonzero(self.targets[start : start + count] >= 0)
            if len(at):
                top = itertools.repeat(self.prompt_top[index], len(at))
                prompt_samples[index] = list(_samples(arrays[-2][:, at], arrays[-1][:, at], top, self.version))
                if hidden is not None and index in summed:
                    sums[index] = _sum(hidden[at])
            start += count
        return StepResult(samples, prompt_samples, sums)


def _sum(x_td: np.ndarray) -> bytes:
    """Return the sum of hidden states [T, D] as [D] int64 in units of `UNIT`."""
    whole_td = np.rint(np.clip(x_td.astype(np.float64), -MOST, MOST) / UNIT).astype(np.int64)
    return whole_td.sum(axis=0).tobytes()


def _samples(chosen: np.ndarray, listed: np.ndarray, num_top: Iterable[int], version: int) -> Iterator[Sample]:
    """Yield samples with lists of the requested lengths.

    They are tuples, which the garbage collector examines only once.
    """
    tokens, ranks, logprobs = chosen[0].tolist(), chosen[1].tolist(), chosen[2].view(np.float32).tolist()
    for s, top in enumerate(num_top):
        if top <= 0:
            yield Sample(tokens[s], logprobs[s], ranks[s] if top == 0 else 0, (), (), version)
        else:
            best, values = listed[0, s, :top].tolist(), listed[1, s, :top].view(np.float32).tolist()
            yield Sample(tokens[s], logprobs[s], ranks[s], tuple(best), tuple(values), version)
