"""Start of a server: invalid settings end it with one clear line."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import server
from tests.support import checkpoints, models

ROOT = Path(__file__).parents[2]


def changed(tmp_path, change) -> Path:
    """Return a copy of the tiny model to which a change has been made."""
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
        (lambda d: None, ["--block-size", "0"], "block_size: must be a power of two between 1 and 256, not 0"),
        (
            lambda d: None,
            ["--max-num-seqs", "8", "--num-gpu-blocks-override", "7"],
            "max_num_seqs: 8 exceeds the 7 blocks",
        ),
        (
            lambda d: None,
            ["--max-num-seqs", "8", "--num-gpu-blocks-override", "1000000000"],
            "num_gpu_blocks_override: 1000000000 blocks take ",
        ),
        (
            lambda d: None,
            ["--max-model-len", "513"],
            "max_model_len: 513 exceeds the model's max_position_embeddings (512)",
        ),
        (lambda d: None, ["--kernels", "mosaic"], "Mosaic GPU kernels need a Hopper GPU"),
        (lambda d: (d / "config.json").unlink(), [], "has no config.json"),
        (lambda d: (d / "tokenizer.json").unlink(), [], "tokenizer: "),
        (without_a_shard, [], "lacks model-2.safetensors"),
        (with_other_tensors, [], "missing model.norm.weight [64]; unexpected surplus [64]"),
        (with_another_architecture, [], "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
    ],
)
def test_invalid_model_or_setting_ends_with_one_line(tmp_path, change, flags, words):
    with pytest.raises(SystemExit) as error:
        server.main(["--model", str(changed(tmp_path, change)), *flags])
    assert words in str(error.value.code) and "\n" not in str(error.value.code)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--ssl-keyfile", __file__], "--ssl-certfile is needed"),
        (["--ssl-certfile", __file__], "--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: "),
        (["--api-key-file", "/dev/null"], "--api-key-file: /dev/null holds no key"),
        (["--max-queue", "0"], "max_queue: must be at least 1"),
        (["--request-timeout", "0"], "request_timeout: must be above 0"),
        (["--access-log", "/no/such/folder/log"], "No such file"),
    ],
)
def test_invalid_flag_ends_with_one_line(flags, words):
    with pytest.raises(SystemExit) as error:
        server.main(["--model", "demo", *flags])
    assert words in str(error.value.code) and "\n" not in str(error.value.code)


def test_missing_directory_ends_the_process_with_status_1(tmp_path):
    command = [sys.executable, "server.py", "--model", str(tmp_path / "nowhere")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 1
    assert (
        run.stderr.splitlines()[-1]
        == f"server.py: error: model: {tmp_path}/nowhere is not a directory or a file in GGUF"
    )
    assert "Traceback" not in run.stderr


def test_port_in_use_is_an_error(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
        with pytest.raises(SystemExit, match="address already in use"):
            server.main(["--model", str(tiny), "--port", port, *flags])


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit):
        server.parse_args(["--help"])
    text = capsys.readouterr().out
    for field in server.EngineConfig.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in text
