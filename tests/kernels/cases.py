"""Random paged batches for the kernel tests.

Every pool slot that no sequence has written holds NaN, blocks lie in random order, and table entries past a context are
-1: an implementation that reads what it must not shows it.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of an attention op, and what they mean: each sequence's dense keys and values."""

    q: jax.Array  # [S, N, H] or [T, N, H]
    k_pool: jax.Array  # [P, K, B, H]
    v_pool: jax.Array  # [P, K, B, H]
    block_tables: jax.Array  # [S, W]
    context_lens: jax.Array  # [S]
    cu_q_lens: jax.Array | None  # [S + 1]; None: one query token per sequence
    dense: list[tuple[np.ndarray, np.ndarray]]  # per sequence k, v [context, K, H], float64
    scale: float

    @property
    def args(self) -> tuple[jax.Array, ...]:
        args = (self.q, self.k_pool, self.v_pool, self.block_tables, self.context_lens)
        return args if self.cu_q_lens is None else (*args, self.cu_q_lens)

    def expected(self) -> np.ndarray:
        """Causal attention in float64, one query row at a time; rows that belong to nobody are 0."""
        q = np.asarray(self.q, np.float64)
        out = np.zeros_like(q)
        for s, (k, v) in enumerate(self.dense):
            first, end = (s, s + 1) if self.cu_q_lens is None else self.cu_q_lens[s : s + 2].tolist()
            for row in range(first, end):
                seen = len(k) - (end - 1 - row)
                out[row] = attend(q[row], k[:seen], v[:seen], self.scale)
        return out

    def run(self, op) -> np.ndarray:
        """What an implementation makes of it, in float64."""
        return np.asarray(op(*self.args, scale=self.scale), np.float64)

    def check(self, out: np.ndarray) -> None:
        """Asserts that `out` is right to within the rounding of its dtype.

        Two roundings separate it from float64: that of the softmax weights before they meet V, and its own. Each moves
        a weighted mean of V by at most a unit of roundoff of the largest value. Sums are fp32 and count for nothing.
        """
        roundoff = float(jnp.finfo(self.q.dtype).eps) / 2
        largest = max((np.abs(v).max(initial=0.0) for _, v in self.dense), default=0.0)
        expected = self.expected()
        np.testing.assert_allclose(out, expected, rtol=0, atol=2 * roundoff * largest)
        nobodys = (expected == 0).all(axis=(1, 2))
        assert (out[nobodys] == 0).all(), "rows without a key must be exactly 0"


replace = dataclasses.replace


