"""The state of a server: its own account in /metrics, and that of the operating system."""

import http.client
import ssl
import time
import urllib.request
from collections.abc import Mapping
from os import sysconf
from pathlib import Path
from typing import NamedTuple

MIB = 2**20
NAMES = {
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage", "process_resident_memory_bytes": "memory_mib", "process_open_fds": "files",
    "process_cpu_seconds_total": "cpu_s", "vllm:num_preemptions_total": "preemptions",
    "vllm:num_swapped_blocks_total": "swapped_blocks",
    "vllm:num_requests_rejected_total": "rejected", "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens", "vllm:prefix_cache_hits_total": "cached_tokens",
}  # fmt: skip


class ServerState(NamedTuple):
    """`kv_usage` is the share of the KV blocks in use; `memory_mib` is resident; `files` are open. The rest counts from
    the server's start."""

    running: float
    waiting: float
    kv_usage: float
    memory_mib: float
    files: float
    cpu_s: float
    preemptions: float
    swapped_blocks: float
    rejected: float
    generated_tokens: float
    prompt_tokens: float
    cached_tokens: float

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.kv_usage)


def read_state(url: str, tls: ssl.SSLContext | None = None) -> ServerState:
    """Raises OSError if the server does not answer within ten seconds."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10, context=tls) as response:
        lines = [line.rpartition(" ") for line in response.read().decode().splitlines()]
    values = {NAMES[name]: float(value) for key, _, value in lines if (name := key.partition("{")[0]) in NAMES}
    return ServerState(**values | {"memory_mib": values["memory_mib"] / MIB})


def wait_until_idle(url: str, within: float, tls: ssl.SSLContext | None = None) -> tuple[ServerState, float]:
    """The state once nothing runs, nothing waits and no block is in use, or after so many seconds; and how many it
    took."""
    start = time.monotonic()
    while not (state := read_state(url, tls)).idle and time.monotonic() - start < within:
        time.sleep(0.02)
    return state, time.monotonic() - start


def is_healthy(url: str, tls: ssl.SSLContext | None = None) -> bool:
    """Whether `/health` says so within ten seconds."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10, context=tls) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False


class ProcessState(NamedTuple):
    """`cpu_s` is the time of all its threads, in user and in kernel mode; `children` are processes."""

    memory_mib: float
    threads: int
    files: int
    children: int
    cpu_s: float


def read_process(pid: int) -> ProcessState:
    """Raises OSError if there is no such process."""
    folder = Path(f"/proc/{pid}")
    status: Mapping[str, str] = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    children = sum(len(path.read_text().split()) for path in folder.glob("task/*/children"))
    return ProcessState(
        int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(list((folder / "fd").iterdir())), children,
        sum(map(int, times)) / sysconf("SC_CLK_TCK"),
    )  # fmt: skip
