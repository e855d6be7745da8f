"""Time limits of tests that wait for something on a busy machine."""

import time

PATIENCE_S = 300.0  # A test that waits so long hangs. No test may depend on a shorter time.


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.001)
