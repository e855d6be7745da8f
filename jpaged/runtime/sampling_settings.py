"""The settings that sampling is compiled for: the host knows which ones a step uses. Imports only numpy."""

import enum

import numpy as np


class Settings(enum.IntEnum):
    """Sampling settings of the rows of a step, each including those before it.

    On a GPU each is an executable of its own, without conditions on the device: the host would wait for them. On a CPU
    `ANY` serves every step, so that fewer executables are compiled.
    """

    GREEDY = 0
    DRAWN = 1  # with a temperature
    FILTERED = 2  # and with top-k, top-p or min-p
    ANY = 3  # and with penalties, biases, masks, beams, lists of the best tokens or ranks


def settings_of(scalars_s: np.ndarray, masked_s: np.ndarray) -> Settings:
    """Return the settings that some rows use.

    Args:
        scalars_s: of `row_table.SCALARS`.
        masked_s: whether each row has a mask.
    """
    if masked_s.any() or any(scalars_s[name].any() for name in ("stateful", "beam", "num_top")):
        return Settings.ANY
    drawn_s = scalars_s["temperature"] > 0
    filtered_s = (scalars_s["top_k"] > 0) | (scalars_s["top_p"] < 1) | (scalars_s["min_p"] > 0)
    if (drawn_s & filtered_s).any():
        return Settings.FILTERED
    return Settings.DRAWN if drawn_s.any() else Settings.GREEDY
