"""One archive of text files: machine code, logs and profiles, of a size that is easy to carry away."""

import io
import tarfile
from pathlib import Path

MAX_BYTES = 15 * 2**20  # of the archive
MAX_FILE_BYTES = 4 * 2**20  # of one file before it is compressed; its end is left out


class Archive:
    """A tar.gz that is complete on disk after every `add`."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path, self._max_bytes = path, max_bytes
        self._files: dict[str, bytes] = {}

    def add(self, files: dict[str, bytes]) -> list[str]:
        """Add files; return the names of files beyond the size limit."""
        left_out = []
        for name, content in files.items():
            packed = _pack(self._files | {name: content[:MAX_FILE_BYTES]})
            if len(packed) > self._max_bytes:
                left_out.append(name)
                continue
            self._files[name] = content[:MAX_FILE_BYTES]
            scratch = self.path.with_suffix(".tmp")
            scratch.write_bytes(packed)
            scratch.replace(self.path)
        return left_out


def _pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=3) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
