"""The client packages themselves against servers, with `make test-clients`.

Scripts named `use_*` run against a server of the demo model, which can't follow the instructions of an agent. Those
named `loop_*` have loops of three turns, and run against the scripted server: each result of a tool has the answer
to it. Each script in packages/ declares its packages. uv installs those of Python scripts into its cache, npm those
of JavaScript into a temporary folder. build/clients.md then has the table of README.md.
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
from tests.serving.conftest import TEMPLATE

pytestmark = pytest.mark.clients

PACKAGES = Path(__file__).with_name("packages")
SCRIPTS = sorted(path.name for kind in ("use_*", "loop_*") for path in PACKAGES.glob(kind))
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
def scripted_server(tmp_path_factory):
    """A scripted server with room for the prompts of agents, of which the template shows tools, calls and results."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    limits = ("--max-num-batched-tokens", "8192", "--max-model-len", "131072", "--num-gpu-blocks-override", "20000")
    flags = ("--tool-call-parser", "hermes", "--chat-template", str(template), *limits)
    with ServerProcess(*flags, module="tests.serving.scripted") as server:
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
        shutil.copy(PACKAGES / "scenarios.mjs", folder)
        command = ["node", shutil.copy(script, folder)]
    if installed.returncode:
        pytest.skip(f"the packages of {script.name} can't be installed: {installed.stderr.strip().splitlines()[-1]}")
    return command


@pytest.mark.parametrize("name", SCRIPTS)
def test_client_package_works(request, table, tmp_path, name):
    server = request.getfixturevalue("scripted_server" if name.startswith("loop_") else "server")
    done = output(*install(PACKAGES / name, tmp_path), server.url, folder=tmp_path)
    versions, *results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failures = {result["scenario"]: result["error"] for result in results if result["error"]}
    packages = ", ".join(f"{package} {version}" for package, version in versions["versions"].items())
    passed = ", ".join(result["scenario"] for result in results if not result["error"])
    table.append(f"| {packages} | {passed} | {', '.join(failures)} |")
    assert done.returncode == 0 and results, done.stderr
    assert not failures, "\n".join(failures.values())
