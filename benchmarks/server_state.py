"""What a server says of itself in /metrics."""

import http.client
import time
import urllib.request
from typing import NamedTuple

MIB = 2**20
NAMES = {
    "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage", "process_resident_memory_bytes": "memory_mib", "process_open_fds": "files",
}  # fmt: skip


class ServerState(NamedTuple):
    """`kv_usage` is the share of the KV blocks in use; `memory_mib` is resident; `files` are open."""

    running: float
    waiting: float
    kv_usage: float
    memory_mib: float
    files: float

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.kv_usage)


def read_state(url: str) -> ServerState:
    """Raises OSError if the server does not answer within ten seconds."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = [line.rpartition(" ") for line in response.read().decode().splitlines()]
    values = {NAMES[name]: float(value) for key, _, value in lines if (name := key.partition("{")[0]) in NAMES}
    return ServerState(**values | {"memory_mib": values["memory_mib"] / MIB})


def wait_until_idle(url: str, within: float) -> tuple[ServerState, float]:
    """The state once nothing runs, nothing waits and no block is in use, or after so many seconds; and how many it
    took."""
    start = time.monotonic()
    while not (state := read_state(url)).idle and time.monotonic() - start < within:
        time.sleep(0.02)
    return state, time.monotonic() - start


def is_healthy(url: str) -> bool:
    """Whether `/health` says so within ten seconds."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
