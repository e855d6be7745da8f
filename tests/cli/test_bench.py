"""`jpaged bench` as a command: its flags reach the benchmark, and the results its report and exit status."""

import json
import math
import re
import resource
import statistics

import pytest

from jpaged.bench.serve import Settings
from jpaged.bench.workload import Workload
from jpaged.cli.main import load, main, parser
from jpaged.serving import listen
from tests.bench.fake_server import FakeServer

FEW = ["--workload", "random", "--num-prompts", "6", "--input-len", "8", "--output-len", "4"]


def test_a_table_and_a_file(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    server = FakeServer(api_key="secret")
    with server.serving() as url:
        main(["bench", "serve", "--url", url, "--api-key", "secret", *FEW, "--request-rate", "100", "inf", "--out",
              str(path), "--per-request", "--goodput", "ttft:1e6", "tpot:1e6", "--seed", "5"])  # fmt: skip
    text = capsys.readouterr().out
    for words in ("random: 6 requests, 100 requests/s", "random: 6 requests, all at once", "time to first token (ms)",
                  "completed 6 of 6", "failed: none", "within ttft 1e+06 ms, tpot 1e+06 ms"):  # fmt: skip
        assert words in text
    written = json.loads(path.read_text())
    assert [run["completed"] for run in written["runs"]] == [6, 6] and len(written["runs"][0]["per_request"]) == 6
    assert written["settings"]["workload"]["seed"] == 5 and "secret" not in path.read_text()


def keys_of_vllm(url, tmp_path, *flags):
    """The result file of a command line of `vllm bench serve`."""
    words = (
        "--backend openai-chat --endpoint /v1/chat/completions --model org/name --dataset-name random --seed 3 "
        "--random-input-len 8 --random-output-len 4 --num-prompts 6 --max-concurrency 2 --trust-remote-code"
    )
    main(["bench", "serve", "--base-url", url, *words.split(), "--save-result", "--result-dir", str(tmp_path), *flags])
    (path,) = tmp_path.iterdir()
    return path.name, json.loads(path.read_text())


def test_a_result_file_has_the_keys_and_the_meaning_of_vllms(tmp_path, capsys):
    server = FakeServer(pause=0.01)
    with server.serving() as url:
        name, found = keys_of_vllm(
            url, tmp_path, "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9",
            "--metadata", "gpu=h200", "note=a=b", "--save-detailed", "--top-p", "0.5", "--extra-body.seed", "7",
            "--goodput", "ttft:1e6",
        )  # fmt: skip
    assert "--trust-remote-code: not needed" in capsys.readouterr().err
    assert re.fullmatch(r"openai-chat-infqps-concurrency2-name-\d{8}-\d{6}\.json", name)
    assert {body["top_p"] for body in server.bodies} == {0.5} and {body["seed"] for body in server.bodies} == {7}
    assert all("messages" in body and body["model"] == "org/name" for body in server.bodies)
    facts = {
        "backend": "openai-chat", "endpoint_type": "openai-chat", "label": None, "model_id": "org/name",
        "tokenizer_id": "org/name", "num_prompts": 6, "gpu": "h200", "note": "a=b", "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": 2, "completed": 6, "failed": 0, "total_output_tokens": 24,
    }  # fmt: skip
    assert found | facts == found
    seconds = found["duration"]
    assert found["request_throughput"] == found["request_goodput"] == pytest.approx(6 / seconds)
    assert found["output_throughput"] == pytest.approx(24 / seconds)
    assert found["total_token_throughput"] == pytest.approx((24 + found["total_input_tokens"]) / seconds)
    assert sum(found["input_lens"]) == found["total_input_tokens"] and found["output_lens"] == [4] * 6
    gaps = [1000 * gap for itls in found["itls"] for gap in itls]
    assert len(gaps) == 18 and found["mean_itl_ms"] == pytest.approx(statistics.fmean(gaps))
    assert found["std_itl_ms"] == pytest.approx(statistics.pstdev(gaps))
    assert found["median_itl_ms"] == found["p50_itl_ms"] == pytest.approx(statistics.median(gaps))
    tpots = [1000 * statistics.fmean(itls) for itls in found["itls"]]
    assert (
        found["mean_tpot_ms"] == pytest.approx(statistics.fmean(tpots)) and found["p99.9_tpot_ms"] <= max(tpots) + 1e-9
    )
    assert found["mean_ttft_ms"] == pytest.approx(1000 * statistics.fmean(found["ttfts"]))
    assert found["mean_e2el_ms"] == pytest.approx(1000 * statistics.fmean(found["latencies"]))


def test_a_result_file_counts_failures_and_has_vllms_defaults(tmp_path):
    with FakeServer({2: "refuse"}).serving() as url, pytest.raises(SystemExit, match="1 of 6 requests failed"):
        keys_of_vllm(url, tmp_path, "--result-filename", "r.json", "--label", "mine")
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found["failed"], found["label"]) == (5, 1, "mine")
    assert {key for key in found if key.endswith("_ms")} == {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")
    }
    assert "ttfts" not in found


