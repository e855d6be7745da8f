"""`python server.py` as a process: it starts, drains on SIGTERM, and refuses to start with one clear line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import server
from tests import checkpoints, models

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_0(tiny, tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "server.py", "--model", str(tiny), "--served-model-name", "tiny", "--port", str(port),
               "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
    try:
        while "ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with post(f"{url}/v1/completions", body) as running:
            first = running.readline()  # it runs
            process.send_signal(signal.SIGTERM)
            while "shutting down" not in log.read_text():
                time.sleep(0.01)
            with pytest.raises(urllib.error.URLError):  # an HTTP 503, or nobody listens any more
                post(f"{url}/v1/completions", body).close()
            lines = [first, *running]
        assert process.wait(timeout=30) == 0
        assert lines[-2] == b"data: [DONE]\n"
        assert json.loads(lines[-4].removeprefix(b"data: "))["usage"]["completion_tokens"] == 500
    finally:
        process.kill()
    assert "Traceback" not in log.read_text(), log.read_text()


def changed(tmp_path, change) -> Path:
    directory = checkpoints.write(tmp_path / "model", models.TINY)
    models.write_tokenizer(directory)
    change(directory)
    return directory


def without_a_shard(directory):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))


def with_other_tensors(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["surplus"] = tensors.pop("model.norm.weight")
    save_file(tensors, directory / "model.safetensors")


def with_another_architecture(directory):
    config = models.TINY | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change, flags, words",
    [
        (lambda d: None, ["--block-size", "0"], "block_size must be between 1 and 256, not 0"),
        (
            lambda d: None,
            ["--max-num-seqs", "8", "--num-gpu-blocks-override", "7"],
            "max_num_seqs (8) exceeds the 7 blocks",
        ),
        (
            lambda d: None,
            ["--max-num-seqs", "8", "--num-gpu-blocks-override", "1000000000"],
            "num_gpu_blocks_override: 1000000000 blocks take ",
        ),
        (
            lambda d: None,
            ["--max-model-len", "513"],
            "max_model_len (513) exceeds the model's max_position_embeddings (512)",
        ),
        (lambda d: None, ["--kernels", "mosaic"], "Mosaic GPU kernels need a Hopper GPU"),
        (lambda d: None, ["--chat-template", "/no/such.jinja"], "No such file or directory: '/no/such.jinja'"),
        (lambda d: (d / "config.json").unlink(), [], "has no config.json"),
        (lambda d: (d / "tokenizer.json").unlink(), [], "tokenizer: "),
        (without_a_shard, [], "lacks model-2.safetensors"),
        (with_other_tensors, [], "missing model.norm.weight [64]; unexpected surplus [64]"),
        (with_another_architecture, [], "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
    ],
)
def test_it_exits_with_one_clear_line(tmp_path, change, flags, words):
    with pytest.raises(SystemExit) as error:
        server.main(["--model", str(changed(tmp_path, change)), *flags])
    assert words in str(error.value.code) and "\n" not in str(error.value.code)


def test_a_missing_directory_ends_the_process_with_that_line(tmp_path):
    command = [sys.executable, "server.py", "--model", str(tmp_path / "nowhere")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == f"server.py: error: model: {tmp_path}/nowhere is not a directory"
    assert "Traceback" not in run.stderr


def test_a_port_in_use(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
        with pytest.raises(SystemExit, match="address already in use"):
            server.main(["--model", str(tiny), "--port", port, *flags])


def test_help_names_every_flag_and_needs_no_jax(capsys):
    with pytest.raises(SystemExit):
        server.parse_args(["--help"])
    text = capsys.readouterr().out
    for field in server.EngineConfig.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text
