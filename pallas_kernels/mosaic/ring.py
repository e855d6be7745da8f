"""A ring of KV tiles in shared memory, filled from the block pool (Mosaic GPU, Hopper)."""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import FP8

WGMMA_ROWS = 64
FP8_DEPTH = 2  # tiles on their way from an fp8 pool
MAX_BOXES_KEPT = 8  # addresses of one tile: the copying warpgroup has few registers


@dataclasses.dataclass(frozen=True)
class KVRing:
    """One warpgroup fills the ring; others compute on its tiles and set them free.

    Tiles of a 16-bit pool land in the ring by TMA, a box per block. Tiles of an fp8 pool land beside it, and the
    filling warpgroup converts them into it. Tensor cores take fp8 only along rows, which V's are not, and want the
    other operand in fp8 too, so nothing is lost but the copy.
    """

    k: Any  # [stages, tile, H]
    v: Any  # [stages, tile, X]: all of the head dim, or a part
    k_full: Any  # barriers [stages]
    v_full: Any
    k_free: Any
    v_free: Any
    k_landed: Any  # barriers, [FP8_DEPTH] of an fp8 pool; of others v_landed is [1], and k_landed not used
    v_landed: Any
    k_fp8: Any = None  # [FP8_DEPTH, tile, H]
    v_fp8: Any = None  # [FP8_DEPTH, tile, X]

    @staticmethod
    def scratch(
        *, stages: int, tile: int, block_size: int, head_dim: int, v_columns: int, dtype: Any, pool_dtype: Any,
        consumers: int,
    ) -> list[Any]:  # fmt: skip
        """What a kernel has to allocate for `KVRing(*refs)`."""
        fp8 = jnp.dtype(pool_dtype) == FP8
        copies = max(1, tile // block_size)
        k, v = (plgpu.SMEM((stages, tile, columns), dtype) for columns in (head_dim, v_columns))
        full = plgpu.Barrier(num_arrivals=1 if fp8 else copies, num_barriers=stages)
        free = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
        landed = plgpu.Barrier(num_arrivals=copies, num_barriers=FP8_DEPTH if fp8 else 1)
        scratch = [k, v, full, full, free, free, landed, landed]
        if fp8:
            scratch += [plgpu.SMEM((FP8_DEPTH, tile, columns), FP8) for columns in (head_dim, v_columns)]
        return scratch

    def fill(self, k_pool_ref, v_pool_ref, table_ref, *, seq, head, start, end, filled, v_column=0):
        """Takes tokens [start, end) of one sequence and KV head through the ring; `start` is a multiple of the tile.

        `filled` tiles went through the ring before; returns how many have after. `table_ref` None: the pools are
        [S, K, L, H], a sequence's keys and values in one piece.

        The last tile is filled up with rows of the last block: the table is never read past `end`. What these rows
        hold is unknown. Who computes masks their scores; in V they are zeroed here, because 0 * NaN is NaN.
        """
        _, tile, _ = self.k.shape
        block_size = k_pool_ref.shape[2]
        rows = min(tile, block_size)
        tiles = pl.cdiv(end - start, tile)
        last_block = lax.div(end - 1, block_size)

        def blocks(i):
            """The block of every box of tile i, and its first row there."""
            for row in range(0, tile, rows):
                token = start + i * tile + row
                if table_ref is None:
                    yield row, seq, pl.multiple_of(token, rows)
                    continue
                block = table_ref[seq, jnp.minimum(lax.div(token, block_size), last_block)]
                yield row, block, pl.multiple_of(lax.rem(token, block_size), rows) if rows < block_size else 0

        def copy(boxes, pool_ref, destination, column, barrier):
            for row, block, offset in boxes:
                source = pool_ref.at[block, head, pl.ds(offset, rows), pl.ds(column, destination.shape[1])]
                plgpu.copy_gmem_to_smem(source, destination.at[pl.ds(row, rows)], barrier)

        if self.k_fp8 is None:
            self._fill(tiles, end - start, filled, blocks, copy, k_pool_ref, v_pool_ref, v_column, tile // rows)
        else:
            self._convert(tiles, end - start, filled, blocks, copy, k_pool_ref, v_pool_ref, v_column)
        return filled + tiles

    def drain(self, filled) -> None:
        """Waits until all tiles are free again: a barrier may not complete twice unobserved."""
        stages = self.k.shape[0]

        @pl.loop(jnp.maximum(filled - stages, 0), filled)
        def drain_stage(n):
            stage = lax.rem(n, stages)
            plgpu.barrier_wait(self.k_free.at[stage])
            plgpu.barrier_wait(self.v_free.at[stage])

    def _fill(self, tiles, tokens, filled, blocks, copy, k_pool_ref, v_pool_ref, v_column, copies) -> None:
        stages, tile, _ = self.k.shape

        @pl.loop(0, tiles)
        def fill_stage(i):
            stage, left = lax.rem(filled + i, stages), tokens - i * tile
            # Table entries are read before the wait for room; of small blocks they are too many to keep.
            boxes = list(blocks(i)) if copies <= MAX_BOXES_KEPT else None
            used = filled + i >= stages
            pl.when(used)(lambda: plgpu.barrier_wait(self.k_free.at[stage]))
            copy(boxes or blocks(i), k_pool_ref, self.k.at[stage], 0, self.k_full.at[stage])
            pl.when(used)(lambda: plgpu.barrier_wait(self.v_free.at[stage]))

            @pl.when(left >= tile)
            def whole():
                copy(boxes or blocks(i), v_pool_ref, self.v.at[stage], v_column, self.v_full.at[stage])

            @pl.when(left < tile)
            def part():
                copy(boxes or blocks(i), v_pool_ref, self.v.at[stage], v_column, self.v_landed.at[0])
                plgpu.barrier_wait(self.v_landed.at[0])
                _convert_tile(self.v.at[stage], self.v.at[stage], left)
                plgpu.commit_smem()
                for _ in range(copies):  # as often as boxes would have arrived
                    plgpu.barrier_arrive(self.v_full.at[stage])

    def _convert(self, tiles, tokens, filled, blocks, copy, k_pool_ref, v_pool_ref, v_column) -> None:
        stages, tile, _ = self.k.shape

        def land(i):
            boxes, slot = list(blocks(i)), lax.rem(i, FP8_DEPTH)
            copy(boxes, k_pool_ref, self.k_fp8.at[slot], 0, self.k_landed.at[slot])
            copy(boxes, v_pool_ref, self.v_fp8.at[slot], v_column, self.v_landed.at[slot])

        for i in range(FP8_DEPTH):
            pl.when(i < tiles)(functools.partial(land, jnp.int32(i)))

        @pl.loop(0, tiles)
        def convert_stage(i):
            stage, slot, left = lax.rem(filled + i, stages), lax.rem(i, FP8_DEPTH), tokens - i * tile
            used = filled + i >= stages
            for landed, free, source, destination, full, rows in (
                (self.k_landed, self.k_free, self.k_fp8, self.k, self.k_full, None),
                (self.v_landed, self.v_free, self.v_fp8, self.v, self.v_full, left),
            ):
                plgpu.barrier_wait(landed.at[slot])
                pl.when(used)(functools.partial(plgpu.barrier_wait, free.at[stage]))
                _convert_tile(source.at[slot], destination.at[stage], rows)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[stage])
            pl.when(i + FP8_DEPTH < tiles)(lambda: land(i + FP8_DEPTH))


def _convert_tile(source, destination, rows) -> None:
    """Copies a tile, in the destination's dtype; rows from `rows` on (None: none) become 0."""
    tile, columns = source.shape
    box = (WGMMA_ROWS, 64)  # at a time: registers are short
    for at, column in itertools.product(range(0, tile, box[0]), range(0, columns, box[1])):
        piece = (pl.ds(at, box[0]), pl.ds(column, box[1]))
        x = plgpu.load(source.at[piece], layout=plgpu.Layout.WGMMA).astype(destination.dtype)
        if rows is not None:
            row = plgpu.broadcasted_iota(jnp.int32, box[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
            x = jnp.where(lax.broadcast_in_dim(row, box, [0]) + at < rows, x, jnp.zeros_like(x))
        destination[piece] = x
