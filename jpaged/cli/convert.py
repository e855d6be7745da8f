"""Store a model's parameters in another format, exactly; its config and its tokenizer come along.

  jpaged convert org/name DIR --to orbax
  jpaged convert DIR OTHER_DIR --to safetensors

All commands load models in either format.
"""

import argparse
from pathlib import Path

from jpaged.cli.loading import exit_on_interrupt


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT"
    parser.add_argument("source", metavar="SOURCE", help="a directory, a hub id, or demo")
    parser.add_argument("target", metavar="TARGET", type=Path, help="the directory to make")
    parser.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="the format")


def run(args: argparse.Namespace) -> None:
    with exit_on_interrupt():
        from jpaged.convert import convert  # it loads jax

    dtype = convert(args.source, args.target, args.to)
    print(f"{args.source} -> {args.target} ({args.to}, {dtype})")
