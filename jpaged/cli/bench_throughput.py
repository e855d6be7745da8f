"""Measure an engine without a server: all requests of a workload are submitted at once.

  jpaged bench throughput                                        the demo model, ShareGPT's lengths
  jpaged bench throughput --model DIR --workload random --input-len 1000 --output-len 100
  jpaged bench throughput --model DIR --load-format dummy        random weights, if only the speed matters

Prompts of drawn lengths are token ids; their outputs are greedy and have the drawn length. Prompts that exceed the
model's length are shortened, and a note gives their number. The time excludes loading and compilation.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from jpaged.cli import workload
from jpaged.cli.loading import loading
from jpaged.cli.serve import add_engine_flags, engine_config
from jpaged.flags import ENGINE

PEERS = ENGINE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged bench throughput`."""
    workload.add_flags(parser)
    parser.add_argument_group("report").add_argument(
        "--out", type=Path, metavar="FILE", help="also write the report to this file, as JSON"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged bench throughput`."""
    config, requests = engine_config(args), workload.workload(args)
    with loading() as bars:
        from jpaged.bench.throughput import bench_engine  # it loads jax
        from jpaged.llm import LLM

        llm = LLM(**asdict(config), progress=bars)
    found = bench_engine(llm, requests, progress=bars)
    for note in found.notes:
        print(f"Note: {note}.")
    print(f"{requests.kind}: {found.requests} requests, {found.prompt_tokens} tokens in, {found.output_tokens} out, "
          f"in {found.duration:.2f} s")  # fmt: skip
    per_second = {
        "requests/s": found.requests, "output tokens/s": found.output_tokens,
        "tokens/s in and out": found.prompt_tokens + found.output_tokens,
    }  # fmt: skip
    print("throughput:", ", ".join(f"{amount / found.duration:.2f} {name}" for name, amount in per_second.items()))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {"engine": asdict(config), "workload": asdict(requests)}
        args.out.write_text(json.dumps({"settings": settings, **asdict(found)}, indent=1, default=str) + "\n")
