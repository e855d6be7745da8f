"""`jpaged plan` as a command: its table, its report, and one-line errors that name the flag."""

import json
import re
from pathlib import Path

import pytest

from jpaged.bench.workload import Lengths
from jpaged.cli import plan
from jpaged.cli.main import load, main, parser
from jpaged.simulator.cost import CostTable, MeasuredStep
from jpaged.simulator.traffic import calls_of, save_trace

SHORT = ["plan", "--workload", "random", "--input-len", "64", "--output-len", "8", "--num-prompts", "20"]


def rows(text):
    """Return the cells of the last table of a text."""
    return [line.split() for line in text.rstrip().rpartition("\n\n")[2].splitlines()]


def test_users_have_a_line_each(capsys):
    main([*SHORT, "--users", "2", "8"])
    text = capsys.readouterr().out
    assert "Llama-3-8B: 8.03e9 parameters, 15.0 GiB in 16 bits" in text
    assert "KV pool: 461,004 tokens of 128 KiB, 56.3 GiB" in text
    assert "requests: 64 tokens in, 8 out on average" in text
    assert "predicted, not measured" in text and "roofline of H100 80GB: 75% of 3.35 TB/s" in text
    head, *lines = rows(text)
    assert head[0] == "users" and [line[0] for line in lines] == ["2", "8"]
    assert all(len(line) == 11 for line in lines)
    assert float(lines[0][1]) < float(lines[1][1])


def test_rates_have_a_line_each(capsys):
    main([*SHORT, "--request-rate", "5", "20"])
    head, *lines = rows(capsys.readouterr().out)
    assert head[0] == "rate" and [line[0] for line in lines] == ["5", "20"]
    assert [float(line[1]) for line in lines] == pytest.approx([5, 20], rel=0.2)


def test_report_has_the_results_of_the_table(tmp_path, capsys):
    path = tmp_path / "new" / "plan.json"
    main([*SHORT, "--users", "4", "--gpu", "h200", "--kv-cache-dtype", "fp8", "--out", str(path)])
    (line,) = rows(capsys.readouterr().out)[1:]
    report = json.loads(path.read_text())
    (found,) = report["loads"]["as given"]
    assert found["users"] == 4 and f"{found['requests_per_s']:.2f}" == line[1]
    assert f"{1e3 * found['tpot_p99']:.1f}" == line[6]
    assert report["deployment"]["gpu"] == "H200 141GB" and report["deployment"]["kv_dtype_bytes"] == 1
    assert report["limits"] == {"ttft": 1.0, "tpot": 0.05} and report["workload"]["kind"] == "random"
    assert "H200" in report["costs"] and report["pool_tokens"] > 1_500_000


def test_search_compares_deployments(capsys, tmp_path):
    args = ["--gpu", "a100-40gb", "--model", "opt-13b", "--max-tpot", "0.03", "--out", str(tmp_path / "plan.json")]
    main([*SHORT, *args])
    text = capsys.readouterr().out
    assert "most users with 99 % of the requests within 1 s to the first token and 30 ms per token:" in text
    answer = {line.rpartition("  ")[0].split("  ")[0]: line for line in text.rpartition("\n\n")[2].splitlines()[1:]}
    names = ["as given", "--kv-cache-dtype fp8", "--tensor-parallel-size 2", "--block-size 64"]
    assert list(answer) == names
    loads = json.loads((tmp_path / "plan.json").read_text())["loads"]
    most = {name: max(each["users"] for each in loads[name] if each["tpot_p99"] <= 0.03) for name in names}
    assert most["--tensor-parallel-size 2"] > most["as given"] > 1
    assert all(f"  {most[name]}  " in answer[name] for name in names)


def test_no_user_within_the_limits_is_said(capsys):
    main([*SHORT, "--max-tpot", "0.001", "--gpu", "a100-80gb", "--block-size", "256"])
    assert rows(capsys.readouterr().out)[1][:3] == ["as", "given", "none"]


def test_variants_are_those_that_are_possible():
    made = parser("plan", load("plan"), "jpaged plan")
    of = lambda *words: list(plan.variants(plan.deployment_of(made.parse_args(words))))
    assert of() == ["--kv-cache-dtype fp8", "--tensor-parallel-size 2", "--block-size 64"]
    assert of("-tp", "32", "--block-size", "256", "--kv-cache-dtype", "fp8") == []


