"""The padding of steps is counted as they are made."""

from benchmarks.engine.padding import count_tokens, waste
from jpaged.config import Limits


def test_three_requests_by_hand():
    """All prompts in one step, then three decode tokens of four, and twice one of one."""
    counts = count_tokens(Limits(64, 4, 64), [(40, 4), (12, 2), (12, 2)], 3)
    assert counts == {
        "mixed_steps": 1, "mixed_tokens": 64, "mixed_computed": 64,
        "decode_steps": 3, "decode_tokens": 5, "decode_computed": 6,
    }  # fmt: skip
    assert waste(counts, "mixed") == 0 and waste(counts, "mixed", "decode") == 1 - 69 / 70


def test_requests_wait_for_a_place():
    counts = count_tokens(Limits(64, 4, 64), [(40, 2)] * 3, 1)
    assert counts["mixed_steps"] == counts["decode_steps"] == 3
    assert counts["mixed_tokens"] == 120 and counts["mixed_computed"] == 144, "shapes of 48 tokens pay"
