"""Measures the cost of one request to the others: the longest pause of a stream beside large requests, and its step
beside requests that use one parameter at its limit.

    python benchmarks/engine/neighbours.py --out results      some minutes
    python benchmarks/engine/neighbours.py --only bad_words

The server is a process of its own with the demo model's shapes, random weights and a context of 32,768 tokens. Its
steps have up to 16 tokens beside large requests, and up to 64 sequences beside parameters. A probe streams tokens while
another process sends the requests. Every case alternates with its baseline: nothing beside the probe, or the same
request without the parameter. Ratios are of medians.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, script_parser, table
from benchmarks.shared.server_process import ServerProcess
from jpaged.config import EngineConfig
from jpaged.core import params
from jpaged.demo import DIRECTORY as DEMO

Body = dict[str, Any]
MAX_MODEL_LEN = 32_768
MAX_NUM_SEQS = 64
SHORT_STEPS = 16  # tokens: full steps are no pauses
MAX_PAUSE_S = 0.05  # beside any accepted request
MAX_STEP_RATIO = 1.2
FLAGS = ("--load-format", "dummy", "--num-gpu-blocks-override", "4096", "--access-log", "none")
STORY = "The little fox saw a red kite over the old tree, and ran home. "
WORDS = [f"{a}{b}{c}" for a in "bcdfghklmnprstwz" for b in "aeiou" for c in "bdgklmnprstvwxyz"]


def large_requests() -> dict[str, tuple[str, Body]]:
    """Return requests that take the server's time by their size, by name: each is accepted, or refused for its length
    alone. Each has the path and the body."""
    text = (STORY * 8000)[:400_000]
    ids = [100] * (MAX_MODEL_LEN - 1)
    message = {"role": "user", "content": STORY}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    schema = {f"property {i}": {"type": "string"} for i in range(20_000)}
    none = {
        "max_tokens": MAX_MODEL_LEN + 1
    }  # refused once the prompt is known: nothing but its preparation is measured
    return {
        "text of 400 kB": ("/tokenize", {"prompt": text}),
        "text of 400 kB, with its pieces": ("/tokenize", {"prompt": text, "return_token_strs": True}),
        "150,000 tokens to text": ("/detokenize", {"tokens": [200] * 150_000}),
        "prompt of 400 kB": ("/v1/completions", {"prompt": text} | none),
        "truncated prompt of 1.2 MB": (
            "/v1/completions", {"prompt": text * 3, "truncate_prompt_tokens": 10, "max_tokens": 1},
        ),
        "prompt of 32,767 ids": ("/v1/completions", {"prompt": ids} | none),
        "4,096 messages": ("/v1/chat/completions", {"messages": [message] * 4096} | none),
        "1,024 parts in each of 16 messages": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1024}] * 16} | none,
        ),
        "2,049 prompts, refused": ("/v1/completions", {"prompt": ["a"] * 2049} | none),
        "2,049 prompts": ("/v1/completions", {"prompt": ["a"] * 2049, "max_tokens": 1}),
        "128 tools": (
            "/v1/chat/completions",
            {"messages": [message], "tools": [tool | {"function": tool["function"] | {"name": f"f{i}"}}
                                              for i in range(128)], "tool_choice": "none"} | none,
        ),
        "schema of 0.8 MB": (
            "/v1/chat/completions",
            {"messages": [message], "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": schema}}}},
        ),
        "4,096 biases": (
            "/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1200)), 1.0)} | none
        ),
        "150,000 allowed tokens": ("/v1/completions", {"prompt": "a", "allowed_token_ids": [200] * 150_000} | none),
        "unknown fields": ("/v1/completions", {"prompt": "a"} | {f"x{i}": 1 for i in range(50_000)}),
        "2,000 tokens of echo with 20 logprobs": (
            "/v1/completions", {"prompt": [100] * 2000, "echo": True, "logprobs": 20, "max_tokens": 1},
        ),
    }  # fmt: skip


def parameters() -> dict[str, tuple[Body, Body]]:
    """Return each parameter at its limit, beside the request that differs in nothing else."""
    wide = {"n": MAX_NUM_SEQS - 1, "ignore_eos": True, "max_tokens": 200}
    sampled, greedy = wide | {"temperature": 1.0}, wide | {"temperature": 0}
    # Half of them begin as a text may go on, half end in a common letter.
    half, rare = params.MAX_STOPS // 2, [chr(200 + i) for i in range(params.MAX_STOPS // 2)]
    long_stops = ["ab" * 127 + rare[i] for i in range(half)] + [rare[i] + "ab" * 127 + "e" for i in range(half)]
    return {
        "bad_words": (sampled, sampled | {"bad_words": WORDS[: params.MAX_BAD_WORDS]}),
        "bad_words with one beginning": (
            greedy | {"allowed_token_ids": [300]},
            greedy | {"logit_bias": {"300": 100}, "bad_words": ["a " + word for word in WORDS[: params.MAX_BAD_WORDS]]},
        ),
        "stop": (sampled, sampled | {"stop": long_stops}),
        "stop_token_ids": (sampled, sampled | {"stop_token_ids": list(range(2, 2 + params.MAX_STOP_TOKENS)),
                                               "min_tokens": 200}),
        "logit_bias": (sampled, sampled | {"logit_bias": dict.fromkeys(map(str, range(1, 1280)), 1.0)}),
        "allowed_token_ids": (sampled, sampled | {"allowed_token_ids": list(range(1280))}),
        "penalties": (sampled, sampled | {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 2}),
        "top_k, top_p, min_p": (sampled, sampled | {"top_k": 50, "top_p": 0.9, "min_p": 0.05}),
        "logprobs": (sampled, sampled | {"logprobs": EngineConfig.max_logprobs}),
        "min_tokens": (sampled, sampled | {"min_tokens": 200}),
        "structured_outputs": (sampled, sampled | {"ignore_eos": False,
                                                   "structured_outputs": {"regex": "[a-z ]{900}"}}),
        "beams": (
            {"n": 63, "temperature": 0, "ignore_eos": True, "max_tokens": 200},
            {"n": 63, "use_beam_search": True, "temperature": 0, "ignore_eos": True, "max_tokens": 200},
        ),
        "beams with stop": (
            {"n": 63, "use_beam_search": True, "temperature": 0, "ignore_eos": True, "max_tokens": 200},
            {"n": 63, "use_beam_search": True, "temperature": 0, "ignore_eos": True, "max_tokens": 200,
             "stop": long_stops},
        ),
        "stream": (sampled, sampled | {"stream": True}),
        "stream with logprobs": (sampled | {"stream": True}, sampled | {"stream": True, "logprobs": 20}),
    }  # fmt: skip


def send(url: str, path: str, data: bytes) -> int:
    """Send a request, read its response, and return its status. Runs in the other process."""
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            while response.read(2**16):
                pass
            return response.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


class Probe:
    """One stream after another, each short enough that its own context costs little.

    Attributes:
        streams: of each stream, when its tokens came.
    """

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session
        self.streams: list[list[float]] = []

    async def run(self) -> None:
        # With ids, each token is an event: one that ends inside a character has no text.
        body = {
            "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        while True:
            times: list[float] = []
            self.streams.append(times)
            async with self._session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())

    def pauses(self, start: float, end: float) -> list[float]:
        """Return the times between tokens of a stream within an interval, in seconds."""
        return [
            later - earlier
            for times in self.streams
            for earlier, later in itertools.pairwise(times)
            if start <= earlier and later <= end
        ]


@contextlib.asynccontextmanager
async def probing(url: str) -> AsyncIterator[Probe]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        probe = Probe(session)
        task = asyncio.create_task(probe.run())
        try:
            while not probe.streams or len(probe.streams[0]) < 50:
                await asyncio.sleep(0.05)
                if task.done():
                    task.result()
            yield probe
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def pause_beside(probe: Probe, url: str, path: str, data: bytes, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Return the probe's longest pause beside a request, and in as long a time just before it."""
    start = time.perf_counter()
    status = await asyncio.wrap_future(pool.submit(send, url, path, data))
    end = time.perf_counter()
    await asyncio.sleep(max(0.2, end - start))
    alone = probe.pauses(end + 0.05, time.perf_counter())
    return {
        "status": status, "seconds": end - start, "alone": max(alone), "beside": max(probe.pauses(start, end + 0.05)),
    }  # fmt: skip


