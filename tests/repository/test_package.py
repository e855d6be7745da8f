"""The distributions: their files, and their use in an environment with their dependencies and nothing else."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest

from benchmarks.shared.server_process import SMALL, ServerProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MIB = 2**20
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a "wheel" or an "sdist" from a tree, and return its path."""
    command = [sys.executable, "-c", BUILD.format(kind), str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the files that git tracks or would track: a build writes beside its sources."""
    folder = tmp_path_factory.mktemp("tree")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel but for its own description."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> str:
    """Return the description of a wheel, with its readme."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    return metadata


def environment(wheel: Path, folder: Path) -> Path:
    """Return the Python of a new environment with a wheel and with links to the packages of this one but for jpaged."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    for path in map(Path, sys.path):
        if path.name == "site-packages":
            for entry in path.iterdir():
                if "jpaged" not in entry.name and not (site / entry.name).exists():
                    (site / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout, and return its output."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_packages_and_their_data_alone(wheel):
    files = contents(wheel)
    assert {name.partition("/")[0] for name in files} == {"jpaged", "pallas_kernels"}
    data = {name for name in files if not name.endswith(".py")}
    folders = {name for name in data if name.startswith(("jpaged/demo/model/", "jpaged/serving/live/page/"))}
    tables = {"jpaged/flags.toml", "jpaged/cli/bench_flags.toml", "pallas_kernels/tuned.json"}
    assert data - folders == {"jpaged/py.typed", "pallas_kernels/py.typed", *tables}
    assert {"jpaged/demo/model/model.safetensors", "jpaged/serving/live/page/index.html"} <= folders
    assert [name for name in files if name.startswith("jpaged/demo/") and name.endswith(".py")] == [
        "jpaged/demo/__init__.py"
    ]
    assert wheel.stat().st_size < 4 * MIB


@pytest.mark.deep
def test_the_source_distribution_builds_the_same_wheel(tree, wheel, tmp_path):
    sdist = build("sdist", tree, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {"CHANGELOG.md", "docs/kernels.md", "docs/flow.svg", "examples/grpo.py"} <= {
        str(path.relative_to(source)) for path in source.rglob("*")
    }
    (tmp_path / "wheel").mkdir()
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(wheel)


def test_the_installed_wheel_completes_and_serves(wheel, tmp_path):
    python = environment(wheel, tmp_path / "environment")
    home = run(python, "-c", "import jpaged, pallas_kernels as p; print(jpaged.__file__, p.__file__)", cwd=tmp_path)
    assert home.count(str(tmp_path)) == 2
    others = ["server", "tools", "tests", "benchmarks"]
    find = f"import importlib.util as u; print([name for name in {others} if u.find_spec(name)])"
    assert run(python, "-c", find, cwd=tmp_path) == "[]\n"
    jpaged = python.with_name("jpaged")
    assert run(jpaged, "--version", cwd=tmp_path).strip()
    with ServerProcess(*SMALL, program=(str(jpaged), "serve")) as server:
        text = run(jpaged, "complete", "Once upon a time", "--max-tokens", "8", "--url", server.url, cwd=tmp_path)
        assert len(text.split()) > 3
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(server.url, timeout=60) as response:
            assert b"<html" in response.read()


@pytest.mark.deep
def test_the_kernels_are_a_distribution_of_their_own(tree, wheel, tmp_path):
    kernels = build("wheel", tree / "pallas_kernels", tmp_path)
    ours = contents(wheel)
    assert contents(kernels) == {name: ours[name] for name in ours if name.startswith("pallas_kernels/")}
    python = environment(kernels, tmp_path / "environment")
    use = """
import importlib.util, jax, jax.numpy as jnp, pallas_kernels as p
assert importlib.util.find_spec("jpaged") is None
kernels = p.select("auto", platform="cpu", device_kind="cpu", compute_capability=None, dtype="float32", head_dim=16,
                   num_heads=2, num_kv_heads=1, block_size=8)
pool = jnp.ones((3, 1, 8, kernels.head_dim))
tables, lens = jnp.array([[2, 0]]), jnp.array([9])
o = kernels.paged_decode_attention(jnp.ones((1, 2, 16)), pool, 2 * pool, tables, lens, scale=0.25)
print(kernels.name, o.shape, float(o.min()), float(o.max()))
"""
    assert run(python, "-c", use, cwd=tmp_path) == "cpu (1, 2, 16) 2.0 2.0\n"


@pytest.mark.deep
def test_a_published_release_depends_on_the_kernels_and_links_to_its_repository(tree, wheel, tmp_path):
    shutil.copytree(tree, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    repository = "https://example.org/owner/jpaged"
    command = [sys.executable, "-m", "tools.release", str(tmp_path / "source"), str(tmp_path), f"{repository}/"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = {path.name for path in tmp_path.iterdir() if path.is_file()}
    names = ("jpaged-0.1.0", "jpaged_kernels-0.1.0")
    assert found == {f"{name}{end}" for name in names for end in (".tar.gz", "-py3-none-any.whl")}
    ours, kernels = (contents(tmp_path / f"{name}-py3-none-any.whl") for name in names)
    assert not ours.keys() & kernels.keys() and ours | kernels == contents(wheel)
    metadata, about_kernels = (metadata_of(tmp_path / f"{name}-py3-none-any.whl") for name in names)
    assert "Requires-Dist: jpaged-kernels==0.1.0\n" in metadata
    assert f"Project-URL: Repository, {repository}\n" in metadata
    links = re.findall(r"\]\(([^)#]+)", metadata + about_kernels)
    assert links and all(link.startswith("http") for link in links)
    assert f"{repository}/blob/v0.1.0/docs/kernel-figures.md" in links
    assert f"{repository}/raw/v0.1.0/docs/flow.svg" in links and f"{repository}/blob/v0.1.0/docs/models.md" in links
