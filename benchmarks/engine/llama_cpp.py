"""jpaged beside llama.cpp on a CPU: the same GGUF file in both servers, for each kind of weights.

    python benchmarks/engine/llama_cpp.py --llama-server PATH --model FILE.gguf --out results
    python benchmarks/engine/llama_cpp.py ... --kinds F32 --only prompt512 chats --rounds 1

`llama-quantize`, which lies beside `llama-server`, makes a file of each kind from the given one. Both servers of a kind
run at the same time, and only one of them works: each figure is measured in both in turn, in an order that alternates
from round to round. Figures are medians over the rounds. Prompts are ids of random words, and new ones in each round,
so that the caches of both servers know only the prefix that the column `cached` shares. Outputs are greedy and do not
end.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import numpy as np

from benchmarks.shared.command_server import Running, serving
from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from jpaged.bench.source import WORDS

ROOT = Path(__file__).parents[2]
CONTEXT, NUM_CHATS, CHAT = 8192, 8, 64
# The dtype of jpaged's activations, where the weights are not quantized.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
JPAGED = (
    f"{sys.executable} {ROOT / 'server.py'} --model {{model}} --port {{port}} --dtype {{dtype}} "
    f"--kv-cache-dtype {{kv_dtype}} --max-model-len {CONTEXT} --max-num-seqs {NUM_CHATS}"
)
LLAMA = (
    "{program} -m {model} --host 127.0.0.1 --port {port} --no-webui -t {threads} -tb {threads} "
    f"-c {CONTEXT} -np {NUM_CHATS} --kv-unified"
)


class Api(NamedTuple):
    """The form of a server's requests and answers.

    Attributes:
        fields: of the body, beside the prompt and the number of tokens.
        count: the number of tokens in an event of a stream. llama.cpp sends no tokens while their text ends inside a
            character, but states the number of all tokens in the last event.
    """

    path: str
    length: str
    fields: dict[str, Any]
    count: Callable[[dict[str, Any]], int]


APIS = {
    "jpaged": Api(
        "/v1/completions", "max_tokens", {"temperature": 0, "ignore_eos": True, "return_token_ids": True},
        lambda event: sum(len(choice.get("token_ids") or ()) for choice in event["choices"]),
    ),
    "llama.cpp": Api(
        "/completion", "n_predict", {"temperature": 0, "ignore_eos": True, "return_tokens": True, "cache_prompt": True},
        lambda event: len(event.get("tokens", ())),
    ),
}  # fmt: skip


class Streamed(NamedTuple):
    """A request's seconds to its first and its last tokens, and the numbers of tokens in the first event and in all."""

    first_s: float
    last_s: float
    first: int
    total: int


