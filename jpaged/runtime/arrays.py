"""Arrays on a device: pairs padded to a few sizes, and a check for lost arrays."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np


def padded(pairs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return sources and destinations, [C] int32 each, C the smallest sufficient one of `sizes`, -1 past the pairs."""
    size = next(size for size in sizes if size >= len(pairs))
    array = np.full((2, size), -1, np.int32)
    array[:, : len(pairs)] = np.asarray(pairs, np.int32).T
    return array[0], array[1]


def usable(arrays: Iterable[jax.Array]) -> bool:
    """Return whether no array was donated, and none is the result of a computation that failed on the device."""
    try:
        for array in arrays:
            array.block_until_ready()
    except RuntimeError:  # jax.errors.JaxRuntimeError in both cases
        return False
    return True
