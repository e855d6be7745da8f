"""Files of cached prefixes between the scheduler, which knows their names, and the runner, which has their blocks."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from jpaged.core.disk_tier import Files
from jpaged.core.scheduler import Scheduler

logger = logging.getLogger(__name__)


class BlockFiles(Protocol):
    """Files of a runner's blocks."""

    def fetch(self, wanted: Files) -> list[bool]:
        """Read the content of blocks from files, for the next plan; return whether each is there."""

    def save(self, written: Files, deleted: Sequence[str]) -> None:
        """Write blocks on the host to files, as they are after the last dispatched step, and delete other files."""

    def close_files(self, written: Files = ()) -> None:
        """Write the last blocks, of the pool, to files, and keep no further ones."""


class PrefixFiles:
    """Reading and writing of files between steps, while the scheduler has a `DiskTier`.

    Args:
        runner: None for an engine without files.
        clock: returns the present time in seconds.
    """

    def __init__(self, scheduler: Scheduler, runner: BlockFiles | None, clock: Callable[[], float]):
        self._scheduler, self._runner, self._clock = scheduler, runner, clock

    def read(self) -> None:
        """Read the files that the next step wants."""
        if self._runner is not None and (disk := self._scheduler.disk) is not None:
            for wanted in self._scheduler.wanted_files():
                start = self._clock()
                disk.arrive(self._runner.fetch(wanted), self._clock() - start)

    def write(self) -> None:
        """Write and delete files after a dispatched step."""
        if self._runner is not None and (disk := self._scheduler.disk) is not None:
            self._runner.save(*disk.take())

    def delete(self) -> None:
        """Delete all files of the model."""
        if (disk := self._scheduler.disk) is not None:
            disk.clear()
            self.write()

    def end(self) -> None:
        """Keep no further files, because the parameters are others."""
        if self._runner is not None:
            logger.warning("kv_cache_dir: not used after an update of the parameters, until the next start")
            self._close(())

    def save(self, *, pool: bool) -> None:
        """Write the cached prefixes for the next start, and keep no further files.

        Args:
            pool: whether there is a pool, whose blocks are written.
        """
        if (disk := self._scheduler.disk) is not None:
            start, written = self._clock(), disk.unsaved() if pool else ()
            logger.info("kv_cache_dir: writing %d cached blocks", len(written))
            self.write()
            self._close(written)
            logger.info("kv_cache_dir: written in %.1f seconds", self._clock() - start)

    def _close(self, written: Files) -> None:
        self._scheduler.close_files()
        if self._runner is not None:
            self._runner.close_files(written)
            self._runner = None
