"""Measure a server with the OpenAI API under load: jpaged, vLLM, SGLang and others.

  jpaged bench serve --request-rate 4                         ShareGPT's lengths, Poisson arrivals
  jpaged bench serve --request-rate 1 2 4 8 --out curve.json  the same at four rates: latency against rate
  jpaged bench serve --workload random --input-len 1000 --output-len 100 --concurrency 32
  jpaged bench serve --url http://host:8000 --endpoint chat --workload file --file requests.jsonl

Prompts have the drawn number of tokens by the server's own count (from /tokenize, or else from requests for a single
token), including tokens that the server adds. Prompts that exceed its max_model_len are shortened, and a note gives
their number. The exit status is 1 if any request failed.
"""

import argparse
import asyncio
import json
import math
import sys
from dataclasses import fields
from pathlib import Path

from jpaged.bench import measure
from jpaged.bench.serve import Result, Settings, bench_server
from jpaged.bench.tokens import PATHS
from jpaged.cli import workload
from jpaged.cli.model import API_KEYS, api_key

MANY = 65_536  # connections


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged bench serve`."""
    parser.epilog = measure.__doc__
    add = parser.add_argument_group("server").add_argument
    add("--url", default="http://127.0.0.1:8000", help="address of the server")
    add("--model", metavar="NAME", help="model to request (default: the first that the server lists)")
    add("--endpoint", choices=tuple(PATHS), default="completions", help="endpoint of the requests")
    add("--api-key", metavar="KEY", help=f"key of the server (default: the environment's {' or '.join(API_KEYS)})")
    workload.add_flags(parser)

    add = parser.add_argument_group("load").add_argument
    add("--request-rate", dest="rates", type=float, nargs="+", default=[math.inf], metavar="R",
        help="requests per second; inf: all at once; several rates: one run each (default: inf)")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="shape of the gamma distribution of arrivals; 1: Poisson; below 1: bursts; above 1: evener")  # fmt: skip
    add("--concurrency", type=int, metavar="C", help="maximum requests at a time (default: no limit)")
    add("--seed", type=int, default=0, help="seed of lengths, texts and arrivals; change it between runs, because "
        "a prefix cache remembers the prompts")  # fmt: skip
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the measurement")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="maximum time of a request")

    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action=argparse.BooleanOptionalAction,
        help="generate the full output length; a vLLM field that jpaged and SGLang accept and OpenAI's API rejects "
        "(default: for drawn lengths, not for a file)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="temperature of all requests")
    add("--token-ids", action="store_true", help="send prompts as token ids of exactly the drawn length")
    add("--tokenizer", metavar="MODEL", help="directory or hub id of a tokenizer that counts tokens in this process")

    add = parser.add_argument_group("report").add_argument
    add("--goodput", nargs="+", type=limit, default=[], metavar="NAME:MS",
        help=f"count requests within latencies, such as ttft:200 tpot:50; of {', '.join(measure.LIMITED)}")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="also write the report to this file, as JSON")
    add("--per-request", action="store_true", help="include the times of each request and chunk in the file")


def limit(text: str) -> tuple[str, float]:
    """Parse a limit of the goodput."""
    name, _, milliseconds = text.partition(":")
    return name, float(milliseconds)


def run(args: argparse.Namespace) -> None:
    """Run `jpaged bench serve`.

    Raises:
        ConnectionError: a request failed.
    """
    from jpaged.bench import report

    args.workload, args.goodput = workload.workload(args), dict(args.goodput)
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    allow_connections()
    result = asyncio.run(bench(args.url, api_key(args), settings))
    print(report.text(result, settings))
    if args.out:
        content = report.document(result, settings, args.url, per_request=args.per_request)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    found = [run.measurement for run in result.runs]
    if failed := sum(each.requests - each.completed for each in found):
        raise ConnectionError(f"{failed} of {sum(each.requests for each in found)} requests failed")


def allow_connections() -> None:
    """Raise this process's limit of open files: each concurrent request needs one."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit either
        return
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if most == resource.RLIM_INFINITY else min(most, MANY)
    if least != resource.RLIM_INFINITY and least < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def bench(url: str, api_key: str | None, settings: Settings) -> Result:
    """Measure the server at `url`."""
    from jpaged.bench.client import Client

    async with Client(url, api_key, timeout=settings.timeout) as client:
        return await bench_server(client, settings, progress=sys.stderr.isatty())
