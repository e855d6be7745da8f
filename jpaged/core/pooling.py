"""Vector of a prompt, made of the model's last hidden states."""

import array
import math
from collections.abc import Sequence

LAST, MEAN = "last", "mean"
POOLINGS = (LAST, MEAN)
UNIT = 2.0**-30  # of sums: whole numbers have one sum in every order, so that the chunks of a prompt change no bit
MOST = 2.0**15  # larger values are sums of this one


def pooled(pooling: str, last: bytes, sums: Sequence[bytes], num_tokens: int) -> list[float]:
    """Return the vector of a prompt, float32 numbers.

    Args:
        last: hidden state of the last token, [D] float32.
        sums: sums of those of all other tokens, [D] int64 each, in units of `UNIT`.
    """
    vector = array.array("f", last)
    if pooling == LAST:
        return vector.tolist()
    totals = [round(min(max(x, -MOST), MOST) / UNIT) for x in vector]
    for part in sums:
        totals = [x + y for x, y in zip(totals, array.array("q", part), strict=True)]
    return array.array("f", [total * UNIT / num_tokens for total in totals]).tolist()


def normalized(vector: Sequence[float], dimensions: int | None = None) -> list[float]:
    """Return the first dimensions of a vector at length 1; zeros stay zeros."""
    kept = vector[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in kept))
    return [x / length for x in kept] if length else list(kept)
