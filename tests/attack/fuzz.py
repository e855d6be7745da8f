"""Attacks a busy server with 64 clients at once, and counts faults: a status of 500 and above other than for a full
queue or a time limit, an answer that breaks its form, a hang, a leak, a traceback in its log.

    python tests/attack/fuzz.py --out results         20,000 requests, some ten minutes
    python tests/attack/fuzz.py --requests 1500 --seed 7

Four attackers: one makes requests from the server's description of its API (`fuzz_described.py`), one breaks bytes
(`fuzz_bytes.py`), one puts hostile values into fields (`fuzz_fields.py`), and one keeps the server busy
(`fuzz_mixed.py`). The server has API keys, TLS, priorities, a time limit for answers, a short queue, and a pool so
small that requests are preempted and swapped to the host, with evicted blocks on the host and in files; the run fails
if one of these was not met. Each request depends on the seed and its number alone. Needs schemathesis
(`pip install -e ".[dev]"`) and openssl.
"""

import argparse
import importlib.metadata
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shared.device import environment, open_device, prepare_environment
from benchmarks.shared.results import Report, Row, script_parser, table
from benchmarks.shared.server_process import ServerProcess
from tests.attack import fuzz_bytes, fuzz_described, fuzz_fields, fuzz_mixed
from tests.attack.fuzz_target import Tally, Target, make_certificate
from tests.attack.server_state import ServerState, is_healthy, read_state, wait_until_idle

ATTACKERS = {"bytes": fuzz_bytes.attack, "fields": fuzz_fields.attack, "mixed": fuzz_mixed.attack}
SHARES = {"described": 7, "bytes": 8, "fields": 15, "mixed": 70}  # percent of the requests
CLIENTS, DESCRIBED_CLIENTS = 60, 4
KEYS = ("first-key", "second-key", "third-key")
FLAGS = (
    "--max-num-seqs", "32", "--max-num-batched-tokens", "64", "--max-model-len", "512",
    "--num-gpu-blocks-override", "64", "--swap-space", "0.25", "--preemption-mode", "swap",
    "--scheduling-policy", "priority", "--max-queue", "80", "--request-timeout", "15", "--access-log", "none",
    "--tool-call-parser", "hermes",
)  # fmt: skip
WARM_UP = 0.25  # of the requests, before memory and open files are first counted
SETTLE_S = 60.0  # for requests that still run after the last one
LOOK_S = 0.5  # from one look at the server to the next
MAX_GROWTH_MIB = 150  # after the warm-up
KEPT = 20  # failures that are told in full


class Watch:
    """Looks at the server now and then, from a thread of its own, while the block runs."""

    def __init__(self, target: Target):
        self._target = target
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.states: list[ServerState] = []
        self.unhealthy = 0

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def most_at_once(self) -> int:
        return int(max((state.running + state.waiting for state in self.states), default=0))

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.states.append(read_state(self._target.url, self._target.tls))
            except OSError:
                self.unhealthy += 1
            else:
                self.unhealthy += not is_healthy(self._target.url, self._target.tls)


