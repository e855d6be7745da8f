"""KV blocks in the host's memory, and their transfers in both directions, many blocks in one transfer."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.stages import Lowered

from jpaged.runtime.placement import Placement, padded

# Numbers of blocks in one transfer. Other numbers are padded, because each shape needs an executable.
TRANSFERS = (4, 16, 64)
# Maximum bytes of a transfer on a CPU. The C library returns larger ones to the system, and each new one is then zeroed
# by the kernel: 64 blocks of 2.8 MB took 230 ms in one transfer, and 64 ms in sixteen.
CPU_BYTES = 2**25

Pairs = Sequence[tuple[int, int]]


class HostBlocks:
    """Content of the host's blocks, in pinned memory, which a GPU reads and writes at full speed.

    Each block is an array of its own. It stays until its id is given to other content.

    Args:
        gather: return blocks of some arrays.
        scatter: return the arrays with such blocks at C destinations; destination -1 writes nothing.
        block_bytes: bytes of a block.

    Attributes:
        transfers: the numbers of blocks in one transfer.
    """

    def __init__(
        self, placement: Placement, gather: Callable[..., list[jax.Array]], scatter: Callable[..., list[jax.Array]],
        block_bytes: int,
    ):  # fmt: skip
        self._placement, self._place = placement, placement.pool
        is_cpu = placement.platform == "cpu"
        self._host = self._place if is_cpu else self._place.with_memory_kind("pinned_host")
        fitting = tuple(size for size in TRANSFERS if not is_cpu or size * block_bytes <= CPU_BYTES)
        self.transfers = fitting or TRANSFERS[:1]
        self._gather = jax.jit(gather, out_shardings=self._place)
        self._scatter = jax.jit(scatter, donate_argnums=0, out_shardings=self._place)
        self._blocks: dict[int, jax.Array] = {}

    def swap_out(self, pool: list[jax.Array], pairs: Pairs) -> None:
        """Copy blocks to the host; `pairs` are (block of the pool, block of the host)."""
        for part in itertools.batched(pairs, self.transfers[-1]):
            blocks = list(self.gathered(pool, [block for block, _ in part]))
            kept = jax.device_put(blocks, self._host)
            self._blocks.update(zip((host for _, host in part), kept, strict=True))

    def swap_in(self, pool: list[jax.Array], pairs: Pairs) -> list[jax.Array]:
        """Copy blocks from the host into the donated pool, and return the pool.

        `pairs` are (block of the host, block of the pool).
        """
        return self.write(pool, [(self._blocks[host], block) for host, block in pairs])

    def write(self, pool: list[jax.Array], contents: Sequence[tuple[Any, int]]) -> list[jax.Array]:
        """Write arrays of numpy or jax into blocks of the donated pool, and return the pool."""
        for part in itertools.batched(contents, self.transfers[-1]):
            _, destinations = padded([(0, block) for _, block in part], self.transfers)
            blocks = jax.device_put([content for content, _ in part], self._place)
            blocks += [blocks[0]] * (len(destinations) - len(part))
            pool = self._scatter(pool, blocks, self._placement.put(destinations))
        return pool

    def lowered(self, pool: list[jax.ShapeDtypeStruct]) -> Iterator[Lowered]:
        """Yield the functions of all transfers as jax lowers them for a pool of these forms."""
        for size in self.transfers:
            ids_c = jax.ShapeDtypeStruct((size,), "int32", sharding=self._placement.whole)
            forms = jax.eval_shape(self._gather, pool, ids_c)
            blocks = [form.update(sharding=self._place) for form in forms]
            yield self._gather.lower(pool, ids_c)
            yield self._scatter.lower(pool, blocks, ids_c)

    def form(self, pool: list[jax.Array]) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of a block of some arrays."""
        form: jax.ShapeDtypeStruct = jax.eval_shape(self._gather, pool, jax.ShapeDtypeStruct((1,), "int32"))[0]
        return form

    def gathered(self, pool: list[jax.Array], block_ids: Sequence[int]) -> Iterator[jax.Array]:
        """Yield blocks of the pool."""
        for part in itertools.batched(block_ids, self.transfers[-1]):
            sources, _ = padded([(block_id, -1) for block_id in part], self.transfers)  # the padding reads any block
            yield from self._gather(pool, self._placement.put(sources))[: len(part)]

    def __getitem__(self, block_id: int) -> jax.Array:
        return self._blocks[block_id]

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)
