"""The padding of steps is counted as they are made."""

from benchmarks.padding import count_tokens, waste
from jpaged.config import Limits


def test_two_requests_by_hand():
    """Both prompts in one step, then two decode rows of two, and twice one of two."""
    counts = count_tokens(Limits(64, 4, 64), [(52, 4), (12, 2)], 2)
    assert counts == {
        "mixed_steps": 1, "mixed_tokens": 64, "mixed_computed": 64,
        "decode_steps": 3, "decode_tokens": 4, "decode_computed": 6,
    }  # fmt: skip
    assert waste(counts, "mixed") == 0 and waste(counts, "mixed", "decode") == 1 - 68 / 70


def test_requests_wait_for_a_place():
    counts = count_tokens(Limits(64, 4, 64), [(40, 2)] * 3, 1)
    assert counts["mixed_steps"] == counts["decode_steps"] == 3
    assert counts["mixed_tokens"] == 120 and counts["mixed_computed"] == 192
