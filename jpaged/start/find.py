"""Search for a local model, a directory or a file in GGUF. Commands do so before they load jax."""

import re
from pathlib import Path

from jpaged.checkpoint_files import check_file, part_names
from jpaged.demo import DIRECTORY as DEMO
from jpaged.models.config_file import CONFIG

MAGIC = b"GGUF"
FILE_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):([^:]+\.gguf)")


def find_local(name: str, *, revision: str | None = None) -> Path | None:
    """Return the directory of a local model, or its file in GGUF; None for the name of a model on the hub.

    Raises:
        ValueError: there is no such model, or a local one has a revision.
    """
    path = DEMO if name == "demo" else Path(name).expanduser()
    if path.is_dir():
        found = path if (path / CONFIG).exists() else _only_gguf(path)
    elif path.is_file():
        check_gguf(found := path)
    elif path.exists() or name.startswith((".", "~", "/")) or not (FILE_ON_HUB.fullmatch(name) or _is_hub_id(name)):
        raise ValueError(f"model: {name} is not a directory or a file in GGUF")
    else:
        return None
    if revision is not None:
        raise ValueError(
            f"revision: only a hub id has revisions, and {name} is a {'directory' if path.is_dir() else 'file'}"
        )
    return found


def check_gguf(path: Path) -> None:
    """Check the first bytes of a file. Raises ValueError if it is not in GGUF."""
    with path.open("rb") as content:
        if content.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"model: {path} is not a directory or a file in GGUF")


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.endswith(".gguf")


def _only_gguf(directory: Path) -> Path:
    """Return the only file in GGUF of a directory, or the first of its parts; the directory itself if it has none.

    Raises:
        ValueError: there are several, or the file is a link out of the directory.
    """
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1 and [file.name for file in files] != part_names(files[0].name):
        names = ", ".join(file.name for file in files[:10])
        raise ValueError(f"model: {directory} has {len(files)} files in GGUF, {names}; name the file")
    for file in files:
        check_file(file)
        check_gguf(file)
    return files[0] if files else directory
