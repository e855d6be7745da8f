"""Attacks a server with requests that nobody should send, and counts what must not happen: a status of 500 and above,
an answer that breaks its form, a hang, a leak, a traceback in its log.

    python benchmarks/fuzz.py --out results         20,000 requests, some minutes
    python benchmarks/fuzz.py --requests 1500 --seed 7

Three attackers at once, a third of the requests each: one that reads the server's description of its API
(`fuzz_described.py`), one that breaks bytes (`fuzz_bytes.py`), one that knows what fields mean (`fuzz_fields.py`). What
is sent depends on the seed alone. Needs schemathesis (`pip install -e ".[dev]"`).
"""

import argparse
import importlib.metadata
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fuzz_bytes, fuzz_described, fuzz_fields
from benchmarks.device import CACHE, environment, open_device, prepare_environment
from benchmarks.results import Report, heading, table
from benchmarks.server_process import SMALL, ServerProcess
from benchmarks.server_state import ServerState, is_healthy, read_state, wait_until_idle

ATTACKERS = {"described": fuzz_described.attack, "bytes": fuzz_bytes.attack, "fields": fuzz_fields.attack}
FLAGS = (*SMALL, "--access-log", "none", "--tool-call-parser", "hermes")
SETTLE = 60.0  # seconds for what still runs after the last request
KEPT = 20  # failures that are told in full


@dataclass
class Tally:
    """What has come of one attacker's requests.

    Attributes:
        outcomes: how many ended in each status, or in each way without one.
        failures: what must not happen, each with the request that brought it about.
    """

    count: int
    advance: Callable[[], None]
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    done: int = 0
    slowest: float = 0.0

    @property
    def full(self) -> bool:
        return self.done >= self.count

    def add(self, outcome: int | str, seconds: float, request: object, problem: str | None = None) -> None:
        """A request has ended. A status of 500 and above is a problem in itself."""
        self.done += 1
        self.outcomes[str(outcome)] += 1
        self.slowest = max(self.slowest, seconds)
        if isinstance(outcome, int) and outcome >= 500:
            problem = problem or f"status {outcome}"
        if problem:
            self.failures.append(f"{problem}: {str(request)[:2000]}")
        self.advance()


class Watch:
    """Looks at the server after every hundredth of the requests."""

    def __init__(self, url: str, requests: int, bar: Any):
        self.url, self.every, self.bar = url, max(1, requests // 100), bar
        self.states: list[ServerState] = []
        self.unhealthy = 0
        self._done = 0
        self._lock = threading.Lock()

    def advance(self) -> None:
        with self._lock:
            self.bar.update()
            self._done += 1
            if self._done % self.every == 0:
                try:
                    self.states.append(read_state(self.url))
                except OSError:
                    self.unhealthy += 1
                else:
                    self.unhealthy += not is_healthy(self.url)

    def growth(self) -> tuple[float, float]:
        """MiB of memory after the first third, and how many more at the end."""
        warm, end = self.states[len(self.states) // 3], self.states[-1]
        return warm.memory_mib, end.memory_mib - warm.memory_mib


def fuzz(url: str, requests: int, seed: int, *, progress: bool = True) -> list[dict[str, Any]]:
    """A row of results for each attacker, and one of the server."""
    with tqdm(total=requests, unit="request", disable=not progress) as bar:
        watch = Watch(url, requests, bar)
        counts = [requests // 3 + (index < requests % 3) for index in range(3)]
        tallies = [Tally(count, watch.advance) for count in counts]
        start = time.monotonic()
        with ThreadPoolExecutor(len(tallies)) as threads:
            attacks = [threads.submit(attack, url, seed, tally) for attack, tally in zip(ATTACKERS.values(), tallies)]
        for each in attacks:
            each.result()
    healthy = is_healthy(url)
    state, seconds_to_idle = wait_until_idle(url, SETTLE) if healthy else (watch.states[-1], None)
    warm_mib, grown_mib = watch.growth()
    rows = [
        {
            "attacker": name, "requests": tally.done, "slowest_s": round(tally.slowest, 3),
            "outcomes": dict(sorted(tally.outcomes.items())), "failures": len(tally.failures),
            "told": tally.failures[:KEPT], "status": "failed" if tally.failures else "ok",
        }
        for name, tally in zip(ATTACKERS, tallies)
    ]  # fmt: skip
    good = healthy and state.idle and not watch.unhealthy
    server = {
        "attacker": "all", "requests": sum(tally.done for tally in tallies), "seconds": time.monotonic() - start,
        "seconds_to_idle": seconds_to_idle, "running": state.running, "waiting": state.waiting,
        "kv_usage": state.kv_usage, "unhealthy": watch.unhealthy, "warm_mib": warm_mib, "grown_mib": grown_mib,
        "files_warm": watch.states[len(watch.states) // 3].files, "files_end": state.files,
        "status": "ok" if good else "failed",
    }  # fmt: skip
    return [*rows, server]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / "fuzz", help="folder for results")
    parser.add_argument("--requests", type=int, default=20_000, help="how many (default 20000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is sent (default 0)")
    parser.add_argument("--url", help="a server that runs already, instead of one started here")
    args = parser.parse_args(argv)
    if args.requests < 100:
        parser.error(f"--requests must be at least 100, not {args.requests}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    versions = {name: importlib.metadata.version(name) for name in ("aiohttp", "schemathesis", "llguidance")}
    report.environment |= {"model": "demo", "seed": args.seed, "flags": FLAGS}
    report.environment["versions"] |= versions
    if args.url:
        rows = fuzz(args.url, args.requests, args.seed)
    else:
        with ServerProcess(*FLAGS, clean=False) as server:
            rows = fuzz(server.url, args.requests, args.seed)
            exit_status = server.stop()
        tracebacks = [server.log()[match.start() :][:4000] for match in re.finditer("Traceback", server.log())]
        rows[-1] |= {"exit_status": exit_status, "tracebacks": len(tracebacks), "logged": tracebacks[:KEPT]}
        if exit_status or tracebacks:
            rows[-1]["status"] = "failed"
    for row in rows:
        report.add(**row)
    columns = [
        table([row for row in rows if "told" in row], ("attacker", "requests", "failures", "slowest_s", "status")),
        table([rows[-1]], [name for name in rows[-1] if name not in ("attacker", "logged")]),
    ]
    text = "\n\n".join(["# Fuzzing the server", heading(report.environment), *columns])
    (args.out / "report.md").write_text(text + "\n")
    print(text)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
