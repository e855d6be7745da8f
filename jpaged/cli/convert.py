"""Convert a model's parameters to another format without loss, and copy its config and tokenizer.

  jpaged convert org/name DIR --to orbax
  jpaged convert DIR OTHER_DIR --to safetensors

All commands load both formats.
"""

import argparse
from pathlib import Path

from jpaged.cli.loading import exit_on_interrupt


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged convert`."""
    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT"
    parser.add_argument("source", metavar="SOURCE", help="directory, hub id, or demo")
    parser.add_argument("target", metavar="TARGET", type=Path, help="new directory")
    parser.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="new format")


def run(args: argparse.Namespace) -> None:
    """Run `jpaged convert`."""
    with exit_on_interrupt():
        from jpaged.convert import convert  # it loads jax

    dtype = convert(args.source, args.target, args.to)
    print(f"{args.source} -> {args.target} ({args.to}, {dtype})")
