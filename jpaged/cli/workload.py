"""Flags for the workload of a benchmark."""

import argparse
from dataclasses import fields
from pathlib import Path

from jpaged.bench.workload import DATASETS, KINDS, Workload
from jpaged.cli.parser import count


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload."""
    defaults = Workload()
    means = "; ".join(f"{n.lower()}: {d.prompt:g} in, {d.output:g} out" for n, d in DATASETS.items())
    group = parser.add_argument_group(
        "workload",
        "sharegpt and alpaca draw log-normal lengths with the means of the PagedAttention paper, in tokens "
        f"({means}). random draws lengths uniformly around --input-len and --output-len; shared-prefix does the same "
        "after one of --num-prefixes common prefixes. The texts are common words. file reads requests as JSON lines, "
        '{"prompt": ...} or {"messages": ...} with "max_tokens", or in ShareGPT\'s JSON format.',
    )
    add = group.add_argument
    add("--workload", dest="kind", choices=KINDS, default=defaults.kind, help="source of the requests")
    add("--num-prompts", type=int, default=defaults.num_prompts, metavar="N", help="number of requests")
    add("--input-len", type=count, default=defaults.input_len, metavar="TOKENS",
        help="prompt length for random and shared-prefix")  # fmt: skip
    add("--output-len", type=count, default=defaults.output_len, metavar="TOKENS",
        help="output length for random and shared-prefix, and for lines without max_tokens")  # fmt: skip
    add("--range-ratio", type=float, default=defaults.range_ratio, metavar="R",
        help="draw lengths between (1 - R) and (1 + R) times the given length")  # fmt: skip
    add("--prefix-len", type=count, default=defaults.prefix_len, metavar="TOKENS",
        help="length of each prefix for shared-prefix, in addition to --input-len")  # fmt: skip
    add("--num-prefixes", type=int, default=defaults.num_prefixes, metavar="N",
        help="number of prefixes for shared-prefix")  # fmt: skip
    add("--file", type=Path, metavar="FILE", help="file with requests for --workload file")


def workload(args: argparse.Namespace) -> Workload:
    """Return the workload of the flags."""
    return Workload(**{field.name: getattr(args, field.name) for field in fields(Workload)})
