"""Patience with a busy machine: how long a test waits for something before it takes it for hanging."""

import time

PATIENCE_S = 300.0  # No test may take as long as this, and none may depend on what is done sooner.


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.001)
