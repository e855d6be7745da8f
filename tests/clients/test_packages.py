"""The client packages themselves against a server of the demo model, with `make test-clients`.

Each script in packages/ declares its packages. uv installs those of Python scripts into its cache, npm those of
JavaScript into a temporary folder. build/clients.md then has the table of README.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.clients

PACKAGES = Path(__file__).with_name("packages")
SCRIPTS = sorted(path.name for path in PACKAGES.glob("use_*"))
# Failures of the server that are known and do not depend on time.
KNOWN = {
    "use_litellm_proxy.py": ["responses"],  # The proxy forwards to /v1/responses.
}
TIMEOUT_S = 900
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
# conftest.py moves the caches of this process, but packages should be downloaded once.
ENV = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
ENV |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def server():
    limits = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "1024")
    with ServerProcess("--tool-call-parser", "hermes", *limits) as server:
        yield server


@pytest.fixture(scope="module")
def table():
    rows = ["| packages | pass | fail |", "|---|---|---|"]
    yield rows
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build/clients.md").write_text("\n".join(rows) + "\n")


def output(*command, folder):
    env = ENV | {"HF_HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, cwd=folder)


def install(script, folder):
    """Install a script's packages and return the command that runs it, or skip the test."""
    if script.suffix == ".py":
        if UV is None:
            pytest.skip("uv is not installed")
        installed = output(UV, "sync", "--script", script, "--python", sys.executable, folder=folder)
        command = [UV, "run", "--script", "--python", sys.executable, script]
    else:
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        packages = re.search(r"^// dependencies: (.*)$", script.read_text(), re.MULTILINE)[1].split()
        installed = output("npm", "install", "--no-audit", "--no-fund", *packages, folder=folder)
        command = ["node", shutil.copy(script, folder)]
    if installed.returncode:
        pytest.skip(f"the packages of {script.name} can't be installed: {installed.stderr.strip().splitlines()[-1]}")
    return command


@pytest.mark.parametrize("name", SCRIPTS)
def test_client_package_works(server, table, tmp_path, name):
    done = output(*install(PACKAGES / name, tmp_path), server.url, folder=tmp_path)
    versions, *results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = {result["scenario"]: result["error"] for result in results if result["error"]}
    packages = ", ".join(f"{package} {version}" for package, version in versions["versions"].items())
    passed = ", ".join(result["scenario"] for result in results if not result["error"])
    table.append(f"| {packages} | {passed} | {', '.join(failures)} |")
    assert done.returncode == 0 and results, done.stderr
    assert list(failures) == KNOWN.get(name, []), "\n".join(failures.values())
