"""Runs a mixed load on a server for an hour, and compares its end with its beginning: memory, threads, open files,
blocks in use, latency.

    python tests/attack/soak.py --out results                 an hour
    python tests/attack/soak.py --minutes 5 --share 1

The server is a process of its own with the demo model and a pool that is too small for its load, so that requests are
preempted. The load comes in waves with pauses between them, so that server and clients together take a share of one
core. After each interval the server is left idle for a moment and measured, with some requests that never change.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.plots import plot
from benchmarks.shared.results import Report, Row, script_parser, table
from benchmarks.shared.server_process import ServerProcess
from tests.attack.load import SlowReader, ask, body, clients
from tests.attack.server_state import read_process, wait_until_idle
from tests.attack.soak_mix import Case, case, problem

FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "512",
         "--num-gpu-blocks-override", "48", "--swap-space", "0.25", "--access-log", "none")  # fmt: skip
PROBES, PROBE_TOKENS = 8, 32
WAVE = (4, 24)  # requests at once
PATIENCE_S = 120.0  # for a wave to end, and for the server to be idle after it
MAX_GROWTH_MIB = 32.0
MAX_SLOWDOWN = 1.5  # of a probe's processor time


@dataclass
class Totals:
    """The load so far.

    Attributes:
        outcomes: numbers of requests by kind and end.
        failures: descriptions of the wrong answers.
        frames: received by the viewer of `/live`.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    waves: int = 0
    frames: int = 0


class Load:
    """Clients of one server."""

    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession, seed: int):
        self.server, self.session, self.rng = server, session, random.Random(seed)
        self.totals = Totals()
        self.probed: list[int] | None = None

    async def wave(self) -> None:
        """Send some requests at once, and wait for all of their ends."""
        rng = self.rng
        tasks = [self._client(case(rng), rng.random(), rng.randrange(4000)) for _ in range(rng.randint(*WAVE))]
        if rng.random() < 0.3:
            tasks.append(self._reads_slowly(rng.randint(1, 4)))
        if rng.random() < 0.3:
            tasks += [self._reads_metrics(), self._looks()]
        if rng.random() < 0.1:
            tasks.append(self._resets())
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*tasks)
        self.totals.waves += 1

    async def watch(self) -> None:
        """View `/live` until cancelled."""
        async with self.session.get("/live", timeout=aiohttp.ClientTimeout(total=None)) as response:
            async for _ in response.content.iter_any():
                self.totals.frames += 1
        self.totals.failures.append("/live ended")

    async def probe(self) -> Row:
        """Measure some equal requests, one after the other, on an idle server."""
        cpu, answers = self._cpu(), []
        for _ in range(PROBES):
            answers.append(await ask(self.session, body(0, PROBE_TOKENS)))
        for answer in answers:
            self.probed = self.probed or answer.token_ids
            if not answer.is_whole(PROBE_TOKENS) or answer.token_ids != self.probed:
                self.totals.failures.append(f"a probe that is not like the first: {asdict(answer)}")
        between = [(answer.last - answer.first) / (PROBE_TOKENS - 1) for answer in answers]
        return {
            "first_token_ms": 1e3 * statistics.median(answer.first for answer in answers),
            "inter_token_ms": 1e3 * statistics.median(between),
            "probe_cpu_ms": 1e3 * (self._cpu() - cpu) / PROBES,
        }

    def _cpu(self) -> float:
        return read_process(self.server.process.pid).cpu_s

    async def _client(self, case: Case, mood: float, patience: int) -> None:
        """Take an answer in whole, or leave: at once, or after so many bytes."""
        request, data, outcome = self.session.post(case.path, json=case.body), b"", "whole"
        try:
            if mood < 0.05:
                async with asyncio.timeout(patience / 4000):
                    async with request as response:
                        data = await response.read()
            else:
                async with request as response:
                    async for piece in response.content.iter_any():
                        data += piece
                        if mood < 0.25 and len(data) > patience:
                            outcome = "left"
                            break
            if outcome == "whole" and (found := problem(case, response.status, data)):
                self.totals.failures.append(f"{found}: {case.path} {json.dumps(case.body)[:1000]}")
                outcome = "wrong"
            elif outcome == "whole" and case.status != 200:
                outcome = f"HTTP {case.status}"
        except TimeoutError:
            outcome = "left"
        except (aiohttp.ClientError, OSError) as error:
            # A server may end the connection before all of a body that it refuses has been sent.
            outcome = f"HTTP {case.status}" if case.status == 413 else "wrong"
            if outcome == "wrong":
                self.totals.failures.append(f"{error!r}: {case.path} {json.dumps(case.body)[:1000]}")
        self.totals.outcomes[f"{case.kind}, {outcome}"] += 1

    async def _reads_slowly(self, seconds: int) -> None:
        """Read a byte a second of a long answer, and go."""
        long = body(self.rng.randrange(10_000), 150) | {"n": 4, "temperature": 1, "logprobs": 20}
        with SlowReader(self.server.url, long) as reader, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await reader.read()
        self.totals.outcomes["slow reader, left"] += 1

    async def _reads_metrics(self) -> None:
        async with self.session.get("/metrics") as response:
            self._take("/metrics", response.status, await response.read())

    async def _looks(self) -> None:
        async with self.session.get("/live") as response:
            self._take("/live", response.status, await response.content.readany())

    async def _resets(self) -> None:
        async with self.session.post("/reset_prefix_cache") as response:
            self._take("/reset_prefix_cache", response.status, b"empty")

    def _take(self, path: str, status: int, data: bytes) -> None:
        self.totals.outcomes[f"{path}, HTTP {status}"] += 1
        if status != 200 or not data:
            self.totals.failures.append(f"{path}: HTTP {status}, {len(data)} bytes")


