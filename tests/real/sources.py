"""Files in source packages of PyPI. Each package is downloaded once, and nothing of it is run."""

import html
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin
from urllib.request import urlopen

from tests.real.packages import CACHE


class SourcePackage(NamedTuple):
    """The source package of a project.

    Attributes:
        archive: its name, without ".tar.gz".
        kinds: the wanted files' kinds, with the paths of each. The first group of a path is the file's name.
    """

    project: str
    archive: str
    kinds: Mapping[str, str]

    def folder(self, kind: str) -> Path:
        """Return the folder with the files of a kind. Download them if they are not there."""
        root = CACHE / self.archive
        if not root.exists():
            self._download(root)
        return root / kind

    def _download(self, root: Path) -> None:
        scratch = root.with_suffix(".part")
        for kind in self.kinds:
            (scratch / kind).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(self._content())) as archive:
            for member in archive:
                for kind, pattern in self.kinds.items():
                    if match := re.fullmatch(pattern, member.name):
                        content = archive.extractfile(member)
                        assert content is not None
                        (scratch / kind / match[1]).write_bytes(content.read())
        scratch.rename(root)

    def _content(self) -> bytes:
        """Return the archive. pip would first build a package from it to learn its metadata."""
        page = f"{_index()}/{self.project}/"
        with urlopen(page) as answer:
            links = re.findall(r'href="([^"]+)"[^>]*>([^<]+)<', answer.read().decode())
        (link,) = (link for link, name in links if name == f"{self.archive}.tar.gz")
        with urlopen(urljoin(page, html.unescape(link))) as answer:
            return answer.read()


def _index() -> str:
    """Return the address of pip's package index."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    set_by_file = subprocess.run(pip, capture_output=True, text=True).stdout.strip()
    return (os.environ.get("PIP_INDEX_URL") or set_by_file or "https://pypi.org/simple").rstrip("/")


LLAMA_CPP = SourcePackage(
    "llama-cpp-python",
    "llama_cpp_python-0.3.36",
    {"templates": r".*/models/templates/([^/]+\.jinja)", "vocabularies": r".*/models/ggml-vocab-([^/]+)"},
)
VLLM = SourcePackage("vllm", "vllm-0.33.0", {"templates": r"[^/]+/examples/tool_chat_template_([^/]+\.jinja)"})
