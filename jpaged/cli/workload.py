"""Flags for the workload of a benchmark."""

import argparse

from jpaged.bench.workload import DATASETS, Workload
from jpaged.cli.setting_flags import add_settings, config_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the workload."""
    means = "; ".join(f"{n.lower()}: {d.prompt:g} in, {d.output:g} out" for n, d in DATASETS.items())
    add_settings(
        parser, Workload, description="sharegpt and alpaca draw log-normal lengths with the means of the "
        f"PagedAttention paper, in tokens ({means}). random draws lengths uniformly around --input-len and "
        "--output-len; shared-prefix does the same after one of --num-prefixes common prefixes. The texts are common "
        'words. file reads requests as JSON lines, {"prompt": ...} or {"messages": ...} with "max_tokens", or in '
        "ShareGPT's JSON format.",
    )  # fmt: skip


def workload(args: argparse.Namespace) -> Workload:
    """Return the workload of the flags."""
    return config_of(args, Workload)
