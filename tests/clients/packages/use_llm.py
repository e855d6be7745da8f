# /// script
# requires-python = ">=3.12"
# dependencies = ["llm>=0.36,<1"]
# ///
"""The command `llm` with a model of `extra-openai-models.yaml`, as its documentation says."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import MANY, MODEL, PROMPT, TIMEOUT_S, URL, cancelled, run

MODELS = f"""
- model_id: fox
  model_name: {MODEL}
  api_base: "{URL}/v1"
  supports_tools: true
  supports_schema: true
  reasoning: true
- model_id: fox-text
  model_name: {MODEL}
  api_base: "{URL}/v1"
  completion: true
"""
PROGRAM = Path(sys.executable).with_name("llm")


def llm(*args, model="fox", code=0):
    command = [PROGRAM, "prompt", "-m", model, "--key", "none", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def chat():
    assert llm("--no-stream", "-o", "max_tokens", "20", "-s", "Be brief.", PROMPT).strip()


def stream():
    assert llm("-o", "max_tokens", "20", PROMPT).strip()


def conversation():
    assert llm("--continue", "-o", "max_tokens", "20", "Again.").strip()


def text_completion():
    assert llm("-o", "max_tokens", "20", "-o", "logprobs", "2", PROMPT, model="fox-text").strip()


def structured():
    schema = {"properties": {"mood": {"enum": ["happy"]}}, "required": ["mood"], "additionalProperties": False}
    assert '"happy"' in llm("--schema", json.dumps({"type": "object"} | schema), "-o", "max_tokens", "200", PROMPT)


def tools():
    assert llm("-T", "llm_version", "-o", "max_tokens", "20", PROMPT).strip()


def reasoning_effort():
    assert llm("-o", "reasoning_effort", "low", "-o", "max_tokens", "20", PROMPT).strip()


def errors():
    assert "max_tokens" in llm("-o", "max_tokens", "5000", PROMPT, code=1)


def cancel():
    with cancelled():
        command = [
            PROGRAM,
            "prompt",
            "-m",
            "fox",
            "--key",
            "none",
            "-o",
            "max_tokens",
            str(MANY),
            "-o",
            "logit_bias",
            '{"1": -100}',
            PROMPT,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    Path(folder, "extra-openai-models.yaml").write_text(MODELS)
    run(chat, stream, conversation, text_completion, structured, tools, reasoning_effort, errors, cancel)
