"""Runs against a scripted server: requests, their times, and counts."""

import asyncio
import json
import math
import statistics
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest

from jpaged.bench import report, serve
from jpaged.bench.client import Client, ServerError
from jpaged.bench.measure import Record
from jpaged.bench.serve import Settings, bench_server
from jpaged.bench.workload import Workload, arrivals
from tests.bench.fake_server import FakeServer, count
from tests.support.patience import PATIENCE_S

SMALL = Workload("random", num_prompts=20, input_len=12, output_len=5, range_ratio=0.4)


async def bench(url, workload=SMALL, **settings):
    settings = Settings(workload, **{"num_warmups": 0} | settings)
    async with Client(url, timeout=settings.timeout) as client:
        return await bench_server(client, settings, progress=False), settings


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("cut", [5, 10**6])
async def test_everything_is_counted(endpoint, cut):
    server = FakeServer(cut=cut)
    with server.serving() as url:
        result, settings = await bench(url, endpoint=endpoint)
    (run,) = result.runs
    found, lengths = run.measurement, SMALL.lengths()
    assert found.completed == found.counted == 20 and not found.failures and result.notes == []
    assert found.output_tokens == found.chunks == run.asked == sum(each.output for each in lengths)
    assert found.prompt_tokens == sum(each.prompt for each in lengths)  # a template's tokens are among them
    assert sorted(map(count, server.bodies)) == sorted(each.prompt for each in lengths)
    for body in server.bodies:
        assert body["model"] == "fake" and body["ignore_eos"] is True and body["temperature"] == 0
    for record in run.records:
        assert record.due <= record.sent <= record.chunks[0] <= record.chunks[-1] <= record.ended
    assert len({json.dumps(body.get("prompt", body.get("messages"))) for body in server.bodies}) == 20
    assert all(word in report.text(result, settings) for word in ("completed 20 of 20", "failed: none"))


async def test_failures_are_counted_by_kind(monkeypatch):
    kinds = {1: "refuse", 4: "break", 5: "refuse", 9: "error", 12: "endless", 13: "hang", 17: "refuse"}
    loop, ended = asyncio.get_running_loop(), []
    clock = loop.time
    # All but the one that hangs have the time that they need.
    monkeypatch.setattr(loop, "time", lambda: clock() + (PATIENCE_S if len(ended) >= 19 else 0.0))
    monkeypatch.setattr(serve, "tqdm", lambda **_: nullcontext(SimpleNamespace(update=lambda: ended.append(True))))
    workload = Workload("random", num_prompts=20, output_len=5, input_len=9)
    with FakeServer(kinds).serving() as url:
        result, settings = await bench(url, workload, timeout=PATIENCE_S)
    found = result.runs[0].measurement
    expected = {"HTTP 503": 3, "broken stream": 2, "error in the stream": 1, "timeout": 1}
    assert found.failures == expected and found.completed == 13 and found.output_tokens == 13 * 5
    text = report.text(result, settings)
    assert "completed 13 of 20" in text and "HTTP 503 (3): too busy" in text and "timeout (1): " in text
    details = {record.failure: record.detail for record in result.runs[0].records}
    assert details["HTTP 503"] == "too busy" and details[None] is None


@pytest.mark.parametrize("failure", ["refuse", "break", "error"])
async def test_nothing_is_measured_if_the_warm_up_fails(failure):
    server = FakeServer({1: failure})
    with server.serving() as url, pytest.raises(ServerError, match="the first request: "):
        await bench(url, num_warmups=2)
    assert len(server.bodies) == 2


async def test_warm_ups_are_not_counted_and_their_texts_are_others():
    server = FakeServer()
    with server.serving() as url:
        result, _ = await bench(url, num_warmups=3)
    assert len(server.bodies) == 23 and result.runs[0].measurement.completed == 20
    assert len({body["prompt"] for body in server.bodies}) == 23


@pytest.mark.parametrize("rate", [math.inf, 500])
@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_the_concurrency_is_kept_and_reached(rate, concurrency):
    server = FakeServer(pause=0.004)
    with server.serving() as url:
        await bench(url, concurrency=concurrency, rates=[rate])
    assert server.most_running == concurrency


