"""Measures the isolation between API keys: the latencies of a small load of one key, alone and beside each load that
another key can make.

    python benchmarks/engine/isolation.py --out results      some minutes
    python benchmarks/engine/isolation.py --only grammars --rounds 1 --seconds 3

The server is a process of its own with the demo model and two keys. Key B sends one stream after another, completions
and chats in turns. The load of key A comes from a third process. For each load, intervals without and with it
alternate; figures are medians over the rounds. All processes share the machine's processors; the third one has the
lowest priority, because the clients of a load would be elsewhere.

The time to the first token and the 99th percentile of the times between tokens may each be at most twice those alone,
plus one step, and twice that for requests with grammars, which take part in every second step. One step is the 99th
percentile of the times between tokens of a stream of key A, if its load generates; else that of key B alone.
"""

import argparse
import asyncio
import contextlib
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.server_process import ServerProcess

Body = dict[str, Any]
Sent = tuple[str, bytes]  # path and body of a request

KEY_A, KEY_B = "key-a", "key-b"
MAX_MODEL_LEN = 1024
FLAGS = (
    "--api-key", KEY_A, KEY_B, "--trust-request-chat-template", "--access-log", "none", "--max-num-seqs", "64",
    "--max-num-batched-tokens", "64", "--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", "4096",
    "--tool-call-parser", "hermes",
)  # fmt: skip
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS = {"completion": COMPLETIONS, "chat": CHATS}
NUM_TOKENS = 40  # of each answer to key B
BODY_BYTES = 2**20 + 16 * MAX_MODEL_LEN  # the server's limit
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WARM_UP_S = 1.0
MAX_RATIO = 2
CONSTRAINED_FACTOR = 2  # requests with grammars take part in every second step beside others