async def stream(session: aiohttp.ClientSession, name: str, url: str, ids: list[int], length: int) -> Streamed:
    """Send a prompt, and read its output.

    Raises:
        RuntimeError: the server refuses the request or returns fewer tokens.
    """
    api, seen, stated = APIS[name], [], 0
    body = {"prompt": ids, api.length: length, "stream": True, **api.fields}
    start = time.perf_counter()
    async with session.post(url + api.path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{name}: HTTP {response.status}, {(await response.text())[:500]}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = json.loads(data)
                stated = event.get("tokens_predicted", 0)
                if (count := api.count(event)) or stated == length:
                    seen.append((time.perf_counter() - start, count))
    total = max(stated, sum(count for _, count in seen))
    if total != length:
        raise RuntimeError(f"{name}: {total} tokens instead of {length}")
    return Streamed(seen[0][0], seen[-1][0], seen[0][1], total)


async def word_ids(session: aiohttp.ClientSession, url: str) -> list[int]:
    """Return the ids of some words, from jpaged."""
    body = {"prompt": " ".join(WORDS), "add_special_tokens": False}
    async with session.post(f"{url}/tokenize", json=body) as response:
        return sorted(set((await response.json())["tokens"]))


class Bench:
    """The measurements of one server in one round. Both servers get the same prompts, which `seed` draws of `words`."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str, words: list[int], seed: Sequence[int]):
        self.session, self.name, self.url = session, name, url
        self._words, self._rng = words, np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        return self._rng.choice(self._words, count).tolist()

    async def run(self, ids: list[int], length: int) -> Streamed:
        return await stream(self.session, self.name, self.url, ids, length)

    async def decode(self, context: int, length: int) -> float:
        """Tokens per second of a single stream."""
        done = await self.run(self.ids(context), length)
        return (done.total - done.first) / (done.last_s - done.first_s)

    async def prompt(self, count: int) -> float:
        """Tokens of a prompt per second until its first token."""
        return count / (await self.run(self.ids(count), 1)).last_s

    async def chats(self) -> float:
        """Output tokens per second of several requests at a time."""
        start = time.perf_counter()
        done = await asyncio.gather(*(self.run(self.ids(CHAT), CHAT) for _ in range(NUM_CHATS)))
        return sum(each.total for each in done) / (time.perf_counter() - start)

    async def cached(self) -> float:
        """Milliseconds to the first token behind a cached prefix of 1,000 tokens and 30 new ones."""
        shared = self.ids(1000)
        await self.run(shared + self.ids(30), 1)
        return 1e3 * (await self.run(shared + self.ids(30), 1)).last_s


Measure = Callable[[Bench], Coroutine[Any, Any, float]]
MEASURES: dict[str, Measure] = {
    "decode100": lambda bench: bench.decode(100, 64),
    "decode4000": lambda bench: bench.decode(4000, 32),
    "prompt512": lambda bench: bench.prompt(512),
    "prompt4096": lambda bench: bench.prompt(4096),
    "chats": lambda bench: bench.chats(),
    "cached": lambda bench: bench.cached(),
}
# Units of all columns. Of these, a smaller figure is better.
UNITS = {"start": "s", **{name: "tok/s" for name in MEASURES}, "cached": "ms", "memory": "MiB"}
LESS = ("start", "cached", "memory")


def quantized(source: Path, kind: str, folder: Path, program: Path) -> Path:
    """Return a GGUF file of a kind, which is made if it is not there."""
    target = folder / f"{source.stem}-{kind}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(".part")
        subprocess.run([program, "--allow-requantize", source, scratch, kind], check=True, capture_output=True)
        scratch.rename(target)
    return target


async def rounds(report: Report, kind: str, servers: dict[str, Running], columns: Sequence[str], count: int) -> None:
    """Measure both servers in turn, after a few requests that are not counted."""
    # A server may close an idle connection at the moment in which the client uses it again.
    connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        words = await word_ids(session, servers["jpaged"].url)
        for name, server in servers.items():
            server.wait_until_idle()
            warm_up = Bench(session, name, server.url, words, (0, 0))
            await warm_up.decode(CHAT, CHAT)
            await warm_up.chats()
        for number in range(1, count + 1):
            for index, column in enumerate(columns):
                for name in list(servers) if number % 2 else reversed(servers):
                    bench = Bench(session, name, servers[name].url, words, (number, index))
                    value = await MEASURES[column](bench)
                    report.add(kind=kind, column=column, server=name, round=number, value=value)


def measure(report: Report, commands: dict[str, str], args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Start both servers, one after the other, as often as there are rounds, and measure those started last.

    Args:
        values: for the commands, with the kind of the weights.
    """
    kind = values["kind"]
    columns = [column for column in args.only if column in MEASURES]
    starts = args.rounds if "start" in args.only else 1
    with contextlib.ExitStack() as kept:
        servers: dict[str, Running] = {}
        with serving("jpaged", f"{commands['jpaged']} --warm-up", path="/health", **values) as server:
            report.say(f"{kind}: jpaged has compiled, or loaded, all shapes after {server.start_s:.1f} s")
        for number in range(1, starts + 1):
            for name, command in commands.items():
                with contextlib.ExitStack() as running:
                    servers[name] = running.enter_context(serving(name, command, path="/health", **values))
                    if "start" in args.only:
                        value = servers[name].start_s
                        report.add(kind=kind, column="start", server=name, round=number, value=value)
                    if number == starts:
                        kept.push(running.pop_all())
        asyncio.run(rounds(report, kind, servers, columns, args.rounds))
        if "memory" in args.only:
            for name, server in servers.items():
                value = server.resident_bytes / 2**20
                report.add(kind=kind, column="memory", server=name, round=1, value=value)


def publish(report: Report) -> None:
    """Publish the medians, with the ratio of jpaged to llama.cpp, which is above 1 where jpaged is better."""
    rows: list[Row] = []
    for kind, column in dict.fromkeys((row["kind"], row["column"]) for row in report.rows):
        found = {
            name: statistics.median(
                row["value"]
                for row in report.rows
                if (row["kind"], row["column"], row["server"]) == (kind, column, name)
            )
            for name in APIS
        }
        ratio = found["jpaged"] / found["llama.cpp"]
        rows.append(
            {"kind": kind, "column": f"{column} ({UNITS[column]})"}
            | found
            | {"jpaged is better by": 1 / ratio if column in LESS else ratio}
        )
    ratios: dict[str, Row] = {}
    for row in rows:
        ratios.setdefault(row["kind"], {"kind": row["kind"]})[row["column"]] = row["jpaged is better by"]
    report.publish(
        f"jpaged beside llama.cpp on {report.environment['threads']} threads: {report.environment['model']}",
        "Single streams behind 100 and 4,000 tokens, with 64 and 32 tokens of output; prompts of 512 and 4,096 tokens "
        f"until the first token; {NUM_CHATS} requests at a time, each of {CHAT} tokens and {CHAT} of output; the first "
        "token behind 1,000 cached and 30 new tokens; the time from the start of the process to the first answer, with "
        f"warm caches; resident memory afterwards. Medians of {max(row['round'] for row in report.rows)} rounds.",
        table(ratios.values(), ["kind", *dict.fromkeys(row["column"] for row in rows)]),
        "## Figures",
        table(rows, ("kind", "column", *APIS, "jpaged is better by")),
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "llama_cpp")
    parser.add_argument("--llama-server", type=Path, required=True, metavar="PATH", help="the program")
    parser.add_argument("--llama-quantize", type=Path, metavar="PATH", help="by default the one beside llama-server")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument("--kinds", nargs="+", default=["F32", "BF16", "Q8_0", "Q4_1"], metavar="KIND",
        help="of weights, as llama-quantize names them (default: %(default)s)")  # fmt: skip
    parser.add_argument("--files", type=Path, metavar="DIR", help="for the files of all kinds (default: below --out)")
    parser.add_argument("--only", nargs="+", default=list(UNITS), choices=UNITS, metavar="COLUMN",
        help="columns to measure (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each figure is measured")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each server")
    parser.add_argument("--jpaged", default=JPAGED, metavar="COMMAND",
        help="jpaged's command, by the shell; {model}, {port}, {dtype}, {kv_dtype}, {kind} are filled in")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    program, folder = args.llama_server.resolve(), args.files or args.out / "files"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    report.environment |= {
        "model": args.model.name, "threads": args.threads,
        "llama.cpp": (version.stdout + version.stderr).strip().splitlines()[0],
    }  # fmt: skip
    # Processes inherit the CPUs of this one: XLA and the kernels take as many threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    for kind in args.kinds:
        quantize = args.llama_quantize or program.with_name("llama-quantize")
        file = quantized(args.model.resolve(), kind, folder.resolve(), quantize)
        report.say(f"{kind}: {file.stat().st_size / 2**20:.0f} MiB")
        commands = {"jpaged": args.jpaged, "llama.cpp": LLAMA}
        dtype = DTYPES.get(kind, "auto")
        # llama.cpp's cache has float16 by default.
        values = {
            "program": program, "model": file, "threads": args.threads, "kind": kind, "dtype": dtype,
            "kv_dtype": "auto" if kind in ("F16", "BF16") else "float16",
        }  # fmt: skip
        measure(report, commands, args, values)
        publish(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
