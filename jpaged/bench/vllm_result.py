"""Result of a run with the keys of `vllm bench serve`, so that its readers work with either."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jpaged.bench.measure import Record
from jpaged.bench.serve import Result, Run, Settings

METRICS = ("ttft", "tpot", "itl", "e2el")


def document(
    result: Result, run: Run, settings: Settings, *, backend: str, label: str | None, metadata: Mapping[str, str],
    metrics: Iterable[str] = METRICS, percentiles: Sequence[float] = (99,), detailed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return a run as JSON values: durations in seconds, latencies in milliseconds, throughputs per second.

    Args:
        backend: kind of the server, a name for readers only.
        metadata: further keys.
        metrics: latencies of METRICS to include.
        percentiles: numbers between 0 and 100.
        detailed: include the lengths, latencies (in seconds) and errors of each request.
    """
    found = run.measurement
    done = [record for record in run.records if record.failure is None]
    facts = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": label,
        "model_id": result.model,
        "tokenizer_id": settings.tokenizer or result.model,
        "num_prompts": found.requests,
        **metadata,
        "request_rate": run.rate if math.isfinite(run.rate) else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.concurrency,
        "duration": found.duration,
        "completed": found.completed,
        "failed": found.requests - found.completed,
        "total_input_tokens": found.prompt_tokens,
        "total_output_tokens": found.output_tokens,
        "request_throughput": found.request_throughput,
        "request_goodput": found.goodput,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_throughput,
    }
    for name in metrics:
        facts |= _spread(name, _values(name, done), percentiles)
    return facts | (_requests(run.records) if detailed else {})


def _values(name: str, records: Sequence[Record]) -> list[float]:
    if name == "itl":
        return [gap for record in records for gap in record.gaps]
    return [value for record in records if (value := getattr(record, name)) is not None]


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return the distribution of latencies in milliseconds; 0 without any, as in vLLM."""
    milliseconds = np.asarray(values or [0.0]) * 1000
    spread = {"mean": np.mean(milliseconds), "median": np.median(milliseconds), "std": np.std(milliseconds)}
    spread |= {f"p{each:g}": np.percentile(milliseconds, each) for each in percentiles}
    return {f"{kind}_{name}_ms": float(value) for kind, value in spread.items()}


def _requests(records: Sequence[Record]) -> dict[str, list[Any]]:
    return {
        "input_lens": [record.prompt_tokens or 0 for record in records],
        "output_lens": [0 if record.failure else record.tokens for record in records],
        "start_times": [record.sent for record in records],
        "ttfts": [record.ttft or 0.0 for record in records],
        "itls": [record.gaps for record in records],
        "latencies": [record.e2el for record in records],
        "errors": [record.detail or record.failure or "" for record in records],
    }