async def samples(
    server: ServerProcess, seconds: float, interval: float, share: float, seed: int
) -> AsyncIterator[Row]:
    """Yield a sample after each interval; the first one comes before any load.

    Args:
        share: of one core that server and clients may take together.
    """
    pid = server.process.pid
    used = lambda: read_process(pid).cpu_s + time.process_time()
    async with clients(server.url) as session:
        load = Load(server, session, seed)
        viewer = asyncio.create_task(load.watch())
        await load.probe()  # warms up
        load.probed = None
        start, first_cpu, due = time.monotonic(), used(), 0.0
        while True:
            elapsed = time.monotonic() - start
            if elapsed >= due:
                idle, waited = await asyncio.to_thread(wait_until_idle, server.url, PATIENCE_S)
                probes = await load.probe()
                process, totals = read_process(pid), load.totals
                due += interval
                yield {
                    "minute": elapsed / 60, "idle_after_s": waited, "running": idle.running, "waiting": idle.waiting,
                    "kv_usage": idle.kv_usage, **process._asdict(), **probes, "requests": totals.outcomes.total(),
                    "generated_tokens": idle.generated_tokens, "cached_tokens": idle.cached_tokens,
                    "preemptions": idle.preemptions, "swapped_blocks": idle.swapped_blocks, "frames": totals.frames,
                    "core_share": (used() - first_cpu) / max(1.0, elapsed), "machine_load": os.getloadavg()[0],
                    "failures": len(totals.failures), "told": totals.failures[:20],
                    "outcomes": dict(sorted(totals.outcomes.items())),
                }  # fmt: skip
            if elapsed >= seconds:
                break
            await load.wave()
            while used() - first_cpu > share * (time.monotonic() - start) and time.monotonic() - start < seconds:
                await asyncio.sleep(0.1)
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)


COMPARED = (
    "memory_mib", "threads", "files", "children", "kv_usage", "first_token_ms", "inter_token_ms", "probe_cpu_ms",
    "idle_after_s", "core_share", "machine_load",
)  # fmt: skip