@pytest.mark.parametrize(
    "words, said",
    [
        ("--dataset-name hf", "--dataset-name hf: only random, sharegpt, custom, prefix_repetition are supported"),
        ("--ramp-up-strategy linear", "--ramp-up-strategy linear: use several rates of --request-rate"),
        ("--no-stream", "--no-stream: latencies need streams"),
        ("--metadata a", "argument --metadata: must be KEY=VALUE, not 'a'"),
        ("--percentile-metrics ttft,x", "argument --percentile-metrics: x is none of ttft, tpot, itl, e2el"),
        ("--metric-percentiles 101", "argument --metric-percentiles: must be between 0 and 100, not 101"),
    ],
)
def test_flags_of_vllm_bench_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *words.split()])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_one_name_is_for_one_rate():
    with pytest.raises(SystemExit, match="result_filename: needs one request rate, not 2"):
        main(["bench", "serve", "--request-rate", "1", "2", "--result-filename", "a.json"])


def test_a_file_of_sharegpt_is_read_as_vllm_names_it(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "word word"}, {"from": "gpt", "value": "word " * 3}]
    path.write_text(json.dumps([{"conversations": turns}] * 2))
    server = FakeServer()
    with server.serving() as url:
        main(["bench", "serve", "--base-url", url, "--dataset-name", "sharegpt", "--dataset-path", str(path)])
    assert {(body["prompt"], body["max_tokens"]) for body in server.bodies} == {("word word", 3)}


def test_requests_that_fail_fail_it(capsys):
    with FakeServer({2: "refuse", 4: "break"}).serving() as url, pytest.raises(SystemExit) as error:
        main(["bench", "serve", "--url", url, *FEW])
    assert error.value.code == "jpaged bench serve: error: 2 of 6 requests failed"
    text = capsys.readouterr().out
    assert "completed 4 of 6" in text and "failed: HTTP 503 (1): too busy; broken stream (1): http" in text


def test_every_setting_has_its_flag():
    made = parser("bench serve", load("bench serve"), "jpaged bench serve")
    args = vars(made.parse_args([]))
    given = {name: value for name, value in vars(Settings(Workload())).items() if name != "workload"}
    assert {name: type(value)(args[name]) if value is not None else args[name] for name, value in given.items()} == (
        given | {"rates": (math.inf,), "goodput": {}}
    )
    for name, value in vars(Workload()).items():
        assert args[name] == value


def test_the_throughput_of_the_demo_model(demo, monkeypatch, tmp_path, capsys):
    path, given = tmp_path / "out.json", {}
    monkeypatch.setattr("jpaged.llm.LLM", lambda **config: given.update(config) or demo)  # compiled already
    main(["bench", "throughput", *FEW, "--max-num-seqs", "2", "--out", str(path)])
    assert given["max_num_seqs"] == 2
    text = capsys.readouterr().out
    assert "random: 6 requests, 48 tokens in, 24 out, in " in text and "output tokens/s" in text
    written = json.loads(path.read_text())
    assert written["output_tokens"] == 24 and written["settings"]["engine"]["max_num_seqs"] == 2
    assert written["settings"]["workload"]["kind"] == "random" and written["duration"] > 0


def test_many_connections_are_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        listen.allow_many_connections()
        many = listen.MANY_CONNECTIONS
        most = many if before[1] == resource.RLIM_INFINITY else min(before[1], many)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
