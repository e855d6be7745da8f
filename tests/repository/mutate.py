"""Mutation testing: which small changes of a module do its quick tests notice?

    make mutate                                                  every module of `SUITES`; takes hours
    make mutate ARGS="jpaged/core/beam.py"                       one module, all its mutants
    make mutate ARGS="jpaged/runtime/sampler.py --only '*7'"     about a tenth of them: those whose number ends in 7
    make mutate ARGS="--report"                                  write the report again, after a change of reasons

mutmut makes the mutants in a copy of the tree. The results are added to the earlier ones of the same source in
`benchmarks/results/mutation`, and replace those of another; `reasons.json` there says why a survivor is no gap in the
tests, and `by_hand.md` is the report's last part: faults that were planted by hand. A run that is interrupted keeps the
results that it has. The exit status is 1 if a survivor has no reason.
"""

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutation"
WORK = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jpaged" / "mutation"
TREE = ("jpaged", "pallas_kernels", "benchmarks", "tests")
# Most mutants of a module leave most of its computations as they are: jax compiles these once for all mutants.
COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": str(WORK / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
LETTERS = {None: ".", 0: "s", 33: "u", 1: "k", 3: "k"}  # by mutmut's exit codes; others are time-outs and crashes
NOT_RUN, SURVIVED, UNREACHED, KILLED, TIMED_OUT = ".sukt"


class Suite(NamedTuple):
    """The quick tests of a module. Tests of planted faults rewrite the source that they read, so none is here.

    Attributes:
        isolation: "forkserver" where tests start a jax backend, whose threads do not survive a fork.
    """

    tests: tuple[str, ...]
    select: str = "not planted and not notices"
    isolation: str = "fork"


ALLOCATOR = Suite(
    (
        "tests/core/test_block_pool.py",
        "tests/core/test_plans.py",
        "tests/core/test_scheduler.py",
        "tests/core/test_acceptance.py",
        "tests/core/test_long_run.py",
        "tests/runtime/test_batch.py",
    ),
    "not planted and not any_traffic and not thousands and not overtaken",
)
BATCH = Suite(("tests/runtime/test_row_table.py", "tests/runtime/test_batch.py"))
RUNNER = Suite(
    ("tests/runtime/test_runner.py", "tests/runtime/test_compilation_cache.py"), "not h200 and not aliases",
    "forkserver",
)  # fmt: skip
SUITES = {
    "jpaged/core/bans.py": Suite(("tests/core/test_bans.py",)),
    "jpaged/core/beam.py": Suite(("tests/core/test_beam.py",), "not transformers and not notices"),
    "jpaged/core/block_pool.py": ALLOCATOR,
    "jpaged/core/block_table.py": ALLOCATOR,
    # Its rules are made as it is imported, which a fork has done before it knows its mutant.
    "jpaged/core/params.py": Suite(("tests/core/test_params.py",), isolation="forkserver"),
    "jpaged/core/plan.py": ALLOCATOR,
    "jpaged/core/queue.py": Suite(("tests/core/test_queue.py", *ALLOCATOR.tests), ALLOCATOR.select),
    "jpaged/core/request.py": ALLOCATOR,
    "jpaged/core/rows.py": Suite(("tests/core/test_rows.py", *ALLOCATOR.tests), ALLOCATOR.select),
    **{
        f"jpaged/core/{name}.py": ALLOCATOR
        for name in ("admission", "branches", "commit", "memory", "planned_step", "scheduler")
    },
    "jpaged/structured/masks.py": Suite(("tests/runtime/test_batch.py",)),
    "jpaged/runtime/arrays.py": Suite(("tests/runtime/test_arrays.py",), isolation="forkserver"),
    "jpaged/runtime/batch.py": BATCH,
    "jpaged/runtime/block_store.py": Suite(("tests/runtime/test_block_store.py",), isolation="forkserver"),
    "jpaged/runtime/compilation_cache.py": Suite(
        ("tests/runtime/test_compilation_cache.py",), "not pool", isolation="forkserver"
    ),
    "jpaged/runtime/device_rows.py": Suite(("tests/runtime/test_device_rows.py",), isolation="forkserver"),
    "jpaged/runtime/kernel_choice.py": Suite(
        ("tests/runtime/test_runner.py",), "kernels_are_chosen or kernels_of_a_gpu or capability", "forkserver"
    ),
    "jpaged/runtime/kv_cache.py": Suite(
        (
            "tests/runtime/test_kv_cache.py", "tests/runtime/test_step.py", "tests/runtime/test_swap.py",
            "tests/runtime/test_block_store.py",
        ), isolation="forkserver",
    ),
    "jpaged/runtime/memory.py": Suite(("tests/runtime/test_memory.py",), isolation="forkserver"),
    "jpaged/runtime/parameters.py": Suite(("tests/runtime/test_parameters.py",), isolation="forkserver"),
    "jpaged/runtime/pending.py": Suite(("tests/runtime/test_pending.py",), isolation="forkserver"),
    "jpaged/runtime/row_table.py": BATCH,
    "jpaged/runtime/runner.py": RUNNER,
    "jpaged/runtime/sampler.py": Suite(
        ("tests/runtime/test_sampler.py",), "not planted and not in_place", "forkserver"
    ),
    "jpaged/runtime/sampling_state.py": Suite(
        ("tests/runtime/test_sampling_state.py",), "not in_place", "forkserver"
    ),
    "jpaged/runtime/shapes.py": Suite(("tests/runtime/test_shapes.py",), isolation="forkserver"),
    "jpaged/runtime/step.py": Suite(
        ("tests/runtime/test_step.py", "tests/engine/test_sharing.py", "tests/runtime/test_runner.py"),
        "test_step or choices or best_of or compiles or alias and not h200",
        "forkserver",
    ),
    "jpaged/runtime/step_costs.py": Suite(("tests/runtime/test_step_costs.py",)),
    "jpaged/runtime/swap.py": Suite(("tests/runtime/test_swap.py",), isolation="forkserver"),
}  # fmt: skip


