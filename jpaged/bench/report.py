"""Reports of a result: text for people, and JSON for programs."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from jpaged.bench.serve import Result, Run, Settings

# Name, title, and unit of each latency, and the number of these units in a second.
SHOWN = (
    ("ttft", "time to first token", "ms", 1e3),
    ("itl", "inter-token latency", "ms", 1e3),
    ("tpot", "time per output token", "ms", 1e3),
    ("e2el", "end-to-end latency", "s", 1.0),
    ("normalised", "normalised latency", "ms/token", 1e3),
    ("delay", "sent later than due", "ms", 1e3),
)

COLUMNS = "requests/s,completed,served/s,output tok/s,normalised ms/tok,ttft p50 ms,ttft p99 ms,itl p99 ms,failed"


def text(result: Result, settings: Settings) -> str:
    """Return a report of each run, and a table of the runs if there are several."""
    parts = [_run(run, settings) for run in result.runs]
    if len(result.runs) > 1:
        parts.append(_curve(result.runs))
    return "\n\n".join([*parts, *(f"Note: {note}." for note in result.notes)])


def document(result: Result, settings: Settings, url: str, *, per_request: bool = False) -> dict[str, Any]:
    """Return the whole result as JSON values, in seconds and tokens.

    Args:
        per_request: include the times of each request, counted from the start of its run.
    """
    values = asdict(settings)
    values["rates"] = [_number(rate) for rate in settings.rates]
    values["workload"]["file"] = str(settings.workload.file) if settings.workload.file else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("jpaged", "aiohttp")}},
        "client": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "server": {"url": url, "model": result.model, "max_model_len": result.max_model_len},
        "settings": values,
        "notes": result.notes,
        "runs": [_document(run, per_request) for run in result.runs],
    }


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: a heading first, the first column left-aligned, numbers right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    )


def failures(run: Run) -> str:
    """Return the number of failures of each kind, and the first message; empty if nothing failed."""
    details = {record.failure: record.detail for record in reversed(run.records)}
    return "; ".join(f"{kind} ({count}): {details[kind]}" for kind, count in run.measurement.failures.items())


def _run(run: Run, settings: Settings) -> str:
    summary = run.measurement
    pace = "all at once" if math.isinf(run.rate) else f"{run.rate:g} requests/s"
    if settings.concurrency:
        pace = f"{'' if math.isinf(run.rate) else pace + ', '}at most {settings.concurrency} at a time"
    rows = [["", "mean", "median", "p90", "p99", "max"]]
    for name, title, unit, scale in SHOWN:
        if name != "delay" or not math.isinf(run.rate):  # without a rate nothing is due at any time
            spread = summary.latencies[name]
            values = [f"{value * scale:.2f}" for value in spread] if spread else ["-"] * 5
            rows.append([f"{title} ({unit})", *values])
    lines = [
        f"{settings.workload.kind}: {summary.requests} requests, {pace}",
        "",
        table(rows),
        "",
        f"completed {summary.completed} of {summary.requests} in {summary.duration:.2f} s",
        f"failed: {failures(run) or 'none'}",
        f"throughput: {summary.request_throughput:.2f} requests/s, {summary.output_throughput:.1f} output tokens/s, "
        f"{summary.total_throughput:.1f} tokens/s in and out",
    ]
    if summary.goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in settings.goodput.items())
        lines.append(f"goodput: {summary.goodput:.2f} requests/s within {limits}")
    if summary.completed:
        lines.append(
            f"tokens: {summary.prompt_tokens} in, {summary.output_tokens} out ({run.asked} asked for) "
            f"in {summary.chunks} chunks of text"
        )
    if uncounted := summary.completed - summary.counted:
        lines.append(f"the server did not count the tokens of {uncounted} answers: their chunks were counted")
    return "\n".join(lines)


def _curve(runs: Sequence[Run]) -> str:
    """Return a table with a row for each rate."""
    rows = [COLUMNS.split(",")]
    for run in runs:
        summary, latencies = run.measurement, run.measurement.latencies
        normalised, ttft, itl = (latencies[name] for name in ("normalised", "ttft", "itl"))
        seconds = [normalised and normalised.mean, ttft and ttft.median, ttft and ttft.p99, itl and itl.p99]
        counts = [f"{summary.completed}", f"{summary.request_throughput:.2f}", f"{summary.output_throughput:.1f}"]
        cells = ["-" if value is None else f"{value * 1e3:.2f}" for value in seconds]
        rows.append([f"{run.rate:g}", *counts, *cells, str(summary.requests - summary.completed)])
    return table(rows)


def _document(run: Run, per_request: bool) -> dict[str, Any]:
    body = {"request_rate": _number(run.rate), "output_tokens_asked": run.asked, **asdict(run.measurement)}
    body["latencies"] = {name: spread and spread._asdict() for name, spread in run.measurement.latencies.items()}
    if per_request:
        start = min(record.due for record in run.records)
        body["per_request"] = [
            asdict(record)
            | {name: getattr(record, name) - start for name in ("due", "sent", "ended")}
            | {"chunks": [at - start for at in record.chunks]}
            for record in run.records
        ]
    return body


def _number(value: float) -> float | str:
    """Return a value for JSON, which has no infinity."""
    return value if math.isfinite(value) else "inf"
