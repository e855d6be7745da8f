"""The files under deploy/ and .github: their flags, paths and targets exist, and their timeouts fit the server's."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from jpaged.cli.main import load, parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVE = parser("serve", load("serve"), "jpaged serve")
DRAIN_S = SERVE.parse_args([]).drain_timeout


def container() -> dict:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S
    return pod["containers"][0]


def test_the_manifest_and_the_image_agree():
    image = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[1])
    assert entry[:2] == ["jpaged", "serve"]
    args = SERVE.parse_args([*entry[2:], *container()["args"]])
    ports = {container()["ports"][0]["containerPort"], int(re.search(r"^EXPOSE (\d+)$", image, re.MULTILINE)[1])}
    assert ports == {args.port} and args.host == "0.0.0.0"
    probes = [container()[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert all(probe == {"path": "/health", "port": args.port} for probe in probes)
    (mount,) = container()["volumeMounts"]
    assert f"VOLUME {mount['mountPath']}\n" in image and container()["image"] in image


def test_the_image_leaves_out_no_file_that_is_installed():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"jpaged", "pallas_kernels", "pyproject.toml", "README.md", "LICENSE"} & set(ignored)


def test_the_unit():
    text = (DEPLOY / "jpaged.service").read_text()
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert command[1:3] == ["serve", "--config"]
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > DRAIN_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "jpaged.service"
    unit.write_text((DEPLOY / "jpaged.service").read_text().replace("/opt/jpaged/bin/jpaged", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_workflows_call_targets_and_scripts_that_exist():
    makefile, commands = (ROOT / "Makefile").read_text(), []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        commands += [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert len(commands) >= 3
    for command in commands:
        program, *args = command.split()
        assert f"\n{args[0]}:" in makefile if program == "make" else (ROOT / program).stat().st_mode & 0o100, command


def test_hooks_call_installed_tools():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/mypy"}