def compare(rows: Sequence[Row]) -> tuple[Row, Row]:
    """Return the medians of the first ten minutes under load, and of the last ten; of a sixth, in a shorter run."""
    loaded = rows[1:]
    window = max(1, min(sum(row["minute"] <= 10 for row in loaded), len(loaded) // 6))
    median = lambda part: {name: statistics.median(row[name] for row in part) for name in COMPARED}
    return median(loaded[:window]) | {"samples": window}, median(loaded[-window:]) | {"samples": window}


def slope_mib_per_hour(rows: Sequence[Row]) -> float | None:
    """Return the trend of memory over the second half of a run, by least squares."""
    half = rows[len(rows) // 2 :]
    if len(half) < 2:
        return None
    return 60 * statistics.linear_regression([r["minute"] for r in half], [r["memory_mib"] for r in half]).slope


def problems(rows: Sequence[Row]) -> list[str]:
    """Return the differences from a server that could go on forever."""
    first, last = compare(rows)
    found = [f"{rows[-1]['failures']} wrong answers"] if rows[-1]["failures"] else []
    busy = [row for row in rows if row["running"] or row["waiting"] or row["kv_usage"]]
    found += [f"minute {row['minute']:.1f}: not idle {PATIENCE_S:g} s after its load" for row in busy]
    for name in ("threads", "files", "children"):
        if last[name] > first[name]:
            found.append(f"{name} grew from {first[name]:g} to {last[name]:g}")
    if last["memory_mib"] - first["memory_mib"] > MAX_GROWTH_MIB:
        found.append(f"memory grew from {first['memory_mib']:.0f} to {last['memory_mib']:.0f} MiB")
    if last["probe_cpu_ms"] > MAX_SLOWDOWN * first["probe_cpu_ms"]:
        found.append(f"a probe took {last['probe_cpu_ms']:.0f} ms of processor time, not {first['probe_cpu_ms']:.0f}")
    found += [f"no {name}" for name in ("preemptions", "cached_tokens") if not rows[-1][name] > rows[0][name]]
    # The viewer of /live hears of the pool at least once a second.
    pairs = itertools.pairwise(rows)
    return found + [
        f"minute {row['minute']:.1f}: no frames" for before, row in pairs if row["frames"] <= before["frames"]
    ]


async def soak(
    report: Report, minutes: float, interval: float, share: float, seed: int, flags: Sequence[str] = FLAGS
) -> Row:
    """Report the samples and return a summary."""
    with ServerProcess(*flags, clean=False) as server:
        with tqdm(total=round(60 * minutes), unit="s", disable=report.quiet) as bar:
            async for row in samples(server, 60 * minutes, interval, share, seed):
                report.add(experiment="soak", **row, status="ok")
                bar.update(min(bar.total, round(60 * row["minute"])) - bar.n)
        exit_status = await asyncio.to_thread(server.stop)
        tracebacks = server.tracebacks()
    rows = [row for row in report.rows if row["experiment"] == "soak"]
    found = problems(rows)
    if exit_status or tracebacks:
        found.append(f"exit status {exit_status}, {len(tracebacks)} tracebacks in the log")
    last = rows[-1]
    return {
        "experiment": "summary", "minutes": last["minute"], "requests": last["requests"],
        "generated_tokens": last["generated_tokens"], "preemptions": last["preemptions"],
        "swapped_blocks": last["swapped_blocks"], "slope_mib_per_hour": slope_mib_per_hour(rows),
        "exit_status": exit_status, "tracebacks": tracebacks, "problems": found, "status": "failed" if found else "ok",
    }  # fmt: skip


def publish(report: Report) -> None:
    rows, summary = report.rows[:-1], report.rows[-1]
    first, last = compare(rows)
    medians = [{"": name, "first": first[name], "last": last[name]} for name in COMPARED]
    ends = [{"request, end": name, "number": count} for name, count in rows[-1]["outcomes"].items()]
    note = f"Medians of {first['samples']} samples each, under load; the machine's other work (`machine_load`) varied."
    shown = ("minute", *COMPARED, "requests", "preemptions", "swapped_blocks")
    whole = summary["minutes"] > 55
    report.publish(
        "An hour of mixed load" if whole else "A mixed load",
        f"Processor: {report.environment['processor']}, {report.environment['cores']} cores, shared with other work.",
        table([summary], [name for name in summary if name not in ("experiment", "tracebacks")]),
        "## The first ten minutes and the last", table(medians, ("", "first", "last")), note,
        "## Requests", table(ends, ("request, end", "number")),
        "## Samples, one a minute" if whole else "## Samples", table(rows, shown),
    )  # fmt: skip


def processor() -> str | None:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "soak")
    parser.add_argument("--minutes", type=float, default=60.0, help="of load (default 60)")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between samples (default 60)")
    parser.add_argument("--share", type=float, default=0.4, help="of one core that all may take (default 0.4)")
    parser.add_argument("--seed", type=int, default=0, help="of all requests (default 0)")
    args = parser.parse_args(argv)
    if not (args.minutes > 0 and args.interval > 0 and args.share > 0 and 60 * args.minutes >= 2 * args.interval):
        parser.error("--minutes, --interval and --share must be above 0, and --minutes hold two intervals")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    report.environment |= {
        "model": "demo", "flags": FLAGS, "seed": args.seed, "share": args.share, "processor": processor(),
        "cores": os.cpu_count(),
    }  # fmt: skip
    summary = asyncio.run(soak(report, args.minutes, args.interval, args.share, args.seed))
    report.add(**summary)
    publish(report)
    plot(report)
    return int(summary["status"] != "ok")


if __name__ == "__main__":
    sys.exit(main())
