"""Cache of compiled executables on disk. It is jax's own, enabled only while an engine loads and compiles."""

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache
from jax._src import distributed
from jax._src.compilation_cache_interface import CacheInterface

logger = logging.getLogger(__name__)

NAME = "-jpaged"  # after a key in a file's name: jax reads other entries in a folder of the program
DIGEST_BYTES = 32

_lock = threading.RLock()  # the settings are those of the process


def cache_folder() -> Path:
    """Return the folder of everything that is kept between runs."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(caches):
        return Path(caches) / "jpaged"
    folder = Path(tempfile.gettempdir()) / f"jpaged-{os.geteuid()}"
    _warn_once(f"{caches} is no absolute path: {folder} is used; XDG_CACHE_HOME names another folder")
    return folder


def private_folder(folder: Path) -> Path | None:
    """Return a folder in `cache_folder` that only this user may write, and create it unless it exists.

    Another user with write access could make this process run any native code. Root may own the folder.

    Returns:
        None, after one warning: it can't be created, or others may write it.
    """
    try:
        for each in (folder.parent, folder):
            each.mkdir(0o700, parents=True, exist_ok=True)
            status = each.stat()
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                owned = f"user {status.st_uid} owns it, and its mode is {status.st_mode & 0o7777:o}"
                raise PermissionError(f"{each} may be written by others: {owned}")
    except OSError as error:
        _warn_once(f"not used: {error}; XDG_CACHE_HOME names another folder")
        return None
    return folder


def executables_folder() -> Path:
    """Return the folder of compiled executables; the program may set it in jax's configuration."""
    return Path(jax.config.jax_compilation_cache_dir or cache_folder() / "xla")


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Keep the executables compiled in the context on disk, and load existing ones.

    If the program has chosen a folder for jax's cache, its settings are used unchanged. Otherwise jax's settings change
    within the context, if there is a `private_folder`. They hold for the whole process: functions that another thread
    compiles meanwhile are kept too, and a second thread waits before it enters.
    """
    with _lock:
        ours: dict[str, Any] = {}
        if jax.config.jax_compilation_cache_dir is None:
            if (folder := private_folder(executables_folder())) is None:
                yield
                return
            ours = {
                "jax_compilation_cache_dir": str(folder),
                "jax_persistent_cache_min_compile_time_secs": 0.0,
                "jax_persistent_cache_min_entry_size_bytes": -1,
            }
        programs = {name: getattr(jax.config, name) for name in ours}
        try:
            _configure(ours)
            try:
                jax_cache._initialize_cache()
            except OSError as error:
                _warn_once(f"not used: {error}")
            if jax_cache._cache is not None:
                jax_cache._cache = CheckedCache(jax_cache._cache)
            yield
        finally:
            _configure(programs)


@contextlib.contextmanager
def every_process_writes() -> Iterator[None]:
    """Let jax write executables to disk in every process of several, not only in process 0.

    jax assumes that the processes share a folder. The other processes would compile at every start, because their
    executables have other keys. The devices must be known before, because jax numbers them by the same variable.
    """
    state = distributed.global_state
    rank, state.process_id = state.process_id, 0
    try:
        yield
    finally:
        state.process_id = rank


class CheckedCache(CacheInterface):
    """Cache of jax whose entries begin with a digest of their key and their content.

    An entry of another key is removed, because jax would run it. An entry that is not whole, such as one of a process
    that was killed while it wrote, is removed too, because jax would keep it for ever.
    """

    def __init__(self, inner: CacheInterface):
        self._inner, self._path = inner, inner._path

    def get(self, key: str) -> bytes | None:
        """Return the content of an entry; None if there is none that is whole."""
        entry: bytes | None = self._inner.get(key + NAME)
        if entry is None:
            return None
        digest, content = entry[:DIGEST_BYTES], entry[DIGEST_BYTES:]
        if digest == _digest(key, content):
            return content
        file = self._path / f"{key}{NAME}-cache"
        logger.info("compilation cache: writing %s again", file)
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("compilation cache: an entry can't be read, nor written again: %s", error)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Add an entry."""
        try:
            self._inner.put(key + NAME, _digest(key, value) + value)
        except OSError as error:
            _warn_once(f"{self._path} can't be written: {error.strerror}; XDG_CACHE_HOME names another folder")


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # jax opens its cache once, at the first compilation with a folder, and then stays with it.
    log = logging.getLogger("jax._src.compilation_cache")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        jax_cache.reset_cache()
    finally:
        log.setLevel(level)


@functools.cache
def _warn_once(problem: str) -> None:
    logger.warning("cache: %s", problem)
