"""Files of KV blocks in a folder of one model and its numerics."""

import contextlib
import hashlib
import logging
import os
import queue
import re
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"jpaged KV 1\n"
NAME, FOLDER = re.compile(r"[0-9a-f]{64}-[0-9]{1,3}"), re.compile(r"[0-9a-f]{32}")
MAX_WAITING = 256  # blocks that wait for the disk; further ones get no file
DIGEST_BYTES = 32
READERS = 4  # threads


def open_folder(path: Path) -> None:
    """Create a folder that only this user may read and write, or check one.

    Raises:
        OSError: it can't be created, or others may read or write it.
    """
    path.mkdir(0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        mode = f"its owner is user {status.st_uid}, and its mode {stat.S_IMODE(status.st_mode):o}"
        raise PermissionError(f"{path} must belong to this user, with mode 700: {mode}")


class DiskStore:
    """Files of blocks. A thread writes them; a failure is told in the log, and the block then has no file.

    A file has a mark of its form, a hash (SHA-256) of its name and content, and the content: the bytes of a block. It
    is written under another name first. A file of another form, size or hash is never used.

    Args:
        folder: of the model and its numerics, in a folder that `open_folder` has checked.

    Attributes:
        names: names of the files at the start, the least recently used first.
    """

    def __init__(self, folder: Path):
        open_folder(folder)
        self._folder, self._may_write = folder, True
        self._waiting: queue.Queue[tuple[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._unwritten: dict[str, Any] = {}  # blocks whose files are not there yet
        for unfinished in folder.glob("*.part"):
            unfinished.unlink(missing_ok=True)
        found = [entry for entry in os.scandir(folder) if NAME.fullmatch(entry.name)]
        if foreign := sum(1 for _ in os.scandir(folder)) - len(found):
            logger.warning("kv_cache_dir: %d files in %s are not blocks, and are ignored", foreign, folder)
        self.names = [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime_ns)]
        self._readers = ThreadPoolExecutor(READERS, "jpaged-files")
        self._thread = threading.Thread(target=self._run, name="jpaged-files", daemon=True)
        self._thread.start()

    def write(self, name: str, block: Any, *, wait: bool = False) -> None:
        """Let the thread write the file of a block, an array of jax or numpy.

        Args:
            wait: wait while too many blocks wait for the disk. Otherwise the block then has no file.
        """
        if not self._may_write:
            return
        self._unwritten[name] = block
        try:
            self._waiting.put((name, block), block=wait)
        except queue.Full:  # the disk is slower than evictions
            self._unwritten.pop(name, None)

    def read(self, names: Sequence[str], forms: Sequence[Any]) -> Iterator[Any]:
        """Yield the blocks of some names, each of the shape and dtype of its form; None without a valid file."""
        return self._readers.map(self._read, names, forms)

    def _read(self, name: str, form: Any) -> Any:
        if (block := self._unwritten.get(name)) is not None:
            return block
        path = self._folder / name
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("kv_cache_dir: %s can't be read: %s", path, error)
            return None
        start, dtype = len(MAGIC) + DIGEST_BYTES, np.dtype(form.dtype)
        data = memoryview(content)[start:]
        if len(data) != form.size * dtype.itemsize or content[:start] != MAGIC + _digest(name, data):
            logger.warning("kv_cache_dir: %s is broken, and is deleted", path)
            self.delete([name])
            return None
        return np.frombuffer(data, dtype).reshape(form.shape)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            self._unwritten.pop(name, None)
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def flush(self) -> None:
        """Wait until all files are written."""
        self._waiting.join()

    def close(self) -> None:
        """End the threads once all files are written."""
        self.flush()
        self._waiting.put(None)
        self._thread.join()
        self._readers.shutdown()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            name, block = item
            try:
                if self._may_write and name in self._unwritten:
                    self._write(name, block)
            except OSError as error:
                self._may_write = False
                logger.warning("kv_cache_dir: no further files are written until the next start: %s", error)
            finally:
                self._unwritten.pop(name, None)
                self._waiting.task_done()

    def _write(self, name: str, block: Any) -> None:
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        with tempfile.NamedTemporaryFile("wb", dir=self._folder, suffix=".part", delete=False) as file:
            try:
                file.write(MAGIC + _digest(name, data))
                file.write(data)
                file.close()
                os.replace(file.name, self._folder / name)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
        if name not in self._unwritten:  # it was deleted meanwhile
            self.delete([name])


def store_in(root: Path, identity: str, limit: int) -> tuple[DiskStore, int]:
    """Return the store of a model in a folder with those of other models, and the bytes that its files may take.

    Files of others, the least recently used first, give way until they take no more than half of the limit.

    Args:
        identity: a text of all that the bits of a block depend on, besides its own text.
        limit: maximum bytes of all files.
    """
    open_folder(root)
    own = hashlib.sha256(identity.encode()).hexdigest()[:32]
    others = [path for path in root.iterdir() if path.is_dir() and FOLDER.fullmatch(path.name) and path.name != own]
    files = sorted((path for other in others for path in other.iterdir()), key=lambda path: path.stat().st_mtime_ns)
    others_bytes = sum(path.stat().st_size for path in files)
    for path in files:
        if others_bytes <= limit // 2:
            break
        others_bytes -= path.stat().st_size
        path.unlink()
    return DiskStore(root / own), limit - others_bytes


def _digest(name: str, data: memoryview) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()
