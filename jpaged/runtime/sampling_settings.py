"""The settings that sampling is compiled for: the host knows which ones a step uses."""

import enum


class Settings(enum.IntEnum):
    """Sampling settings of the rows of a step, each including those before it.

    On a GPU each has an executable without conditions on the device, because the host would wait for conditions. On a
    CPU `ANY` serves every step, so that fewer executables are compiled.
    """

    GREEDY = 0
    DRAWN = 1  # with a temperature
    FILTERED = 2  # and with top-k, top-p or min-p
    ANY = 3  # and with penalties, biases, masks, beams, lists of the best tokens or ranks
