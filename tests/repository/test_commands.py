"""Commands of the README and of the pages: each one is accepted, and is run by a test or has the reason why not."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jpaged.cli.main import COMMANDS, load, parser
from jpaged.serving.tool_parsers.format import FORMATS
from tests.serving.client import Client
from tools import api_docs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("jpaged", "python", "make", "curl", "pip", "docker", "git")
VALUES = {"MODEL": "demo", "[MODEL]": "demo", "HOST:PORT": "host:1234", "URL": "http://host"}

# Beginnings of commands, and the tests that run them.
RUN = {
    "curl": "repository/test_commands.py",
    "jpaged serve": "serving/test_shutdown.py",
    "jpaged serve MODEL -tp": "parallel/test_join.py",
    "jpaged serve --ray": "serving/ray/test_ray.py",
    "jpaged worker": "parallel/test_join.py",
    "jpaged chat": "cli/test_models.py",
    "jpaged complete": "cli/test_models.py",
    "jpaged bench": "cli/test_bench.py",
    "jpaged plan": "cli/test_plan.py",
    "jpaged doctor": "cli/test_doctor.py",
    "jpaged verify": "cli/test_verify.py",
    "jpaged convert": "cli/test_convert.py",
    "jpaged completion": "cli/test_completion.py",
    "python -m jpaged": "repository/test_package.py",
    "python server.py": "serving/test_shutdown.py",
    "python -m tools.models_page": "models/test_architectures.py",
    "python -m tools.routes_table": "repository/test_readme.py",
    "python benchmarks/gpu_suite.py": "benchmarks/test_gpu_suite.py",
    "python benchmarks/kernels/ops.py": "benchmarks/test_benchmarks.py",
    "python benchmarks/kernels/tune.py": "benchmarks/test_benchmarks.py",
    "python benchmarks/kernels/compiled_step.py": "kernels/test_compiled_step.py",
    "python benchmarks/engine/neighbours.py": "benchmarks/test_neighbours.py",
    "python benchmarks/engine/isolation.py": "benchmarks/test_isolation.py",
    "python tests/attack/fuzz.py": "serving/test_fuzz.py",
    "python tests/attack/fuzz_checkpoints.py": "serving/test_fuzz.py",
    "python tests/attack/load.py": "serving/test_load.py",
    "python tests/attack/soak.py": "serving/test_soak.py",
    "make bench": "benchmarks/test_evaluation.py",
    "make dist": "repository/test_package.py",
    "make docs": "repository/test_commands.py",
    "pip install ./pallas_kernels": "repository/test_package.py",
}
# Commands without such a test, and the reasons.
NOT_RUN = {
    "make serve": "installs packages, then runs server.py",
    "make test": "installs packages, then runs tests",
    "make mutate": "takes minutes to hours",
    "pip install": "needs a package index",
    "git clone": "needs the repository's address",
    "docker": "needs a registry of images",
    "python -m tests.kernels.figures": "takes minutes; kernels/test_sass.py computes its figures",
    "python -m sglang_router": "needs another project's router",
}


def commands():
    """Yield the commands of all pages: lines of blocks, and code within sentences."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line.partition("  #")[0] for kind, block in blocks if not kind for line in block.splitlines()]
        codes = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        for command in (" ".join(each.removeprefix("$ ").split()) for each in (*lines, *codes)):
            if command.partition(" ")[0] in PROGRAMS and " " in command:
                yield command


FOUND = sorted(set(commands()))


def beginning(command):
    """The longest key of RUN or NOT_RUN that a command begins with."""
    return max((each for each in (*RUN, *NOT_RUN) if command.startswith(each)), key=len, default=None)


def test_each_command_is_run_by_a_test_or_has_a_reason():
    assert {command for command in FOUND if beginning(command) is None} == set()
    assert {beginning(command) for command in FOUND} == RUN.keys() | NOT_RUN.keys()
    assert [path for path in RUN.values() if not (ROOT / "tests" / path).is_file()] == []


@pytest.mark.parametrize("command", [each for each in FOUND if each.startswith(("jpaged ", "python server.py"))])
def test_flags_are_accepted(command):
    words = shlex.split(command.replace("python server.py", "jpaged serve"))[1:]
    name = next(
        each for each in sorted(COMMANDS, key=len, reverse=True) if each == " ".join(words[: each.count(" ") + 1])
    )
    values = [VALUES.get(word, word) for word in words[name.count(" ") + 1 :]]
    made = parser(name, load(name), name)
    if values == ["--help"]:
        assert made.format_help()
    elif values:  # a name without flags stands for the command
        made.parse_args(values)


@pytest.mark.parametrize("command", [each for each in FOUND if re.match(r"python \S+/", each)])
def test_scripts_exist_and_accept_their_flags(command):
    script, *words = shlex.split(command)[1:]
    assert (ROOT / script).is_file()
    if words:
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        module.parse(words)


@pytest.mark.deep
def test_the_api_reference_is_written(tmp_path):
    api_docs.main(tmp_path)
    assert "generate" in (tmp_path / "jpaged.html").read_text()


def test_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {command.split()[1] for command in FOUND if command.startswith("make ")}
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()


@pytest.mark.parametrize("command", [each for each in FOUND if each.startswith("curl ")])
async def test_curl_gets_an_answer(command, demo):
    words = shlex.split(command)
    address, body = next(word for word in words if "localhost:8000" in word), words[words.index("-d") + 1]
    async with (
        Client(demo.engine, demo.tokenizer, model_name="demo", tool_format=FORMATS["hermes"]) as client,
        client.session.post(address.replace("localhost:8000", client.url), data=body.encode()) as response,
    ):
        content = b'"embedding"' if "embeddings" in address else b'"choices"'
        assert response.status == 200 and content in await response.read()
