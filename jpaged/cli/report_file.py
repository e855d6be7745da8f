"""File of a command's report, as JSON."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_out_flag(group: argparse._ArgumentGroup) -> None:
    """Add the flag that names the file."""
    group.add_argument("--out", type=Path, metavar="FILE", help="also write the report to this file, as JSON")


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, and the directories above it. Other values than JSON's are written as texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
