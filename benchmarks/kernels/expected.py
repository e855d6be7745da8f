"""Attention and KV writes in plain numpy, in float64: the comparison for an implementation's output before it is
timed. It shares no code with the implementations, the jnp reference among them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.workloads import Workload

# Largest relative error of a row (one token, one head) in the Euclidean norm. 16-bit: the softmax weights and the
# output are rounded to 2^-8 or 2^-11; float32 leaves room for tf32; fp8: weights may be rounded to fp8 too.
TOLERANCES = {"bfloat16": 0.03, "float16": 0.01, "float32": 2e-3, "float8_e4m3fn": 0.08}


class WrongOutput(AssertionError):
    """An implementation's result differs from numpy's."""


class Attention(NamedTuple):
    """Rows [R, N, H] and their log-sum-exps [R, N]."""

    o: np.ndarray
    lse: np.ndarray


def host(x: jax.Array) -> np.ndarray:
    """Return the array in float32."""
    return np.asarray(x.astype(jnp.float32))


def attend(
    q_nh: np.ndarray, k_lkh: np.ndarray, v_lkh: np.ndarray, *, scale: float, soft_cap: float | None = None,
    window: int | None = None, sinks_n: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """One query token, the last of L keys: output [N, H] and log-sum-exp [N]."""
    n, h = q_nh.shape
    length, num_kv_heads, _ = k_lkh.shape
    if length == 0:
        return np.zeros((n, h)), np.full(n, -np.inf)
    q_kgh = q_nh.reshape(num_kv_heads, -1, h).astype(np.float64)
    k_klh, v_klh = (x.transpose(1, 0, 2)[:, max(0, length - window) if window else 0 :] for x in (k_lkh, v_lkh))
    score = q_kgh @ k_klh.swapaxes(1, 2).astype(np.float64) * scale
    if soft_cap is not None:
        score = soft_cap * np.tanh(score / soft_cap)
    top = score.max(-1, keepdims=True)
    sinks = None if sinks_n is None else sinks_n.astype(np.float64).reshape(num_kv_heads, -1, 1)
    top = top if sinks is None else np.maximum(top, sinks)
    weight = np.exp(score - top)
    total = weight.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks - top))
    return (weight @ v_klh.astype(np.float64) / total).reshape(n, h), (top + np.log(total)).reshape(n)


def sample_rows(workload: Workload, count: int = 8, seed: int = 0) -> list[int]:
    """The first and last rows of the batch, those of the longest and the shortest sequence, and random ones."""
    first = workload.cu_q_lens
    longest, shortest = int(np.argmax(workload.lens)), int(np.argmin(workload.lens))
    rows = [0, int(first[-1]) - 1, int(first[longest + 1]) - 1, int(first[shortest])]
    rows += np.random.default_rng(seed).integers(0, first[-1], count).tolist()
    return sorted(set(rows))[: count + 4]


def expected_rows(workload: Workload, rows: Sequence[int], index: int = 0) -> np.ndarray:
    """[R, N, H]: the given rows of one set."""
    out: list[np.ndarray] = []
    q, first = host(workload.q[jnp.asarray(rows)]), workload.cu_q_lens
    held: tuple[int, tuple[np.ndarray, np.ndarray]] | None = None
    for q_nh, row in zip(q, rows):
        s = int(np.searchsorted(first, row, "right")) - 1
        if held is None or held[0] != s:
            held = s, _dense(workload, s, index)
        seen = workload.lens[s] - (int(first[s + 1]) - 1 - row)
        out.append(attend(q_nh, held[1][0][:seen], held[1][1][:seen], scale=workload.shape.scale)[0])
    return np.stack(out)


def check_rows(out: np.ndarray, expected: np.ndarray, dtype: str) -> float:
    """The largest relative error of a row. Raises WrongOutput if it is past `dtype`'s tolerance, or a row is NaN."""
    error = np.linalg.norm(out - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)
    worst = float(np.max(error))
    if not worst <= TOLERANCES[dtype]:  # NaN is not
        at = [int(i) for i in np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)]
        raise WrongOutput(f"row {at} is off by {worst:.2g} of its norm, allowed are {TOLERANCES[dtype]:g} for {dtype}")
    return worst


def check_output(out: np.ndarray, workload: Workload, index: int = 0) -> float:
    """Compares sampled rows of a whole output [R, N, H], and looks for NaN in all of it."""
    if not np.isfinite(out).all():
        raise WrongOutput(f"{(~np.isfinite(out)).any(-1).sum()} rows of the output are not finite")
    rows = sample_rows(workload)
    return check_rows(out[np.asarray(rows)], expected_rows(workload, rows, index), str(workload.k_pool.dtype))


def _dense(workload: Workload, s: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """A sequence's keys and values [L, K, H] of one set."""
    blocks = workload.set_tables[index][s]  # the whole row: one shape for every sequence of the batch
    dims = (-1, workload.shape.num_kv_heads, workload.shape.head_dim)
    k, v = (host(pool[blocks]).transpose(0, 2, 1, 3).reshape(dims) for pool in (workload.k_pool, workload.v_pool))
    return k[: workload.lens[s]], v[: workload.lens[s]]