def _send(target: Target, seed: int, indices: range, tallies: dict[str, Tally]) -> None:
    """Send the requests of these numbers, as many at once as there are clients."""
    kinds = [random.Random(f"{seed} {i}").choices(list(SHARES), list(SHARES.values()))[0] for i in indices]
    described = kinds.count("described")
    counts = [described // DESCRIBED_CLIENTS + (i < described % DESCRIBED_CLIENTS) for i in range(DESCRIBED_CLIENTS)]

    def send(index: int, kind: str) -> None:
        ATTACKERS[kind](target, random.Random(f"{seed} {index} request"), tallies[kind])

    with ThreadPoolExecutor(CLIENTS) as clients, ThreadPoolExecutor(DESCRIBED_CLIENTS) as others:
        sent = [
            others.submit(fuzz_described.attack, target, seed + 1000 * indices.start + i, count, tallies["described"])
            for i, count in enumerate(counts)
            if count
        ]
        sent += [clients.submit(send, index, kind) for index, kind in zip(indices, kinds) if kind != "described"]
        for each in sent:
            each.result()


def fuzz(target: Target, requests: int, seed: int, *, progress: bool = True) -> list[Row]:
    """Return a row of results for each attacker, and one of the server."""
    start = time.monotonic()
    with tqdm(total=requests, unit="request", disable=not progress) as bar:
        lock = threading.Lock()

        def advance() -> None:
            with lock:
                bar.update()

        tallies = {name: Tally(advance) for name in SHARES}
        idle = [wait_until_idle(target.url, SETTLE_S, target.tls)[0]]
        with Watch(target) as watch:
            for part in (range(int(WARM_UP * requests)), range(int(WARM_UP * requests), requests)):
                _send(target, seed, part, tallies)
                state, seconds_to_idle = wait_until_idle(target.url, SETTLE_S, target.tls)
                idle.append(state)
    seconds = time.monotonic() - start
    begun, warm, end = idle
    rows: list[Row] = [
        {
            "attacker": name, "requests": tally.done, "generated": tally.generated,
            "slowest_s": round(tally.slowest, 3), "outcomes": dict(sorted(tally.outcomes.items())),
            "failures": len(tally.failures), "told": tally.failures[:KEPT],
            "status": "failed" if tally.failures else "ok",
        }
        for name, tally in tallies.items()
    ]  # fmt: skip
    statuses = [tally.outcomes for tally in tallies.values()]
    server = {
        "attacker": "all", "requests": sum(row["requests"] for row in rows),
        "generated": sum(row["generated"] for row in rows), "seconds": seconds, "most_at_once": watch.most_at_once,
        "preemptions": end.preemptions - begun.preemptions,
        "swapped_blocks": end.swapped_blocks - begun.swapped_blocks,
        "queue_full": sum(outcomes["503"] for outcomes in statuses),
        "timed_out": sum(outcomes["504"] for outcomes in statuses),
        "too_large": sum(outcomes["413"] for outcomes in statuses),
        "wrong_key": sum(outcomes["401"] for outcomes in statuses), "seconds_to_idle": seconds_to_idle,
        "running": end.running, "waiting": end.waiting, "kv_usage": end.kv_usage, "unhealthy": watch.unhealthy,
        "warm_mib": warm.memory_mib, "grown_mib": end.memory_mib - warm.memory_mib, "files_warm": warm.files,
        "files_end": end.files,
    }  # fmt: skip
    found = problems(server) + ([] if is_healthy(target.url, target.tls) else ["not healthy at the end"])
    return [*rows, server | {"problems": found, "status": "failed" if found else "ok"}]


def problems(server: Row) -> list[str]:
    """Return the faults in the row of a server, and the conditions that its attackers did not meet."""
    found = [f"{name} is {server[name]:g} at the end" for name in ("running", "waiting", "kv_usage") if server[name]]
    if server["unhealthy"]:
        found.append(f"not healthy {server['unhealthy']} times")
    if server["files_end"] > server["files_warm"] + 2:
        found.append(f"open files grew from {server['files_warm']:g} to {server['files_end']:g}")
    if server["grown_mib"] > MAX_GROWTH_MIB:
        found.append(f"memory grew by {server['grown_mib']:.0f} MiB")
    if server["generated"] < 0.5 * server["requests"]:
        found.append(f"{server['generated']} of {server['requests']} requests generated tokens, less than half")
    met = ("preemptions", "swapped_blocks", "queue_full", "timed_out", "too_large")
    return found + [f"no {name}" for name in met if not server[name]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser(__doc__, "fuzz")
    parser.add_argument("--requests", type=int, default=20_000, help="how many (default 20000)")
    parser.add_argument("--seed", type=int, default=0, help="of all requests (default 0)")
    args = parser.parse_args(argv)
    if args.requests < 100:
        parser.error(f"--requests must be at least 100, not {args.requests}")
    return args


def attacked(requests: int, seed: int, *, progress: bool = True) -> list[Row]:
    """Return the rows of `fuzz` for a server of its own, whose end and log count too."""
    with tempfile.TemporaryDirectory() as folder:
        chain, key = make_certificate(Path(folder))
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(KEYS))
        tls = ("--ssl-certfile", str(chain), "--ssl-keyfile", str(key), "--api-key-file", str(keys))
        files = ("--kv-cache-dir", f"{folder}/kv")
        with ServerProcess(*FLAGS, *tls, *files, clean=False) as server:
            rows = fuzz(Target(server.url, KEYS, chain), requests, seed, progress=progress)
            exit_status = server.stop()
        tracebacks = server.tracebacks()
    rows[-1] |= {"exit_status": exit_status, "tracebacks": len(tracebacks), "logged": tracebacks[:KEPT]}
    if exit_status or tracebacks:
        rows[-1]["status"] = "failed"
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    prepare_environment()
    args = parse(argv)
    report = Report(args.out / "results.json", environment(open_device(tiny=True), tiny=False))
    versions = {name: importlib.metadata.version(name) for name in ("aiohttp", "schemathesis", "llguidance")}
    flags = (*FLAGS, "--ssl-certfile", "--ssl-keyfile", "--api-key-file")
    report.environment |= {"model": "demo", "seed": args.seed, "flags": flags, "machine_load": os.getloadavg()[0]}
    report.environment["versions"] |= versions
    rows = attacked(args.requests, args.seed)
    for row in rows:
        report.add(**row)
    report.publish("Fuzzing the server", *tables(rows))
    return int(any(row["status"] != "ok" for row in rows))


def tables(rows: Sequence[Row]) -> list[str]:
    columns = ("attacker", "requests", "generated", "failures", "slowest_s", "status")
    server = {name: value for name, value in rows[-1].items() if name not in ("attacker", "logged", "status")}
    values: list[dict[str, Any]] = [{"server": name, "value": value} for name, value in server.items()]
    statuses = [{"attacker": row["attacker"]} | row["outcomes"] for row in rows[:-1]]
    names = sorted({name for row in statuses for name in row} - {"attacker"})
    return [
        table(rows, columns), "## The server", table(values, ("server", "value")),
        "## Outcomes", table(statuses, ("attacker", *names)),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
