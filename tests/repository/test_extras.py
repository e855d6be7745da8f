"""The requirements of each extra have a solution together with those of the tests, on every supported Python."""

import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.deep
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_requirements_of_an_extra_have_a_solution(extra):
    uv = pytest.importorskip("uv", reason="uv is not installed: make test-extras")
    command = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--universal", "--extra", extra, "--extra", "dev"]
    done = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
