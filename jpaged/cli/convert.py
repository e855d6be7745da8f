"""Convert a model's parameters to another format, by default without loss, and copy its config and tokenizer.

  jpaged convert org/name DIR --to orbax
  jpaged convert DIR OTHER_DIR --to safetensors
  jpaged convert FILE.gguf DIR --to safetensors --dtype bfloat16

All commands load both formats, and files in GGUF. Quantized weights of GGUF need float32 to be exact, the default.
"""

import argparse
from pathlib import Path

from jpaged.cli.loading import exit_on_interrupt
from jpaged.config import DTYPES
from jpaged.start.find import find_local


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged convert`."""
    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT"
    parser.add_argument("source", metavar="SOURCE", help="directory, file in GGUF, hub id, or demo")
    parser.add_argument("target", metavar="TARGET", type=Path, help="new directory")
    parser.add_argument("--to", required=True, choices=("orbax", "safetensors"), help="new format")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="new dtype (default: the one that holds all parameters exactly)"
    )


def run(args: argparse.Namespace) -> None:
    """Run `jpaged convert`."""
    find_local(args.source)
    with exit_on_interrupt():
        from jpaged.convert import convert  # it loads jax

    dtype = convert(args.source, args.target, args.to, args.dtype)
    print(f"{args.source} -> {args.target} ({args.to}, {dtype})")
