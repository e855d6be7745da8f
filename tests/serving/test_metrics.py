"""Metrics against the engine's own work, and a dashboard that reads only existing metrics."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jpaged.config import Limits
from jpaged.core.block_pool import BlockPool
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.scheduler import Scheduler
from jpaged.engine.engine import Engine
from jpaged.serving.metrics import Metrics
from tests.serving.client import Client
from tests.support.fake_runner import VOCAB, FakeRunner

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
# Names of vLLM that dashboards and autoscalers read.
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "request_success",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens",
)  # fmt: skip


def read(text: str) -> dict[str, float]:
    """Return the value of each sample by its name and its labels, except those of the model and the only engine."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


class Lab:
    """An engine on a fake runner with a fake clock, observed as a server's engine."""

    def __init__(self, num_blocks=64):
        self.now = 100.0
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), Limits(100, 8, 16), vocab_size=VOCAB)
        self.seconds = 0.0  # of a step
        runner = FakeRunner(num_blocks, 4, scheduler=self.scheduler)
        self.engine = Engine(self.scheduler, self, clock=lambda: self.now)
        self.dispatch_without_time = runner.dispatch
        self.page = Metrics("m", [self.engine.stats])
        (self.metrics,) = self.page.engines

    def dispatch(self, plan, make_masks):
        pending = self.dispatch_without_time(plan, make_masks)
        self.now += self.seconds
        return pending

    def add(self, name, prompt, params):
        self.metrics.added(self.engine.add(name, prompt, params))

    def step(self, seconds):
        self.seconds = seconds
        output = self.engine.step()
        self.metrics.stepped(self.scheduler, output)
        for request in output.ended:
            self.metrics.ended(request)

    def read(self):
        return read(self.page.render().decode())


def test_metrics_of_one_request_are_exact():
    lab = Lab()
    lab.step(1)  # without requests
    lab.now = 110
    lab.add("a", [1] * 20, SamplingParams(max_tokens=3))
    lab.now = 112  # two seconds pass before the step
    for seconds in (5, 1, 2, 4):  # 16 tokens of the prompt, the other 4 with the first token, two more
        lab.step(seconds)
    found = lab.read()
    sums = {name: found[f"vllm:{name}_sum"] for name in HISTOGRAMS}
    assert sums == {
        "request_queue_time_seconds": 2.0, "time_to_first_token_seconds": 8.0, "request_prefill_time_seconds": 6.0,
        "inter_token_latency_seconds": 6.0, "request_decode_time_seconds": 6.0, "e2e_request_latency_seconds": 14.0,
        "iteration_tokens_total": 22.0, "request_prompt_tokens": 20.0, "request_generation_tokens": 3.0,
    }  # fmt: skip
    assert found["vllm:request_inference_time_seconds_sum"] == 12
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 2 and found["vllm:iteration_tokens_total_count"] == 4
    assert found["vllm:prompt_tokens_total"] == 20 and found["vllm:generation_tokens_total"] == 3
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:request_params_max_tokens_sum"] == 3 and found["vllm:request_params_n_sum"] == 1


def test_queue_time_is_the_time_of_waiting():
    lab = Lab()
    for name in "ab":  # The steps of the first prompt leave no room for the second.
        lab.add(name, [ord(name) % 50] * 32, SamplingParams(max_tokens=1))
    for _ in range(4):
        lab.step(10)
    found = lab.read()
    assert found["vllm:request_queue_time_seconds_sum"] == 20
    assert found["vllm:time_to_first_token_seconds_sum"] == 20 + 40


def test_branches_beams_preemptions_and_aborts_are_counted():
    lab = Lab(num_blocks=16)
    lab.add("n", [1, 2, 3], SamplingParams(n=3, max_tokens=4, seed=0))
    lab.add("beams", [4, 5, 6], BeamSearchParams(beam_width=2, max_tokens=4))
    while lab.engine.has_work:
        lab.step(1)
    found = lab.read()
    assert found["vllm:request_success_total{finished_reason=length}"] == 5
    assert found["vllm:generation_tokens_total"] >= 3 * 4 + 2 * 3
    for i in range(4):
        lab.add(str(i), [i] * 12, SamplingParams(max_tokens=20))
    for _ in range(12):
        lab.step(1)
    assert lab.read()["vllm:num_preemptions_total"] == lab.scheduler.num_preemptions > 0
    running, waiting = lab.read()["vllm:num_requests_running"], lab.read()["vllm:num_requests_waiting"]
    assert running + waiting == 4 and running > 0 and waiting > 0
    assert lab.read()["vllm:kv_cache_usage_perc"] == lab.scheduler.pool.num_used / 16
    for i in range(4):
        lab.metrics.ended(lab.engine.abort(str(i)))
    found = lab.read()
    assert found["vllm:request_success_total{finished_reason=abort}"] == 4
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


@pytest.mark.parametrize("kind, names", [("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)])
async def test_metrics_have_the_names_and_types_that_dashboards_read(client, kind, names):
    await asyncio.gather(client.complete("Hello", max_tokens=4), client.complete("Hello there", max_tokens=4))
    await client.idle()
    async with client.session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in names:
        family = families[f"vllm:{name}"]
        assert family.type == kind and family.samples and family.documentation, name
        assert all((sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0") for sample in family.samples)
    samples = families["vllm:num_requests_running"].samples
    assert [(sample.labels, sample.value) for sample in samples] == [({"model_name": "tiny", "engine": "0"}, 0.0)]


async def test_http_responses_are_counted_by_route(loaded):
    async with Client(*loaded) as client:
        await client.complete("a", max_tokens=1)
        await client.complete("a", 400, max_tokens=0)
        for path in ("/nowhere/1", "/nowhere/2", "/v1/models/a", "/v1/models/b"):
            async with client.session.get(path) as response:
                assert response.status == 404
        found = read(client.service.metrics.render().decode())
    counted = {key: value for key, value in found.items() if key.startswith("http_requests_total")}
    assert counted == {
        "http_requests_total{handler=/v1/completions,method=POST,status=200}": 1,
        "http_requests_total{handler=/v1/completions,method=POST,status=400}": 1,
        "http_requests_total{handler=unknown,method=GET,status=404}": 2,
        "http_requests_total{handler=/v1/models/{model},method=GET,status=404}": 2,
    }


async def test_dashboard_reads_only_existing_metrics(client):
    await client.complete("Hello", max_tokens=4)
    async with client.session.get("/metrics") as response:
        known = {
            sample.name for family in text_string_to_metric_families(await response.text()) for sample in family.samples
        }
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    names = {name for expression in asked for name in re.findall(r"(?:vllm:|http_|process_)\w+", expression)}
    assert len(asked) > 10 and names <= known, names - known
