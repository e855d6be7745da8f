"""The paper's evaluation: measures, simulates, and writes docs/benchmarks.md with its plots.

    make bench                                          under 20 minutes on two cores, no GPU
    python benchmarks/paper/evaluate.py --only report   the page again, from the results
    python benchmarks/paper/evaluate.py --tiny --out DIR --results DIR    short traces, to see that it works

Nothing else should run on the machine meanwhile: measured figures are times. Two results that are the same on every
machine are read as committed: those of `sharing.py` and of `simulated.py --million`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paper import measured, plots, report, simulated
from benchmarks.paper.figures import Figures
from benchmarks.shared.device import CHECKOUT, environment, open_device, prepare_environment
from benchmarks.shared.results import Report

RESULTS = CHECKOUT / "benchmarks" / "results"
PREEMPTION = {False: ["--block-sizes", "1", "16", "256"], True: []}  # arguments, by whether the run is tiny


def measure(args: argparse.Namespace) -> None:
    """All measured and simulated rows, in one file. Timed parts run one after another.

    The executables of many block sizes need more memory mappings than a process may have, so that parts run in several.
    """
    where = environment(open_device(tiny=True), args.tiny) | {"cores": os.cpu_count(), "command": "make bench"}
    rows = Report(args.results / "evaluation" / "results.json", where)
    with tempfile.TemporaryDirectory() as folder:
        for parts in measured.GROUPS:
            _script("measured.py", ["--parts", *parts, "--out", folder], args)
            content = json.loads((Path(folder) / "results.json").read_text())
            rows.rows += content["rows"]
            for name in parts:
                rows.end_part(name, **content["parts"][name])
    _script("preemption.py", ["--out", str(args.results / "preemption"), *PREEMPTION[args.tiny]], args)
    start, cases = time.monotonic(), simulated.cases()
    for number, (case, found) in enumerate(simulated.search_all(cases, args.tiny), 1):
        rows.rows += found
        rows.write()
        rows.say(f"simulated {number} of {len(cases)}: {case.name}")
    rows.end_part("simulated", status="ok", seconds=time.monotonic() - start)


def _script(script: str, arguments: Sequence[str], args: argparse.Namespace) -> None:
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments, *(["--tiny"] if args.tiny else [])]
    if status := subprocess.run(command, cwd=CHECKOUT).returncode:
        raise SystemExit(f"{script} ended with status {status}")


def write(args: argparse.Namespace) -> None:
    """The page and its plots."""
    contents: dict[str, dict[str, Any]] = {}
    folders = {"evaluation": args.results, "preemption": args.results, "sharing": RESULTS, "million": RESULTS}
    for name, folder in folders.items():
        contents[name] = json.loads((folder / name / "results.json").read_text())
    (args.out / "benchmarks.md").write_text(report.of_contents(contents))
    paths = plots.draw(Figures(contents["evaluation"]), args.out / "benchmarks")
    print(f"{args.out / 'benchmarks.md'} and {len(paths)} plots")


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {"results": measure, "report": write}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs", help="folder of the page (default: docs)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--only", choices=tuple(STAGES), nargs="+", default=tuple(STAGES))
    parser.add_argument("--tiny", action="store_true", help="short traces: figures mean nothing")
    args = parser.parse_args(argv)
    prepare_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for name in args.only:
        STAGES[name](args)
        print(f"{name}: done after {(time.monotonic() - start) / 60:.1f} minutes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
