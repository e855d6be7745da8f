"""Serve a Llama of 110 million parameters on a CPU beside other servers: throughput, first token, inter-token latency.

    python benchmarks/engine/cpu_serving.py --out results
    python benchmarks/engine/cpu_serving.py --server "NAME=other serve --model {model} --port {port}"

All servers run from the beginning to the end, and are measured in turn, in an order that alternates from round to
round: ShareGPT-like and Alpaca-like requests, sixteen at a time, then single streams behind prompts of 128 tokens.
Parameters are random (`--load-format dummy`), so that no output ends before its length; float32. Figures are medians
over the rounds.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.shared.command_server import serving
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from jpaged.bench.client import Client
from jpaged.bench.serve import Settings, bench_server
from jpaged.bench.source import WORDS
from jpaged.bench.workload import Workload

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
CONCURRENCY = 16
OWN = (
    f"{sys.executable} {ROOT / 'server.py'} --model {{model}} --port {{port}} --load-format dummy --dtype float32 "
    f"--max-num-seqs {CONCURRENCY}"
)


def write_model(directory: Path) -> Path:
    """Write a config and a tokenizer with one word for each token id; the parameters are the servers' own.

    The first words are those of prompts: were they unknown, all prompts would be one token many times.
    """
    (directory / "config.json").write_text(json.dumps(CONFIG))
    words = ["w0", "w1", "w2", *dict.fromkeys(WORDS)]
    words += [f"w{i}" for i in range(len(words), CONFIG["vocab_size"])]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2", "bos_token": "w1"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def workloads(scale: float, number: int) -> dict[str, Settings]:
    """Return the settings of each workload of a round. Each draws texts of its own, which no cache knows."""
    seeds = itertools.count(3 * number)

    def settings(kind: str, count: int, concurrency: int, **lengths: int) -> Settings:
        seed = next(seeds)
        work = Workload(kind=kind, num_prompts=max(1, round(scale * count)), seed=seed, **lengths)
        return Settings(work, concurrency=concurrency, token_ids=True)

    return {
        "ShareGPT-like": settings("sharegpt", 32, CONCURRENCY),
        "Alpaca-like": settings("alpaca", 64, CONCURRENCY),
        "single stream": settings("random", 4, 1, input_len=128, output_len=64),
    }


async def measure(url: str, settings: Settings) -> Mapping[str, float]:
    """Send a workload, and return its figures; latencies are in milliseconds."""
    async with Client(url, None, timeout=1800) as client:
        (run,) = (await bench_server(client, settings, progress=False)).runs
    found = run.measurement
    assert found.completed == found.requests, found.failures
    first, gaps, each = (found.latencies[name] for name in ("ttft", "itl", "tpot"))
    assert first is not None and gaps is not None and each is not None
    return {
        "prompt_tokens": found.prompt_tokens, "tokens_s": found.output_throughput, "ttft_ms": 1e3 * first.median,
        "ttft_p99_ms": 1e3 * first.p99, "tpot_ms": 1e3 * each.median,
        "itl_ms": 1e3 * gaps.median, "itl_p99_ms": 1e3 * gaps.p99,
    }  # fmt: skip


COLUMNS = ("tokens_s", "ttft_ms", "ttft_p99_ms", "tpot_ms", "itl_ms", "itl_p99_ms")


def publish(report: Report, names: Sequence[str]) -> None:
    """Publish the medians over the rounds, and the ratios of the first server's to those of each other server."""
    kinds = list(dict.fromkeys(row["workload"] for row in report.rows))
    medians = {
        (kind, name): {
            column: statistics.median(
                row[column] for row in report.rows if (row["workload"], row["server"]) == (kind, name)
            ) for column in COLUMNS
        } for kind in kinds for name in names
    }  # fmt: skip
    rows = [{"workload": kind, "server": name} | medians[kind, name] for kind in kinds for name in names]
    ratios = [
        {"workload": kind, "to": name}
        | {column: medians[kind, names[0]][column] / medians[kind, name][column] for column in COLUMNS}
        for kind in kinds for name in names[1:]
    ]  # fmt: skip
    parts = [
        f"12 layers, hidden 768, float32, {CONCURRENCY} requests at a time (one for single streams, behind prompts of "
        "128 tokens). Output tokens per second; time to first token, time per output token and inter-token "
        "latency (between two chunks, in which some servers put several tokens) in milliseconds. Medians of "
        f"{max(row['round'] for row in report.rows) + 1} rounds.",
        table(rows, ("workload", "server", *COLUMNS)),
    ]  # fmt: skip
    if ratios:
        parts += [f"## {names[0]} over the others", table(ratios, ("workload", "to", *COLUMNS))]
    report.publish("A Llama of 110 million parameters on a CPU", *parts)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "cpu_serving")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND",
        help="another server, by the shell; {model} and {port} are replaced")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each server is measured")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="times as many requests")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    servers = {"jpaged": OWN} | dict(given.split("=", 1) for given in args.server)
    report.environment["servers"] = list(servers)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        model = write_model(Path(folder))
        urls = {}
        for name, command in servers.items():
            server = running.enter_context(serving(name, command, model=model))
            report.say(f"{name} serves after {server.start_s:.0f} s")
            urls[name] = server.url
        for number in range(args.rounds):
            for kind, settings in workloads(args.scale, number).items():
                for name in list(urls) if number % 2 == 0 else list(reversed(urls)):
                    figures = asyncio.run(measure(urls[name], settings))
                    report.add(experiment="cpu serving", workload=kind, server=name, round=number, **figures)
    publish(report, list(servers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
