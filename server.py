"""Serves a model over HTTP, in the OpenAI API's form: `python server.py` is `jpaged serve`."""

import argparse
import sys
from collections.abc import Sequence

from jpaged.cli.main import load, parser, run
from jpaged.config import EngineConfig

__all__ = ["EngineConfig", "main", "parse_args"]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    args: argparse.Namespace = parser("serve", load("serve"), "server.py").parse_args(
        sys.argv[1:] if argv is None else argv
    )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    run("serve", sys.argv[1:] if argv is None else argv, prog="server.py")


if __name__ == "__main__":
    main()
