"""Searches the kernels' configurations on the GPU at hand and writes pallas_kernels/tuned.json.

    python benchmarks/kernels/tune.py --kernels mosaic.decode --head-dims 128 64 --budget 580
    python benchmarks/kernels/tune.py --tiny               no GPU: shows that the search works; writes no table

For each kernel, head dim and pool dtype every candidate of `tuning.candidates` is checked against numpy and timed on
one workload; the best few are then timed beside the default, interleaved, on several. A candidate replaces the default
if it is faster in the geometric mean by more than --margin. Candidates that don't compile, or are wrong, are left out.

A journal in --out holds the result of each candidate, and the running one: after a hang or a crash start the same
command again, and it goes on behind it. After a change of the kernels delete the journal.
"""

import argparse
import dataclasses
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.bench import Poisoned, probe_device
from benchmarks.kernels.expected import check_output
from benchmarks.kernels.implementations import PagedTimed, Unsuitable, choose
from benchmarks.kernels.workloads import Shape, Workload, make_workload
from benchmarks.shared.deadline import Deadline
from benchmarks.shared.device import CACHE, CHECKOUT, Device, environment, open_device, prepare_environment
from benchmarks.shared.results import Report, write_tables
from benchmarks.shared.timing import TINY, Effort, measure, ratio
from pallas_kernels import Ops, load, tuning

TABLE = CHECKOUT / "pallas_kernels" / "tuned.json"
FINALISTS = 6
POOL_DTYPES = {"16 bit": "bfloat16", "fp8": "float8_e4m3fn"}
# Sequences x context of decode, prompts of ragged: every candidate is timed on the first.
DECODES = ((64, 4096), (1, 8192), (16, 2048), (256, 1024))
PROMPTS = ((1, 4096), (8, 512), (1, 16384))

Build = Callable[[tuning.Tiles, Workload], PagedTimed]


class Journal:
    """The results of candidates, one line each, kept across runs."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        self.known: dict[str, Any] = {}
        for line in lines:
            entry = json.loads(line)
            self.known[entry["key"]] = entry["result"]

    def run(self, key: str, work: Callable[[], float]) -> tuple[float | None, str | None]:
        """Seconds, or None and the reason; from memory where it ran before. One that never ended isn't tried again."""
        if key not in self.known:
            self._note(key, "hung or crashed")
            try:
                self._note(key, work())
            except Exception as error:
                self._note(key, f"{type(error).__name__}: {error}"[:300])
                try:
                    probe_device()
                except Exception as fault:  # the next candidates would be taken for broken ones
                    raise Poisoned(f"{key} has left no device: start the same command again") from fault
        result = self.known[key]
        return (result, None) if isinstance(result, float) else (None, result)

    def _note(self, key: str, result: float | str) -> None:
        self.known[key] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "result": result}) + "\n")


def search(
    kernel: str,
    default: tuning.Tiles,
    candidates: Iterable[tuning.Tiles],
    workloads: Sequence[Workload],
    build: Build,
    *,
    journal: Journal,
    prefix: str,
    effort: Effort,
    deadline: Deadline,
    report: Report,
    margin: float,
) -> tuple[tuning.Tiles, float, float]:
    """The best configuration, its microseconds on the first workload, and its time over the default's."""

    def once(tiles: tuning.Tiles) -> float:
        timed = build(tiles, workloads[0])
        check_output(timed.output(0), workloads[0])
        return measure({"": timed}, effort._replace(rounds=1))[""].median

    times: dict[tuning.Tiles, float] = {}
    for tiles in dict.fromkeys([default, *candidates]):
        if deadline.passed:
            report.say(f"{kernel}: time is up with {len(times)} candidates timed")
            break
        seconds, reason = journal.run(f"{prefix} {tiles}", partial(once, tiles))
        if seconds is not None:
            times[tiles] = seconds
        report.say(f"{kernel} {tiles}: " + (f"{1e6 * seconds:.2f} us" if seconds is not None else str(reason)))
    if default not in times:
        raise RuntimeError(f"{kernel}: the default {default} does not run: {journal.known.get(f'{prefix} {default}')}")
    finalists = sorted(times, key=times.__getitem__)[:FINALISTS]
    logs: dict[tuning.Tiles, list[float]] = {tiles: [] for tiles in finalists}
    first_us = {tiles: 1e6 * times[tiles] for tiles in (*finalists, default)}
    for i, workload in enumerate(workloads):
        runs = {tiles: build(tiles, workload) for tiles in dict.fromkeys([default, *finalists])}
        for timed in runs.values():
            check_output(timed.output(0), workload)
        timings = measure({str(tiles): timed for tiles, timed in runs.items()}, effort)
        for tiles in finalists:
            logs[tiles].append(math.log(ratio(timings[str(tiles)], timings[str(default)])))
            if i == 0:
                first_us[tiles] = 1e6 * timings[str(tiles)].median
    over = {tiles: math.exp(sum(log) / len(log)) for tiles, log in logs.items()}
    best = min(over, key=over.__getitem__)
    if over[best] > 1 - margin:
        best = default
    return best, first_us[best], over.get(best, 1.0)


