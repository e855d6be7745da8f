"""Servers that benchmarks start by a command of the shell."""

import sys
import urllib.request

import pytest

from benchmarks.shared.command_server import serving
from tests.support.patience import until

COMMAND = f"{sys.executable} -m http.server {{port}} --bind 127.0.0.1 --directory {{folder}}"


def answers(url):
    try:
        urllib.request.urlopen(url).close()
        return True
    except OSError:
        return False


def test_a_server_runs_within_the_block_and_reports_memory_and_cpu_time(tmp_path):
    (tmp_path / "file").write_text("content")
    with serving("files", COMMAND, path="/file", folder=tmp_path) as server:
        with urllib.request.urlopen(f"{server.url}/file") as response:
            assert response.read() == b"content"
        server.wait_until_idle()
        assert server.start_s > 0 and server.cpu_s > 0 and 2**20 < server.resident_bytes < 2**30
        assert answers(server.url)
    until(lambda: not answers(server.url))


def test_a_command_that_ends_is_an_error_with_its_log():
    with pytest.raises(RuntimeError, match=r"echoes does not serve: no model\n"), serving("echoes", "echo no model"):
        pass
