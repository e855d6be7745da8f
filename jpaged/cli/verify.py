"""Compute certified outputs again, and compare them to the bit.

  jpaged verify outputs.jsonl                       the demo model
  jpaged verify outputs.jsonl --model DIR --dtype bfloat16

FILE has a line of JSON for each request: as `jpaged.replay.save(outputs, FILE)` writes outputs of requests with
certificate=True, or responses of the server to requests with certificate and return_token_ids. The engine needs the
settings that the certificates name, such as --dtype and --block-size; a difference is named. The exit status is 0 if
all outputs are equal, and 1 otherwise.
"""

import argparse
import sys
from dataclasses import asdict

from jpaged.cli.loading import loading
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE
from jpaged.replay import load
from jpaged.start.find import find_local

PEERS = ENGINE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged verify`."""
    parser.usage = "%(prog)s FILE [flags]"
    parser.add_argument("file", metavar="FILE", help="certified outputs, a line of JSON for each request")
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged verify`."""
    outputs, config = load(args.file), config_of(args, EngineConfig)
    if not any(request.outputs for request in outputs):
        raise ValueError(f"{args.file}: has no outputs")
    find_local(config.model, revision=config.revision)
    with loading() as bars:
        from jpaged.llm import LLM  # it loads jax

        llm = LLM(**asdict(config), progress=bars)
    results = llm.replay(outputs, use_tqdm=bars)
    different = [result for result in results if not result.equal]
    for result in different:
        print(f"request {result.request_id}, output {result.index}: {result}")
    num_refused = sum(not result.replayed for result in different)
    counts = {"equal": len(results) - len(different), "different": len(different) - num_refused}
    for name, count in (counts | {"not replayed": num_refused}).items():
        print(f"{name:12} {count:6,}")
    if different:
        sys.exit(1)
