"""Workloads of the ops: block tables, and pools larger than any cache.

A pool is one array whose blocks are cut into `sets` of equal size. The sets' block tables are alike but for their first
block, so that calls on one set after another read different memory through the same pattern, and a peer that takes
views can be given a set as a view.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.block_pool import BlockPool
from jpaged.core.block_table import BlockTable

COLD_FACTOR = 8  # bytes read between two visits of a set, in sizes of the cache
MAX_SETS = 128
MIN_CALLS = 8  # in one launch, however few the sets: so that the device, and not the host, is waited for
SLACK = 1.1  # blocks of a set per block in use: churning needs some that are free


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a layer's attention, and how its pool is cut."""

    head_dim: int
    block_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def token_bytes(self) -> int:
        """Of a token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def row_bytes(self) -> int:
        """Of a token's query and output."""
        return 2 * self.num_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def uniform_lens(batch: int, context: int) -> list[int]:
    """Every sequence has the same length."""
    return [context] * batch


def zipf_lens(batch: int, context: int, seed: int = 0) -> list[int]:
    """The r-th longest of a batch has `context / r` tokens; in random order."""
    lens = [max(1, context // rank) for rank in range(1, batch + 1)]
    random.Random(seed).shuffle(lens)
    return lens


LENGTHS: dict[str, Callable[[int, int], list[int]]] = {"uniform": uniform_lens, "zipf": zipf_lens}


def set_blocks(lens: Sequence[int], shape: Shape) -> int:
    """Blocks of one set."""
    return math.ceil(SLACK * sum(map(shape.blocks, lens))) + 1


def identity_tables(lens: Sequence[int], shape: Shape, num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Each sequence's blocks lie one after another, and the sequences too."""
    ends = np.cumsum([shape.blocks(n) for n in lens]).tolist()
    return [list(range(end - shape.blocks(n), end)) for n, end in zip(lens, ends)]


def permuted_tables(lens: Sequence[int], shape: Shape, num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Blocks drawn at random, none twice."""
    order = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return [[order[block] for block in table] for table in identity_tables(lens, shape, num_blocks)]


def churned_tables(lens: Sequence[int], shape: Shape, num_blocks: int, seed: int = 0, turnovers: int = 8):
    """Return the tables of jpaged's own allocator after a long run.

    Sequences of random lengths arrive, grow by a block at a time in random order, and end, until every block of the
    pool has been handed out `turnovers` times on average; then those of `lens` take their place one by one, growing
    side by side.
    """
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, shape.block_size)
    wanted = [shape.blocks(n) for n in lens]
    growing: list[tuple[BlockTable, int]] = []  # and how many blocks each is to reach
    kept: list[BlockTable] = []
    handed_out = 0

    def grow(table: BlockTable) -> bool:
        start = len(table) * shape.block_size
        return table.append(start, start + shape.block_size) is not None

    while handed_out < turnovers * num_blocks:
        if len(growing) < max(2, len(lens)):
            growing.append((BlockTable(pool), rng.randint(1, 2 * max(1, num_blocks // max(2, len(lens))))))
        i = rng.randrange(len(growing))
        table, target = growing[i]
        full = not grow(table)
        handed_out += not full
        if full or len(table) >= target:
            growing.pop(i)[0].free()
    rng.shuffle(growing)
    order = list(range(len(lens)))
    rng.shuffle(order)
    kept = [BlockTable(pool) for _ in lens]
    unfinished = []
    while order or unfinished:
        if order:
            unfinished.append(order.pop())
        for s in list(unfinished):
            while len(kept[s]) < wanted[s] and not grow(kept[s]):
                growing.pop()[0].free()
            if len(kept[s]) == wanted[s]:
                unfinished.remove(s)
    pool.check_invariants([table.block_ids for table in kept] + [table.block_ids for table, _ in growing])
    return [table.block_ids[0] for table in kept]


TABLES: dict[str, Callable[[Sequence[int], Shape, int], list[list[int]]]] = {
    "identity": identity_tables, "permutation": permuted_tables, "churned": churned_tables,
}  # fmt: skip


def num_sets(bytes_per_set: int, l2_bytes: int, most: int = MAX_SETS) -> int:
    """How many sets it takes to read `COLD_FACTOR` caches before one is read again."""
    return max(1, min(most, math.ceil(COLD_FACTOR * l2_bytes / max(1, bytes_per_set))))


def random_array(shape: Sequence[int], dtype: str, seed: int) -> jax.Array:
    """Standard normal numbers, from a generator that is fast on a GPU."""
    drawn = "bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype
    make = jax.jit(lambda key: jax.random.normal(key, tuple(shape), drawn).astype(dtype))
    return make(jax.random.key(seed, impl="unsafe_rbg"))


def make_pools(shape: Shape, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Random k_pool and v_pool [P, K, B, H]."""
    dims = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return random_array(dims, shape.dtype, 1), random_array(dims, shape.dtype, 2)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One batch, over sets of a pool.

    Attributes:
        lens: context of each sequence.
        q_lens: query tokens of each sequence; None is one each, a decode batch.
        tables: each sequence's blocks within a set.
        k_pool, v_pool: [P, K, B, H], P at least `sets * blocks_per_set`.
        q: [S, N, H] or [T, N, H].
    """

    shape: Shape
    lens: list[int]
    q_lens: list[int] | None
    tables: list[list[int]]
    blocks_per_set: int
    sets: int
    k_pool: jax.Array
    v_pool: jax.Array
    q: jax.Array

    @property
    def bytes(self) -> int:
        """The fewest bytes that one call must move."""
        return sum(self.lens) * self.shape.token_bytes + self.q.shape[0] * self.shape.row_bytes

    @property
    def flops(self) -> int:
        """Operations of one call's two products, causal masking counted as work saved."""
        seen = sum(n * (2 * length - n + 1) // 2 for n, length in zip(self.q_lens or [1] * len(self.lens), self.lens))
        return 4 * self.shape.num_heads * self.shape.head_dim * seen

    @property
    def rotated_bytes(self) -> int:
        return self.sets * sum(self.lens) * self.shape.token_bytes

    @property
    def calls(self) -> int:
        """How many calls are timed together: whole rounds over the sets."""
        return self.sets * -(-MIN_CALLS // self.sets)

    def cycled(self, items: Sequence[Any]) -> list[Any]:
        """One of `items` for each call, in turn."""
        return [items[i % len(items)] for i in range(self.calls)]

    @cached_property
    def table_sw(self) -> np.ndarray:
        """[S, W] int32 of the first set."""
        table = np.zeros((len(self.lens), max(map(len, self.tables))), np.int32)
        for row, blocks in zip(table, self.tables):
            row[: len(blocks)] = blocks
        return table

    @cached_property
    def set_tables(self) -> list[jax.Array]:
        """Each set's [S, W] int32."""
        return [jnp.asarray(self.table_sw + i * self.blocks_per_set) for i in range(self.sets)]

    @cached_property
    def context_lens(self) -> jax.Array:
        return jnp.asarray(self.lens, jnp.int32)

    @cached_property
    def cu_q_lens(self) -> np.ndarray:
        """[S + 1] int32."""
        return np.cumsum([0, *(self.q_lens or [1] * len(self.lens))]).astype(np.int32)

    def rewired(self, tables: list[list[int]]) -> "Workload":
        """The same lengths and pools through other tables."""
        return dataclasses.replace(self, tables=tables)


def make_workload(
    shape: Shape,
    lens: list[int],
    *,
    q_lens: list[int] | None = None,
    tables: str = "permutation",
    l2_bytes: int,
    pools: tuple[jax.Array, jax.Array] | None = None,
    most_sets: int = MAX_SETS,
) -> Workload:
    """A batch with cold data; `pools`, if given, are used as far as they reach."""
    blocks = set_blocks(lens, shape)
    sets = num_sets(sum(lens) * shape.token_bytes, l2_bytes, most_sets)
    k_pool, v_pool = pools or make_pools(shape, sets * blocks)
    rows = sum(q_lens) if q_lens else len(lens)
    return Workload(
        shape, lens, q_lens, TABLES[tables](lens, shape, blocks), blocks, min(sets, k_pool.shape[0] // blocks),
        k_pool, v_pool, random_array((rows, shape.num_heads, shape.head_dim), shape.dtype, 3),
    )  # fmt: skip


def pool_blocks(shape: Shape, lens: Sequence[int], l2_bytes: int, most_sets: int = MAX_SETS) -> int:
    """Blocks that `make_workload` wants for a batch."""
    return set_blocks(lens, shape) * num_sets(sum(lens) * shape.token_bytes, l2_bytes, most_sets)