@dataclass
class Times:
    """Latencies of streams, in seconds: to their first tokens, and between tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


class Load(NamedTuple):
    """Load of key A.

    Attributes:
        num_clients: requests at once.
        request: the request of a number.
        reads: the clients read the answers.
        generates: steps hold tokens of it, so that a further stream of key A measures them.
        constrained: each request of key B has a new grammar, too.
        rest_s: seconds that the server may work on it after the clients have gone.
    """

    num_clients: int
    request: Callable[[int], Sent]
    reads: bool = True
    generates: bool = False
    constrained: bool = False
    rest_s: float = 0.5


def sent(path: str, **body: Any) -> Sent:
    return path, json.dumps(body).encode()


def template(number: int) -> Sent:
    return sent(CHATS, messages=[{"role": "user", "content": str(number)}], chat_template=ENDLESS)


def grammar(number: int) -> Sent:
    """Return a request with a grammar of one of five kinds. Most take from a tenth of a second to some seconds."""
    names = [f"x{i}" for i in range(900)]
    rules = [f'{name}: e "{name}" | "{number}" e?' for name in names]
    words = " | ".join(f"/[a-z]*{number}{i}[a-z]{{0,{5 + i % 90}}}/" for i in range(2000))
    wanted: Sequence[Body] = [
        {"grammar": "\n".join(["start: e", "e: e e e | e e | " + " | ".join(names), *rules])},
        {"regex": f"(a{{1000}}){{{1000 + number}}}"},
        {"json": {"enum": [f"value {number} {i}" for i in range(4000)]}},
        {"json": {"type": "object", "properties": {f"p {number} {i}": {"type": "string"} for i in range(2500)}}},
        {"grammar": f"start: ({words})*"},
    ]
    return sent(COMPLETIONS, prompt="a", max_tokens=NUM_TOKENS, structured_outputs=wanted[number % len(wanted)])


def long_prompt(number: int) -> Sent:
    ids = [100 + number % 1000, 100 + number // 1000 % 1000] * (MAX_MODEL_LEN // 2 - 8)
    return sent(COMPLETIONS, prompt=ids, max_tokens=8, ignore_eos=True)


@functools.cache
def huge_bodies() -> Sequence[Sent]:
    """Return bodies just below the server's limit: two with too long prompts, three that are invalid, and a tool."""
    message = {"role": "user", "content": "a" * 220}
    properties = {f"p{i}": {"type": "string"} for i in range(BODY_BYTES // 30)}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = sent(CHATS, messages=[message] * 4096)
    return [
        messages,
        sent(COMPLETIONS, prompt="a " * (BODY_BYTES // 2 - 20)),
        (CHATS, messages[1][:-1]),
        sent(CHATS, messages=[[]] * (BODY_BYTES // 4 - 10)),
        sent(CHATS, messages=[message], **{f"field {i}": 1 for i in range(BODY_BYTES // 18)}),
        sent(CHATS, messages=[message], tools=[tool]),
    ]


def huge_body(number: int) -> Sent:
    return huge_bodies()[number % len(huge_bodies())]


def unread_stream(number: int) -> Sent:
    return sent(
        COMPLETIONS, prompt=str(number), max_tokens=MAX_MODEL_LEN - 16, ignore_eos=True, stream=True,
        return_token_ids=True,
    )  # fmt: skip


def tokens_400(number: int) -> Sent:
    return sent(COMPLETIONS, prompt=str(number), max_tokens=400, ignore_eos=True)


LOADS = {
    "templates": Load(8, template, rest_s=6.0),
    "grammars": Load(6, grammar, generates=True, constrained=True, rest_s=11.0),
    "long prompts": Load(8, long_prompt, generates=True),
    "huge bodies": Load(8, huge_body),
    "slow readers": Load(60, unread_stream, reads=False, generates=True),
    "150 requests": Load(150, tokens_400, generates=True),
}


def open_session(url: str, key: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url, headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0),
    )  # fmt: skip


async def stream(session: aiohttp.ClientSession, path: str, body: Body, times: Times) -> None:
    """Add the times of an answer of so many tokens, each of which is an event because of its id."""
    body |= {"stream": True, "return_token_ids": True}
    last = start = time.perf_counter()
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                now = time.perf_counter()
                (times.first if last == start else times.between).append(now - last)
                last = now


async def latencies(url: str, seconds: float, numbers: Iterator[int], constrained: bool) -> dict[str, Times]:
    """Return the times of key B's streams, by kind, one after another for some seconds and at least one of each."""
    found = {kind: Times() for kind in KINDS}
    deadline = time.perf_counter() + seconds
    async with open_session(url, KEY_B) as session:
        while time.perf_counter() < deadline:
            for kind, path in KINDS.items():
                number = next(numbers)
                text = f"{number}: once upon a time"
                body: Body = {"max_tokens": NUM_TOKENS, "temperature": 0}
                body |= {"prompt": text} if kind == "completion" else {"messages": [{"role": "user", "content": text}]}
                if constrained:
                    body["structured_outputs"] = {"regex": f"{number}[a-z ]{{900}}"}
                else:
                    body["ignore_eos"] = True
                await stream(session, path, body, found[kind])
    return found


async def apply_load(connection: Connection, url: str, load: Load, start: int) -> Counter[str]:
    """Apply a load until the connection has a message, and return the statuses of its answers."""
    statuses, numbers = Counter[str](), itertools.count(start)

    async def send() -> None:
        while True:
            path, data = load.request(next(numbers))
            async with session.post(path, data=io.BytesIO(data)) as response:
                statuses[str(response.status)] += 1
                if not load.reads:
                    await asyncio.Event().wait()
                await response.read()

    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), told.set)
    async with open_session(url, KEY_A) as session:
        tasks = [asyncio.create_task(send()) for _ in range(load.num_clients)]
        ended, _ = await asyncio.wait([asyncio.create_task(told.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in ended:
            task.result()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


def run_load(connection: Connection, url: str, name: str, start: int) -> None:
    """Apply a load between two messages, in the process of key A. It leaves the processor to the server."""
    os.nice(19)
    LOADS[name].request(0)
    connection.send("ready")
    connection.recv()
    connection.send(asyncio.run(apply_load(connection, url, LOADS[name], start)))


@contextlib.asynccontextmanager
async def measured_steps(url: str) -> AsyncIterator[Times]:
    """Enter a context with the times of streams of key A, the first of which has begun."""
    times = Times()

    async def run() -> None:
        while True:
            await stream(session, COMPLETIONS, {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}, times)

    async with open_session(url, KEY_A) as session:
        task = asyncio.create_task(run())
        try:
            while not times.first:
                await asyncio.sleep(0.01)
                if task.done():
                    task.result()
            yield times
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def latencies_beside(
    url: str, name: str, seconds: float, numbers: Iterator[int]
) -> tuple[dict[str, Times], list[float], Counter[str]]:
    """Return the times of key B's streams beside a load, those of steps, and the statuses of the load's answers."""
    load = LOADS[name]
    here, there = multiprocessing.Pipe()
    arguments = there, url, name, 1000 * next(numbers)
    process = multiprocessing.get_context("spawn").Process(target=run_load, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        await asyncio.to_thread(here.recv)
        async with measured_steps(url) if load.generates else contextlib.nullcontext(Times()) as steps:
            here.send("begin")
            await asyncio.sleep(WARM_UP_S)
            steps.between.clear()
            found = await latencies(url, seconds, numbers, load.constrained)
        here.send("end")
        statuses = await asyncio.to_thread(here.recv)
    finally:
        process.kill()
    return found, steps.between, statuses


def rest(server: ServerProcess, seconds: float) -> None:
    """Wait until the server has no work, some of which may be unseen for some seconds."""
    time.sleep(seconds)
    while server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting"):
        time.sleep(0.1)


def percentile_99(times: Sequence[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def measure_load(server: ServerProcess, name: str, rounds: int, seconds: float, numbers: Iterator[int]) -> list[Body]:
    """Return a row for each kind of key B's requests."""
    load = LOADS[name]
    alone, loaded, steps, answers = [], [], [], Counter[str]()
    for _ in tqdm(range(rounds), desc=name, disable=None):
        alone.append(asyncio.run(latencies(server.url, seconds, numbers, load.constrained)))
        found, between, statuses = asyncio.run(latencies_beside(server.url, name, seconds, numbers))
        rest(server, load.rest_s)
        loaded.append(found)
        answers += statuses
        if between:
            steps.append(percentile_99(between))
    rows = []
    for kind in KINDS:
        row: Body = {"load": name, "request": kind}
        for where, rounds_of in (("alone", alone), ("loaded", loaded)):
            row[f"first_{where}_ms"] = 1e3 * statistics.median(
                statistics.median(times[kind].first) for times in rounds_of
            )
            row[f"between_{where}_ms"] = 1e3 * statistics.median(
                percentile_99(times[kind].between) for times in rounds_of
            )
            row[f"num_{where}"] = sum(len(times[kind].first) for times in rounds_of)
        row["step_ms"] = 1e3 * statistics.median(steps) if steps else row["between_alone_ms"]
        rows.append(row | {"holds": holds(row), "answers_to_load": dict(sorted(answers.items()))})
    return rows


def holds(row: Body) -> bool:
    """Return whether both latencies beside the load are within the bound."""
    factor = CONSTRAINED_FACTOR if LOADS[row["load"]].constrained else 1
    return all(
        row[f"{what}_loaded_ms"] <= factor * (MAX_RATIO * row[f"{what}_alone_ms"] + row["step_ms"])
        for what in ("first", "between")
    )


def publish(report: Report) -> None:
    pair = lambda row, what: f"{row[f'{what}_alone_ms']:.1f} / {row[f'{what}_loaded_ms']:.1f}"
    rows = [
        {
            "load of key A": row["load"], "request of key B": row["request"],
            "first token, ms, alone / beside": pair(row, "first"),
            "between tokens, p99, ms, alone / beside": pair(row, "between"),
            "one step, ms": row["step_ms"], "holds": "yes" if row["holds"] else "**no**",
            "answers to B": f"{row['num_alone']} / {row['num_loaded']}",
            "answers to A": ", ".join(f"{status}: {count}" for status, count in row["answers_to_load"].items()),
        }
        for row in report.rows
    ]  # fmt: skip
    report.publish(
        "Isolation between API keys",
        "Latencies of key B alone and beside each load of key A. It holds if both beside the load are at most "
        f"{MAX_RATIO} times those alone, plus one step: the 99th percentile of the times between tokens of a stream of "
        "key A, or of key B alone where key A generates nothing. Beside grammars, key B's requests have grammars, too, "
        f"and take part in every second step: they may take {CONSTRAINED_FACTOR} times the bound.",
        "The server and the clients of both keys are three processes on the same processors, which other programs use "
        "as well. The clients of key A have the lowest priority, except for the stream that measures steps. "
        f"{report.environment['method']}",
        table(rows, list(rows[0])),
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "isolation")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="intervals without and with each load")
    parser.add_argument("--seconds", type=float, default=6.0, metavar="S", help="length of an interval")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the loads whose names hold this")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    method = (
        f"Medians of {args.rounds} rounds; each has {args.seconds:g} s alone, then {args.seconds:g} s beside the load."
    )
    report.environment |= {"model": "demo", "flags": FLAGS, "method": method}
    numbers = itertools.count(1)
    with ServerProcess(*FLAGS) as server:
        for constrained in (False, True):
            asyncio.run(latencies(server.url, args.seconds, numbers, constrained))
        for name in LOADS:
            if args.only in name:
                for row in measure_load(server, name, args.rounds, args.seconds, numbers):
                    report.add(**row)
    publish(report)
    return int(not all(row["holds"] for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