def mutate(module: str, only: list[str], jobs: int) -> dict[str, Any]:
    """Run the mutants of a module whose names match a pattern, `jobs` at a time; return their row of results."""
    suite, folder = SUITES[module], WORK / module.replace("/", ".")
    shutil.rmtree(folder, ignore_errors=True)
    for name in TREE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    options = {
        "source_paths": ["jpaged"], "only_mutate": [module], "also_copy": list(TREE),
        "do_not_mutate_patterns": [r"^\s*assert\b"],  # a weaker check is no fault
        "pytest_add_cli_args_test_selection": suite.tests,
        "pytest_add_cli_args": ["-k", suite.select, "--hypothesis-profile=mutation", "-p", "no:cacheprovider"],
        "timeout_multiplier": 2, "timeout_constant": 20, "process_isolation": suite.isolation,
    }  # fmt: skip
    lines = [
        f"{name} =" + ("".join(f"\n    {each}" for each in value) if isinstance(value, list | tuple) else f" {value}")
        for name, value in options.items()
    ]
    (folder / "setup.cfg").write_text("\n".join(["[mutmut]", *lines, ""]))
    run_mutmut(folder, "--max-children", str(jobs), *only)
    return collect(folder, module)


def collect(folder: Path, module: str) -> dict[str, Any]:
    """Return a row of results from the folder in which mutmut has run, perhaps not to its end.

    Its `outcomes` have a letter for each mutant, in mutmut's order; its `survivors`, one change for each that survived.
    """
    codes = json.loads((folder / "mutants" / f"{module}.meta").read_text())["exit_code_by_key"]
    outcomes = "".join(LETTERS.get(code, TIMED_OUT) for code in codes.values())
    if set(outcomes) <= {NOT_RUN}:
        raise SystemExit(f"no mutant of {module} was run: see above, and {folder}")
    survivors = [change(folder, module, name) for name, letter in zip(codes, outcomes) if letter == SURVIVED]
    return {
        "module": module, "outcomes": outcomes, "survivors": survivors,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "source": source(folder, module),
    }  # fmt: skip


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the newer result of each mutant, if both rows are of the same source; else the newer row."""
    if old["source"] != new["source"]:
        return new
    survivors, outcomes = [], ""
    changes = iter(old["survivors"]), iter(new["survivors"])
    for letters in zip(old["outcomes"], new["outcomes"], strict=True):
        found = [next(each) if letter == SURVIVED else None for each, letter in zip(changes, letters)]
        newest = letters[1] != NOT_RUN
        outcomes += letters[newest]
        if (change := found[newest]) is not None:
            survivors.append(change)
    return new | {"outcomes": outcomes, "survivors": survivors}


def change(folder: Path, module: str, name: str) -> str:
    """Return a mutant as "function: - old + new"."""
    with contextlib.chdir(folder):  # where mutmut looks for its settings
        from mutmut.mutation.diff_apply import get_diff_for_mutant

        diff = get_diff_for_mutant(name, path=module).splitlines()
    function = name.rpartition(".")[2].split("__mutmut_")[0].removeprefix("x").strip("_ǁ").replace("ǁ", ".")
    changed = [f"{line[0]} {line[1:].strip()}" for line in diff if line[:1] in "-+" and line[:3] not in ("---", "+++")]
    return f"{function}: {' '.join(changed)}"


def run_mutmut(folder: Path, *arguments: str) -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    # The copy must be imported, not this checkout.
    environment = os.environ | COMPILED_ONCE | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mutmut", "run", *arguments]
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run(command, cwd=folder, env=environment, check=False)


def source(folder: Path, module: str) -> str:
    """Return git's name of the module's content: which version was mutated."""
    command = ["git", "hash-object", folder / module]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout[:7]


def report(rows: list[dict[str, Any]], reasons: dict[str, dict[str, str]]) -> tuple[str, int]:
    """Return the report in Markdown, and the number of survivors without a reason."""
    open_ones = 0
    table, lists = [], []
    for row in rows:
        known = reasons.get(row["module"], {})
        unexplained = [survivor for survivor in row["survivors"] if survivor not in known]
        open_ones += len(unexplained)
        outcomes = row["outcomes"]
        run = len(outcomes) - outcomes.count(NOT_RUN)
        counts = [outcomes.count(letter) for letter in (KILLED, TIMED_OUT, UNREACHED, SURVIVED)]
        cells = [row["module"], len(outcomes), run, *counts, len(unexplained), row["date"], row["source"]]
        table.append(f"| {' | '.join(map(str, cells))} |")
        if row["survivors"]:
            lines = [f"- `{survivor}`: {known.get(survivor, '**open**')}" for survivor in row["survivors"]]
            lists.append("\n".join([f"## {row['module']}", "", *lines]))
    missing = ", ".join(f"`{module}`" for module in SUITES if module not in {row["module"] for row in rows})
    parts = [
        "# Mutation testing",
        "Written by `make mutate`. `unreached` mutants are in functions that the module's suite never calls; "
        "a time-out counts as found. `source` is the beginning of `git hash-object` of the module. "
        "`open` survivors have no reason yet: a gap in the tests, or equivalent code.",
        "| module | mutants | run | killed | time-outs | unreached | survived | open | date | source |\n"
        f"|{' --- |' * 10}\n" + "\n".join(table),
        f"Not run: {missing or 'none'}.",
        *lists,
    ]
    return "\n\n".join(parts) + "\n", open_ones


def load() -> list[dict[str, Any]]:
    path = RESULTS / "results.json"
    return json.loads(path.read_text()) if path.exists() else []


def store(row: dict[str, Any]) -> None:
    rows = {row["module"]: row for row in load()}
    rows[row["module"]] = merge(rows.get(row["module"], row), row)
    content = json.dumps([rows[name] for name in SUITES if name in rows], indent=1, ensure_ascii=False)
    (RESULTS / "results.json").write_text(content + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files to mutate (default: all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="mutants' names, such as '*7'")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (default: 1)")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    args = parser.parse_args()
    if unknown := [module for module in args.modules if module not in SUITES]:
        parser.error(f"no suite for {', '.join(unknown)}; there are: {', '.join(SUITES)}")
    for module in () if args.report else args.modules or SUITES:
        store(mutate(module, args.only, args.jobs))
    rows = load()
    reasons = json.loads((RESULTS / "reasons.json").read_text())
    text, open_ones = report(rows, reasons)
    text += "\n" + (RESULTS / "by_hand.md").read_text()
    (RESULTS / "report.md").write_text(text)
    print(text)
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
