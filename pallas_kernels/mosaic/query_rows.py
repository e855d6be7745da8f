"""Places of query heads in the boxes that the decode kernel loads."""

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

TMA_ROWS = 8  # a box of swizzled shared memory starts at a multiple of this number of rows


@dataclass(frozen=True)
class QueryRows:
    """Rows of q [R K stride, H] that hold the heads of a KV head.

    A box of M rows that starts at a multiple of 8 holds these heads, and heads of a neighbour. Nothing reads the
    neighbour's heads: each head is a separate column of all products.

    Attributes:
        stride: rows of a KV head.
        direct: whether q is taken as it is, with `stride` the query heads of a KV head. Otherwise it has a row for each
            sequence, padded so that a box holds one KV head.
    """

    stride: int
    direct: bool

    @classmethod
    def of(cls, num_rows: int, num_heads: int, num_kv_heads: int) -> "QueryRows":
        """Return the places for q [R, N, H]."""
        group = num_heads // num_kv_heads
        fits = TMA_ROWS % group == 0 or group % TMA_ROWS == 0
        if fits and num_rows * num_heads % TMA_ROWS == 0:
            return cls(group, True)
        return cls(pl.cdiv(group, TMA_ROWS) * TMA_ROWS, False)

    def first(self, row: Any, head: Any, num_kv_heads: int) -> Any:
        """Return the first row of a KV head."""
        return (row * num_kv_heads + head) * self.stride

    def lead(self, row: Any, head: Any, num_kv_heads: int) -> Any:
        """Return the number of rows in a box before the first row of a KV head."""
        return self.first(row, head, num_kv_heads) % TMA_ROWS if self.stride % TMA_ROWS else 0 * (row + head)
