# /// script
# requires-python = ">=3.12"
# dependencies = ["vllm>=0.33,<1"]
# ///
"""`vllm bench serve`, which needs no GPU."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import MODEL, TIMEOUT_S, URL, run

TOKENIZER = Path(__file__).parents[3] / "jpaged/demo/model"


def benchmark(backend, path, *flags):
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("vllm"), "bench", "serve", "--backend", backend, "--endpoint", path,
            "--base-url", URL, "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random",
            "--random-input-len", "16", "--random-output-len", "8", "--ignore-eos", "--num-prompts", "4",
            "--max-concurrency", "2", "--save-result", "--result-dir", folder, *flags,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (report,) = Path(folder).glob("*.json")
        result = json.loads(report.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 32), result


def completions():
    benchmark("vllm", "/v1/completions", "--logprobs", "1", "--temperature", "0", "--top-k", "5")


def chats():
    benchmark("openai-chat", "/v1/chat/completions")


run(completions, chats)