async def test_without_a_limit_all_run_at_once():
    server = FakeServer(together=150)
    with server.serving() as url:
        await bench(url, Workload("random", num_prompts=150, input_len=5, output_len=4))
    assert server.most_running == 150


async def test_a_rate_takes_its_time_and_every_rate_has_its_own_texts():
    server = FakeServer()
    with server.serving() as url:
        result, settings = await bench(url, rates=[50.0, 200.0])
    assert [run.rate for run in result.runs] == [50.0, 200.0]
    for run in result.runs:
        due = arrivals(20, run.rate)
        start = run.records[0].due
        assert [record.due - start for record in run.records] == pytest.approx(due)
        assert run.measurement.duration >= due[-1]
    assert len({body["prompt"] for body in server.bodies}) == 40
    assert sorted(map(count, server.bodies[:20])) == sorted(map(count, server.bodies[20:]))
    lines = report.text(result, settings).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["50", "200"]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness):
    due = arrivals(40_000, rate=8.0, burstiness=burstiness, seed=1)
    gaps = [b - a for a, b in pairwise(due)]
    assert due[0] == 0 and len(due) == 40_000 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8 / burstiness**0.5, rel=0.04)
    if burstiness == 1.0:  # a Poisson process: as many arrivals in each second as its law says
        counts = [0] * 4000
        for at in due:
            if at < 4000:
                counts[int(at)] += 1
        assert statistics.variance(counts) == pytest.approx(statistics.fmean(counts), rel=0.1)
        median = statistics.median(gaps)
        assert median == pytest.approx(math.log(2) / 8, rel=0.03)


def test_arrivals_at_once_and_by_seed():
    assert arrivals(3, math.inf) == [0, 0, 0]
    assert arrivals(9, 2, seed=1) == arrivals(9, 2, seed=1) != arrivals(9, 2, seed=2)


@pytest.mark.parametrize("tokenizer", [None, "demo"])
async def test_without_tokenize_the_server_is_asked_for_single_tokens(tokenizer):
    server = FakeServer(tokenizes=False)
    with server.serving() as url:
        result, _ = await bench(url, tokenizer=tokenizer)
    assert all(body["max_tokens"] == 1 for body in server.whole)
    if tokenizer is None:
        assert result.runs[0].measurement.prompt_tokens == sum(each.prompt for each in SMALL.lengths())
    else:  # its words were counted here
        assert len(server.whole) == 1


async def test_token_ids():
    server = FakeServer()
    with server.serving() as url:
        await bench(url, token_ids=True)
        assert all(isinstance(token, int) for body in server.bodies for token in body["prompt"])
    assert sorted(len(body["prompt"]) for body in server.bodies) == sorted(each.prompt for each in SMALL.lengths())
    assert server.tokenized[0]["add_special_tokens"] is False
    with (
        FakeServer(tokenizes=False).serving() as url,
        pytest.raises(ValueError, match="token_ids: the server has no /tokenize"),
    ):
        await bench(url, token_ids=True)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("output_len", [12, 60])  # with the longer one, of prompts only what can't go is left
async def test_what_is_too_long_for_the_model_is_shortened_with_a_note(endpoint, output_len):
    server = FakeServer(max_model_len=30)
    with server.serving() as url:
        workload = Workload("random", num_prompts=20, input_len=20, output_len=output_len, range_ratio=0.5)
        result, settings = await bench(url, workload, endpoint=endpoint)
    assert max(count(body) + body["max_tokens"] for body in server.bodies) == 30
    shortened = sum(each.prompt + each.output > 30 for each in workload.lengths())
    assert result.notes == [f"{shortened} of 20 requests were shortened to the model's 30 tokens"]
    assert result.notes[0] in report.text(result, settings)


async def test_a_server_that_does_not_count():
    with FakeServer(counts=False, answer=lambda body: ["a", "", "b"]).serving() as url:
        result, settings = await bench(url)
    found = result.runs[0].measurement
    assert found.counted == 0 and found.output_tokens == found.chunks == 40  # an empty text is none
    assert "the server did not count the tokens of 20 answers" in report.text(result, settings)


