"""Checks of a checkpoint's files before they are opened.

Checkpoints come from others: reading a FIFO would block, and a link could lead to other files of this machine.
"""

import json
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 16 * 2**20
MAX_TOKENIZER_BYTES = 64 * 2**20  # of each of its files
MAX_INDEX_BYTES = 64 * 2**20  # of the index of shards
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # name of a part of a split file, as llama-gguf-split writes it


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a split file in GGUF by the name of one; the name itself if it is no part's."""
    part = PART.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, int(part[3]) + 1)]


def check_file(path: Path, max_bytes: int | None = None, *, root: Path | None = None, field: str = "model") -> None:
    """Check that a file of a checkpoint may be opened.

    Args:
        max_bytes: maximum size; None: no limit.
        root: the checkpoint's folder, if that is not the file's own.
        field: the setting that an error is about.

    Raises:
        OSError: there is no such file.
        ValueError: it is no regular file, lies outside of the folder, or is too large.
    """
    status = path.stat()
    _check_place(path, root or path.parent, field)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{field}: {path} must be a regular file, not a folder, FIFO, socket or device")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(f"{field}: {path} must have at most {max_bytes} bytes, not {status.st_size}")


def check_folder(folder: Path, small: Collection[str] = (), *, field: str = "model") -> None:
    """Check the files in a folder, without its subfolders, before a library opens some of them.

    Args:
        small: names of files that may have `MAX_TOKENIZER_BYTES`.

    Raises:
        ValueError: a file may not be opened.
    """
    for path in sorted(folder.glob("*")):
        if path.exists() and not path.is_dir():
            check_file(path, MAX_TOKENIZER_BYTES if path.name in small else None, field=field)


def check_tree(folder: Path, *, field: str = "model") -> None:
    """Check a subfolder of a checkpoint with all files below it. Raises ValueError if one may not be opened."""
    for path in (folder, *sorted(folder.rglob("*"))):
        if path.is_dir():
            _check_place(path, folder.parent, field)
        else:
            check_file(path, root=folder.parent, field=field)


def read_file(path: Path, max_bytes: int) -> bytes:
    """Check and read a file. If a FIFO has replaced the file since the check, opening it does not block."""
    check_file(path, max_bytes)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as content:
        return content.read(max_bytes)


def read_json(path: Path, *, missing_ok: bool = False, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint; {} if it is missing and `missing_ok`.

    Raises:
        ValueError: the file does not contain a JSON object, or may not be opened; the message has its path.
    """
    if missing_ok and not path.exists():
        return {}
    data = read_file(path, max_bytes)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _check_place(path: Path, root: Path, field: str) -> None:
    """Check that no symbolic link leads out of a checkpoint's folder.

    In the cache of the hub, files of models--NAME/snapshots/COMMIT are links to models--NAME/blobs.
    """
    root = root.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    if not (target := path.resolve()).is_relative_to(root):
        raise ValueError(f"{field}: {path} must not be a link out of the checkpoint's folder, to {target}")
