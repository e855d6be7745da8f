"""Load a server, and check its guarantees under load: every stream complete and as it is alone, clean refusals, the
blocks of clients that vanish, readers that hold nobody else up, a shutdown that loses nothing.

    python tests/attack/load.py --out results         a thousand streams, 256 of them running; some minutes
    python tests/attack/load.py --streams 300

The server is a process of its own with the demo model; the clients are here. Times are of both on one machine.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.server_process import SMALL, ServerProcess
from tests.attack.server_state import ServerState, read_state

Row = dict[str, Any]
# 256 sequences at once, and few shapes of prompts to compile.
WIDE = ("--max-num-seqs", "256", "--max-num-batched-tokens", "512", "--max-model-len", "512",
        "--num-gpu-blocks-override", "2048", "--access-log", "none")  # fmt: skip
NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Finn", "Grace", "Henry", "Jack", "Lily")
THINGS = ("a fox", "a boat", "the moon", "a red kite", "an old tree", "a sand castle", "a small dog", "the rain")
WHOLE = aiohttp.ClientTimeout(total=600, sock_read=300)


@dataclass
class Answer:
    """The response to a request.

    Attributes:
        status: 0 if there was no answer.
        done: the answer is whole: of a stream, its last event was [DONE].
        error: that of the body, or of a stream's event.
        first, last: seconds to the first token and to the end.
    """

    status: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    retry_after: str | None = None
    first: float = 0.0
    last: float = 0.0

    def is_whole(self, num_tokens: int) -> bool:
        return self.done and self.error is None and len(self.token_ids) == num_tokens and self.finish_reason == "length"


def body(index: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request of its own for every index below a million; its answer is the same whenever it is sent."""
    name, thing = NAMES[index % 10], THINGS[index // 10 % 8]
    prompt = f"{name} saw {thing} {index // 80} times"
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
    return {"prompt": prompt, "max_tokens": num_tokens, "stream": True} | fixed | fields


async def ask(
    session: aiohttp.ClientSession, request: dict[str, Any], gate: asyncio.Event | None = None,
    answer: Answer | None = None,
) -> Answer:  # fmt: skip
    """Sends a request and takes its answer in, as it comes. With a gate, it is complete but for its body until that
    opens."""
    answer, start = answer or Answer(), time.monotonic()

    async def sent() -> AsyncIterator[bytes]:
        if gate is not None:
            await gate.wait()
        yield json.dumps(request).encode()

    try:
        async with session.post("/v1/completions", data=sent()) as response:
            answer.status, answer.retry_after = response.status, response.headers.get("Retry-After")
            async for line in response.content:
                if response.content_type != "text/event-stream":
                    _take(answer, json.loads(line + await response.content.read()), start)
                    answer.done = True
                elif line.strip() == b"data: [DONE]":
                    answer.done = True
                elif line.strip():
                    _take(answer, json.loads(line.removeprefix(b"data: ")), start)
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        answer.error = {"message": repr(error)}
    answer.last = time.monotonic() - start
    return answer


def _take(answer: Answer, part: dict[str, Any], start: float) -> None:
    if "error" in part:
        answer.error = part["error"]
        return
    (choice,) = part["choices"]
    answer.first = answer.first or time.monotonic() - start
    answer.text += choice["text"]
    answer.token_ids += choice["token_ids"]
    assert answer.finish_reason is None, "a token after the end"
    answer.finish_reason = choice["finish_reason"]


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as there are requests at once, each request on one of its own."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector, timeout=WHOLE) as session:
        yield session


async def state_of(url: str) -> ServerState:
    return await asyncio.to_thread(read_state, url)


async def until(holds: Callable[[], Awaitable[bool]], within: float) -> float:
    """Seconds until something holds. Raises TimeoutError if it does not within so many."""
    start = time.monotonic()
    async with asyncio.timeout(within):
        while not await holds():
            await asyncio.sleep(0.01)
    return time.monotonic() - start


async def streams(url: str, count: int, num_tokens: int, num_alone: int, max_running: int) -> Row:
    """Many streams, all begun before any of them is answered; some are compared with their answers alone.

    Args:
        max_running: the server's --max-num-seqs, which must be reached.
    """
    gate = asyncio.Event()
    async with clients(url) as session:
        indices = range(0, count, max(1, count // num_alone))
        alone = {i: await ask(session, body(i, num_tokens)) for i in tqdm(indices, desc="alone", disable=None)}
        await session.post("/reset_prefix_cache")
        files = (await state_of(url)).files
        tasks = [asyncio.create_task(ask(session, body(i, num_tokens), gate)) for i in range(count)]

        async def connected() -> bool:
            return (await state_of(url)).files >= files + count - 1

        await until(connected, 60)
        gate.set()
        start, most, most_running = time.monotonic(), 0.0, 0.0
        with tqdm(total=count, desc="streams", disable=None) as bar:
            while pending := [task for task in tasks if not task.done()]:
                now = await state_of(url)
                most, most_running = max(most, now.running + now.waiting), max(most_running, now.running)
                bar.update(count - len(pending) - bar.n)
                await asyncio.wait(pending, timeout=0.2)
        seconds = time.monotonic() - start
        answers = [await task for task in tasks]
        texts = await _detokenized(session, answers)
    wrong = [i for i, expected in alone.items() if answers[i].token_ids != expected.token_ids]
    firsts = sorted(answer.first for answer in answers)
    return {
        "case": "streams", "streams": count, "tokens": num_tokens, "seconds": seconds, "most_at_once": most,
        "most_running": most_running, "max_running": max_running, "tokens_per_s": count * num_tokens / seconds,
        "first_p50_s": statistics.median(firsts), "first_max_s": firsts[-1],
        "whole": sum(answer.is_whole(num_tokens) for answer in answers), "compared": len(alone), "wrong": len(wrong),
        "garbled": sum(answer.text != text for answer, text in zip(answers, texts)),
    }  # fmt: skip


async def _detokenized(session: aiohttp.ClientSession, answers: Sequence[Answer]) -> list[str]:
    texts = []
    for answer in answers:
        async with session.post("/detokenize", json={"tokens": answer.token_ids}) as response:
            texts.append((await response.json())["prompt"])
    return texts


async def full_queue(url: str, count: int, num_tokens: int) -> Row:
    """More requests at once than may run and wait: each is refused at once, or complete."""
    gate = asyncio.Event()
    async with clients(url) as session:
        tasks = [asyncio.create_task(ask(session, body(i, num_tokens), gate)) for i in range(count)]
        await asyncio.sleep(0.5)
        gate.set()
        answers = await asyncio.gather(*tasks)
    refused = [answer for answer in answers if answer.status == 503]
    clean = [a for a in refused if a.retry_after == "1" and (a.error or {}).get("type") == "ServiceUnavailableError"]
    return {
        "case": "full queue", "requests": count, "refused": len(refused), "clean": len(clean),
        "whole": sum(answer.status == 200 and answer.is_whole(num_tokens) for answer in answers),
    }  # fmt: skip


async def vanishing(url: str, count: int, num_tokens: int) -> Row:
    """Half of the clients go in the middle of their streams, some without a goodbye."""
    async with clients(url) as leaving, clients(url) as staying:
        progress = [Answer() for _ in range(count)]
        tasks = [
            asyncio.create_task(ask(leaving if i % 2 else staying, body(i, num_tokens), answer=progress[i]))
            for i in range(count)
        ]

        async def begun() -> bool:
            now = await state_of(url)
            return (
                any(a.token_ids for a in progress)
                and now.running + now.waiting + sum(a.done for a in progress) == count
            )

        await until(begun, 60)
        vanished = sum(not progress[i].done for i in range(1, count, 2))
        before = await state_of(url)
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks[1::2], return_exceptions=True)

        async def only_the_others() -> bool:
            unfinished = sum(not answer.done for answer in progress[::2])  # the server may know of more that are done
            now = await state_of(url)
            return now.running + now.waiting <= unfinished

        seconds = await until(only_the_others, 60)
        after = await state_of(url)
        answers = await asyncio.gather(*tasks[::2])
    return {
        "case": "vanishing", "clients": count, "vanished": vanished, "seconds_to_free": seconds,
        "cpu_to_free_s": after.cpu_s - before.cpu_s,
        "stayed": len(answers), "whole": sum(answer.is_whole(num_tokens) for answer in answers),
    }  # fmt: skip


class SlowReader:
    """A client that asks for a long stream and then reads a byte a second."""

    def __init__(self, url: str, request: dict[str, Any]):
        address = urlsplit(url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects: its window
        self.socket.connect((address.hostname, address.port))
        data = json.dumps(request).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)
        self.socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    async def read(self) -> None:
        """A byte a second, until there is no more."""
        while await asyncio.get_running_loop().sock_recv(self.socket, 1):
            await asyncio.sleep(1)

    def rest(self) -> bytes:
        """All that is still to come, at once."""
        self.socket.settimeout(30)
        pieces = []
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(2**20):
                pieces.append(piece)
        return b"".join(pieces)


async def slow_reader(url: str, num_others: int, num_tokens: int) -> Row:
    """Others beside a client that reads a byte a second, and without it."""

    async def others(session: aiohttp.ClientSession) -> tuple[float, int]:
        start, whole = time.monotonic(), 0
        for i in range(num_others):
            whole += (await ask(session, body(i, num_tokens))).is_whole(num_tokens)
        return (time.monotonic() - start) / num_others, whole

    async with clients(url) as session:
        without, _ = await others(session)
        before = await state_of(url)
        # More than sockets hold: a list of twenty tokens with each of some thousands.
        long = body(0, 400) | {"n": 16, "temperature": 1, "seed": 1, "logprobs": 20}
        with SlowReader(url, long) as reader:
            reading = asyncio.create_task(reader.read())
            beside, whole = await others(session)

            async def idle() -> bool:
                return (await state_of(url)).idle

            await until(idle, 120)  # its blocks are free, though nearly all of its answer is still to be read
            unread = not reading.done()
            after = await state_of(url)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return {
        "case": "slow reader", "others": num_others, "whole": whole, "without_s": without, "beside_s": beside,
        "still_reading": unread, "grown_mib": after.memory_mib - before.memory_mib,
    }  # fmt: skip


async def terminated(server: ServerProcess, count: int, num_tokens: int) -> Row:
    """SIGTERM while some requests run and the others wait: all are answered, and nothing new is."""
    async with clients(server.url) as session:
        tasks = [asyncio.create_task(ask(session, body(i, num_tokens, stream=i % 4 != 0))) for i in range(count)]

        async def accepted() -> bool:
            now = await state_of(server.url)
            return now.running + now.waiting + sum(task.done() for task in tasks) == count

        await until(accepted, 60)
        unfinished = sum(not task.done() for task in tasks)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait_for_log, "shutting down: finishing")
        late = await ask(session, body(count, num_tokens))
        answers = await asyncio.gather(*tasks)
        exit_status = await asyncio.to_thread(server.process.wait, 60)
        after = await ask(session, body(count, num_tokens))
    return {
        "case": "terminated", "requests": count, "unfinished": unfinished, "late_status": late.status,
        "whole": sum(answer.is_whole(num_tokens) for answer in answers), "exit_status": exit_status,
        "after_status": after.status,
    }  # fmt: skip


def problems(row: Row) -> list[str]:
    """Return the problems of a row."""
    match row["case"]:
        case "streams":
            wanted = {"whole": row["streams"], "wrong": 0, "garbled": 0, "most_running": row["max_running"]}
        case "full queue":
            wanted = {"clean": row["refused"], "whole": row["requests"] - row["refused"]}
        case "vanishing":
            wanted = {"whole": row["stayed"]}
            # On a machine with other work, the processor's time says more than the clock.
            if min(row["seconds_to_free"], row["cpu_to_free_s"]) > 2:
                return [f"blocks were free after {row['seconds_to_free']:.1f} s"]
        case "slow reader":
            wanted = {"whole": row["others"], "still_reading": True}
            if row["beside_s"] > 5 * row["without_s"] + 1:
                return [f"others took {row['beside_s']:.2f} s, not {row['without_s']:.2f} s"]
        case _:
            wanted = {"whole": row["requests"], "exit_status": 0, "after_status": 0}
            if row["late_status"] not in (0, 503):
                return [f"a late request got {row['late_status']}"]
    return [f"{name} is {row[name]}, not {value}" for name, value in wanted.items() if row[name] != value]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "load")
    parser.add_argument("--streams", type=int, default=1000, help="how many at once (default 1000)")
    parser.add_argument("--tokens", type=int, default=64, help="of each (default 64)")
    args = parser.parse_args(argv)
    if args.streams < 300 or not 1 <= args.tokens <= 200:
        parser.error("--streams must be at least 300, and --tokens between 1 and 200")
    return args


async def load(count: int, num_tokens: int) -> AsyncIterator[Row]:
    with ServerProcess(*WIDE, start_within=600) as server:
        yield await streams(server.url, count, num_tokens, num_alone=count // 4, max_running=256)
        yield await vanishing(server.url, count, 2 * num_tokens)
    with ServerProcess(*SMALL, "--access-log", "none") as server:
        yield await slow_reader(server.url, 20, 32)
        yield await terminated(server, 100, num_tokens)
    small = (*SMALL, "--max-queue", "8", "--max-num-seqs", "2", "--access-log", "none")
    with ServerProcess(*small) as server:
        yield await full_queue(server.url, 100, num_tokens)


async def run(args: argparse.Namespace) -> int:
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    report.environment |= {"model": "demo", "flags": {"streams, vanishing": WIDE, "others": SMALL}}
    async for row in load(args.streams, args.tokens):
        found = problems(row)
        report.add(**row, problems=found, status="failed" if found else "ok")
    tables = [f"## {row['case']}\n\n{table([row], [name for name in row if name != 'case'])}" for row in report.rows]
    report.publish("The server under load", *tables)
    return int(any(row["status"] != "ok" for row in report.rows))


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    return asyncio.run(run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
