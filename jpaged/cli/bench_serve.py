"""Measure a server under load: any that speaks the OpenAI API, as jpaged, vLLM and SGLang do.

  jpaged bench serve --request-rate 4                         ShareGPT's lengths, Poisson arrivals
  jpaged bench serve --request-rate 1 2 4 8 --out curve.json  the same at four rates: latency against rate
  jpaged bench serve --workload random --input-len 1000 --output-len 100 --concurrency 32
  jpaged bench serve --url http://host:8000 --endpoint chat --workload file --file requests.jsonl

Prompts have as many tokens as drawn, by the server's own count (asked through /tokenize, or else through requests for
a single token), including tokens that the server adds. Prompts too long for its max_model_len are shortened, and a note
says how many. The exit status is 1 if any request failed.
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
    parser.epilog = measure.__doc__
    add = parser.add_argument_group("the server").add_argument
    add("--url", default="http://127.0.0.1:8000", help="where it is")
    add("--model", metavar="NAME", help="model to request (default: the first that the server lists)")
    add("--endpoint", choices=tuple(PATHS), default="completions", help="which of its endpoints")
    add("--api-key", metavar="KEY", help=f"its key (default: the environment's {' or '.join(API_KEYS)})")
    workload.add_flags(parser)

    add = parser.add_argument_group("the load").add_argument
    add("--request-rate", dest="rates", type=float, nargs="+", default=[math.inf], metavar="R",
        help="requests per second, inf for all at once; of several rates each is a run (default: inf)")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="1: Poisson arrivals; less: in bursts; more: evener (the shape of a gamma distribution)")  # fmt: skip
    add("--concurrency", type=int, metavar="C", help="most requests at a time (default: any number)")
    add("--seed", type=int, default=0, help="of lengths, texts and arrivals: the same seed, the same requests. A "
        "prefix cache remembers them, so change it from run to run")  # fmt: skip
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the first that is measured")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="a request fails after so long")

    add = parser.add_argument_group("the requests").add_argument
    add("--ignore-eos", action=argparse.BooleanOptionalAction,
        help="let no output end before its length. A field of vLLM's that jpaged and SGLang know and OpenAI's own API "
        "refuses (default: for drawn lengths, not for a file)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="of all requests")
    add("--token-ids", action="store_true", help="send prompts as token ids, of exactly the length drawn")
    add("--tokenizer", metavar="MODEL", help="count tokens here, with this directory's or hub id's tokenizer")

    add = parser.add_argument_group("the report").add_argument
    add("--goodput", nargs="+", type=limit, default=[], metavar="NAME:MS",
        help=f"count requests within such latencies, as ttft:200 tpot:50; of {', '.join(measure.LIMITED)}")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="write everything to this file too, as JSON")
    add("--per-request", action="store_true", help="in it, the times of every request and of every chunk")


def limit(text: str) -> tuple[str, float]:
    """A goodput's limit."""
    name, _, milliseconds = text.partition(":")
    return name, float(milliseconds)


def run(args: argparse.Namespace) -> None:
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
    """Lets this process have many files open: requests that run at the same time need one each."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit either
        return
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if most == resource.RLIM_INFINITY else min(most, MANY)
    if least != resource.RLIM_INFINITY and least < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def bench(url: str, api_key: str | None, settings: Settings) -> Result:
    from jpaged.bench.client import Client

    async with Client(url, api_key, timeout=settings.timeout) as client:
        return await bench_server(client, settings, progress=sys.stderr.isatty())
