"""Results of benchmarks: one JSON file that grows row by row, and tables made of it."""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.device import CACHE

Row = dict[str, Any]


class Report:
    """Rows of results under one description of the machine. The file is rewritten, whole, as each row comes."""

    def __init__(self, path: Path, environment: dict[str, Any], *, quiet: bool = False):
        self.path, self.environment, self.quiet = path, environment, quiet
        self.rows: list[Row] = []
        self.parts: dict[str, Row] = {}
        self._start = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.write()
        self.say(brief(row))

    def end_part(self, name: str, **row: Any) -> None:
        """How a part of a suite ended."""
        self.parts[name] = row
        self.write()
        self.say(f"part {name}: {row['status']} after {row['seconds']:.0f} s")

    def say(self, line: str) -> None:
        if not self.quiet:
            print(f"[{time.monotonic() - self._start:7.1f} s] {line}", flush=True)

    def publish(self, title: str, *parts: str, name: str = "report.md") -> None:
        """Write a title, the origin of the figures and some parts as Markdown, next to the JSON file; print them."""
        text = "\n\n".join([f"# {title}", heading(self.environment), *parts])
        self.path.with_name(name).write_text(text + "\n")
        print(text)

    @property
    def content(self) -> dict[str, Any]:
        return {"environment": self.environment, "parts": self.parts, "rows": self.rows}

    def write(self) -> None:
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.content, indent=1, default=float))
        scratch.replace(self.path)


def script_parser(description: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser with --out, by default a folder in the cache of the benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / folder, metavar="DIR", help="folder for results")
    return parser


def brief(row: Row) -> str:
    """A row as a line of a log."""
    show = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(
        f"{key}={show(value)}"
        for key, value in row.items()
        if value is not None and key not in ("log", "text") and not isinstance(value, list | dict)
    )


def heading(environment: dict[str, Any]) -> str:
    """Where figures come from, in a line."""
    if not environment:
        return "No part ran far enough to name the device."
    where = f"{environment['device_kind']} ({environment['platform']}), jax {environment['versions'].get('jax')}, "
    where += f"{environment['date'][:10]}, commit {_short(environment['commit'])}"
    if environment["tiny"]:
        where += ". **A smoke run of tiny shapes: it shows that the program works; its times mean nothing.**"
    elif environment["platform"] != "gpu":
        where += ". **Not a GPU.**"
    return where


def _short(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    return commit[:12] + commit[40:]


def table(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """A markdown table of some columns; those that no row has are left out."""
    rows = list(rows)
    columns = [column for column in columns if any(row.get(column) is not None for row in rows)]

    def cell(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
        return str(value).replace("|", "\\|").replace("\n", " ")

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def with_floor(row: Row, read_gb_per_s: float | None) -> Row:
    """Return a row of a step with the time that reading its bytes takes at the read ceiling, if that is known."""
    if read_gb_per_s is None:
        return row
    floor_ms = row["bytes"] / read_gb_per_s / 1e6
    return row | dict(floor_ms=floor_ms, of_floor=floor_ms / row["step_ms"])


def ceiling_of(rows: Iterable[Row], what: str, column: str) -> float | None:
    """Return the best figure of the ceilings whose names start with `what`, None if none was measured."""
    found = [row for row in rows if row["experiment"] == "ceilings" and row.get("what", "").startswith(what)]
    return max((row[column] for row in found), default=None)


# Columns of each experiment's table, the case first.
COLUMNS: dict[str, Sequence[str]] = {
    "cells": ("part", "cell", "status", "seconds", "reason"),
    "model": ("model", "kernels", "status", "error", "logprob_error", "steps", "samples", "near_ties",
              "drawn_differently", "reason"),
    "demo": ("what", "kernels", "status", "equal_tokens", "near_ties", "reason"),
    "correctness": ("implementation", "variant", "case", "status", "error", "reason"),
    "peers": ("variant", "status", "reason"),
    "ceilings": ("what", "variant", "us", "gb_per_s", "tflop_per_s", "status", "reason"),
    "product": ("weight", "rows", "variant", "us", "us_low", "us_high", "gb_per_s", "tflop_per_s", "published", "error",
                "status", "reason"),
    "exactness": ("model", "kernels", "products", "states", "differ_alone", "differ_in_halves", "status", "reason"),
    "decode": ("variant", "lengths", "head_dim", "block_size", "batch", "context", "us", "us_low", "us_high",
               "gb_per_s", "of_read_ceiling", "published", "host_us", "error", "status", "reason"),
    "splits": ("variant", "head_dim", "block_size", "batch", "context", "us", "us_low", "us_high", "over_fixed",
               "gb_per_s", "error", "status", "reason"),
    "paging": ("kind", "variant", "head_dim", "block_size", "batch", "context", "us", "us_low", "us_high",
               "over_identity", "error", "status", "reason"),
    "prefill": ("variant", "head_dim", "block_size", "batch", "context", "us", "us_low", "us_high", "tflop_per_s",
                "of_matmul_ceiling", "published", "host_us", "error", "status", "reason"),
    "mixed": ("variant", "head_dim", "block_size", "decodes", "chunk", "context", "us", "us_low", "us_high",
              "tflop_per_s", "gb_per_s", "error", "status", "reason"),
    "write": ("variant", "head_dim", "block_size", "tokens", "us", "us_low", "us_high", "gb_per_s", "host_us",
              "status", "reason"),
    "step": ("model", "kernels", "variant", "batch", "context", "step_ms", "step_ms_low", "step_ms_high", "dispatch_ms",
             "device_ms", "floor_ms", "of_floor", "tokens_per_s", "compile_s", "status", "reason"),
    "gap": ("model", "kernels", "batch", "context", "gap_us", "status", "reason"),
    "step kernels": ("model", "kernels", "batch", "context", "kernel", "launches", "us"),
    "throughput": ("model", "kernels", "variant", "requests", "input_tokens", "output_tokens", "seconds",
                   "output_tokens_per_s", "tokens_per_s", "preemptions", "status", "reason"),
    "tuning": ("kernel", "head_dim", "pool_dtype", "tiles", "us", "over_default", "status", "reason"),
}  # fmt: skip


def markdown(report: dict[str, Any], title: str) -> str:
    """A whole report: where it ran, how its parts ended, a table for each experiment."""
    lines = [f"# {title}", "", heading(report["environment"]), ""]
    if report["parts"]:
        parts = [{"part": name} | row for name, row in report["parts"].items()]
        lines += [table(parts, ("part", "status", "seconds", "reason")), ""]
    for experiment, columns in COLUMNS.items():
        rows = [row for row in report["rows"] if row.get("experiment") == experiment]
        if rows:
            lines += [f"## {experiment}", "", table(rows, columns), ""]
    for row in report["rows"]:
        if row.get("text"):
            title = f"## {row['part']}: {row['cell']}, {row['status']}"
            lines += [title, "", "```", row["text"].strip(), "```", ""]
    return "\n".join(lines)


def write_tables(report: Report, title: str) -> str:
    """Writes report.md beside the JSON, and returns its text."""
    text = markdown(report.content, title)
    report.path.with_name("report.md").write_text(text)
    return text
