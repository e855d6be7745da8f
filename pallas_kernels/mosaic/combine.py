"""Merge of the partial results of split-KV attention (Mosaic GPU, Hopper).

Axis letters besides the package's: R rows of the output, I splits of the batch, U splits of one sequence, M query heads
of one KV head padded to wgmma's N, X output columns of one thread block.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ring import TMA_ROWS
from pallas_kernels.mosaic.softmax import LOG2E, natural_lse, sinks_first, softmax_state
from pallas_kernels.mosaic.support import check_grid, compiler_params, store_transposed
from pallas_kernels.options import Ref

Carry = tuple[jax.Array, jax.Array, jax.Array]  # output, maximum and sum of the softmax so far

LANES = 32  # log-sum-exps of one split, padded: a TMA box of shared memory starts at a multiple of 128 bytes
COLUMNS = 64  # X


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

    def period(self, num_heads: int, num_kv_heads: int) -> int:
        """Return the number of rows after which the heads of boxes repeat."""
        return math.lcm(num_heads, TMA_ROWS) if self.direct else num_kv_heads * self.stride

    def of_heads(self, x_n: jax.Array, num_kv_heads: int) -> jax.Array:
        """Return numbers of heads in the places of the rows of a period, with those of the next boxes after them."""
        period = self.period(len(x_n), num_kv_heads)
        if not self.direct:
            x_kg = x_n.reshape(num_kv_heads, -1)
            x_n = jnp.pad(x_kg, ((0, 0), (0, self.stride - x_kg.shape[1]))).reshape(-1)
        return jnp.tile(x_n, -(-(period + LANES) // len(x_n)))[: period + LANES]

    def lead(self, row: Any, head: Any, num_kv_heads: int) -> Any:
        """Return the number of rows in a box before the first row of a KV head."""
        return self.first(row, head, num_kv_heads) % TMA_ROWS if self.stride % TMA_ROWS else 0 * (row + head)


def _kernel(
    o_ikhm_ref: Ref,  # [I, K, H, M] fp32
    lse_ikl_ref: Ref,  # [I, K, LANES] fp32, base 2; M are in use
    first_s1_ref: Ref,  # [S + 1]: first split of each sequence
    row_s_ref: Ref,  # [S]: row of the output, -1 = none
    o_rnh_ref: Ref,  # [R, N, H]
    lse_skl_ref: Ref,  # [S, K, LANES] fp32, natural
    *,
    parts_smem: Ref,  # [U, X, M] fp32
    lses_smem: Ref,  # [U, LANES] fp32
    o_smem: Ref,  # [M, X]
    lse_smem: Ref,  # [LANES] fp32
    parts_full: Ref,  # barriers [U]
    lses_full: Ref,  # barriers [U]
    rows: QueryRows,
    sinks_ref: Any = None,  # ref or None: fp32, base 2, of `QueryRows.of_heads`
    sinks_smem: Any = None,  # [LANES] fp32
    sinks_full: Any = None,  # barrier
) -> None:
    seq, c = lax.axis_index("s"), lax.axis_index("c")
    m = parts_smem.shape[2]
    _, num_kv_heads, h, _ = o_ikhm_ref.shape
    group, chunks = o_rnh_ref.shape[1] // num_kv_heads, h // COLUMNS
    head, chunk = lax.div(c, chunks), lax.rem(c, chunks)
    columns = pl.ds(pl.multiple_of(chunk * COLUMNS, COLUMNS), COLUMNS)
    first, splits = first_s1_ref[seq], first_s1_ref[seq + 1] - first_s1_ref[seq]
    row = row_s_ref[seq]

    def wide(x_m: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x_m, (COLUMNS, m), [1])

    def lse_of(u: jax.Array) -> jax.Array:
        return plgpu.load(lses_smem.at[u, pl.ds(0, m)], layout=plgpu.Layout.WGMMA.reduce(0))

    def largest(u: jax.Array, max_m: jax.Array) -> jax.Array:
        plgpu.barrier_wait(lses_full.at[u])
        return jnp.maximum(max_m, lse_of(u))

    def merge(u: jax.Array, carry: Carry) -> Carry:
        acc_xm, max_m, sum_m = carry
        weight_m = jnp.exp2(lse_of(u) - max_m)
        plgpu.barrier_wait(parts_full.at[u])
        part_xm = plgpu.load(parts_smem.at[u], layout=plgpu.Layout.WGMMA)
        return acc_xm + part_xm * wide(weight_m), max_m, sum_m + weight_m

    @pl.when(row >= 0)
    def combine() -> None:
        if sinks_ref is not None:
            box = lax.div(rows.first(row, head, num_kv_heads), TMA_ROWS) * TMA_ROWS
            at = lax.rem(box, rows.period(o_rnh_ref.shape[1], num_kv_heads))
            own = pl.ds(pl.multiple_of(at, TMA_ROWS), LANES)
            plgpu.copy_gmem_to_smem(sinks_ref.at[own], sinks_smem, sinks_full)

        @pl.loop(0, splits)
        def fetch(u: jax.Array) -> None:  # all of them at once
            plgpu.copy_gmem_to_smem(lse_ikl_ref.at[first + u, head], lses_smem.at[u], lses_full.at[u])
            plgpu.copy_gmem_to_smem(o_ikhm_ref.at[first + u, head, columns], parts_smem.at[u], parts_full.at[u])

        acc_xm, max_m, sum_m = softmax_state(COLUMNS, m, softmax_axis=0)
        max_m = lax.fori_loop(0, splits, largest, max_m)
        if sinks_ref is not None:
            plgpu.barrier_wait(sinks_full)
            sink_m = plgpu.load(sinks_smem.at[pl.ds(0, m)], layout=plgpu.Layout.WGMMA.reduce(0))
            max_m = jnp.maximum(max_m, sink_m)
            sum_m = jnp.exp2(sink_m - max_m) * jnp.where(splits > 0, 1.0, 0.0)
        acc_xm, _, sum_m = lax.fori_loop(0, splits, merge, (acc_xm, max_m, sum_m))
        o_xm = acc_xm / wide(jnp.where(sum_m == 0.0, 1.0, sum_m))  # no context: exactly 0
        store_transposed(o_smem, o_xm.astype(o_smem.dtype))
        lse_smem.at[pl.ds(0, m)][...] = natural_lse(max_m, sum_m)
        plgpu.commit_smem()
        lead = rows.lead(row, head, num_kv_heads)
        for g in range(group):
            plgpu.copy_smem_to_gmem(o_smem.at[lead + g], o_rnh_ref.at[row, head * group + g, columns])
        pl.when(chunk == 0)(lambda: plgpu.copy_smem_to_gmem(lse_smem, lse_skl_ref.at[seq, head]))
        plgpu.wait_smem_to_gmem(0)


def combine(
    o_ikhm: jax.Array, lse_ikl: jax.Array, first_s1: jax.Array, row_s: jax.Array, o_rnh_ref: Ref, *,
    rows: QueryRows, max_splits: int, sinks_n: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Merge the splits of each sequence s into row `row_s[s]` of the output ref; a sequence without splits gives 0.

    Args:
        rows: places of the query heads in M.
        sinks_n: see `AttentionOptions`; a sequence with splits has them once.

    Returns:
        The natural log-sum-exps [S, K, LANES] float32 of the sequences that have a row, in the places of the heads.
    """
    _, k, h, m = o_ikhm.shape
    grid = (k * (h // COLUMNS), row_s.shape[0])
    check_grid("paged_decode_combine", grid)
    kernel: Callable[..., None] = functools.partial(_kernel, rows=rows)
    arrays: list[jax.Array] = []
    scratch: dict[str, Any] = {}
    if sinks_n is not None:
        arrays.append(rows.of_heads(sinks_n * LOG2E, k))
        scratch = dict(sinks_smem=plgpu.SMEM((LANES,), jnp.float32), sinks_full=plgpu.Barrier())
        kernel = functools.partial(sinks_first, kernel)
    lse_skl: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((row_s.shape[0], k, LANES), jnp.float32),
        grid=grid,
        grid_names=("c", "s"),
        scratch_types=dict(
            parts_smem=plgpu.SMEM((max_splits, COLUMNS, m), jnp.float32),
            lses_smem=plgpu.SMEM((max_splits, LANES), jnp.float32),
            o_smem=plgpu.SMEM((m, COLUMNS), o_rnh_ref.dtype),
            lse_smem=plgpu.SMEM((LANES,), jnp.float32),
            parts_full=plgpu.Barrier(num_barriers=max_splits),
            lses_full=plgpu.Barrier(num_barriers=max_splits),
            **scratch,
        ),
        compiler_params=compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="paged_decode_combine",
    )(*arrays, o_ikhm, lse_ikl, first_s1, row_s, o_rnh_ref)
    return lse_skl
