"""The flags that say which requests a benchmark makes."""

import argparse
from dataclasses import fields
from pathlib import Path

from jpaged.bench.workload import DATASETS, KINDS, Workload
from jpaged.cli.parser import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    defaults = Workload()
    means = "; ".join(f"{n.lower()}: {d.prompt:g} in, {d.output:g} out" for n, d in DATASETS.items())
    group = parser.add_argument_group(
        "the workload",
        "sharegpt and alpaca draw log-normal lengths with the means of the PagedAttention paper, in tokens "
        f"({means}). random draws them evenly around --input-len and --output-len; so "
        "does shared-prefix, behind one of --num-prefixes beginnings. Their texts are common words. file has requests "
        'as JSON lines, {"prompt": ...} or {"messages": ...} with "max_tokens", or is ShareGPT\'s JSON.',
    )
    add = group.add_argument
    add("--workload", dest="kind", choices=KINDS, default=defaults.kind, help="where the requests come from")
    add("--num-prompts", type=int, default=defaults.num_prompts, metavar="N", help="how many requests there are")
    add("--input-len", type=count, default=defaults.input_len, metavar="TOKENS", help="of random and shared-prefix")
    add("--output-len", type=count, default=defaults.output_len, metavar="TOKENS",
        help="of random and shared-prefix, and of lines without max_tokens")  # fmt: skip
    add("--range-ratio", type=float, default=defaults.range_ratio, metavar="R",
        help="lengths between (1 - R) and (1 + R) times the one given")  # fmt: skip
    add("--prefix-len", type=count, default=defaults.prefix_len, metavar="TOKENS",
        help="of shared-prefix: tokens before --input-len others")  # fmt: skip
    add("--num-prefixes", type=int, default=defaults.num_prefixes, metavar="N", help="of shared-prefix: how many")
    add("--file", type=Path, metavar="FILE", help="of file")


def workload(args: argparse.Namespace) -> Workload:
    return Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)})
