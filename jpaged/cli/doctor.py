"""Report on this machine: devices, versions, the kernels for a model, their self-test, and the caches.

  jpaged doctor                                the demo model's shapes
  jpaged doctor --model DIR --retest           another model; tests the kernels again
  jpaged doctor --json                         for programs and bug reports

The flags are those of serve, so that the same kernels are chosen. The exit status is 1 if an op failed its self-test
or no kernels can run, and otherwise 0.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from jpaged.cli.loading import exit_on_interrupt
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE
from jpaged.start.find import find_local

if TYPE_CHECKING:
    from jpaged.doctor import Report

PEERS = ENGINE
GIB, MIB = 2**30, 2**20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged doctor`."""
    add = parser.add_argument_group("report").add_argument
    add("--json", action="store_true", help="print the report as JSON")
    add("--retest", action="store_true", help="test the kernels again instead of using stored results")
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged doctor`."""
    config = config_of(args, EngineConfig)
    find_local(config.model, revision=config.revision)
    # The tests run in a process of their own, which needs the memory that jax would take for this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pallas_kernels").setLevel(logging.INFO)  # the progress of tests
    with exit_on_interrupt():
        from jpaged.doctor import examine  # it loads jax

    report = examine(config, retest=args.retest)
    print(json.dumps(asdict(report), indent=1) if args.json else "\n".join(lines(report)))
    if report.problems:
        sys.exit(1)


def lines(report: "Report") -> Iterator[str]:
    """Yield the lines of a report as text; a section without lines is left out."""
    cache, host = report.cache, report.host
    state = "writable" if cache.writable else "not writable"
    memory, disk = host.memory_available_bytes / GIB, host.disk_free_bytes / GIB
    sections: dict[str, Iterable[str]] = {
        "devices": _devices(report),
        "versions": (f"{name:20} {version}" for name, version in report.versions.items()),
        "settings": (f"{each.setting:24} {each.value!s:10} {each.reason}" for each in report.settings),
        f"kernels for {report.model}" if report.model else "kernels": (
            f"{op.op:24} {op.implementation:10} {op.reason}" for op in report.ops
        ),
        "self-test": _tests(report),
        "compilation cache": [f"{cache.path}: {cache.entries} files, {cache.size_bytes / MIB:.1f} MiB, {state}"],
        "host": [f"{memory:.1f} GiB of memory available, {disk:.1f} GiB of disk free"],
        "warnings": report.warnings,
        "problems": report.problems,
    }
    for title, rows in sections.items():
        if indented := [f"  {row}" for row in rows]:
            yield from (title, *indented)
    yield "" if report.problems else "all is well"


def _devices(report: "Report") -> Iterator[str]:
    for device in report.devices:
        capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
        yield f"{device.kind} ({device.platform}{capability})"
    for card in report.cards:
        free, total = card.free_bytes / GIB, card.total_bytes / GIB
        yield f"{card.name}: {free:.1f} of {total:.1f} GiB free, as the driver sees it"


def _tests(report: "Report") -> Iterator[str]:
    if report.self_test:
        yield report.self_test
    for result in report.tests:
        when = f"stored on {result.tested_at}" if result.remembered else "just now"
        said = f": {result.reason}" if result.reason else ""
        yield f"{result.program:10} {result.test:24} {result.status} ({when}){said}"
