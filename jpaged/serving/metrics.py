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


class _Families:
    """Families of the engines' metrics, each defined once."""

    def __init__(self, registry: CollectorRegistry):
        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", told, [*LABELS, *labels], registry=registry)

        def histogram(name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", told, LABELS, buckets=buckets, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, computed or found in the prefix cache")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.corrupted = counter("corrupted_requests", "Requests ended by non-finite logits of the model")
        self.success = counter("request_success", "Finished choices, by finish reason", "finished_reason")
        self.first_token = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token", FIRST_TOKEN_SECONDS
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Seconds between successive tokens of a request", TOKEN_SECONDS
        )
        self.mean_between = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds between successive tokens of a request",
            TOKEN_SECONDS,
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the end of a request", REQUEST_SECONDS
        )
        self.queue = histogram("request_queue_time_seconds", "Seconds from arrival to the first step", REQUEST_SECONDS)
        self.prefill = histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token", REQUEST_SECONDS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Seconds from the first token to the last", REQUEST_SECONDS
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Seconds from the first step to the last token", REQUEST_SECONDS
        )
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of a step", STEP_TOKENS)
        self.prompt_len = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.generated = histogram("request_generation_tokens", "Generated tokens of a request", TOKENS)
        self.longest = histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest choice of a request", TOKENS
        )
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of a request", TOKENS)
        self.n = histogram("request_params_n", "n of a request", CHOICES)


class EngineMetrics:
    """Observer of an engine that counts."""

    def __init__(self, families: _Families, model_name: str, engine: str):
        self._success, self._labels = families.success, (model_name, engine)
        self._prompt_tokens = families.prompt_tokens.labels(*self._labels)
        self._generation_tokens = families.generation_tokens.labels(*self._labels)
        self._corrupted = families.corrupted.labels(*self._labels)
        self._first_token = families.first_token.labels(*self._labels)
        self._between = families.between.labels(*self._labels)
        self._mean_between = families.mean_between.labels(*self._labels)
        self._whole = families.whole.labels(*self._labels)
        self._queue = families.queue.labels(*self._labels)
        self._prefill = families.prefill.labels(*self._labels)
        self._decode = families.decode.labels(*self._labels)
        self._inference = families.inference.labels(*self._labels)
        self._step_tokens = families.step_tokens.labels(*self._labels)
        self._prompt_len = families.prompt_len.labels(*self._labels)
        self._generated = families.generated.labels(*self._labels)
        self._longest = families.longest.labels(*self._labels)
        self._max_tokens = families.max_tokens.labels(*self._labels)
        self._n = families.n.labels(*self._labels)

    def added(self, request: Request) -> None:
        """Count a new request."""
        self._n.observe(request.params.num_outputs)
        self._max_tokens.observe(request.max_tokens)

    def stepped(self, scheduler: Scheduler, output: StepOutput) -> None:
        """Count the tokens of a step, and observe the latencies of its requests."""
        if output.plan is not None and output.plan.rows:
            self._step_tokens.observe(output.plan.num_tokens)
        self._generation_tokens.inc(sum(progress.tokens for progress in output.progress))
        for request, _, gap in output.progress:
            times = request.metrics
            if gap is None:
                self._queue.observe(times.scheduled_ts - times.queued_ts)
                self._first_token.observe(times.first_token_ts - times.queued_ts)
                self._prefill.observe(times.first_token_ts - times.scheduled_ts)
                self._prompt_tokens.inc(len(request.prompt_token_ids))
            else:
                self._between.observe(gap)

    def ended(self, request: Request) -> None:
        """Count an ended request and its choices, and observe its latencies."""
        times = request.metrics
        if request.sequences[0].stop_reason == NON_FINITE:
            self._corrupted.inc()
        for sequence in request.outputs:
            self._success.labels(*self._labels, str(sequence.finish_reason)).inc()
        self._whole.observe(times.finished_ts - times.queued_ts)
        self._prompt_len.observe(len(request.prompt_token_ids))
        self._generated.observe(times.num_generation_tokens)
        longest = max(sequence.num_output_tokens for sequence in request.sequences)
        self._longest.observe(longest)
        if times.num_generation_tokens:
            self._inference.observe(times.last_token_ts - times.scheduled_ts)
            self._decode.observe(times.last_token_ts - times.first_token_ts)
        if longest > 1:
            self._mean_between.observe((times.last_token_ts - times.first_token_ts) / (longest - 1))


class Metrics:
    """Metrics of a server: those of its engines, with the model's name and the engine's number, and those of HTTP.

    Args:
        stats: of each engine, return its numbers, at any time.

    Attributes:
        engines: an observer of each engine.
    """

    def __init__(self, model_name: str, stats: Sequence[Callable[[], EngineStats]]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))
        ProcessCollector(registry=self._registry)
        families = _Families(self._registry)
        self.engines = [EngineMetrics(families, model_name, str(index)) for index in range(len(stats))]
        rejected = "Requests rejected because the queue was full"
        self._rejected = Counter(
            "vllm:num_requests_rejected", rejected, ["model_name"], registry=self._registry
        ).labels(model_name)
        self._http = Counter(
            "http_requests", "HTTP responses", ["method", "handler", "status"], registry=self._registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Seconds from the headers of an HTTP request to the end of its response",
            ["method", "handler"],
            buckets=REQUEST_SECONDS, registry=self._registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an answered HTTP request.

        Args:
            handler: path of the request's route, which has a limited number of values.
        """
        self._http.labels(method, handler, str(status)).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def rejected(self) -> None:
        """Count a request that found the queue full."""
        self._rejected.inc()


class _EngineCollector(Collector):
    """Collector of the engines' own numbers, which are read when they are asked for."""

    def __init__(self, model_name: str, stats: Sequence[Callable[[], EngineStats]]):
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = [each() for each in self._stats]
        gauges: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_requests_running": ("Running requests", lambda s: s.num_running),
            "num_requests_waiting": ("Waiting requests", lambda s: s.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the KV blocks in use, from 0 to 1", lambda s: s.num_used_blocks / s.num_blocks
            ),
        }  # fmt: skip
        counters: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
            "num_preemptions": ("Preempted requests", lambda s: s.num_preemptions),
            "num_swapped_blocks": ("KV blocks swapped to the host", lambda s: s.num_swapped_blocks),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
        }
        for family, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (told, value) in numbers.items():
                metric = family(f"vllm:{name}", told, labels=LABELS)
                for engine, each in enumerate(stats):
                    metric.add_metric([self._model_name, str(engine)], value(each))
                yield metric
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the KV pool", labels=["block_size", "num_gpu_blocks", "engine"]
        )
        for engine, each in enumerate(stats):
            info.add_metric([str(each.block_size), str(each.num_blocks), str(engine)], 1)
        yield info
