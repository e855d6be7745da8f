"""The comparisons with llama.cpp: requests and answers of both servers, ratios, and windows of a perplexity."""

import json
import math

import aiohttp
import pytest
from aiohttp import web

from benchmarks.engine.llama_cpp import APIS, LESS, MEASURES, UNITS, Bench, publish, stream
from benchmarks.engine.perplexity import perplexity, read, windows
from benchmarks.shared.results import Report
from jpaged import SamplingParams

ENVIRONMENT = {
    "device_kind": "cpu", "platform": "cpu", "tiny": False, "versions": {}, "date": "2026-11-26", "commit": None,
    "threads": 2, "model": "m.gguf",
}  # fmt: skip


def events(name, body):
    """The events of a stream of each server: several tokens in one, and some without any."""
    if name == "jpaged":
        tokens = [[5], [], *[[6]] * (body["max_tokens"] - 3), [7, 8]] if body["max_tokens"] > 1 else [[5]]
        return [{"choices": [{"token_ids": ids or None}]} for ids in tokens] + [{"choices": []}]
    count = body["n_predict"]
    tokens = [[5], *[[6]] * (count - 3)] if count > 1 else [[5]]  # the text of the last two is part of a character
    return [*({"tokens": ids} for ids in tokens), {"tokens": [], "stop": True, "tokens_predicted": max(count, 1)}]


@pytest.fixture(params=APIS)
async def server(request):
    """A server that streams events of the wanted number of tokens, and its requests."""
    name, bodies = request.param, []

    async def answer(call):
        bodies.append(body := await call.json())
        response = web.StreamResponse()
        await response.prepare(call)
        for event in events(name, body):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post(APIS[name].path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as session:
        yield session, name, "http://{}:{}".format(*runner.addresses[0]), bodies
    await runner.cleanup()


async def test_a_stream_counts_tokens_and_sends_ids_greedily_to_the_last(server):
    session, name, url, bodies = server
    done = await stream(session, name, url, [1, 2, 3], 9)
    assert (done.first, done.total) == (1, 9) and 0 < done.first_s <= done.last_s
    (body,) = bodies
    assert body["prompt"] == [1, 2, 3] and body["ignore_eos"] and body["temperature"] == 0 and body["stream"]


async def test_another_number_of_tokens_is_an_error(server):
    session, name, url, _ = server
    with pytest.raises(RuntimeError, match="1 tokens instead of 0"):
        await stream(session, name, url, [1], 0)


async def test_both_servers_get_the_same_new_prompts_in_every_round(server):
    session, name, url, bodies = server
    for number in (1, 2):
        for index, measure in enumerate(MEASURES.values()):
            assert 0 < await measure(Bench(session, name, url, list(range(5000)), (number, index))) < math.inf
    prompts = [tuple(body["prompt"][:8]) for body in bodies]
    assert sorted({len(body["prompt"]) for body in bodies}) == [64, 100, 512, 1030, 4000, 4096]
    assert len(set(prompts)) == len(prompts) - 2, "only the prefix of `cached` occurs twice, in each round"
    assert Bench(session, name, url, list(range(5000)), (1, 0)).ids(8) == list(prompts[0])


def test_ratios_are_above_one_where_jpaged_is_better(tmp_path):
    report = Report(tmp_path / "results.json", ENVIRONMENT, quiet=True)
    for column in UNITS:
        for number, (ours, theirs) in enumerate([(1.0, 2.0), (8.0, 4.0), (9.0, 3.0)], 1):
            report.add(kind="F32", column=column, server="jpaged", round=number, value=ours)
            report.add(kind="F32", column=column, server="llama.cpp", round=number, value=theirs)
    publish(report)
    text = (tmp_path / "report.md").read_text()
    for column, unit in UNITS.items():
        assert f"| F32 | {column} ({unit}) | 8 | 3 | {'0.375' if column in LESS else '2.67'} |" in text


def test_windows_are_whole_and_begin_as_texts_do():
    ids = [0, *range(1, 12)]
    assert windows(ids, [], 4, None) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert windows(ids, [0], 5, None) == [[0, 1, 2, 3, 4], [0, 6, 7, 8, 9]]
    assert windows(ids, [], 4, 2) == windows(ids, [], 4, None)[:2] and windows(ids, [], 13, None) == []


def test_a_perplexity_is_that_of_the_second_half_without_its_first_token(demo):
    cut = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]]
    outputs = demo.generate(cut, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scored = [
        output.prompt_logprobs[at][window[at]].logprob for output, window in zip(outputs, cut) for at in range(4, 6)
    ]
    assert perplexity(demo, cut) == pytest.approx(math.exp(-sum(scored) / 4))


def test_strings_of_special_tokens_are_left_out_of_a_text(tmp_path):
    for name, text in (("a.md", "one <s>two"), ("b.md", "</s>three")):
        (tmp_path / name).write_text(text)
    assert read([tmp_path / "a.md", tmp_path / "b.md"], ["<s>", "</s>"]) == "one two\nthree"
    assert read([tmp_path / "a.md"], []) == "one <s>two"
