"""Dispatched step, and its result once the device has computed it."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from jpaged.core.plan import Sample, StepPlan, StepResult


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
    """

    def __init__(
        self, plan: StepPlan, chosen: jax.Array, listed: jax.Array, num_top: np.ndarray,
        prompt: tuple[jax.Array, jax.Array] | None, targets: np.ndarray, prompt_top: list[int],
        version: int = 0, late: jax.Array | None = None,
    ):  # fmt: skip
        self._plan, self._num_top, self._targets, self._prompt_top = plan, num_top, targets, prompt_top
        self._version, self._late = version, late
        self._most = int(num_top.max(initial=-1))
        self._arrays = [chosen, *([listed] if self._most >= 0 else []), *(prompt or ())]
        self._has_prompt = prompt is not None
        for array in self._arrays:
            array.copy_to_host_async()

    def wait(self) -> None:
        """Wait until the next step should be dispatched."""
        if self._late is not None:
            self._late.block_until_ready()

    def result(self) -> StepResult:
        """Wait for the step's tokens and return its result."""
        arrays = jax.device_get(self._arrays)
        if self._most < 0:
            tokens, _, bits = arrays[0][:, : len(self._num_top)]
            pairs = zip(tokens.tolist(), bits.view(np.float32).tolist())
            version = self._version
            samples = [Sample(token, logprob, 0, (), (), version) for token, logprob in pairs]
        else:
            samples = list(_samples(arrays[0], arrays[1], self._num_top.tolist(), self._version))
        return StepResult(samples, self._prompt_samples(*arrays[-2:]) if self._has_prompt else {})

    def _prompt_samples(self, chosen: np.ndarray, listed: np.ndarray) -> Mapping[int, list[Sample]]:
        """Return the samples of the prompts' own tokens, by row of the plan."""
        found: dict[int, list[Sample]] = {}
        start = 0
        for index, (_, _, count, _) in enumerate(self._plan.rows):
            at = start + np.flatnonzero(self._targets[start : start + count] >= 0)
            if len(at):
                top = itertools.repeat(self._prompt_top[index], len(at))
                found[index] = list(_samples(chosen[:, at], listed[:, at], top, self._version))
            start += count
        return found


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
