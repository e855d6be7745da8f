"""Result of a run with the keys of `vllm bench serve`, so that its readers work with either."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from jpaged.bench.measure import Record, latencies
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
        percentiles: of the latencies `metrics`, numbers between 0 and 100.
        detailed: include the lengths, latencies (in seconds) and errors of each request.
    """
    summary, done = run.measurement, [record for record in run.records if record.failure is None]
    facts = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        **dict.fromkeys(("endpoint_type", "backend"), backend),
        "label": label,
        "model_id": result.model,
        "tokenizer_id": settings.tokenizer or result.model,
        "num_prompts": summary.requests,
        **metadata,
        "request_rate": run.rate if math.isfinite(run.rate) else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.concurrency,
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.requests - summary.completed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
    }
    for name in metrics:
        milliseconds = np.asarray(latencies(name, done) or [0.0]) * 1000  # 0 without any, as in vLLM
        spread = {"mean": np.mean(milliseconds), "median": np.median(milliseconds), "std": np.std(milliseconds)}
        spread |= {f"p{each:g}": np.percentile(milliseconds, each) for each in percentiles}
        facts |= {f"{kind}_{name}_ms": float(value) for kind, value in spread.items()}
    return facts | (_requests(run.records) if detailed else {})


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
