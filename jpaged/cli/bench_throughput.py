"""Measure an engine without a server: all requests of a workload are submitted at once.

  jpaged bench throughput                                        the demo model, ShareGPT's lengths
  jpaged bench throughput --model DIR --workload random --input-len 1000 --output-len 100
  jpaged bench throughput --model DIR --load-format dummy        random weights, if only the speed matters

Prompts of drawn lengths are token ids; their outputs are greedy and have the drawn length. Prompts that exceed the
model's length are shortened, and a note gives their number. The time excludes loading and compilation.
"""

import argparse
from dataclasses import asdict

from jpaged.bench.workload import Workload
from jpaged.cli import workload
from jpaged.cli.loading import loading
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.flags import ENGINE
from jpaged.start.find import find_local

PEERS = ENGINE


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged bench throughput`."""
    workload.add_flags(parser)
    workload.add_out_flag(parser.add_argument_group("report"))
    add_settings(parser, EngineConfig)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged bench throughput`."""
    config, requests = config_of(args, EngineConfig), config_of(args, Workload)
    find_local(config.model, revision=config.revision)
    with loading() as bars:
        from jpaged.bench.throughput import bench_engine  # it loads jax
        from jpaged.llm import LLM

        llm = LLM(**asdict(config), progress=bars)
    result = bench_engine(llm, requests, progress=bars)
    for note in result.notes:
        print(f"Note: {note}.")
    print(
        f"{requests.kind}: {result.requests} requests, {result.prompt_tokens} tokens in, "
        f"{result.output_tokens} out, in {result.duration:.2f} s"
    )
    amounts = {
        "requests/s": result.requests,
        "output tokens/s": result.output_tokens,
        "tokens/s in and out": result.prompt_tokens + result.output_tokens,
    }
    print("throughput:", ", ".join(f"{amount / result.duration:.2f} {name}" for name, amount in amounts.items()))
    if args.out:
        settings = {"engine": asdict(config), "workload": asdict(requests)}
        workload.write_report(args.out, {"settings": settings, **asdict(result)})