def attend(q_nh: np.ndarray, k_tkh: np.ndarray, v_tkh: np.ndarray, scale: float) -> np.ndarray:
    """Attention of one query token over t keys, in the arrays' own precision; 0 where there are none."""
    out = np.zeros_like(q_nh)
    if len(k_tkh) == 0:
        return out
    group = q_nh.shape[0] // k_tkh.shape[1]
    for n, q in enumerate(q_nh):
        score = k_tkh[:, n // group] @ q * scale
        weight = np.exp(score - score.max())
        out[n] = weight @ v_tkh[:, n // group] / weight.sum()
    return out


@dataclasses.dataclass(frozen=True)
class Write:
    """The arguments of a KV write; slots no token is written to hold NaN and must keep it."""

    k_pool: jax.Array  # [P, K, B, H]
    v_pool: jax.Array
    k: jax.Array  # [T, K, H]
    v: jax.Array
    slot_mapping: jax.Array  # [T]

    @property
    def args(self) -> tuple[jax.Array, ...]:
        return self.k_pool, self.v_pool, self.k, self.v, self.slot_mapping

    def check(self, k_pool: jax.Array, v_pool: jax.Array) -> None:
        """Asserts that both pools are right to the bit."""
        block_size = self.k_pool.shape[2]
        for out, pool, new in ((k_pool, self.k_pool, self.k), (v_pool, self.v_pool, self.v)):
            expected = np.array(pool, np.float32)
            for slot, row in zip(self.slot_mapping.tolist(), np.asarray(new, np.float32), strict=True):
                if slot >= 0:
                    expected[slot // block_size, :, slot % block_size] = row
            np.testing.assert_array_equal(np.asarray(out, np.float32), expected)


# One list for every implementation. Contexts: none, one token, and the edges of blocks, tiles (64) and splits (512).
DECODE = {
    "block 16": dict(contexts=[0, 1, 16, 17, 512, 0, 513, 600], group=4, block_size=16),
    "block 8, head dim 128": dict(contexts=[5, 8, 64, 65], group=7, block_size=8, head_dim=128),
    # Scores far apart: for some heads the last split, or a late tile, outweighs what came before.
    "peaked": dict(contexts=[1000], num_kv_heads=1, group=8, scale=1.0),
    "block 64, float16": dict(contexts=[1, 64, 0, 129], block_size=64, head_dim=128, dtype=jnp.float16),
    "block 128, head dim 256, 16 heads on one": dict(
        contexts=[127, 128, 200], num_kv_heads=1, group=16, block_size=128, head_dim=256
    ),
}
RAGGED = {
    "prompts, chunks and decodes": dict(
        contexts=[0, 1, 16, 17, 40, 0, 100], q_lens=[0, 1, 16, 1, 40, 0, 35], padding_rows=3, group=4, block_size=16
    ),
    "block 128, float16": dict(
        contexts=[130, 3, 64], q_lens=[130, 3, 1], num_kv_heads=1, block_size=128, head_dim=128, dtype=jnp.float16
    ),
    "block 8, head dim 256, 16 heads on one": dict(
        contexts=[70, 3], q_lens=[6, 3], padding_rows=2, num_kv_heads=1, group=16, block_size=8, head_dim=256
    ),
    "block 32, 7 heads on one": dict(contexts=[65, 300], q_lens=[20, 1], num_kv_heads=1, group=7, block_size=32),
    "padding only": dict(contexts=[0, 0], q_lens=[0, 0], padding_rows=5, num_kv_heads=1),
}
WRITE = {
    "block 16": dict(),
    "one KV head, block 8, head dim 64": dict(num_kv_heads=1, block_size=8, head_dim=64),
    "block 128, head dim 256, float16": dict(block_size=128, head_dim=256, dtype=jnp.float16),
}


def make_write(*, num_kv_heads=2, block_size=16, head_dim=128, num_tokens=7, dtype=jnp.bfloat16, seed=0) -> Write:
    """Tokens to random slots, every third of them padding."""
    rng = np.random.default_rng(seed)
    num_blocks = 3
    k, v = rng.standard_normal((2, num_tokens, num_kv_heads, head_dim))
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[::3] = -1
    pool = jnp.full((num_blocks, num_kv_heads, block_size, head_dim), jnp.nan, dtype)
    return Write(pool, pool, jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(slots, jnp.int32))


def make_batch(
    contexts: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    padding_rows: int = 0,
    num_kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    width: int | None = None,
    scale: float | None = None,
    dtype=jnp.bfloat16,
    seed: int = 0,
) -> Batch:
    """A decode batch, or with `q_lens` a ragged one whose last `padding_rows` rows are NaN and belong to nobody."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-n // block_size) for n in contexts]
    order = rng.permutation(sum(num_blocks) + 3)  # three blocks that nobody owns
    width = width or max(1, *num_blocks)
    tables = np.full((len(contexts), width), -1, np.int32)
    k_pool, v_pool = np.full((2, len(order), num_kv_heads, block_size, head_dim), np.nan)
    dense = []
    for s, (n, blocks) in enumerate(zip(contexts, np.split(order, np.cumsum(num_blocks))[:-1], strict=True)):
        tables[s, : len(blocks)] = blocks
        k, v = _rounded(rng.standard_normal((2, n, num_kv_heads, head_dim)), dtype)
        for t in range(n):
            k_pool[blocks[t // block_size], :, t % block_size] = k[t]
            v_pool[blocks[t // block_size], :, t % block_size] = v[t]
        dense.append((k, v))
    rows = len(contexts) if q_lens is None else sum(q_lens) + padding_rows
    q = rng.standard_normal((rows, num_kv_heads * group, head_dim))
    if padding_rows:
        q[-padding_rows:] = np.nan
    return Batch(
        q=jnp.asarray(q, dtype),
        k_pool=jnp.asarray(k_pool, dtype),
        v_pool=jnp.asarray(v_pool, dtype),
        block_tables=jnp.asarray(tables),
        context_lens=jnp.asarray(contexts, jnp.int32),
        cu_q_lens=None if q_lens is None else jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        dense=dense,
        scale=scale or head_dim**-0.5,
    )


def _rounded(x: np.ndarray, dtype) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)
