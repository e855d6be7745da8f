"""Cache of compiled executables on disk. It is jax's own, enabled only while an engine loads and compiles."""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed
from jax.experimental.compilation_cache.compilation_cache import reset_cache

logger = logging.getLogger(__name__)

_lock = threading.RLock()  # the settings are those of the process


def cache_folder() -> Path:
    """Return the folder of everything that is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged"


def executables_folder() -> Path:
    """Return the folder of compiled executables; the program may set it in jax's configuration."""
    return Path(jax.config.jax_compilation_cache_dir or cache_folder() / "xla")


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Keep the executables compiled in the context on disk, and load existing ones.

    If the program has chosen a folder for jax's cache, its settings are used unchanged. Otherwise jax's settings change
    within the context. They are those of the process: functions that another thread compiles meanwhile are kept too,
    and a second thread waits before it enters.
    """
    with _lock, _rewriting(executables_folder()):
        if jax.config.jax_compilation_cache_dir is not None:
            yield
            return
        ours: dict[str, Any] = {
            "jax_compilation_cache_dir": str(executables_folder()),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        programs = {name: getattr(jax.config, name) for name in ours}
        try:
            _configure(ours)
            yield
        finally:
            _configure(programs)


@contextlib.contextmanager
def every_process_writes() -> Iterator[None]:
    """Let jax write executables to disk in this process also if it is not process 0 of several.

    jax assumes that the processes share a folder, and would compile at every start of the others. Their executables
    have keys of their own. The devices must be known before, because jax numbers them by the same variable.
    """
    state = distributed.global_state
    rank, state.process_id = state.process_id, 0
    try:
        yield
    finally:
        state.process_id = rank


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # jax opens its cache once, at the first compilation with a folder, and then stays with it.
    with _level("jax._src.compilation_cache", logging.WARNING):
        reset_cache()


@contextlib.contextmanager
def _rewriting(folder: Path) -> Iterator[None]:
    """Let jax replace entries that it can't read, such as those of a process that was killed while it wrote them.

    jax warns of such an entry, compiles, and then keeps the existing file, so every start would compile it again. Only
    a debug record, which precedes the write of the new executable, contains the key of the entry.
    """

    def remove_unreadable(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("PERSISTENT COMPILATION CACHE MISS"):
            entry = folder / f"{record.args[1]}-cache"  # type: ignore[index]
            try:
                entry.unlink()
                logger.info("compilation cache: writing %s again", entry)
            except FileNotFoundError:
                pass
            except OSError as error:
                logger.warning("compilation cache: an entry can't be read, nor written again: %s", error)
        return record.levelno >= level

    compiler = logging.getLogger("jax._src.compiler")
    level = compiler.getEffectiveLevel()
    compiler.addFilter(remove_unreadable)
    try:
        with _level(compiler.name, logging.DEBUG):
            yield
    finally:
        compiler.removeFilter(remove_unreadable)


@contextlib.contextmanager
def _level(name: str, level: int) -> Iterator[None]:
    changed = logging.getLogger(name)
    before = changed.level
    changed.setLevel(level)
    try:
        yield
    finally:
        changed.setLevel(before)
