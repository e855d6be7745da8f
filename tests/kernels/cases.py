"""Random paged batches for the kernel tests, and their correct results.

Every pool slot that no sequence has written holds NaN, blocks lie in random order, and table entries past a context are
-1: an implementation that reads unwritten slots shows it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of an attention op, and their meaning: each sequence's dense keys and values."""

    q: np.ndarray  # [S, N, H] or [T, N, H]
    k_pool: np.ndarray  # [P, K, B, pool's H]
    v_pool: np.ndarray  # [P, K, B, pool's H]
    block_tables: np.ndarray  # [S, W]
    context_lens: np.ndarray  # [S]
    cu_q_lens: np.ndarray | None  # [S + 1]; None: one query token per sequence
    dense: list[tuple[np.ndarray, np.ndarray]]  # per sequence k, v [context, K, H], float64
    options: dict[str, Any]

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        args = (self.q, self.k_pool, self.v_pool, self.block_tables, self.context_lens)
        return args if self.cu_q_lens is None else (*args, self.cu_q_lens)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Causal attention in float64, one query row at a time, and its log-sum-exp; 0 and -inf for nobody's rows."""
        q = np.asarray(self.q, np.float64)
        out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
        for s, (k, v) in enumerate(self.dense):
            first, end = (s, s + 1) if self.cu_q_lens is None else self.cu_q_lens[s : s + 2].tolist()
            for row in range(first, end):
                seen = len(k) - (end - 1 - row)
                oldest = max(0, seen - (self.options.get("window") or seen))
                keys = slice(oldest, seen)
                out[row], lse[row] = attend(
                    q[row],
                    k[keys],
                    v[keys],
                    self.options["scale"],
                    self.options.get("soft_cap"),
                    self.options.get("sinks_n"),
                )
        return out, lse

    def run(self, op, **changed) -> Any:
        """Return an implementation's result in float64."""
        out = op(*self.args, **(self.options | changed))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), out)

    def check(self, out) -> None:
        """Asserts that `out` is right to within the rounding of its dtype.

        Two roundings separate it from float64: that of the softmax weights before they meet V, and its own. Each moves
        a weighted mean of V by at most a unit of roundoff of the largest value. Scores and sums are fp32; they count
        for nothing beside 16 bits, and alone where q is fp32.
        """
        out, lse = out if self.options.get("return_lse") else (out, None)
        wide = self.q.dtype == jnp.float32
        roundoff = 2e-5 if wide else float(jnp.finfo(self.q.dtype).eps) / 2
        largest = max((np.abs(v).max(initial=0.0) for _, v in self.dense), default=0.0)
        expected, expected_lse = self.expected()
        np.testing.assert_allclose(out, expected, rtol=0, atol=2 * roundoff * largest)
        nobodys = (expected == 0).all(axis=(1, 2))
        assert (out[nobodys] == 0).all(), "rows without a key must be exactly 0"
        if lse is not None:
            np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=5e-5)


replace = dataclasses.replace


