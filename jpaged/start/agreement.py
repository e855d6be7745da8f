"""Numbers that the processes of one mesh must agree on. Alone, a process agrees with itself."""

from collections.abc import Sequence

import numpy as np
from jax.experimental import multihost_utils

from jpaged.runtime.placement import Placement


def least(number: int, placement: Placement) -> int:
    """Return the least number of all processes that share a mesh. All of them must call it."""
    if placement.num_processes == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def leaders_values(values: Sequence[float], placement: Placement) -> Sequence[float]:
    """Return the values of process 0, as float32, in all processes that share a mesh. All of them must call it."""
    if placement.num_processes == 1:
        return values
    return [float(value) for value in multihost_utils.broadcast_one_to_all(np.array(values, np.float32))]
