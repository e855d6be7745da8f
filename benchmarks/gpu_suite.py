"""Checks and times jpaged on a GPU in nine minutes: `python benchmarks/gpu_suite.py --out results`.

Needs jax, flax, transformers and numpy, and no network. Other missing packages cost the cells that need them. Parts:

    model      the engine's step on two layers of real models, compared with the reference implementation
    exact      hidden states of sequences alone and together, to the bit
    demo       greedy tokens of the demo model, compared with a CPU's, offline and over HTTP
    ceilings   read bandwidth, copies, matrix products
    step       the decode step of a Llama-3.1-8B with random parameters, and its kernels
    products   products of weights of real models, by kernels and by XLA
    anchors    attention at the shapes of published figures: decode, prefill, mixed steps
    peers      the anchors by FlashInfer, torch and jax, where they are installed
    check, sweep, tune, throughput     with --all: all checks, whole grids, the kernels' configurations, a workload

Each cell of a part is a process: a fault, a hang or a wrong number costs one cell. Cells that measure run alone, others
several at a time. Rows go to results.json in --out as they come; report.md and the plots are renewed. Exit status: 1 if
a cell failed, hung or found something wrong.
"""

import argparse
import dataclasses
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import CACHE
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, write_tables
from benchmarks.suite.cells import FIRST, PARTS, Cell, cells
from benchmarks.suite.process import Process

BUDGET_S, CLOSING_S = 540.0, 10.0  # for everything, and of it for the last plots and report
MIN_SECONDS, STOP_S = 10.0, 8.0  # of time left to start a cell with, and a case of a cell
AT_ONCE = min(4, max(2, (os.cpu_count() or 2) // 4))  # cells that do not measure
RED, LATE = ("wrong", "failed", "killed"), "the suite's time was up"


class Suite:
    """Runs cells and keeps their rows."""

    def __init__(self, args: argparse.Namespace):
        self._tiny, self._deadline = args.tiny, Deadline(args.budget - CLOSING_S)
        self.report = Report(args.out / "results.json", {})
        self._red: dict[Cell, str] = {}  # the first red status of a cell's rows

    def run(self, cells: Sequence[Cell]) -> int:
        """Run cells in order. Return the exit status."""
        waiting, running = list(cells), list[Process]()
        with tempfile.TemporaryDirectory(prefix="gpu_suite_") as folder:
            try:
                while waiting or running:
                    while waiting and self._may_start(waiting[0], running):
                        running += self._started(waiting.pop(0), Path(folder))
                    for process in list(running):
                        if end := process.kill("skipped", LATE) if self._deadline.passed else process.poll():
                            running.remove(process)
                            waiting += self._end(process.cell, end)
                            if not running and (not waiting or waiting[0].part != process.cell.part):
                                plot(self.report)
                    time.sleep(0.05)
            finally:
                for process in running:
                    process.kill("killed", "the suite ended")
        print(write_tables(self.report, "GPU suite"))
        return int(any(row["status"] in RED for row in self.report.rows))

    def _may_start(self, cell: Cell, running: Sequence[Process]) -> bool:
        alone = cell.alone or any(process.cell.alone for process in running)
        return not running if alone else len(running) < AT_ONCE

    def _started(self, cell: Cell, folder: Path) -> list[Process]:
        """Start a cell, or leave a row that says why not."""
        missing, left = [each for each in cell.needs if importlib.util.find_spec(each) is None], self._deadline.left
        if missing or left < MIN_SECONDS:
            reason = f"{', '.join(missing)} can't be imported" if missing else LATE
            self.report.add(experiment="cells", part=cell.part, cell=cell.name, status="skipped", reason=reason)
            return []
        self.report.say(f"{cell.part}: {cell.name}")
        run = dict(tiny=self._tiny, results=str(self.report.path.resolve()), budget=min(left, cell.limit_s) - STOP_S)
        return [Process(cell, folder, run | cell.options, self._receive)]

    def _receive(self, cell: Cell, kind: str, value: Any) -> None:
        environment = self.report.environment
        if kind == "say":
            self.report.say(f"{cell.name}: {value}")
        elif kind == "environment":
            versions = environment.get("versions", {}) | value["versions"]
            named = environment if environment.get("platform") == "gpu" else value  # a cell may run on the CPU
            self.report.environment = named | dict(versions=versions, command=" ".join(sys.argv))
        elif kind == "row" and not cell.command:
            if value.get("status") in RED:
                self._red.setdefault(cell, value["status"])
            self.report.add(**value)

    def _end(self, cell: Cell, end: dict[str, Any]) -> list[Cell]:
        """Add the row of a cell. Return a red model's run under a checker, where that is installed."""
        if "jax sees no GPU" in str(end["reason"]):
            raise SystemExit(end["reason"].partition(": ")[2])
        end["status"] = self._red.get(cell, "ok") if end["status"] == "ok" else end["status"]
        red = end["status"] in RED
        end["text"] = end["text"] if red or cell.command else None
        self.report.add(experiment="cells", part=cell.part, cell=cell.name, **end)
        write_tables(self.report, "GPU suite")
        checker = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
        if not (red and checker and cell.part == "model") or cell.command:
            return []
        tool = "synccheck" if end["status"] == "killed" else "memcheck"
        separate = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}  # the checker then knows the ends of each array
        changes: Any = dict(name=f"{cell.name}, {tool}", command=(checker, "--tool", tool), environment=separate)
        return [dataclasses.replace(cell, **changes, limit_s=60.0)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=CACHE / "gpu_suite", help="folder for results")
    add(
        "--parts", type=lambda text: text.split(","), default=FIRST, metavar="NAME,...", help="default: the first eight"
    )
    add("--all", action="store_const", const=PARTS, dest="parts", help="all parts")
    add("--cells", type=re.compile, default="", metavar="REGEX", help="only cells whose names match")
    add("--tiny", action="store_true", help="small shapes and one sample, on any device")
    add(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="for everything (default 540); the rest is skipped",
    )
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))} (allowed {', '.join(PARTS)})")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    wanted = (cell for part in PARTS if part in args.parts for cell in cells(part, args.tiny))
    return Suite(args).run([cell for cell in wanted if re.search(args.cells, cell.name)])


if __name__ == "__main__":
    sys.exit(main())
