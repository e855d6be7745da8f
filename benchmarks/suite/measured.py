"""Experiments of `benchmarks/kernels` and `benchmarks/engine` as cells."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import ops, tune
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.published import published
from benchmarks.shared.device import Device
from benchmarks.shared.results import Report, ceiling_of
from benchmarks.suite.worker import Send, load


class Relay(Report):
    """A Report whose rows go to the suite, with published figures beside them."""

    def __init__(self, send: Send, environment: dict[str, Any]):
        self._send = send
        super().__init__(Path("results.json"), environment)

    def add(self, **row: Any) -> None:
        self._send("row", row | dict(published=published(row, self.environment["device_kind"])))

    def say(self, line: str) -> None:
        self._send("say", line)

    def write(self) -> None:
        self._send("environment", self.environment)


def run(options: dict[str, Any], send: Send, device: Device) -> None:
    """Run an experiment as far as the time goes.

    Options: `experiment` ("module:function"), `settings` (its arguments after the Bench), `implementations`, `peers`,
    `budget` (seconds), `tiny`, `results` (the path of all rows so far, with the ceilings of the device).
    """
    bench = ops.make_bench(argparse.Namespace(**options, rounds=3), partial(Relay, send))
    rows = json.loads(Path(options["results"]).read_text())["rows"]
    bench.read_gb_per_s = ceiling_of(rows, "read", "gb_per_s")
    bench.matmul_tflop_per_s = ceiling_of(rows, "matmul", "tflop_per_s")
    load(options["experiment"])(bench, **options["settings"])


def grids(bench: Bench, name: str, flags: list[str]) -> None:
    """Run an experiment of ops.py with each of some lines of flags; a tiny run has one grid."""
    for line in flags[: bench.sized(None, 1)]:
        ops.experiments(bench, ops.parse(line.split() + ["--tiny"] * bench.tiny))[name]()


def search(options: dict[str, Any], send: Send, device: Device) -> None:
    """Search the kernels' configurations with tune.py, and send its rows."""
    folder = Path(options["results"]).with_name("tune")
    flags = ["--out", str(folder), "--table", str(folder / "tuned.json"), "--budget", str(options["budget"])]
    tune.main(flags + ["--tiny", "--kernels", "mosaic.decode", "--head-dims", "64"] * options["tiny"])
    for row in json.loads((folder / "tuning.json").read_text())["rows"]:
        send("row", row)
