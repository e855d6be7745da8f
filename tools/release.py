"""Build the distributions of a release: `make dist REPOSITORY=https://github.com/owner/jpaged`.

A clone's `pip install .` needs no other distribution of this project, so there jpaged contains the kernels. A published
jpaged depends on the published jpaged-kernels instead: pip does not notice two distributions with the same files.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]+)\)")


def main() -> None:
    """Build the sdists and wheels of both distributions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="an exported commit, whose files are changed")
    parser.add_argument("target", type=Path, help="the folder of the distributions")
    parser.add_argument("repository", help="the address of the repository, for the links of the package's page")
    args = parser.parse_args()
    prepare(args.source, args.repository.rstrip("/"))
    for folder, kind in itertools.product((args.source / "pallas_kernels", args.source), ("sdist", "wheel")):
        command = [sys.executable, "-c", BUILD.format(kind), str(args.target.resolve())]
        subprocess.run(command, cwd=folder, check=True)


def prepare(source: Path, repository: str) -> None:
    """Change a tree into that of a release: dependency on jpaged-kernels, project URLs, and absolute links."""
    if not repository.startswith("https://"):
        raise SystemExit(f"REPOSITORY: must be the https address of the repository, not {repository!r}")
    project, kernels = source / "pyproject.toml", source / "pallas_kernels" / "pyproject.toml"
    version = tomllib.loads(kernels.read_text())["project"]["version"]
    urls = {"Repository": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    lines = "".join(f'{name} = "{repository}{path}"\n' for name, path in urls.items())
    table = f"[project.urls]\n{lines}\n[project.optional-dependencies]\n"
    _replace(
        project,
        ("dependencies = [\n", f'dependencies = [\n    "jpaged-kernels=={version}",\n'),
        ('include = ["jpaged*", "pallas_kernels*"]', 'include = ["jpaged*"]'),
        ('"pallas_kernels" = ["py.typed", "tuned.json"]\n', ""),
        ("[project.optional-dependencies]\n", table),
    )
    _replace(kernels, ("[project.optional-dependencies]\n", f'readme = "README.md"\n\n{table}'))
    base = f"{repository}/{{}}/v{version}/"
    for page, target, folder in (
        ("README.md", "README.md", ""),
        ("docs/kernels.md", "pallas_kernels/README.md", "docs/"),
    ):
        (source / target).write_text(absolute_links((source / page).read_text(), base + folder))


def absolute_links(page: str, base: str) -> str:
    """Return a page of Markdown with its links to files of the repository made absolute, pictures as raw files."""
    return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({base.format('raw' if link[1] else 'blob')}{link[3]})", page)


def _replace(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path}: {old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    path.write_text(text)


if __name__ == "__main__":
    main()