def test_saved_trace_replays_to_the_same_results(tmp_path, capsys):
    save_trace(calls_of([Lengths(30, 9)] * 30, [0.01 * i for i in range(30)]), tmp_path / "trace.jsonl")
    outputs = []
    for _ in range(2):
        main(["plan", "--trace", str(tmp_path / "trace.jsonl"), "--out", str(tmp_path / "plan.json")])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "requests: 30 tokens in, 9 out" in outputs[0]
    head, line = rows(outputs[0])
    assert head[0] == "requests" and line[0] == "30" and float(line[1]) == pytest.approx(100, rel=0.1)
    assert json.loads((tmp_path / "plan.json").read_text())["workload"].endswith("trace.jsonl")


def test_measured_costs_replace_the_roofline(tmp_path, capsys):
    steps = [MeasuredStep(64, 64, kind, 0.25, 0.0) for kind in (True, False)]
    CostTable(steps, "a device of 2026").save(tmp_path / "costs.json")
    main([*SHORT, "--users", "4", "--costs", str(tmp_path / "costs.json")])
    text = capsys.readouterr().out
    assert "duration of a step: a device of 2026" in text and float(rows(text)[1][5]) >= 250


def test_workload_of_a_file_is_counted_by_a_tokenizer(tmp_path, capsys):
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "Once upon a time", "max_tokens": 5}, {"messages": [{"role": "user", "content": "Once"}]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["--workload", "file", "--file", str(path), "--tokenizer", "demo", "--output-len", "7"]
    main(["plan", *words, "--users", "1"])
    text = capsys.readouterr().out
    assert "6 out on average" in text and "Note: the file has 2 requests only." in text


def test_the_pages_command_reproduces_its_rows(capsys):
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    command, output = re.search(r"```\n\$ jpaged (plan --model .*)\n((?:.*\n)*?)```", page).groups()
    main(command.split())
    text = capsys.readouterr().out
    assert text == output
    one, eight = rows(text)[1:]
    alone, speedup = f"{1000 / float(one[5]):.0f}", f"{float(eight[2]) / float(one[2]):.1f}"
    assert f"output tokens/s while decoding | 75 | {alone} |" in page
    assert f"divided by that with one | 6.6 | {speedup} |" in page


def test_long_contexts_mixtures_and_fewer_bits(capsys, tmp_path):
    path = tmp_path / "plan.json"
    lengths = ["--workload", "random", "--input-len", "9000", "--output-len", "8", "--num-prompts", "4"]
    model = ["--model", "llama-3.1-8b", "--quantization", "int4"]
    main(["plan", *lengths, *model, "--gpu", "rtx-pro-6000", "--users", "1", "--out", str(path)])
    text = capsys.readouterr().out
    assert "8.03e9 parameters, 6.0 GiB, weights of layers in 5 bits" in text and "9000 tokens in" in text
    report = json.loads(path.read_text())["deployment"]
    assert (report["max_model_len"], report["weight_bits"]) == (131_072, 5)
    main([*SHORT, "--gpu", "b200", "--model", "qwen3-30b-a3b", "--users", "1", "--quantization", "fp8"])
    assert "Qwen3-30B-A3B: 30.53e9 parameters, 29.0 GiB, weights of layers in 8 bits" in capsys.readouterr().out


def test_stored_kinds_of_weights_where_kernels_take_them(capsys):
    model = ["--model", "qwen3-30b-a3b", "--users", "1", "--max-model-len", "8192"]
    main([*SHORT, *model, "--gpu", "epyc-9654", "--quantization", "q4_0"])
    text = capsys.readouterr().out
    assert "weights of layers in 4.5 bits" in text and "roofline of EPYC 9654" in text
    assert "experts of a layer that a step reads, by tokens: 8 of 1, 52 of 8, 126 of 64" in text
    main([*SHORT, *model, "--gpu", "h200", "--quantization", "awq"])
    assert "weights of layers in 4.375 bits" in capsys.readouterr().out
    for flags, named in (["rtx-4090"], "rtx-4090"), (["h200", "-tp", "2"], "2 x h200"):
        told = rf"quantization: awq is kept on a CPU or one Hopper GPU only: {named} has int8, fp8 and int4$"
        with pytest.raises(SystemExit, match=told):
            main([*SHORT, *model, "--quantization", "awq", "--gpu", *flags])


def test_model_of_a_directory(capsys):
    main([*SHORT, "--model", "demo", "--users", "1"])
    assert "demo: 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, told",
    [
        ("--users 0", "--users: must be at least 1, not 0"),
        ("--users 4 -3", "--users: must be at least 1, not -3"),
        ("--users x", "--users: 'x' is no number"),
        ("--request-rate 0", "--request-rate: must be above 0 and finite, not 0"),
        ("--request-rate 1 -1", "--request-rate: must be above 0"),
        ("--request-rate inf", "--request-rate: must be above 0 and finite, not inf"),
        ("--request-rate nan", "--request-rate: must be above 0 and finite, not nan"),
        ("--users 4 --request-rate 1", "--request-rate: not allowed with argument --users"),
        ("--users 4 --trace x", "--trace: not allowed with argument --users"),
        ("--think-time -1", "--think-time: must be at least 0 and finite, not -1"),
        ("--think-time inf", "--think-time: must be at least 0"),
        ("--max-ttft 0", "--max-ttft: must be above 0"),
        ("--max-tpot -0.1", "--max-tpot: must be above 0"),
        ("--gpu b300", "--gpu: invalid choice: 'b300'"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype: invalid choice"),
        ("--workload none", "--workload: invalid choice"),
        ("--max-model-len x", "--max-model-len: 'x' is no number"),
        ("--user 4", "unknown flag --user; did you mean --users?"),
    ],
)
def test_wrong_flags_end_with_status_2(words, told, capsys):
    with pytest.raises(SystemExit) as error:
        main(["plan", *words.split()])
    message = capsys.readouterr().err
    assert error.value.code == 2 and message.count("\n") == 1
    assert message.startswith("jpaged plan: error: ") and told in message


@pytest.mark.parametrize(
    "words, told",
    [
        ("--gpu-memory-utilization 0", "gpu_memory_utilization: must be above 0 and at most 1, not 0.0"),
        ("--gpu-memory-utilization 1.5", "gpu_memory_utilization: must be above 0 and at most 1, not 1.5"),
        ("--gpu-memory-utilization nan", "gpu_memory_utilization: must be above 0"),
        ("--block-size 0", "block_size: must be a power of two between 1 and 256, not 0"),
        ("--block-size 24", "block_size: must be a power of two between 1 and 256, not 24"),
        ("--max-model-len 9000", "max_model_len: 9000 exceeds the 8192 tokens of Llama-3-8B"),
        ("--max-model-len 0", "max_model_len: must be at least 2, not 0"),
        ("--max-num-seqs 0", "max_num_seqs: must be at least 1, not 0"),
        ("--max-num-batched-tokens 0", "max_num_batched_tokens: must be at least 1, not 0"),
        ("--max-num-batched-tokens 64 --max-num-seqs 65", "max_num_batched_tokens: must be at least max_num_seqs (65)"),
        ("--tensor-parallel-size 0", "tensor_parallel_size: must be at least 1, not 0"),
        ("-tp 3", "tensor_parallel_size: 3 GPUs can't share the 32 heads"),
        ("--model llama-3-70b", "gpu: no room on 1 x H100 80GB for Llama-3-70B (131.4 GiB)"),
        ("--model no-such-model", "model: no-such-model is not a directory"),
        ("--num-prompts 0", "num_prompts: must be at least 1, not 0"),
        ("--range-ratio 1", "range_ratio: must be at least 0 and below 1"),
        ("--workload random --input-len 0", "input_len: must be at least 1"),
        ("--workload file", "file: the workload file needs one"),
        ("--file EMPTY", "file: the workload file needs one, and no other workload has one"),
        ("--workload file --file EMPTY", "tokenizer: --workload file needs one"),
        ("--workload file --file EMPTY --tokenizer demo", "holds no request"),
        ("--workload file --file EMPTY --tokenizer no-such-directory/", "tokenizer: no-such-directory/ has none"),
        ("--costs EMPTY", "costs: EMPTY holds no table of steps"),
        ("--costs MISSING", "MISSING"),
        ("--trace EMPTY", "trace: EMPTY holds no request"),
        ("--trace MISSING", "MISSING"),
    ],
)
def test_impossible_settings_end_with_status_1(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("")
    with pytest.raises(SystemExit) as error:
        main(["plan", *words.split()])
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    assert error.value.code.startswith("jpaged plan: error: ") and told in error.value.code


def test_no_room_says_how_to_mend_it():
    with pytest.raises(SystemExit, match=r"use more GPUs .--tensor-parallel-size. or a smaller --max-model-len"):
        main(["plan", "--model", "opt-66b"])
