"""Files of real models in the source package of llama-cpp-python, which is downloaded once."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.real.packages import CACHE

REQUIREMENT = "llama-cpp-python==0.3.36"
FOLDERS = {
    "templates": re.compile(r".*/models/templates/([^/]+\.jinja)"),
    "vocabularies": re.compile(r".*/models/ggml-vocab-([^/]+)"),
}


def folder_of(kind: str) -> Path:
    """Return the folder with the files of a kind, one of FOLDERS."""
    root = CACHE / REQUIREMENT
    if not root.exists():
        _download(root)
    return root / kind


def _download(root: Path) -> None:
    wheels, scratch = CACHE / "wheels", root.with_suffix(".part")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(wheels), REQUIREMENT], check=True)
    (package,) = wheels.glob("llama_cpp_python-*.tar.gz")
    for kind in FOLDERS:
        (scratch / kind).mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as archive:
        for member in archive:
            for kind, pattern in FOLDERS.items():
                if match := pattern.fullmatch(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    (scratch / kind / match[1]).write_bytes(content.read())
    package.unlink()
    scratch.rename(root)
