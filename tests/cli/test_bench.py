"""`jpaged bench` as a command: its flags reach the benchmark, and the results its report and exit status."""

import json
import math
import resource

import pytest

from jpaged.bench.serve import Settings
from jpaged.bench.workload import Workload
from jpaged.cli import bench_serve
from jpaged.cli.main import load, main, parser
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
        bench_serve.allow_connections()
        most = bench_serve.MANY if before[1] == resource.RLIM_INFINITY else min(before[1], bench_serve.MANY)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
