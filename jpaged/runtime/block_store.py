"""KV blocks of an engine, on the device and on the host, and their moves between steps."""

from collections.abc import Sequence

import jax

from jpaged.core.plan import StepPlan
from jpaged.runtime.arrays import padded, usable
from jpaged.runtime.kv_cache import KVCache, Pool
from jpaged.runtime.placement import Placement
from jpaged.runtime.swap import TRANSFERS, HostBlocks


class BlockStore:
    """Owner of the KV pool. The step takes `pool` donated, and its caller stores the new one here.

    Args:
        num_host_blocks: room on the host; 0: no swapping.
        copy_sizes: numbers of blocks that are copied at once; a sequence writes into at most one shared block in a
            step.

    Attributes:
        cache: the layout of the pool.
        pool: the keys and values of each layer.
        host: blocks of preempted requests, in the memory of the host.
    """

    def __init__(
        self, cache: KVCache, num_blocks: int, num_host_blocks: int, copy_sizes: Sequence[int], placement: Placement
    ):
        self.cache, self.num_blocks, self.num_host_blocks = cache, num_blocks, num_host_blocks
        self.copy_sizes, self._placement = copy_sizes, placement
        self._copy = jax.jit(cache.copy, donate_argnums=0, out_shardings=placement.pool)
        self.pool: Pool = cache.allocate(num_blocks, placement.pool)
        self.host = HostBlocks(placement)

    def apply(self, plan: StepPlan) -> None:
        """Move the blocks of a plan.

        The order is: to the host, copies, from the host. So no block is overwritten before it is read.
        """
        for blocks_of_request in plan.swap_out:
            self.host.swap_out(self.pool, blocks_of_request)
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        if plan.swap_in:
            self.pool = self.host.swap_in(self.pool, plan.swap_in)

    def warm_up(self) -> None:
        """Compile every move, without moving a block."""
        for size in self.copy_sizes:
            self._copy_blocks([(-1, -1)] * size)
        for size in TRANSFERS if self.num_host_blocks else ():
            self.swap_round_trip(size)

    def swap_round_trip(self, count: int) -> Pool:
        """Move block 0 to the host and back `count` times, which leaves it unchanged. The pool must not be in use."""
        self.host.swap_out(self.pool, [(0, i) for i in range(count)])
        self.pool = self.host.swap_in(self.pool, [(i, 0) for i in range(count)])
        return self.pool

    def drop(self) -> None:
        """Let go of all blocks, until `recover`."""
        self.pool = []
        self.host.clear()

    def recover(self) -> None:
        """Allocate the pool again, empty, if it was dropped or a failed step has lost it; drop the blocks on the host.

        An error of the allocation is passed on; the call can then be repeated.
        """
        if not (self.pool and usable(self.pool)):
            for array in self.pool:
                array.delete()  # The new pool may need the memory of the old one.
            self.pool = self.cache.allocate(self.num_blocks, self._placement.pool)
        self.host.clear()

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.pool = self._copy(self.pool, *self._placement.put(padded(copies, self.copy_sizes)))
