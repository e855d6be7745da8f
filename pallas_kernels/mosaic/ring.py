"""Ring of KV tiles in shared memory, filled from the block pool (Mosaic GPU, Hopper)."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import FP8
from pallas_kernels.options import Ref

Box = tuple[int, jax.Array, jax.Array | int]  # row in a tile, block, first row in the block

WGMMA_ROWS = 64
TMA_ROWS = 8  # a box of swizzled shared memory starts at a multiple of this number of rows
FP8_DEPTH = 2  # fp8 tiles in flight
MAX_BOXES_KEPT = 8  # addresses of one tile: the copying warpgroup has few registers


class Landing(NamedTuple):
    """Tiles of an fp8 pool before their conversion."""

    k: Ref  # [FP8_DEPTH, tile, H] fp8
    v: Ref  # [FP8_DEPTH, tile, X] fp8
    k_full: Ref  # barriers [FP8_DEPTH]
    v_full: Ref


class KVRing(NamedTuple):
    """Ring of tiles between one warpgroup that fills them and others that compute on them and free them.

    TMA copies tiles of a 16-bit pool into the ring, one box per block. It copies tiles of an fp8 pool into a second
    buffer, from which the filling warpgroup converts them into the ring: wgmma takes fp8 only along rows, which V's are
    not, and only for both operands.

    The filling warpgroup must be the only one in its thread of the kernel and needs no barrier between boxes: one
    elected thread issues every copy, and every overwrite is ordered after the reads of the tile by `k_free`,
    `v_free` or `commit_smem`. Kernels with a ring are therefore compiled without automatic barriers.
    """

    k: Ref  # [stages, tile, H]
    v: Ref  # [stages, tile, X]: all columns of the head dim, or some
    k_full: Ref  # barriers [stages]
    v_full: Ref  # barriers [stages + 1]; the last one is for a tile whose tail is cleared once it has landed
    k_free: Ref  # barriers [stages]
    v_free: Ref
    landing: Any  # `Landing` of an fp8 pool, else None

    @staticmethod
    def scratch(stages: int, shape: tuple[int, int, int], dtype: Any, pool: jax.Array, *, consumers: int) -> "KVRing":
        """Return the scratch types of a ring for tiles of a pool; `shape`: tokens, columns of K, columns of V."""
        tile, head_dim, v_columns = shape
        copies, landing = pl.cdiv(tile, pool.shape[2]), None
        if pool.dtype == FP8:
            k, v = (plgpu.SMEM((FP8_DEPTH, tile, columns), FP8) for columns in (head_dim, v_columns))
            landed = plgpu.Barrier(num_arrivals=copies, num_barriers=FP8_DEPTH)
            landing, copies = Landing(k, v, landed, landed), 1
        free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
        return KVRing(
            k=plgpu.SMEM((stages, tile, head_dim), dtype),
            v=plgpu.SMEM((stages, tile, v_columns), dtype),
            k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages + 1),
            k_free=free,
            v_free=free,
            landing=landing,
        )

    def fill(
        self, k_pool_ref: Ref, v_pool_ref: Ref, table_ref: Ref, *, seq: jax.Array, head: jax.Array, start: jax.Array,
        end: jax.Array, filled: jax.Array, seen: jax.Array | None = None, v_column: jax.Array | int = 0,
    ) -> jax.Array:  # fmt: skip
        """Take tokens [start, end) of one sequence and KV head through the ring; `start` is a multiple of the tile.

        The last tile is filled up with rows of the last block: the table is never read past `end`. Their content is
        unknown. Consumers mask their scores; in V they are cleared here, because 0 * NaN is NaN.

        Args:
            filled: number of tiles that went through the ring before.
            seen: first token that a consumer sees. The table is not read before its block, because no sequence may hold
                these blocks any more: rows of a block of the sequence take their place. None: all tokens are seen.

        Returns:
            The number of tiles that have gone through the ring.
        """
        stages, tile, _ = self.k.shape
        block_size = k_pool_ref.shape[2]
        rows = min(tile, block_size)
        tiles = pl.cdiv(end - start, tile)
        last_block = lax.div(end - 1, block_size)
        # The rows of the last block may not be written yet.
        first_block = None if seen is None else jnp.minimum(lax.div(seen, block_size), jnp.maximum(last_block - 1, 0))

        def boxes(i: jax.Array) -> Iterator[Box]:
            """Yield the row in tile i, the block and the first row in the block of every box."""
            for row in range(0, tile, rows):
                token = start + i * tile + row
                index = jnp.minimum(lax.div(token, block_size), last_block)
                block = table_ref[seq, index if first_block is None else jnp.maximum(index, first_block)]
                yield row, block, pl.multiple_of(lax.rem(token, block_size), rows) if rows < block_size else 0

        def copy(boxes: Iterable[Box], pool_ref: Ref, column: jax.Array | int, tile_ref: Ref, barrier: Ref) -> None:
            for row, block, offset in boxes:
                source = pool_ref.at[block, head, pl.ds(offset, rows), pl.ds(column, tile_ref.shape[1])]
                plgpu.copy_gmem_to_smem(source, tile_ref.at[pl.ds(row, rows)], barrier)

        def fill_stage(i: jax.Array) -> None:
            stage, left = lax.rem(filled + i, stages), end - start - i * tile
            # Table entries are read before the wait for room, unless they are too many to keep.
            kept = list(boxes(i)) if tile // rows <= MAX_BOXES_KEPT else None
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.k_free.at[stage]))
            copy(kept or boxes(i), k_pool_ref, 0, self.k.at[stage], self.k_full.at[stage])
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.v_free.at[stage]))
            full = self.v_full.at[jnp.where(left < tile, stages, stage)]
            copy(kept or boxes(i), v_pool_ref, v_column, self.v.at[stage], full)

            @pl.when(left < tile)
            def clear_tail() -> None:
                plgpu.barrier_wait(full)
                _convert(self.v.at[stage], self.v.at[stage], left)
                plgpu.commit_smem()
                for _ in range(tile // rows):  # the arrivals of the boxes
                    plgpu.barrier_arrive(self.v_full.at[stage])

        def land(i: jax.Array) -> None:
            kept, slot = list(boxes(i)), lax.rem(i, FP8_DEPTH)
            copy(kept, k_pool_ref, 0, self.landing.k.at[slot], self.landing.k_full.at[slot])
            copy(kept, v_pool_ref, v_column, self.landing.v.at[slot], self.landing.v_full.at[slot])

        def convert_stage(i: jax.Array) -> None:
            stage, slot, left = lax.rem(filled + i, stages), lax.rem(i, FP8_DEPTH), end - start - i * tile
            plgpu.barrier_wait(self.landing.k_full.at[slot])
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.k_free.at[stage]))
            _convert(self.landing.k.at[slot], self.k.at[stage], None)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.k_full.at[stage])
            plgpu.barrier_wait(self.landing.v_full.at[slot])
            pl.when(filled + i >= stages)(lambda: plgpu.barrier_wait(self.v_free.at[stage]))
            _convert(self.landing.v.at[slot], self.v.at[stage], left)
            plgpu.commit_smem()  # all warps have read the landed tile: the next one may overwrite it
            plgpu.barrier_arrive(self.v_full.at[stage])
            pl.when(i + FP8_DEPTH < tiles)(lambda: land(i + FP8_DEPTH))

        if self.landing is None:
            pl.loop(0, tiles)(fill_stage)
        else:
            for i in range(FP8_DEPTH):
                pl.when(i < tiles)(functools.partial(land, jnp.int32(i)))
            pl.loop(0, tiles)(convert_stage)
        return filled + tiles

    def drain(self, filled: jax.Array) -> None:
        """Wait until all tiles are free again: a barrier may not complete twice unobserved."""
        stages = self.k.shape[0]

        @pl.loop(jnp.maximum(filled - stages, 0), filled)
        def drain_stage(n: jax.Array) -> None:
            stage = lax.rem(n, stages)
            plgpu.barrier_wait(self.k_free.at[stage])
            plgpu.barrier_wait(self.v_free.at[stage])


def _convert(source: Ref, destination: Ref, rows: jax.Array | None) -> None:
    """Copy a tile in the destination's dtype; rows from `rows` on (None: no rows) become 0."""
    tile, columns = source.shape
    box = (WGMMA_ROWS, 64)  # at a time: registers are short
    for at, column in itertools.product(range(0, tile, box[0]), range(0, columns, box[1])):
        piece = (pl.ds(at, box[0]), pl.ds(column, box[1]))
        x = plgpu.load(source.at[piece], layout=plgpu.Layout.WGMMA).astype(destination.dtype)
        if rows is not None:
            row = plgpu.broadcasted_iota(jnp.int32, box[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
            x = jnp.where(lax.broadcast_in_dim(row, box, [0]) + at < rows, x, jnp.zeros_like(x))
        destination[piece] = x
