"""Costs of steps with drafts, and of the rounds of a draft model."""

from collections.abc import Sequence
from typing import NamedTuple

STEP_MEMORY, ALONE_MEMORY = 0.02, 0.05  # weights of the newest step, and of the newest one that does not overlap
ROUND_MEMORY = 0.2  # weight of the newest round of a draft model
STEP_FORGETTING, ROUND_FORGETTING = 0.003, 0.2  # shares that a step, or a rest, without drafts takes from an overhead
LONG = 2  # times its expected time, beyond which the time of a step or a round is not believed


class DecodeCosts(NamedTuple):
    """Measured seconds of a step with decode tokens only.

    Attributes:
        seconds: by the number of tokens, on empty contexts; empty: unknown.
        context: seconds for each token and each token of its context.
    """

    seconds: Sequence[float] = ()
    context: float = 0.0

    def of(self, tokens: int, context: int) -> float:
        """Return the cost of a step with some tokens; the same for any number if it is unknown."""
        if not self.seconds:
            return 1.0
        return self.seconds[min(tokens, len(self.seconds) - 1)] + tokens * context * self.context


UNKNOWN = DecodeCosts()


class DraftModelLimits(NamedTuple):
    """Maximum tokens of a sequence of a draft model, and the costs of its decode steps; unknown: not considered."""

    max_model_len: int
    costs: DecodeCosts


class Overhead:
    """Time of steps of a kind beyond their measured costs, such as the host's work: a mean of past steps.

    Args:
        memory: least weight of the newest step.

    Attributes:
        seconds: of a step; 0 at first, and as long as the steps take less than their costs.
        num_steps: number of steps so far.
    """

    def __init__(self, memory: float) -> None:
        self.seconds, self.num_steps, self._memory = 0.0, 0, memory

    def learn(self, seconds: float, cost: float) -> None:
        """Take note of a step. One that took far longer, as while a shape is compiled, counts as a long one."""
        self.num_steps += 1
        seconds, weight = min(seconds, LONG * (cost + self.seconds)), max(self._memory, 1 / self.num_steps)
        self.seconds = max(0.0, self.seconds + weight * (seconds - cost - self.seconds))

    def approach(self, seconds: float, weight: float) -> None:
        """Believe the past steps less, so that such a step is tried again at some time."""
        self.seconds += weight * (seconds - self.seconds)