def attend(
    q_nh: np.ndarray,
    k_tkh: np.ndarray,
    v_tkh: np.ndarray,
    scale: float,
    soft_cap: float | None,
    sinks_n: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one query token over t keys, in the arrays' own precision; 0 and -inf where there are none."""
    out, lse = np.zeros_like(q_nh), np.full(len(q_nh), -np.inf)
    if len(k_tkh) == 0:
        return out, lse
    group = q_nh.shape[0] // k_tkh.shape[1]
    for n, q in enumerate(q_nh):
        score = k_tkh[:, n // group] @ q * scale
        if soft_cap is not None:
            score = soft_cap * np.tanh(score / soft_cap)
        all_scores = score if sinks_n is None else np.append(score, sinks_n[n])
        top = all_scores.max()
        total = np.exp(all_scores - top).sum()
        out[n] = np.exp(score - top) @ v_tkh[:, n // group] / total
        lse[n] = top + math.log(total)
    return out, lse


@dataclasses.dataclass(frozen=True)
class Write:
    """The arguments of a KV write; slots no token is written to hold NaN and must keep it."""

    k_pool: np.ndarray  # [P, K, B, pool's H]
    v_pool: np.ndarray
    k: np.ndarray  # [T, K, H]
    v: np.ndarray
    slot_mapping: np.ndarray  # [T]
    options: dict[str, np.ndarray]

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        return self.k_pool, self.v_pool, self.k, self.v, self.slot_mapping

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Heads of the tokens in float64, rotated if there are angles."""
        if "cos_t" not in self.options:
            return np.asarray(x, np.float64)
        low, high = np.split(np.asarray(x, np.float64), 2, axis=-1)
        cos, sin = (np.asarray(self.options[name], np.float64)[:, None] for name in ("cos_t", "sin_t"))
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Both pools in float64, in units of their scales and not yet rounded to their dtype."""
        k, v = self.rotated(self.k), np.asarray(self.v, np.float64)
        if self.k_pool.dtype == FP8:
            k, v = (
                np.clip(x / np.asarray(self.options[name])[:, None], -448, 448)
                for x, name in ((k, "k_scale_k"), (v, "v_scale_k"))
            )
        pools = []
        block_size, pool_head_dim = self.k_pool.shape[2:]
        for pool, new in ((self.k_pool, k), (self.v_pool, v)):
            pool = np.array(pool, np.float64)
            for slot, row in zip(self.slot_mapping.tolist(), new, strict=True):
                if slot >= 0:
                    padded = np.pad(row, ((0, 0), (0, pool_head_dim - row.shape[1])))
                    pool[slot // block_size, :, slot % block_size] = padded
            pools.append(pool)
        return pools[0], pools[1]

    def check(self, k_pool: np.ndarray, v_pool: np.ndarray, q: np.ndarray | None = None) -> None:
        """Asserts that both pools are right: to the bit where nothing but a move happens, else to rounding."""
        assert (q is None) == ("q_tnh" not in self.options)
        if q is not None:
            eps = float(jnp.finfo(self.k.dtype).eps)
            expected = self.rotated(self.options["q_tnh"])
            np.testing.assert_allclose(np.asarray(q, np.float64), expected, rtol=eps, atol=1e-6)
        rotated, fp8 = "cos_t" in self.options, self.k_pool.dtype == FP8
        eps = float(jnp.finfo(self.k.dtype).eps) + (float(jnp.finfo(FP8).eps) if fp8 else 0)
        for out, expected, exact in zip((k_pool, v_pool), self.expected(), (not rotated and not fp8, not fp8)):
            # Below, of fp8, the step between the smallest numbers; of a rotation, what is lost where two halves cancel.
            tolerance = dict(rtol=0, atol=0) if exact else dict(rtol=eps, atol=2**-9 if fp8 else 1e-6)
            np.testing.assert_allclose(np.asarray(out, np.float64), expected, **tolerance)


# Lists for every implementation. Contexts: none, one token, and the edges of blocks, tiles (64, 128) and splits (512).
DECODE = {
    "block 16": dict(contexts=[0, 1, 16, 17, 512, 0, 513, 600], group=4, block_size=16),
    "block 8, head dim 128": dict(contexts=[5, 8, 64, 65], group=7, block_size=8, head_dim=128),
    # Scores far apart: for some heads the last split, or a late tile, outweighs what came before.
    "peaked": dict(contexts=[1000], num_kv_heads=1, group=8, scale=1.0),
    "block 64, float16": dict(contexts=[1, 64, 0, 129], block_size=64, head_dim=128, dtype=jnp.float16),
    "block 128, head dim 256, 16 heads on one": dict(
        contexts=[127, 128, 200], num_kv_heads=1, group=16, block_size=128, head_dim=256
    ),
    "fp8, lse, two splits": dict(contexts=[0, 1, 130, 514], group=2, fp8=True, return_lse=True),
    "window over a split's edge, capped": dict(
        contexts=[0, 4, 530, 600], num_kv_heads=1, group=4, window=70, soft_cap=2.0, return_lse=True
    ),
    "head dim 80": dict(contexts=[3, 70], head_dim=80, pool_head_dim=128),
    "sinks": dict(contexts=[0, 1, 514, 70], group=8, sinks=True, return_lse=True),
    "sinks, window over a split's edge, capped, fp8": dict(
        contexts=[0, 4, 530], num_kv_heads=3, group=5, sinks=True, window=70, soft_cap=2.0, fp8=True, return_lse=True
    ),
    "head dim 256, window, capped": dict(contexts=[0, 3, 90], group=2, head_dim=256, window=40, soft_cap=2.0),
}
RAGGED = {
    "prompts, chunks and decodes": dict(
        contexts=[0, 1, 16, 17, 40, 0, 100], q_lens=[0, 1, 16, 1, 40, 0, 35], padding_rows=3, num_kv_heads=1, group=2,
        block_size=16,
    ),
    "block 128, float16": dict(
        contexts=[130, 3, 64], q_lens=[130, 3, 1], num_kv_heads=1, block_size=128, head_dim=128, dtype=jnp.float16
    ),
    "block 8, head dim 256, 16 heads on one": dict(
        contexts=[70, 3], q_lens=[6, 3], padding_rows=2, num_kv_heads=1, group=16, block_size=8, head_dim=256
    ),
    "block 32, 7 heads on one": dict(contexts=[65, 300], q_lens=[20, 1], num_kv_heads=1, group=7, block_size=32),
    "padding only": dict(contexts=[0, 0], q_lens=[0, 0], padding_rows=5, num_kv_heads=1, return_lse=True),
    "fp8, lse": dict(contexts=[0, 1, 120], q_lens=[0, 1, 40], group=2, fp8=True, return_lse=True),
    "window, capped": dict(
        contexts=[400, 9], q_lens=[120, 9], padding_rows=1, num_kv_heads=1, group=4, window=130, soft_cap=2.0,
        return_lse=True,
    ),
    "head dim 80": dict(contexts=[70, 5], q_lens=[3, 5], head_dim=80, pool_head_dim=128),
    "sinks": dict(
        contexts=[70, 0, 1, 20], q_lens=[33, 0, 1, 1], padding_rows=2, group=8, sinks=True, return_lse=True
    ),
    "sinks, window, capped, fp8": dict(
        contexts=[200, 9, 30], q_lens=[70, 9, 1], padding_rows=1, num_kv_heads=3, group=5, sinks=True, window=65,
        soft_cap=2.0, fp8=True, return_lse=True,
    ),
    "small: sinks, window, capped, fp8, lse": dict(
        contexts=[70, 0, 1, 20], q_lens=[33, 0, 1, 1], padding_rows=2, num_kv_heads=1, group=8, sinks=True, window=40,
        soft_cap=2.0, fp8=True, return_lse=True,
    ),
    "head dim 256, window, capped": dict(
        contexts=[90, 5], q_lens=[30, 1], group=2, head_dim=256, window=40, soft_cap=2.0
    ),
}  # fmt: skip
WRITE = {
    "block 16": dict(),
    "one KV head, block 8, head dim 64": dict(num_kv_heads=1, block_size=8, head_dim=64),
    "block 128, head dim 256, float16": dict(block_size=128, head_dim=256, dtype=jnp.float16),
    "rotated": dict(num_kv_heads=3, rotated=True),
    "rotated, one KV head, head dim 64": dict(num_kv_heads=1, head_dim=64, rotated=True, dtype=jnp.float16),
    "fp8": dict(num_kv_heads=3, fp8=True, head_dim=64),
    "fp8, rotated": dict(num_kv_heads=8, fp8=True, rotated=True),
    "head dim 80, rotated": dict(head_dim=80, pool_head_dim=128, rotated=True),
    "queries": dict(group=4, rotated=True),
    "queries of 3 KV heads, head dim 64": dict(group=3, num_kv_heads=3, head_dim=64, rotated=True),
    "queries, fp8": dict(group=7, rotated=True, fp8=True, head_dim=64),
    "queries, two thread blocks": dict(group=16, num_kv_heads=10, num_tokens=3, rotated=True),
    "queries, head dim 80": dict(group=2, head_dim=80, pool_head_dim=128, rotated=True),
}

_LENGTHS = st.one_of(
    st.sampled_from([0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]), st.integers(0, 140)
)


@st.composite
def batches(draw, *, ragged: bool, long: bool, dtypes: Sequence[Any]) -> Batch:
    """Any batch with a token in it that an op takes; `long` contexts cross the edge of a split."""
    head_dims = [(64, 64), (128, 128), (32, 64), (80, 128), (256, 256), (192, 256)]
    head_dim, pool_head_dim = draw(st.sampled_from(head_dims))
    lengths = st.one_of(_LENGTHS, st.sampled_from([511, 512, 513, 577])) if long else _LENGTHS
    contexts = draw(st.lists(lengths, min_size=1, max_size=5).filter(any))
    case: dict[str, Any] = dict(
        num_kv_heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 16)), head_dim=head_dim,
        pool_head_dim=pool_head_dim, block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        dtype=draw(st.sampled_from(list(dtypes))), fp8=draw(st.booleans()), return_lse=draw(st.booleans()),
        sinks=draw(st.booleans()),
        soft_cap=draw(st.sampled_from([None, None, 3.0])), window=draw(st.sampled_from([None, None, 1, 16, 65])),
        width=max(1, -(-max(contexts) // 8)) + draw(st.integers(0, 3)), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip
    if ragged:
        case["q_lens"] = [draw(st.integers(min(n, 1), min(n, 70))) for n in contexts]
        case["padding_rows"] = draw(st.integers(0, 5))
    return make_batch(contexts, **case)


@st.composite
def writes(draw, *, dtypes: Sequence[Any]) -> Write:
    """Any KV write."""
    head_dim, pool_head_dim = draw(st.sampled_from([(64, 64), (128, 128), (256, 256), (32, 64), (80, 128)]))
    return make_write(
        num_kv_heads=draw(st.integers(1, 9)), block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        head_dim=head_dim, pool_head_dim=pool_head_dim, num_tokens=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(list(dtypes))), rotated=draw(st.booleans()), fp8=draw(st.booleans()),
        group=draw(st.sampled_from([0, 0, 1, 4, 7])), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


def make_write(
    *, num_kv_heads=2, block_size=16, head_dim=128, pool_head_dim=None, num_tokens=7, dtype=jnp.bfloat16,
    rotated=False, fp8=False, group=0, seed=0,
) -> Write:  # fmt: skip
    """Tokens to random slots, every third of them padding; with a group, queries too if they are rotated."""
    rng = np.random.default_rng(seed)
    num_blocks = 3
    k, v = rng.standard_normal((2, num_tokens, num_kv_heads, head_dim))
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[::3] = -1
    shape = (num_blocks, num_kv_heads, block_size, pool_head_dim or head_dim)
    pool = _array(np.full(shape, np.nan), FP8 if fp8 else dtype)
    options = {}
    if rotated:
        angle = rng.uniform(-4, 4, (num_tokens, head_dim // 2))
        options |= dict(cos_t=np.cos(angle), sin_t=np.sin(angle))
    if fp8:  # some numbers are past what fits
        options |= {name: rng.uniform(1e-3, 2, num_kv_heads) for name in ("k_scale_k", "v_scale_k")}
    options = {name: _array(x, np.float32) for name, x in options.items()}
    k, v = _array(k, dtype), _array(v, dtype)
    if rotated and group:
        q = rng.standard_normal((num_tokens, num_kv_heads * group, head_dim))
        options["q_tnh"] = _array(q, dtype)
    return Write(pool, pool, k, v, _array(slots, np.int32), options)


def make_batch(
    contexts: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    padding_rows: int = 0,
    num_kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    pool_head_dim: int | None = None,
    block_size: int = 16,
    width: int | None = None,
    scale: float | None = None,
    dtype=jnp.bfloat16,
    fp8: bool = False,
    sinks: bool = False,
    seed: int = 0,
    **options: Any,
) -> Batch:
    """A decode batch, or with `q_lens` a ragged one whose last `padding_rows` rows are NaN and belong to nobody."""
    rng = np.random.default_rng(seed)
    num_blocks = [-(-n // block_size) for n in contexts]
    order = rng.permutation(sum(num_blocks) + 3)  # three blocks that nobody owns
    tables = np.full((len(contexts), width or max(1, *num_blocks)), -1, np.int32)
    pool_dtype = FP8 if fp8 else dtype
    shape = (len(order), num_kv_heads, block_size, pool_head_dim or head_dim)
    k_pool, v_pool = np.full((2, *shape), np.nan)
    scales = rng.uniform(0.25, 2, (2, num_kv_heads)).astype(np.float32) if fp8 else np.ones((2, num_kv_heads))
    dense = []
    for s, (n, blocks) in enumerate(zip(contexts, np.split(order, np.cumsum(num_blocks))[:-1], strict=True)):
        tables[s, : len(blocks)] = blocks
        k, v = _rounded(rng.standard_normal((2, n, num_kv_heads, head_dim)), pool_dtype)
        padded_k, padded_v = (np.pad(x, ((0, 0), (0, 0), (0, shape[3] - head_dim))) for x in (k, v))
        first_query = n - (1 if q_lens is None else q_lens[s])
        first = (
            max(0, first_query - (options.get("window") or n) + 1) // block_size
        )  # another sequence may own the blocks before it
        for t in range(first * block_size, n):
            k_pool[blocks[t // block_size], :, t % block_size] = padded_k[t]
            v_pool[blocks[t // block_size], :, t % block_size] = padded_v[t]
        dense.append((k * scales[0][:, None], v * scales[1][:, None]))
    rows = len(contexts) if q_lens is None else sum(q_lens) + padding_rows
    q = rng.standard_normal((rows, num_kv_heads * group, head_dim))
    if padding_rows:
        q[-padding_rows:] = np.nan
    if sinks:  # from those without effect to those that outweigh all keys
        options |= dict(sinks_n=_array(rng.uniform(-4, 8, num_kv_heads * group), np.float32))
    if fp8:
        options |= dict(k_scale_k=_array(scales[0], np.float32), v_scale_k=_array(scales[1], np.float32))
    return Batch(
        q=_array(q, dtype),
        k_pool=_array(k_pool, pool_dtype),
        v_pool=_array(v_pool, pool_dtype),
        block_tables=_array(tables, np.int32),
        context_lens=_array(contexts, np.int32),
        cu_q_lens=None if q_lens is None else _array(np.cumsum([0, *q_lens]), np.int32),
        dense=dense,
        options=dict(scale=scale or head_dim**-0.5, **options),
    )


def _array(x: Any, dtype) -> np.ndarray:
    return np.asarray(x).astype(dtype)


def _rounded(x: np.ndarray, dtype) -> np.ndarray:
    return np.asarray(_array(x, dtype), np.float64)
