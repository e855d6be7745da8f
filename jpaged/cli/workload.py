"""Flags of benchmarks: their workload, and the file of their report."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.bench.workload import DATASETS, Workload
from jpaged.cli.setting_flags import add_settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload."""
    means = "; ".join(f"{n.lower()}: {d.prompt:g} in, {d.output:g} out" for n, d in DATASETS.items())
    add_settings(
        parser, Workload, description="sharegpt and alpaca draw log-normal lengths with the means of the "
        f"PagedAttention paper, in tokens ({means}). random draws lengths uniformly around --input-len and "
        "--output-len; shared-prefix does the same after one of --num-prefixes common prefixes. The texts are common "
        'words. file reads requests as JSON lines, {"prompt": ...} or {"messages": ...} with "max_tokens", or in '
        "ShareGPT's JSON format.",
    )  # fmt: skip


def add_out_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names the file of the report."""
    group.add_argument("--out", type=Path, metavar="FILE", help="also write the report to this file, as JSON")


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, and the directories above it. Other values than JSON's are written as texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
