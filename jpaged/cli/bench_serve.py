"""Measure a server with the OpenAI API under load: jpaged, vLLM, SGLang and others.

  jpaged bench serve --request-rate 4                         ShareGPT's lengths, Poisson arrivals
  jpaged bench serve --request-rate 1 2 4 8 --out curve.json  the same at four rates: latency against rate
  jpaged bench serve --workload random --input-len 1000 --output-len 100 --concurrency 32
  jpaged bench serve --url http://host:8000 --endpoint chat --workload file --file requests.jsonl
  jpaged bench serve --dataset-name random --random-input-len 1000 --save-result    flags and keys of vllm bench serve

Prompts have the drawn number of tokens by the server's own count (from /tokenize, or else from requests for a single
token), including tokens that the server adds. Prompts that exceed its max_model_len are shortened, and a note gives
their number. The exit status is 1 if any request failed.
"""

import argparse
import asyncio
import math
import sys
from dataclasses import fields
from pathlib import Path

from jpaged.bench import measure
from jpaged.bench.serve import Result, Settings, bench_server
from jpaged.bench.tokens import PATHS
from jpaged.bench.vllm_result import METRICS
from jpaged.bench.workload import Workload
from jpaged.cli import workload
from jpaged.cli.model import API_KEYS, api_key
from jpaged.cli.peer_flags import Object
from jpaged.cli.setting_flags import config_of
from jpaged.flags import Table
from jpaged.serving.listen import allow_many_connections

PEERS = Table.read("jpaged.cli", "bench_flags.toml")
BACKENDS = ("openai", "openai-chat", "vllm", "vllm-chat", "sglang", "sglang-oai", "sglang-oai-chat", "lmdeploy", "tgi")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jpaged bench serve`."""
    parser.epilog = measure.__doc__
    add = parser.add_argument_group("server").add_argument
    add("--url", help="address of the server (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="host of the server")
    add("--port", type=int, default=8000, help="port of the server")
    add("--backend", choices=BACKENDS, default="openai",
        help="kind of the server, for --save-result; those of chat set --endpoint chat")  # fmt: skip
    add("--model", metavar="NAME", help="model to request (default: the first that the server lists)")
    add("--served-model-name", metavar="NAME", help="model to request, if --model is a name for readers")
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
    _add_request_flags(parser)


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the fields of requests, and for reports."""
    add = parser.add_argument_group("requests").add_argument
    add("--ignore-eos", action=argparse.BooleanOptionalAction,
        help="generate the full output length; a vLLM field that jpaged and SGLang accept and OpenAI's API rejects "
        "(default: for drawn lengths, not for a file)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="temperature of all requests")
    add("--token-ids", action="store_true", help="send prompts as token ids of exactly the drawn length")
    add("--extra-body", metavar="JSON", action=Object, help="further fields of each request (default: none)")
    add("--tokenizer", metavar="MODEL", help="directory or hub id of a tokenizer that counts tokens in this process")
    group = parser.add_argument_group("report")
    group.add_argument("--goodput", nargs="+", type=limit, default=[], metavar="NAME:MS",
        help=f"count requests within latencies, such as ttft:200 tpot:50; of {', '.join(measure.LIMITED)}")  # fmt: skip
    workload.add_out_flag(group)
    text = "include the times of each request and chunk in the file"
    group.add_argument("--per-request", action="store_true", help=text)
    add = parser.add_argument_group("results as of `vllm bench serve`").add_argument
    add("--save-result", action="store_true", help="write a file with its keys for each rate")
    add("--save-detailed", action="store_true", help="include the values of each request")
    add("--result-dir", type=Path, metavar="DIR", default=Path(), help="directory of the files")
    add("--result-filename", metavar="FILE", help="name of the file (default: of label, rate, model and time)")
    add("--label", help="first part of the name (default: the backend)")
    add("--metadata", nargs="*", type=pair, metavar="KEY=VALUE", default=[], help="further keys of the file")
    add("--percentile-metrics", type=metrics, metavar="NAMES", default="ttft,tpot,itl",
        help=f"latencies in the file; of {','.join(METRICS)}")  # fmt: skip
    add("--metric-percentiles", type=percentiles, metavar="P", default="99", help="percentiles of each, such as 50,99")


def limit(text: str) -> tuple[str, float]:
    """Parse a limit of the goodput."""
    name, _, milliseconds = text.partition(":")
    return name, float(milliseconds)


def pair(text: str) -> tuple[str, str]:
    """Parse KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, not {text!r}")
    return key.strip(), value.strip()


def metrics(text: str) -> list[str]:
    """Parse names of latencies, separated by commas."""
    if unknown := [name for name in text.split(",") if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(METRICS)}")
    return text.split(",")


def percentiles(text: str) -> list[float]:
    """Parse percentiles, separated by commas."""
    numbers = [float(part) for part in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, not {text}")
    return numbers


def run(args: argparse.Namespace) -> None:
    """Run `jpaged bench serve`.

    Raises:
        ConnectionError: a request failed.
    """
    from jpaged.bench import report

    if args.file and args.kind == "sharegpt":  # as vLLM names its file
        args.kind = "file"
    args.workload, args.goodput = config_of(args, Workload), dict(args.goodput)
    args.model = args.served_model_name or args.model
    if args.backend.endswith("-chat"):
        args.endpoint = "chat"
    if args.result_filename and len(args.rates) > 1:
        raise ValueError(f"result_filename: needs one request rate, not {len(args.rates)}")
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    url = args.url or f"http://{args.host}:{args.port}"
    allow_many_connections()
    result = asyncio.run(bench(url, api_key(args), settings))
    print(report.text(result, settings))
    if args.out:
        workload.write_report(args.out, report.document(result, settings, url, per_request=args.per_request))
    if args.save_result:
        _save_results(args, result, settings)
    measurements = [run.measurement for run in result.runs]
    if failed := sum(each.requests - each.completed for each in measurements):
        raise ConnectionError(f"{failed} of {sum(each.requests for each in measurements)} requests failed")


def _save_results(args: argparse.Namespace, result: Result, settings: Settings) -> None:
    """Write a file with the keys of `vllm bench serve` for each rate."""
    from jpaged.bench import vllm_result

    for run in result.runs:
        content = vllm_result.document(
            result, run, settings, backend=args.backend, label=args.label, metadata=dict(args.metadata),
            metrics=args.percentile_metrics, percentiles=args.metric_percentiles, detailed=args.save_detailed,
        )  # fmt: skip
        at_most = f"-concurrency{args.concurrency}" if args.concurrency else ""
        name = f"{args.label or args.backend}-{run.rate}qps{at_most}-{result.model.split('/')[-1]}-{content['date']}"
        workload.write_report(args.result_dir / (args.result_filename or f"{name}.json"), content)


async def bench(url: str, api_key: str | None, settings: Settings) -> Result:
    """Measure the server at `url`."""
    from jpaged.bench.client import Client

    async with Client(url, api_key, timeout=settings.timeout) as client:
        return await bench_server(client, settings, progress=sys.stderr.isatty())
