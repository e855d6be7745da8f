# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["aider-chat>=0.86,<1"]
# ///
"""The command `aider`, asking without files. Its prompts for edits are longer than the demo model's context."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scenarios import MODEL, PROMPT, TIMEOUT_S, URL, run


def aider(*flags):
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("aider"), "--model", f"openai/{MODEL}", "--openai-api-base", f"{URL}/v1",
            "--openai-api-key", "none", "--edit-format", "ask", "--no-git", "--yes-always", "--no-check-update",
            "--no-show-model-warnings", "--analytics-disable", "--map-tokens", "0", "--message", PROMPT, *flags,
        ]  # fmt: skip
        env = os.environ | {"HOME": folder}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr


def chat():
    aider("--no-stream")


def stream():
    aider("--stream")


run(chat, stream)
