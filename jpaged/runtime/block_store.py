"""KV blocks of an engine, on the device and on the host, and their moves between steps."""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.stages import Lowered

from jpaged.core.disk_tier import Files
from jpaged.core.plan import Pairs, StepPlan
from jpaged.runtime.disk_store import DiskStore, store_in
from jpaged.runtime.kv_cache import KVCache, Pool, gather, scatter
from jpaged.runtime.placement import Placement, form_of, padded, usable
from jpaged.runtime.states import gather_pages, scatter_pages
from jpaged.runtime.swap import HostBlocks


class BlockStore:
    """Owner of the KV pool. The step takes `pool` donated, and its caller stores the new one here.

    Args:
        copy_sizes: numbers of blocks that are copied at once; a sequence writes into at most one shared block in a
            step.

    Attributes:
        cache: the layout of the pool.
        num_blocks: blocks of the pool; 0 before `allocate`.
        num_host_blocks: room on the host; 0: no swapping.
        num_pages, num_host_pages: pages of states, on the device and on the host.
        pool: the keys and values, and the states, of each layer.
        host: blocks of preempted requests and copies of evicted ones, in the memory of the host.
        host_pages: their pages.
        files: files of blocks; None: there are none.
    """

    def __init__(self, cache: KVCache, copy_sizes: Sequence[int], placement: Placement):
        self.cache, self.copy_sizes, self._placement = cache, copy_sizes, placement
        self.num_blocks = self.num_host_blocks = self.num_pages = self.num_host_pages = 0
        self._sized_by = ""
        self._copy = jax.jit(cache.copy, donate_argnums=0, out_shardings=placement.pool)
        self.pool: Pool = []
        self.host = HostBlocks(placement, gather, scatter, self.block_bytes)
        self.files: DiskStore | None = None
        self._fetched: dict[int, Any] = {}  # content of blocks, and of pages as -1 - p, that was read from files
        self._form: Any = None  # shape and dtype of a block, and of a page
        self._page_form: Any = None
        self.host_pages = HostBlocks(placement, gather_pages, scatter_pages, cache.states.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on each device."""
        return self.cache.block_bytes // self._placement.kv_size

    @property
    def is_lazy(self) -> bool:
        """Whether a block takes memory once it is used, not from the beginning."""
        return self.cache.zeros_on(self._placement.pool) is not None and sys.platform == "linux"

    @property
    def size(self) -> str:
        """Size of the pool in words."""
        gib = (self.num_blocks * self.block_bytes + self.num_pages * self.cache.states.page_bytes) / 2**30
        return f"{gib:.2f} GiB" + " on each device" * (len(self._placement.local_devices) > 1)

    def allocate(
        self, num_blocks: int, num_host_blocks: int, sized_by: str, num_pages: int = 0, num_host_pages: int = 0
    ) -> None:
        """Allocate the pool.

        Args:
            sized_by: the setting to change if it is too large.

        Raises:
            ValueError: there is no memory for it.
        """
        self.num_blocks, self.num_host_blocks, self._sized_by = num_blocks, num_host_blocks, sized_by
        self.num_pages, self.num_host_pages = num_pages, num_host_pages
        with self.exhaustion():
            self.recover()

    @contextlib.contextmanager
    def exhaustion(self) -> Iterator[None]:
        """Convert the exhaustion of the device's memory to a ValueError with the setting to change."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = f"no memory is left with a KV pool of {self.num_blocks} blocks ({self.size}); use less"
            raise ValueError(f"{self._sized_by}: {problem} ({str(error).splitlines()[0]})") from error

    def open_files(self, root: Path, identity: str, limit: int) -> tuple[list[str], int]:
        """Keep files of blocks in a folder; return the names of its files, and their maximum number.

        Args:
            root, identity, limit: as in `store_in`.

        Raises:
            OSError: the folder can't be used.
        """
        layout = [(shape[1:], dtype) for shape, dtype in self.cache.shapes(1, 1)]
        keys_and_values, states = self.cache.parts(self.pool)
        self._form, self._page_form = self.host.form(keys_and_values), states and self.host_pages.form(states)
        self.files, room = store_in(root, repr((identity, layout, self.cache.groups.windows)), limit)
        return self.files.names, room // max(self.cache.block_bytes, self.cache.states.page_bytes)

    def apply(self, plan: StepPlan) -> None:
        """Move the blocks of a plan.

        The order is: to the host, copies, from the host and from files. So no block is overwritten before it is read.
        """
        if plan.swap_out:
            self._swap_out(plan.swap_out)
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        if plan.swap_in:
            self._swap_in(plan.swap_in)
        if plan.from_files:
            self._write(plan.from_files)

    def fetch(self, wanted: Files) -> list[bool]:
        """Read the content of blocks from files, for the next plan; return whether each is there."""
        assert self.files is not None, "there are no files"
        forms = [self._form if block >= 0 else self._page_form for block, _ in wanted]
        found = list(self.files.read([name for _, name in wanted], forms))
        self._fetched |= {block: content for (block, _), content in zip(wanted, found, strict=True)}
        return [content is not None for content in found]

    def save(self, written: Files, deleted: Sequence[str]) -> None:
        """Write blocks on the host to files, and delete other files."""
        assert self.files is not None, "there are no files"
        for place, name in written:
            self.files.write(name, self.host[place] if place >= 0 else self.host_pages[-1 - place])
        self.files.delete(deleted)

    def save_blocks(self, written: Files) -> None:
        """Write blocks of the pool to files, and wait for them."""
        assert self.files is not None, "there are no files"
        keys_and_values, states = self.cache.parts(self.pool)
        blocks = [(block, name) for block, name in written if block >= 0]
        pages = [(-1 - page, name) for page, name in written if page < 0]
        for host, pool, each in ((self.host, keys_and_values, blocks), (self.host_pages, states, pages)):
            for (_, name), block in zip(each, host.gathered(pool, [number for number, _ in each]), strict=True):
                self.files.write(name, block, wait=True)
        self.files.flush()

    def _swap_out(self, moved: Pairs) -> None:
        keys_and_values, states = self.cache.parts(self.pool)
        if blocks := [pair for pair in moved if pair[0] >= 0]:
            self.host.swap_out(keys_and_values, blocks)
        if pages := [(-1 - source, -1 - place) for source, place in moved if source < 0]:
            self.host_pages.swap_out(states, pages)

    def _swap_in(self, moved: Pairs) -> None:
        keys_and_values, states = self.cache.parts(self.pool)
        if blocks := [pair for pair in moved if pair[0] >= 0]:
            keys_and_values = self.host.swap_in(keys_and_values, blocks)
        if pages := [(-1 - place, -1 - to) for place, to in moved if place < 0]:
            states = self.host_pages.swap_in(states, pages)
        self.pool = keys_and_values + states

    def _write(self, fetched: Sequence[int]) -> None:
        """Write the fetched content of some blocks into the pool, and drop the other content."""
        keys_and_values, states = self.cache.parts(self.pool)
        contents, self._fetched = self._fetched, {}
        if blocks := [(contents[block], block) for block in fetched if block >= 0]:
            keys_and_values = self.host.write(keys_and_values, blocks)
        if pages := [(contents[page], -1 - page) for page in fetched if page < 0]:
            states = self.host_pages.write(states, pages)
        self.pool = keys_and_values + states

    def warm_up(self, *, swaps: bool = True) -> None:
        """Compile every move, without moving a block. `swaps`: those to the host and back, too."""
        for size in self.copy_sizes:
            self._copy_blocks([(-1, -1)] * size)
        for size in self.host.transfers if swaps and self.num_host_blocks else ():
            self.swap_round_trip(size)
        if swaps and self.num_host_pages:
            self._swap_out(((-1, -1),))
            self._swap_in(((-1, -1),))

    def lowered_swaps(self) -> Iterator[Lowered]:
        """Return the functions of swaps as jax lowers them one after the other; none without room on the host."""
        keys_and_values, states = self.cache.parts([form_of(array) for array in self.pool])
        return itertools.chain(
            self.host.lowered(keys_and_values) if self.num_host_blocks else (),
            self.host_pages.lowered(states) if self.num_host_pages else (),
        )

    def swap_round_trip(self, count: int) -> Pool:
        """Move block 0 to the host and back `count` times, which leaves it unchanged. The pool must not be in use."""
        self._swap_out(tuple((0, i) for i in range(count)))
        self._swap_in(tuple((i, 0) for i in range(count)))
        self.host.clear()
        return self.pool

    def drop(self) -> None:
        """Let go of all blocks, until `recover`."""
        self.pool = []
        self.host.clear()
        self.host_pages.clear()

    def recover(self) -> None:
        """Allocate the pool again, empty, if it was dropped or a failed step has lost it; drop those on the host."""
        if not (self.pool and usable(self.pool)):
            for array in self.pool:
                array.delete()  # The new pool may need the memory of the old one.
            self.pool = self.cache.allocate(self.num_blocks, self.num_pages, self._placement.pool)
        self.host.clear()
        self.host_pages.clear()
        self._fetched.clear()

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.pool = self._copy(self.pool, *self._placement.put(padded(copies, self.copy_sizes)))
