"""SIGINT while a command imports, loads or compiles, and the progress that it shows meanwhile."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128"]


def interrupted(command, words):
    """Send SIGINT once stderr has these words. Return the status (SIGKILL: it hung) and the rest of stderr."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    limit = threading.Timer(PATIENCE_S, process.kill)
    try:
        assert any(words in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        limit.start()
        rest = process.stderr.read()
        return process.wait(), rest
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    "command, words",
    [
        pytest.param(["-X", "importtime", "server.py", *SMALL], "aiohttp", id="importing"),
        pytest.param(
            ["-m", "jpaged.cli.main", "complete", "Once", *SMALL],
            "compiling or loading steps",
            id="compiling",
            marks=pytest.mark.deep,  # the test below has native code
        ),
    ],
)
def test_sigint_before_a_command_is_ready_ends_it_quietly_with_status_130(command, words, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is compiled yet
    status, rest = interrupted(command, words)
    assert status == 130
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest


def test_sigint_does_not_wait_for_native_code():
    """As in a compilation of a minute, which runs no Python code."""
    code = "\n".join(
        [
            "import hashlib, sys",
            "from jpaged.cli.loading import exit_on_interrupt",
            "with exit_on_interrupt():",
            "    print('hashing', file=sys.stderr)",
            "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",  # some ten minutes
        ]
    )
    assert interrupted(["-c", code], "hashing") == (130, "")


def test_after_loading_sigint_is_a_keyboard_interrupt_again():
    code = "\n".join(
        [
            "import os, signal, sys, threading",
            "from jpaged.cli.loading import loading",
            "with loading() as bars:",
            "    assert not bars",
            "try:",
            "    signal.raise_signal(signal.SIGINT)",
            "except KeyboardInterrupt:",
            "    sys.exit(f'interrupted, {threading.active_count()} thread')",
        ]
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (run.returncode, run.stderr) == (1, "interrupted, 1 thread\n")
