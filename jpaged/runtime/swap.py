"""KV blocks in the host's memory, and their transfers in both directions, many blocks in one transfer."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Lowered

from jpaged.runtime.placement import Placement, padded

# Numbers of blocks in one transfer. Other numbers are padded, because each shape needs an executable.
TRANSFERS = (4, 16, 64)

Pairs = Sequence[tuple[int, int]]


class _Chunk(NamedTuple):
    """Blocks of one transfer, [A, C, ...]: row i is host block `block_ids[i]`."""

    blocks: jax.Array
    block_ids: list[int]


class HostBlocks:
    """Content of the host's blocks, in pinned memory, which a GPU reads and writes at full speed.

    Blocks of one transfer are one array. The array is dropped when its blocks are swapped in, or when the id of any of
    them is reused. All blocks of a request are swapped together, so the others are not needed any more either.

    Args:
        gather: return blocks [A, C, ...] of some arrays.
        scatter: return the arrays with such blocks at C destinations; destination -1 writes nothing.
    """

    def __init__(self, placement: Placement, gather: Callable[..., jax.Array], scatter: Callable[..., list[jax.Array]]):
        kinds = {memory.kind for memory in placement.device.addressable_memories()}
        self._placement = placement
        self._host = placement.blocks.with_memory_kind("pinned_host") if "pinned_host" in kinds else placement.blocks
        self._gather = jax.jit(gather, out_shardings=placement.blocks)
        self._scatter = jax.jit(scatter, donate_argnums=0, out_shardings=placement.pool)
        self._chunks: dict[int, _Chunk] = {}

    def swap_out(self, pool: list[jax.Array], pairs: Pairs) -> None:
        """Copy a request's blocks to the host; `pairs` are (block of the pool, block of the host)."""
        for part in itertools.batched(pairs, TRANSFERS[-1]):
            sources, _ = padded(part, TRANSFERS)  # of the padding, any block is read
            blocks = self._gather(pool, self._placement.put(sources))
            chunk = _Chunk(jax.device_put(blocks, self._host), [host for _, host in part])
            for block_id in chunk.block_ids:
                self._drop(block_id)
            self._chunks.update(dict.fromkeys(chunk.block_ids, chunk))

    def swap_in(self, pool: list[jax.Array], pairs: Pairs) -> list[jax.Array]:
        """Copy blocks from the host, which then drops them, into the donated pool, and return the pool.

        `pairs` are (block of the host, block of the pool).
        """
        wanted = dict(pairs)
        while wanted:
            chunk = self._chunks[next(iter(wanted))]
            destinations = np.full(chunk.blocks.shape[1], -1, np.int32)
            destinations[: len(chunk.block_ids)] = [wanted.pop(block_id, -1) for block_id in chunk.block_ids]
            blocks = jax.device_put(chunk.blocks, self._placement.blocks)
            pool = self._scatter(pool, blocks, self._placement.put(destinations))
            self._drop(chunk.block_ids[0])
        return pool

    def lowered(self, pool: list[jax.ShapeDtypeStruct]) -> Iterator[Lowered]:
        """Yield the functions of all transfers as jax lowers them for a pool of these forms."""
        for size in TRANSFERS:
            ids_c = jax.ShapeDtypeStruct((size,), "int32", sharding=self._placement.whole)
            blocks = jax.eval_shape(self._gather, pool, ids_c).update(sharding=self._placement.blocks)
            yield self._gather.lower(pool, ids_c)
            yield self._scatter.lower(pool, blocks, ids_c)

    def clear(self) -> None:
        """Drop all blocks."""
        self._chunks.clear()

    def __len__(self) -> int:
        return len(self._chunks)

    def _drop(self, block_id: int) -> None:
        if block_id in self._chunks:
            for other in self._chunks[block_id].block_ids:
                del self._chunks[other]