def tuned_row(kernel: str, device: Device, head_dim: int, pool: str, tiles: tuning.Tiles, us: float) -> dict[str, Any]:
    """A row of tuned.json."""
    return {
        "kernel": kernel, "device_kind": device.kind, "head_dim": head_dim, "pool_dtype": pool,
        "tiles": dataclasses.asdict(tiles), "us": round(us, 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "jax": jax.__version__,
    }  # fmt: skip


def merge(rows: Sequence[dict[str, Any]], new: dict[str, Any], *, keep: bool = True) -> list[dict[str, Any]]:
    """The table with `new` in the place of a row for the same kernel, device, head dim and pool dtype; without
    `keep` with neither: the default holds."""
    key = lambda row: tuple(row[name] for name in ("kernel", "device_kind", "head_dim", "pool_dtype"))
    return sorted([row for row in rows if key(row) != key(new)] + [new] * keep, key=key)


def _workloads(kernel: str, shape: Shape, pool_dtype: str, device: Device, tiny: bool) -> list[Workload]:
    """Batches over a pool of `pool_dtype`; an fp8 pool's numbers are checked as they are stored."""
    cases = DECODES if kernel.endswith("decode") else PROMPTS
    out = []
    for batch, context in [(2, 40)] if tiny else cases:
        lens = [context] * batch
        workload = make_workload(
            shape, lens, q_lens=None if kernel.endswith("decode") else lens, l2_bytes=device.l2_bytes,
            most_sets=32 if kernel.endswith("decode") else 4,
        )  # fmt: skip
        pools = (pool.astype(pool_dtype) for pool in (workload.k_pool, workload.v_pool))
        out.append(dataclasses.replace(workload, k_pool=next(pools), v_pool=next(pools)))
    return out


def _builder(kernel: str, shape: Shape, pool_dtype: str, device: Device, tiny: bool) -> Build:
    """Makes the kernel with given tiles. Raises Unsuitable where the device can't run it."""
    program, part = kernel.split(".")
    op = {"decode": "paged_decode_attention", "ragged": "ragged_paged_attention"}[part]
    choose("reference" if tiny else program, device, shape, pool_dtype)
    scales = {}
    if "float8" in pool_dtype:
        scales = {name: jnp.ones(shape.num_kv_heads, jnp.float32) for name in ("k_scale_k", "v_scale_k")}

    def build(tiles: tuning.Tiles, workload: Workload) -> PagedTimed:
        implementation = load("pallas_kernels.reference") if tiny else load(f"pallas_kernels.{program}", {part: tiles})
        return PagedTimed(getattr(Ops(implementation), op), workload, **scales)

    return build


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / "tune", help="folder for the journal and results")
    parser.add_argument("--tiny", action="store_true", help="the reference on small shapes, in the kernels' place")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="try no candidate after this long")
    parser.add_argument("--kernels", nargs="+", choices=tuple(tuning.KERNELS), default=list(tuning.KERNELS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--pool-dtypes", nargs="+", choices=tuple(POOL_DTYPES), default=["16 bit", "fp8"])
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--margin", type=float, default=0.01, help="gain that is worth a row (default 0.01)")
    parser.add_argument(
        "--table", type=Path, default=TABLE, help="where the rows go (default pallas_kernels/tuned.json)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_environment()
    device, deadline = open_device(args.tiny), Deadline(args.budget)
    report = Report(args.out / "tuning.json", environment(device, args.tiny))
    journal = Journal(args.out / "journal.jsonl")
    effort = TINY if args.tiny else Effort(samples=3, min_seconds=0.01)
    failed = False
    for kernel in args.kernels:
        for head_dim, pool in ((h, p) for h in args.head_dims for p in args.pool_dtypes):
            row: dict[str, Any] = dict(experiment="tuning", kernel=kernel, head_dim=head_dim, pool_dtype=pool)
            heads = (4, 2) if args.tiny else (32, 8)
            shape = Shape(head_dim, args.block_size, *heads, dtype="bfloat16")
            pool_dtype = POOL_DTYPES[pool]
            candidates = list(tuning.candidates(kernel))[: 3 if args.tiny else None]
            default = tuning.DEFAULTS.get((kernel, head_dim), tuning.KERNELS[kernel]())
            start = time.monotonic()
            try:
                if deadline.passed:
                    raise Unsuitable("time")
                build = _builder(kernel, shape, pool_dtype, device, args.tiny)
                workloads = _workloads(kernel, shape, pool_dtype, device, args.tiny)
                tiles, us, over = search(
                    kernel, default, candidates, workloads, build, journal=journal, effort=effort, deadline=deadline,
                    report=report, margin=args.margin, prefix=f"{device.kind} {kernel} {head_dim} {pool}",
                )  # fmt: skip
            except Unsuitable as error:
                report.add(**row, status="skipped", reason=str(error))
                continue
            except Poisoned:
                raise
            except Exception as error:
                failed = True
                report.add(**row, status="failed", reason=f"{type(error).__name__}: {error}"[:600])
                continue
            report.add(**row, tiles=str(tiles), us=us, over_default=over, status="ok", seconds=time.monotonic() - start)
            if not args.tiny:
                new = tuned_row(kernel, device, head_dim, pool, tiles, us)
                held = args.table if args.table.exists() else TABLE
                rows = merge(json.loads(held.read_text()), new, keep=tiles != default)
                args.table.write_text(json.dumps(rows, indent=1) + "\n")
    print(write_tables(report, "Tuning"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
