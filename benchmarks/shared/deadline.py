"""Time budgets."""

import time
from collections.abc import Callable


class Deadline:
    """A time budget that the cases of an experiment look at before they start."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._end, self._clock = clock() + seconds, clock

    @property
    def left(self) -> float:
        return self._end - self._clock()

    @property
    def passed(self) -> bool:
        return self.left <= 0
