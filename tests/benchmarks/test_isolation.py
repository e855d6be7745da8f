"""benchmarks/engine/isolation.py: the answers to each load's requests, and the report of a bound that is exceeded."""

import asyncio
import itertools
import json
import multiprocessing

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.engine import isolation
from benchmarks.shared.results import Report
from jpaged.serving.errors import ApiError
from jpaged.serving.parse import parse
from jpaged.serving.protocol import ChatRequest, CompletionRequest

ENVIRONMENT = {
    "device_kind": "cpu", "platform": "cpu", "versions": {}, "date": "2026-11-26", "commit": None, "tiny": False,
    "method": "Medians of 1 round.",
}  # fmt: skip
MODELS = {isolation.COMPLETIONS: CompletionRequest, isolation.CHATS: ChatRequest}


@pytest.mark.parametrize("name", [name for name in isolation.LOADS if name != "huge bodies"])
def test_requests_of_loads_are_valid_and_differ(name):
    sent = [isolation.LOADS[name].request(number) for number in range(990, 1010)]
    assert len(set(sent)) == len(sent)
    for path, data in sent:
        parse(MODELS[path], data)


def test_long_prompts_fit_the_context_and_share_no_block():
    prompts = [json.loads(isolation.long_prompt(number)[1])["prompt"] for number in range(5)]
    assert all(len(prompt) + 8 <= isolation.MAX_MODEL_LEN < len(prompt) + 17 for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)


def test_huge_bodies_are_just_below_the_limit_and_three_are_invalid():
    refused = 0
    for path, data in isolation.huge_bodies():
        assert 0.85 * isolation.BODY_BYTES < len(data) < isolation.BODY_BYTES
        try:
            parse(MODELS[path], data)
        except ApiError:
            refused += 1
    assert refused == 3


@pytest.mark.parametrize("first, between, expected", [(35.0, 19.0, True), (35.1, 19.0, False), (35.0, 19.1, False)])
@pytest.mark.parametrize("load, factor", [("templates", 1), ("grammars", 2)])
def test_both_latencies_are_held_against_twice_those_alone_plus_a_step(load, factor, first, between, expected):
    row = {"load": load, "first_alone_ms": 15.0, "between_alone_ms": 7.0, "step_ms": 5.0}
    assert isolation.holds(row | {"first_loaded_ms": factor * first, "between_loaded_ms": factor * between}) is expected


def test_percentile_leaves_out_one_time_in_a_hundred():
    assert isolation.percentile_99([*range(1, 100), 1000]) == 99
    assert isolation.percentile_99([3.0]) == 3.0


def with_stub(use):
    """Return the result of `use(url, bodies)` beside a server of streams, and the bodies that it got.

    A stream has an event without a token, then three tokens.
    """
    bodies = []

    async def answer(request):
        assert request.headers["Authorization"] in ("Bearer key-a", "Bearer key-b")
        bodies.append(json.loads(await request.read()))
        events = [f"data: {json.dumps({'choices': [{'token_ids': each}]})}\n\n" for each in ([], [1], [2], [3])]
        return web.Response(text="".join([*events, "data: [DONE]\n\n"]))

    async def run():
        app = web.Application()
        app.add_routes([web.post(path, answer) for path in (isolation.COMPLETIONS, isolation.CHATS)])
        async with TestServer(app) as server:
            return await use(str(server.make_url("/")), bodies), bodies

    return asyncio.run(run())


@pytest.mark.parametrize("constrained", [False, True])
def test_latencies_are_those_of_tokens(constrained):
    found, bodies = with_stub(lambda url, _: isolation.latencies(url, 0.01, itertools.count(1), constrained))
    for times in found.values():
        assert times.first and len(times.between) == 2 * len(times.first)
        assert min(*times.first, *times.between) > 0
    assert len({json.dumps(body.get("prompt", body.get("messages"))) for body in bodies}) == len(bodies)
    grammars = {json.dumps(body.get("structured_outputs")) for body in bodies}
    assert len(grammars) == (len(bodies) if constrained else 1)


def test_a_load_runs_until_it_is_told():
    here, there = multiprocessing.Pipe()
    load = isolation.LOADS["long prompts"]._replace(num_clients=3)

    async def use(url, bodies):
        applied = asyncio.create_task(isolation.apply_load(there, url, load, 5))
        while len(bodies) < 20:
            assert not applied.done()
            await asyncio.sleep(0.001)
        here.send("end")
        return await applied

    statuses, bodies = with_stub(use)
    assert statuses.keys() == {"200"} and statuses["200"] >= 20 - load.num_clients
    assert bodies[0] == json.loads(isolation.long_prompt(5)[1])


def test_steps_are_measured_by_streams_of_key_a():
    async def use(url, bodies):
        async with isolation.measured_steps(url) as steps:
            while len(bodies) < 3:
                await asyncio.sleep(0.001)
            return steps

    steps, bodies = with_stub(use)
    assert len(steps.between) >= 4 and {body["prompt"] for body in bodies} == {"a"}


def test_report_shows_what_does_not_hold(tmp_path):
    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    times = {"first_alone_ms": 15.0, "between_alone_ms": 7.0, "first_loaded_ms": 16.25, "between_loaded_ms": 8.0}
    row = {
        "request": "chat",
        **times,
        "step_ms": 5.0,
        "answers_to_load": {"200": 3, "503": 1},
        "num_alone": 9,
        "num_loaded": 7,
    }
    report.add(load="good", holds=True, **row)
    report.add(load="bad", holds=False, **row)
    isolation.publish(report)
    text = (tmp_path / "report.md").read_text()
    assert "| good | chat | 15.0 / 16.2 | 7.0 / 8.0 | 5 | yes | 9 / 7 | 200: 3, 503: 1 |" in text
    assert "| bad | chat | 15.0 / 16.2 | 7.0 / 8.0 | 5 | **no** |" in text


@pytest.mark.deep
def test_a_short_run(tmp_path):
    isolation.main(["--only", "long prompts", "--rounds", "1", "--seconds", "0.2", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["request"] for row in rows] == ["completion", "chat"]
    assert all(row["num_loaded"] and row["step_ms"] > 0 for row in rows)
