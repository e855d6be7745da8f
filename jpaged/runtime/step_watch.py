"""Comparison of the steps that run with the measured costs of steps."""

import logging
import time
from collections.abc import Callable, Mapping

from jpaged.runtime.batch import Bucket

logger = logging.getLogger(__name__)

MUCH, STEPS = 0.7, 8  # so many steps that each take less than this share of their cost contradict the costs


class StepWatch:
    """Judge of the costs of steps, which were measured too high if the machine was busy.

    The time from the dispatch of a step to its result is at least that of the step, and a step with contexts takes at
    least as long as the measured one on empty contexts. Steps that take much less time therefore contradict the costs.

    Args:
        costs: seconds by shape.
        padded: whether a step costs as much as its whole shape.
        forget: called once, when the costs are contradicted.
    """

    def __init__(self, costs: Mapping[Bucket, float], forget: Callable[[], None], *, padded: bool):
        self._costs, self._padded, self._forget, self._left = costs, padded, forget, STEPS

    def begin(self, bucket: Bucket, num_tokens: int) -> Callable[[], None]:
        """Note the dispatch of a step of so many tokens, and return a function to call with its result."""
        start = time.perf_counter()

        def end() -> None:
            seconds = time.perf_counter() - start
            if self._left and seconds < MUCH * self._cost(bucket, num_tokens):
                self._left -= 1
                if not self._left:
                    logger.warning(
                        "steps take much less time than their measured costs: the next start measures them again"
                    )
                    self._forget()

        return end

    def _cost(self, bucket: Bucket, num_tokens: int) -> float:
        """Return the cost of the largest measured step that the step is not smaller than; 0 if all are larger."""
        if self._padded:
            return self._costs.get(bucket, 0.0)
        smaller = (
            cost for each, cost in self._costs.items() if each.decode == bucket.decode and each.num_tokens <= num_tokens
        )
        return max(smaller, default=0.0)
