"""Lengths as they are drawn, and requests from files."""

import json
import statistics

import pytest

from jpaged.bench.workload import DATASETS, KINDS, LONGEST, Job, Lengths, Workload, fit, read_jobs


@pytest.mark.parametrize("kind, dataset", [("alpaca", "Alpaca"), ("sharegpt", "ShareGPT")])
def test_lengths_of_datasets_have_the_papers_means(kind, dataset):
    lengths = Workload(kind, num_prompts=20_000).lengths()
    assert statistics.fmean(each.prompt for each in lengths) == pytest.approx(DATASETS[dataset].prompt, rel=0.02)
    assert statistics.fmean(each.output for each in lengths) == pytest.approx(DATASETS[dataset].output, rel=0.02)
    assert min(min(each.prompt, each.output) for each in lengths) >= 1
    assert max(max(each.prompt, each.output) for each in lengths) <= LONGEST
    shape = statistics.stdev(each.prompt for each in lengths) / statistics.fmean(each.prompt for each in lengths)
    assert 0.8 < shape < 1.05  # log-normal with a deviation of one mean


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "file"])
def test_the_seed_decides(kind):
    same = [Workload(kind, seed=3, range_ratio=0.5).lengths() for _ in range(2)]
    assert same[0] == same[1] and len(same[0]) == 200
    assert Workload(kind, seed=4, range_ratio=0.5).lengths() != same[0]


def test_random_lengths_are_even_around_what_is_asked():
    lengths = Workload("random", num_prompts=5000, input_len=100, output_len=10, range_ratio=0.3).lengths()
    assert {each.prompt for each in lengths} == set(range(70, 131))
    assert {each.output for each in lengths} == set(range(7, 14))
    assert Workload("random", num_prompts=2, input_len=100, output_len=10).lengths() == [Lengths(100, 10)] * 2


def test_shared_prefixes_take_turns():
    lengths = Workload(
        "shared-prefix", num_prompts=5, input_len=3, output_len=4, prefix_len=9, num_prefixes=2
    ).lengths()
    assert lengths == [Lengths(3, 4, i % 2, 9) for i in range(5)]


def test_what_is_too_long_is_shortened_and_counted():
    drawn = [Lengths(10, 5), Lengths(50, 20), Lengths(50, 80), Lengths(50, 500), Lengths(10, 20, 0, 70)]
    fitted, shortened = fit(drawn, 90)
    assert fitted == [Lengths(10, 5), Lengths(50, 20), Lengths(10, 80), Lengths(1, 89), Lengths(1, 19, 0, 70)]
    assert shortened == 3
    assert fit(drawn, None) == (drawn, 0)
    assert fit(drawn[2:4], 90, least=6)[0] == [Lengths(10, 80), Lengths(6, 84)]
    words = "a prefix of 70 tokens and the 6 of the shortest prompt leave no room in the model's 76"
    with pytest.raises(ValueError, match=words):
        fit(drawn, 76, least=6)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"kind": "poem"}, "workload: must be one of sharegpt, alpaca, random, shared-prefix, file, not 'poem'"),
        ({"num_prompts": 0}, "num_prompts: must be at least 1, not 0"),
        ({"range_ratio": 1}, "range_ratio: must be at least 0 and below 1, not 1"),
        ({"kind": "file"}, "file: the workload file needs one"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(ValueError, match=words):
        Workload(**fields)


def written(tmp_path, text):
    path = tmp_path / "requests"
    path.write_text(text)
    return path


def test_json_lines(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": [1, 2], "max_tokens": 7}, {"messages": [{"role": "user", "content": "b"}]}]
    path = written(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_jobs(path) == [Job("a"), Job([1, 2], 7), Job([{"role": "user", "content": "b"}])]
    jobs = Workload("file", num_prompts=2, file=path).jobs()
    assert len(jobs) == 2 and jobs == Workload("file", num_prompts=2, file=path).jobs()


def test_sharegpts_json(tmp_path):
    turn = lambda who, text: {"from": who, "value": text}
    good = {"id": 1, "conversations": [turn("human", "why?"), turn("gpt", "because"), turn("human", "oh")]}
    others = [{"conversations": turns} for turns in ([], [turn("gpt", "hi")], [turn("human", "?"), turn("gpt", "")])]
    assert read_jobs(written(tmp_path, json.dumps([*others, good]))) == [Job("why?", answer="because")]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no request"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ("[1", "requests is not JSON"),
        ("[1]", "item 1 must be an object"),
        ('{"text": "a"}', 'line 1 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'line 1 must have either "prompt" or "messages"'),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be at least 1, not 0"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_jobs(written(tmp_path, text))
