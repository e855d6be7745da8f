"""The work list of the decode kernels against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cuts

SPLIT, TILE = 512, 64


def size(n: int, most: int) -> int:
    """Return the tokens of a split of a context of n tokens."""
    return next(SPLIT << i for i in range(20) if (SPLIT << i) * most >= n)


@pytest.mark.parametrize(
    "window, most",
    [
        pytest.param(window, most, marks=[] if i % 4 == j else [pytest.mark.deep])
        for i, window in enumerate((None, 1, 100, 512, 5000)) for j, most in enumerate((7, 1, 16, 32))
    ],
)  # fmt: skip
def test_splits_cover_the_keys_of_each_query(window, most):
    """Every split in order, none that is empty, at most `most` of a context, up to the longest context."""
    lens = [0, 131_072, 1, 511, 512, 513, 0, 70_001, 1024, 16_384, 16_385, 8192, 8193, 131_071]
    expected, first = [], [0]
    for s, n in enumerate(lens):
        seen, tokens = max(0, n - window) if window else 0, size(n, most)
        expected += [
            (s, max(u * tokens, seen // TILE * TILE), min((u + 1) * tokens, n), seen)
            for u in range(most)
            if u * tokens < n and (u + 1) * tokens > seen
        ]
        first.append(len(expected))
    work = cuts.make_splits(jnp.array(lens), most=most, split=SPLIT, tile=TILE, window=window)
    assert int(work.num_splits[0]) == len(expected) and work.first_s1.tolist() == first
    np.testing.assert_array_equal(work.work_i4[: len(expected)], expected)
    assert len(work.work_i4) == most * len(lens)


def test_split_size_is_the_smallest_that_holds_the_context():
    lens = np.unique(np.concatenate([2 ** np.arange(17) + d for d in (-1, 0, 1)]))
    for most in (1, 3, 16, 32):
        seen = cuts.split_size(jnp.asarray(lens, jnp.int32), SPLIT, most)
        assert seen.tolist() == [size(int(n), most) for n in lens]


def test_partials_of_the_largest_shapes_are_bounded():
    """256 sequences of 131,072 tokens, each split leaving 8 padded query heads of 128 float32 per KV head."""
    for num_kv_heads in (1, 2, 3, 5, 7, 8, 32, 128):
        most = cuts.max_splits(num_kv_heads, 131_072, SPLIT)
        assert 1 <= most <= 32 and most * num_kv_heads >= min(128, 32 * num_kv_heads)
        assert 256 * most * num_kv_heads * 8 * (128 + 4) * 4 <= 160e6
    assert cuts.max_splits(8, 131_072, SPLIT) == 16
    assert cuts.max_splits(1, 600, SPLIT) == 2