async def step_beside(probe: Probe, url: str, body: Body, pool: ProcessPoolExecutor) -> float:
    """Return the probe's median time between tokens while a request generates."""
    data = json.dumps({"prompt": "Once upon a time", **body}).encode()
    request: Future[int] = pool.submit(send, url, "/v1/completions", data)
    start = time.perf_counter()
    status = await asyncio.wrap_future(request)
    end = time.perf_counter()
    assert status == 200, f"status {status}: {data[:300]!r}"
    third = (end - start) / 3  # neither its admission nor its end
    return statistics.median(probe.pauses(start + third, end - third))


@contextlib.contextmanager
def long_demo() -> Iterator[Path]:
    """The demo model's config and tokenizer with a long context, in a directory of their own."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        shutil.copytree(DEMO, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
        yield directory


async def measure_pauses(url: str, repeats: int, only: str, report: Report) -> None:
    """Add a row for each large request whose name holds `only`."""
    with ProcessPoolExecutor(1) as pool:
        async with probing(url) as probe:
            for name, (path, body) in tqdm(large_requests().items(), desc="large requests", disable=None):
                if only not in name:
                    continue
                data = json.dumps(body).encode()
                found = [await pause_beside(probe, url, path, data, pool) for _ in range(repeats)]
                report.add(
                    experiment="pause", case=name, bytes=len(data), status=found[0]["status"],
                    seconds=statistics.median(each["seconds"] for each in found),
                    **{f"{where}_ms": 1e3 * statistics.median(each[where] for each in found)
                       for where in ("alone", "beside")},
                    least_ms=1e3 * min(each["beside"] for each in found),
                )  # fmt: skip


async def measure_steps(url: str, repeats: int, only: str, report: Report) -> None:
    """Add a row for each parameter whose name holds `only`."""
    with ProcessPoolExecutor(1) as pool:
        async with probing(url) as probe:
            for name, (plain, limit) in tqdm(parameters().items(), desc="parameters", disable=None):
                if only not in name:
                    continue
                pairs = [[await step_beside(probe, url, body, pool) for body in (plain, limit)] for _ in range(repeats)]
                without, with_limit = zip(*pairs)
                report.add(
                    experiment="step", case=name, plain_ms=1e3 * statistics.median(without),
                    limit_ms=1e3 * statistics.median(with_limit),
                    ratio=statistics.median(after / before for before, after in pairs),
                    least_ratio=min(with_limit) / min(without),
                )  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script_parser(__doc__, "neighbours")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="how often each case is measured")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the cases whose names hold this")
    return parser.parse_args(argv)


def publish(report: Report) -> None:
    pauses, steps = ([row for row in report.rows if row["experiment"] == name] for name in ("pause", "step"))
    report.publish(
        "The cost of one request to the others",
        f"## Longest pause of a stream (limit {1e3 * MAX_PAUSE_S:g} ms beside any request)",
        "`least_ms` is the pause that every repeat had at least, and is held against the limit; the others are "
        "medians. Other programs on the machine make pauses too.",
        table(pauses, ("case", "bytes", "status", "seconds", "alone_ms", "beside_ms", "least_ms")),
        f"## Median step beside a request, without and with one parameter at its limit (limit {MAX_STEP_RATIO})",
        "`ratio` is the median over the repeats, and is held against the limit; `least_ratio` compares the fastest "
        "repeats of both.",
        table(steps, ("case", "plain_ms", "limit_ms", "ratio", "least_ratio")),
    )


def above(rows: Sequence[Body]) -> list[str]:
    """Return the cases above their limits."""
    late = [row["case"] for row in rows if row["experiment"] == "pause" and row["least_ms"] > 1e3 * MAX_PAUSE_S]
    slow = [row["case"] for row in rows if row["experiment"] == "step" and row["ratio"] > MAX_STEP_RATIO]
    return late + slow


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    gc.disable()  # a collection would be a pause of the probe, not of its stream
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    report.environment |= {"model": "demo, random weights, context 32,768", "flags": FLAGS}
    with long_demo() as model:
        for measure, size in ((measure_pauses, SHORT_STEPS), (measure_steps, MAX_NUM_SEQS)):
            limits = ("--max-num-seqs", str(size), "--max-num-batched-tokens", str(size))
            with ServerProcess("--model", str(model), *FLAGS, *limits) as server:
                asyncio.run(measure(server.url, args.repeats, args.only, report))
    publish(report)
    cases = above(report.rows)
    for case in cases:
        print(f"above the limit: {case}")
    return int(bool(cases))


if __name__ == "__main__":
    sys.exit(main())
