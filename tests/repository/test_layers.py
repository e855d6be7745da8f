"""The layers are a test: a module imports only from lower ones, and the pure part loads neither jax nor numpy."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lowest first. Within a line, modules of one package may import each other, packages may not.
LAYERS = [
    ["jpaged.checkpoint_files"],
    [
        "pallas_kernels",
        "jpaged.setting",
        "jpaged.gguf_file",
        "jpaged.child",
        "jpaged.progress",
        "jpaged.worker",
        "jpaged.kv_events",
    ],
    ["jpaged.config"],
    ["jpaged.flags"],
    ["jpaged.core"],
    ["jpaged.models", "jpaged.tokenizer", "jpaged.gguf_tokenizer", "jpaged.replay"],
    ["jpaged.chat_revisions"],
    ["jpaged.chat", "jpaged.structured"],
    ["jpaged.runtime", "jpaged.demo"],
    ["jpaged.engine", "jpaged.parallel"],
    ["jpaged.start"],
    ["jpaged.llm", "jpaged.convert", "jpaged.doctor"],
    ["jpaged.serving", "jpaged.bench", "jpaged.rl"],
    ["jpaged.serving.ray", "jpaged.simulator"],
    ["jpaged.cli"],
    ["jpaged", "jpaged.__main__", "server", "tools"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Third-party imports that a package may have; a package without an entry may have any.
OUTSIDE = {
    "pallas_kernels": {"jax", "llvmlite"},
    "jpaged": set(),
    "jpaged.setting": set(),
    "jpaged.checkpoint_files": set(),
    "jpaged.gguf_file": {"gguf", "numpy"},
    "jpaged.config": set(),
    "jpaged.flags": set(),
    "jpaged.child": set(),
    "jpaged.progress": {"tqdm"},
    "jpaged.worker": set(),
    "jpaged.kv_events": {"msgspec"},
    "jpaged.core": set(),
    "jpaged.replay": set(),
    "jpaged.engine": {"msgspec", "tokenizers", "zmq"},
    "jpaged.parallel": {"jax", "msgspec", "numpy"},
    "jpaged.start": {"flax", "huggingface_hub", "jax", "numpy"},
    "jpaged.serving": {"aiohttp", "prometheus_client", "pydantic", "tokenizers"},
    "jpaged.serving.ray": {"prometheus_client", "ray", "starlette"},
    "jpaged.bench": {"aiohttp", "numpy", "tokenizers", "tqdm"},
    "jpaged.rl": {"flax", "jax", "numpy", "tunix"},
    "jpaged.simulator": set(),
    "jpaged.cli": {"aiohttp", "shtab", "yaml"},
    "jpaged.chat": {"jinja2", "tokenizers", "transformers"},
    "jpaged.structured": {"llguidance", "numpy", "tokenizers"},
    "jpaged.tokenizer": {"tokenizers", "transformers"},
    "jpaged.gguf_tokenizer": {"tokenizers", "transformers"},
    "server": set(),
}
WITHOUT_JAX = [
    "jpaged",
    "jpaged.models.config_file",
    "jpaged.core.scheduler",
    "jpaged.engine.engine",
    "jpaged.engine.async_engine",
    "jpaged.serving.serve",
    "jpaged.simulator.capacity",
    "jpaged.start.resolve",
    "jpaged.start.find",
    "jpaged.demo",
    "server",
]
# Without constraints llguidance is not needed, for example by a benchmark in a small environment.
WITHOUT_LLGUIDANCE = ["jpaged.llm", "jpaged.structured.compiler", "benchmarks.gpu_suite"]
WITHOUT_NUMPY = ["jpaged", "jpaged.models.config_file", "jpaged.core.scheduler", "jpaged.start.find"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package(name: str) -> str | None:
    """The entry of LAYERS that a dotted name belongs to; None if it is not ours."""
    while name and name not in RANK:
        name = name.rpartition(".")[0]
    return name or None


def imported(source: str) -> Iterator[str]:
    """Every import, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(name: str, source: str) -> Iterator[str]:
    own = package(name)
    if own is None or (own == "jpaged" and name != "jpaged"):
        yield f"{name} is in no layer"
        return
    for target in imported(source):
        other, top = package(target), target.partition(".")[0]
        if other == own:
            continue
        if other is not None and RANK[other] >= RANK[own]:
            yield f"{name} imports {target}, which is not below it"
        elif other is None and top not in sys.stdlib_module_names and top not in OUTSIDE.get(own, {top}):
            yield f"{name} imports {top}"


def sources() -> list[Path]:
    folders = ("jpaged", "pallas_kernels", "tools")
    return [ROOT / "server.py", *(path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py"))]


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_down(path):
    assert list(violations(module_name(path), path.read_text())) == []


@pytest.mark.parametrize(
    "name, source",
    [
        ("jpaged.core.scheduler", "import jax"),
        ("jpaged.core.scheduler", "import numpy as np"),
        ("jpaged.core.scheduler", "from jpaged.engine.engine import Engine"),
        ("jpaged.core.request", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jpaged.llm import LLM"),
        ("jpaged.models.llama", "def f():\n    from jpaged.runtime.runner import ModelRunner"),
        ("pallas_kernels.reference", "import flax"),
        ("pallas_kernels.reference", "from jpaged.config import EngineConfig"),
        ("jpaged.engine.engine", "import jax.numpy as jnp"),
        ("jpaged.engine.async_engine", "from jpaged.start.load import load_engine"),
        ("jpaged.llm", "from jpaged.doctor import examine"),
        ("jpaged.brand_new", "import os"),
    ],
)
def test_that_test_can_fail(name, source):
    assert list(violations(name, source)) != []


def loads(modules: list[str], library: str) -> str | None:
    """Return the first of some modules that loads a library, in one process; None if none of them does."""
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    if {library!r} in sys.modules:
        print(module)
        break
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.strip() or None


@pytest.mark.parametrize(
    ("library", "modules"), [("jax", WITHOUT_JAX), ("numpy", WITHOUT_NUMPY), ("llguidance", WITHOUT_LLGUIDANCE)]
)
def test_modules_load_without_a_library(library, modules):
    assert loads(modules, library) is None


@pytest.mark.deep
def test_those_tests_can_fail():
    assert loads(["jpaged", "jpaged.llm"], "jax") == "jpaged.llm" and loads(["jpaged.runtime.batch"], "numpy")
    assert loads(["jpaged.structured.grammar"], "llguidance")