@pytest.mark.parametrize("ignore_eos, sent", [(None, False), (True, True)])
async def test_files(tmp_path, ignore_eos, sent):
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "a b", "max_tokens": 3}, {"prompt": "a " * 12, "max_tokens": 9}, {"prompt": "a " * 40},
             {"prompt": [1, 2, 3]}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    server = FakeServer(max_model_len=20)
    with server.serving() as url:
        result, _ = await bench(url, Workload("file", file=path, output_len=6), ignore_eos=ignore_eos)
    assert sorted((count(body), body["max_tokens"]) for body in server.bodies) == [(3, 3), (3, 6), (13, 7)]
    assert all(("ignore_eos" in body) == sent for body in server.bodies)
    assert result.notes == [
        "the file has 4 requests only",
        "2 of 4 requests were too long for the model's 20 tokens: 1 left out, the others' outputs shortened",
    ]


async def test_conversations_from_files(tmp_path):
    path = tmp_path / "requests.jsonl"
    turns = [{"role": role, "content": "a b"} for role in ("user", "assistant", "user")]
    path.write_text(json.dumps({"messages": turns, "max_tokens": 9}))
    server = FakeServer(max_model_len=20)
    with server.serving() as url:
        await bench(url, Workload("file", file=path), endpoint="chat")
        assert server.bodies[0]["messages"] == turns and count(server.bodies[0]) + server.bodies[0]["max_tokens"] <= 20
        with pytest.raises(ValueError, match="endpoint: completions takes no messages; chat does"):
            await bench(url, Workload("file", file=path))


async def test_sharegpt_files_ask_for_outputs_as_long_as_their_answers(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "why is that so?"}, {"from": "gpt", "value": "it just is like that"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    server = FakeServer()
    with server.serving() as url:
        await bench(url, Workload("file", file=path), endpoint="chat")
    (body,) = server.bodies
    assert body["messages"] == [{"role": "user", "content": "why is that so?"}] and body["max_tokens"] == 5


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"endpoint": "embeddings"}, "endpoint: must be one of completions, chat, not 'embeddings'"),
        ({"rates": [1, 0]}, "request_rate: must be above 0, not 0"),
        ({"burstiness": -1}, "burstiness: must be above 0, not -1"),
        ({"concurrency": 0}, "concurrency: must be at least 1, not 0"),
        ({"num_warmups": -1}, "num_warmups: must be at least 0, not -1"),
        ({"goodput": {"itl": 3}}, "goodput: itl is none of ttft, tpot, e2el"),
        ({"token_ids": True, "endpoint": "chat"}, "token_ids: the endpoint chat takes none"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(ValueError, match=words):
        Settings(SMALL, **fields)


async def test_the_document_holds_everything_and_is_json():
    with FakeServer({3: "refuse"}).serving() as url:
        result, settings = await bench(url, rates=[math.inf, 400.0], goodput={"ttft": 1e9})
    document = json.loads(json.dumps(report.document(result, settings, url, per_request=True), allow_nan=False))
    assert document["server"] == {"url": url, "model": "fake", "max_model_len": None}
    assert document["settings"]["rates"] == ["inf", 400.0] and document["settings"]["workload"]["num_prompts"] == 20
    assert set(document["versions"]) == {"python", "jpaged", "aiohttp"} and document["date"]
    first, second = document["runs"]
    assert first["request_rate"] == "inf" and first["failures"] == {"HTTP 503": 1} and second["failures"] == {}
    assert first["goodput"] == first["request_throughput"] > 0
    assert set(first["latencies"]["ttft"]) == {"mean", "median", "p90", "p99", "max"}
    records = second["per_request"]
    assert len(records) == 20 and records[0]["due"] == 0 and set(records[0]) == set(vars(Record(0)))
    assert all(0 <= each["sent"] <= each["chunks"][0] <= each["ended"] for each in records)
    assert "per_request" not in report.document(result, settings, url)["runs"][0]
