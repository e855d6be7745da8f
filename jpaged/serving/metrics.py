"""Prometheus metrics under vLLM's names, for existing dashboards."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jpaged.core.request import NON_FINITE, Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import EngineStats, StepOutput

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
REQUEST_SECONDS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
CHOICES = (1, 2, 5, 10, 20, 50)
LABELS = ["model_name", "engine"]  # as in vLLM

# Text and buckets of each engine's histograms, by name.
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds from arrival to the first token", FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Seconds between successive tokens of a request", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean seconds between successive tokens of a request", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Seconds from arrival to the end of a request", REQUEST_SECONDS),
    "request_queue_time_seconds": ("Seconds from arrival to the first step", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("Seconds from the first step to the first token", REQUEST_SECONDS),
    "request_decode_time_seconds": ("Seconds from the first token to the last", REQUEST_SECONDS),
    "request_inference_time_seconds": ("Seconds from the first step to the last token", REQUEST_SECONDS),
    "iteration_tokens_total": ("Tokens of a step", STEP_TOKENS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request", TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of the longest choice of a request", TOKENS),
    "request_params_max_tokens": ("max_tokens of a request", TOKENS),
    "request_params_n": ("n of a request", CHOICES),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens, computed or found in the prefix cache",
    "generation_tokens": "Generated tokens",
    "corrupted_requests": "Requests ended by non-finite logits of the model",
}
Number = tuple[str, Callable[[EngineStats], float]]
# Text and value of the numbers that an engine holds, by name.
GAUGES: dict[str, Number] = {
    "num_requests_running": ("Running requests", lambda s: s.num_running),
    "num_requests_waiting": ("Waiting requests", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("Share of the KV blocks in use, from 0 to 1", lambda s: s.num_used_blocks / s.num_blocks),
    "prefix_cache_pinned_blocks": ("Pinned KV blocks of the prefix cache", lambda s: s.num_pinned),
    "prefix_cache_host_blocks": ("Cached KV blocks on the host", lambda s: s.num_host_blocks),
}
TOTALS: dict[str, Number] = {
    "num_preemptions": ("Preempted requests", lambda s: s.num_preemptions),
    "num_swapped_blocks": ("KV blocks swapped to the host", lambda s: s.num_swapped_blocks),
    "prefix_cache_evicted_blocks": ("Cached KV blocks moved to the host when evicted", lambda s: s.num_evicted),
    "prefix_cache_returned_blocks": ("Cached KV blocks moved back from the host", lambda s: s.num_returned),
    "prefix_cache_read_blocks": ("Cached KV blocks read from files", lambda s: s.num_read),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    "spec_decode_num_drafts": ("Sequences of steps with draft tokens", lambda s: s.num_drafted),
    "spec_decode_num_draft_tokens": ("Draft tokens", lambda s: s.num_drafts),
    "spec_decode_num_accepted_tokens": ("Draft tokens that became output", lambda s: s.num_kept),
}


class EngineMetrics:
    """Observer of an engine that counts.

    Args:
        counters: those of COUNTERS, `request_success` and `spec_decode_num_accepted_tokens_per_pos`, by name.
        labels: values of LABELS.
    """

    def __init__(self, counters: dict[str, Counter], histograms: dict[str, Histogram], labels: tuple[str, str]):
        self._success, self._labels = counters["request_success"], labels
        self._kept_at = counters["spec_decode_num_accepted_tokens_per_pos"]
        self._counters = {name: counters[name].labels(*labels) for name in COUNTERS}
        self._histograms = {name: family.labels(*labels) for name, family in histograms.items()}

    def added(self, request: Request) -> None:
        """Count a new request."""
        self._histograms["request_params_n"].observe(request.params.num_outputs)
        self._histograms["request_params_max_tokens"].observe(request.max_tokens)

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """Count the tokens of a step, and observe the latencies of its requests."""
        if output.plan is not None and output.plan.rows:
            self._histograms["iteration_tokens_total"].observe(output.plan.num_tokens)
        self._counters["generation_tokens"].inc(sum(progress.tokens for progress in output.progress))
        for _, kept in output.committed.verified:
            for position in range(kept):
                self._kept_at.labels(*self._labels, str(position)).inc()
        for request, _, gap in output.progress:
            times = request.metrics
            if gap is None:
                self._histograms["request_queue_time_seconds"].observe(times.scheduled_ts - times.queued_ts)
                self._histograms["time_to_first_token_seconds"].observe(times.first_token_ts - times.queued_ts)
                self._histograms["request_prefill_time_seconds"].observe(times.first_token_ts - times.scheduled_ts)
                self._counters["prompt_tokens"].inc(len(request.prompt_token_ids))
            else:
                self._histograms["inter_token_latency_seconds"].observe(gap)

    def ended(self, request: Request) -> None:
        """Count an ended request and its choices, and observe its latencies."""
        times = request.metrics
        if request.sequences[0].stop_reason == NON_FINITE:
            self._counters["corrupted_requests"].inc()
        for sequence in request.outputs:
            self._success.labels(*self._labels, str(sequence.finish_reason)).inc()
        self._histograms["e2e_request_latency_seconds"].observe(times.finished_ts - times.queued_ts)
        self._histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        self._histograms["request_generation_tokens"].observe(times.num_generation_tokens)
        longest = max(sequence.num_output_tokens for sequence in request.sequences)
        self._histograms["request_max_num_generation_tokens"].observe(longest)
        if times.num_generation_tokens:
            self._histograms["request_inference_time_seconds"].observe(times.last_token_ts - times.scheduled_ts)
            self._histograms["request_decode_time_seconds"].observe(times.last_token_ts - times.first_token_ts)
        if longest > 1:
            mean = (times.last_token_ts - times.first_token_ts) / (longest - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(mean)


class Metrics(Collector):
    """Metrics of a server: those of its engines, with the model's name and the engine's number, and those of HTTP.

    Args:
        stats: functions that return the numbers of each engine, at any time.

    Attributes:
        engines: an observer of each engine.
        rejected: the requests that found the queue full.
    """

    def __init__(self, model_name: str, stats: Sequence[Callable[[], EngineStats]]):
        self._model_name, self._stats = model_name, stats
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        counters = {name: Counter(f"vllm:{name}", text, LABELS, registry=registry) for name, text in COUNTERS.items()}
        text, labels = "Finished choices, by finish reason", [*LABELS, "finished_reason"]
        counters["request_success"] = Counter("vllm:request_success", text, labels, registry=registry)
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens that became output, by their position"
        counters[name] = Counter(f"vllm:{name}", text, [*LABELS, "position"], registry=registry)
        histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.engines = [EngineMetrics(counters, histograms, (model_name, str(index))) for index in range(len(stats))]
        text = "Requests rejected because the queue was full"
        rejected = Counter("vllm:num_requests_rejected", text, ["model_name"], registry=registry)
        self.rejected = rejected.labels(model_name)
        labels = ["method", "handler"]
        self._http = Counter("http_requests", "HTTP responses", [*labels, "status"], registry=registry)
        name, text = "http_request_duration_seconds", "Seconds from the headers of a request to the end of its response"
        self._http_seconds = Histogram(name, text, labels, buckets=REQUEST_SECONDS, registry=registry)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request; `handler` is the path of its route, of which there are a limited number."""
        self._http.labels(method, handler, str(status)).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers that the engines hold, which are read when Prometheus asks."""
        stats = [each() for each in self._stats]
        for family, numbers in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, TOTALS)):
            for name, (text, value) in numbers.items():
                metric = family(f"vllm:{name}", text, labels=LABELS)
                for engine, each in enumerate(stats):
                    metric.add_metric([self._model_name, str(engine)], value(each))
                yield metric
        labels = ["block_size", "num_gpu_blocks", "engine"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV pool", labels=labels)
        for engine, each in enumerate(stats):
            info.add_metric([str(each.block_size), str(each.num_blocks), str(engine)], 1)
        yield info
