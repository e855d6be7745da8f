# /// script
# requires-python = ">=3.12"
# dependencies = ["guidellm>=0.8,<1"]
# ///
"""GuideLLM's benchmark of completions and chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import MODEL, TIMEOUT_S, URL, run

TOKENIZER = Path(__file__).parents[3] / "jpaged/demo/model"


def benchmark(path, profile):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--profile", profile, "--constraint", "kind=max_requests,count=4", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (found,) = json.loads(report.read_text())["benchmarks"]
    requests, tokens = found["metrics"]["request_totals"], found["metrics"]["output_token_count"]
    assert requests["successful"] == 4 and requests["errored"] == 0, requests
    assert tokens["successful"]["mean"] == 8, tokens


def completions():
    benchmark("/v1/completions", "kind=synchronous")


def chats():
    benchmark("/v1/chat/completions", "kind=concurrent,streams=2")


run(completions, chats)
