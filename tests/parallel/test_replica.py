"""Two processes of two devices each: the tokens of one process, the size of frames, and the death of one of them."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jpaged.start.load import load_engine
from tests.parallel.traffic import config, generate
from tests.support import checkpoints, models
from tests.support.few_shapes import few_shapes
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def free_address() -> str:
    """An address with a free port after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return f"127.0.0.1:{port}"
            except OSError:
                continue


class Replica:
    """A leader and a worker, with files for their logs."""

    def __init__(self, model: Path, folder: Path, mode: str):
        address = free_address()
        self.logs = [folder / "leader.log", folder / "worker.log"]
        leader = [sys.executable, "-m", "tests.parallel.leader_process", str(model), address, mode]
        worker = [sys.executable, "-m", "tests.support.few_shapes", "worker", "--nnodes", "2", "--node-rank", "1"]
        self.leader = self.start(leader, self.logs[0])
        self.worker = self.start([*worker, "--dist-init-addr", address], self.logs[1])

    def start(self, command: list[str], log: Path) -> subprocess.Popen:
        env = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        with log.open("w") as stderr:
            return subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )

    def told(self) -> str:
        """The next line of the leader; the transport of the collectives has lines of its own."""
        while not (line := self.leader.stdout.readline()).startswith(("{", "looping")):
            assert line, self.log(0)
        return line

    def obey(self, command: str) -> None:
        self.leader.stdin.write(f"{command}\n")
        self.leader.stdin.flush()

    def log(self, index: int) -> str:
        return self.logs[index].read_text()

    def stop(self) -> None:
        for process in (self.leader, self.worker):
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of one layer whose heads and vocabulary four devices can divide."""
    directory = tmp_path_factory.mktemp("model")
    config = models.TINY | {"vocab_size": 260, "num_hidden_layers": 1}
    checkpoints.write(directory, config, generation={"eos_token_id": models.EOS})
    models.write_tokenizer(directory)
    return directory


@pytest.fixture
def start(model, tmp_path):
    replicas = []

    def begin(mode: str) -> Replica:
        replicas.append(Replica(model, tmp_path, mode))
        return replicas[-1]

    yield begin
    for replica in replicas:
        replica.stop()


def close(found, expected) -> bool:
    """Whether two outputs have the same tokens and texts, and logprobs that differ by the order of sums only."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else found == expected


def assert_ended(process: subprocess.Popen, log: Path, words: str) -> None:
    # After ten seconds jax would have aborted it, with another status.
    assert process.wait(PATIENCE_S) == 69, log.read_text()
    (line,) = re.findall("^.* CRITICAL .*$", log.read_text(), re.MULTILINE)
    assert re.search(rf"jpaged.parallel: replica ended: {words}.* \(exit status 69\)$", line), line


def test_two_processes_give_the_tokens_of_one_and_end_when_the_follower_is_killed(start, model):
    replica = start("run")
    with few_shapes():
        one_device = dataclasses.replace(config(str(model)), tensor_parallel_size=1)  # which is soon compiled
        engine = load_engine(one_device, progress=False).engine
    expected, steps = generate(engine)
    told = json.loads(replica.told())
    assert told["swapped"] > 0 and told["compilations"] == 0
    assert close(told["outputs"], expected), "the tokens must be those of one process"
    assert close(told["again"], expected), "an error of the leader's host must change no token"
    frames, sent = told["frames"] / told["steps"], told["bytes"] / told["steps"]
    print(f"{frames:.2f} frames and {sent:.0f} bytes per step")
    assert told["steps"] >= steps - 2 and frames < 1.5 and sent < 1000
    replica.obey("loop")
    assert replica.told() == "looping\n"
    replica.worker.kill()
    assert_ended(replica.leader, replica.logs[0], r"node 1 \(127.0.0.1:\d+\) is lost")


@pytest.mark.deep
def test_a_follower_ends_when_the_leader_is_killed(start):
    replica = start("skip")
    replica.told()
    replica.obey("loop")
    assert replica.told() == "looping\n"
    replica.leader.kill()
    assert_ended(replica.worker, replica.logs[1], r"the leader \(127.0.0.1:\d+\) is lost")


@pytest.mark.deep
def test_a_replica_ends_with_status_0_when_its_leader_ends(start):
    replica = start("skip")
    while "ready: node 1 of 2" not in replica.log(1):
        assert replica.worker.poll() is None, replica.log(1)
        time.sleep(0.05)
    replica.worker.send_signal(signal.SIGTERM)  # the leader still needs it
    while "waiting for the end" not in replica.log(1):
        assert replica.worker.poll() is None, replica.log(1)
        time.sleep(0.05)
    replica.obey("end")
    assert replica.leader.wait(PATIENCE_S) == 0 and replica.worker.wait(PATIENCE_S) == 0, replica.log(1)
    assert "stopped: the leader has ended" in replica.log(1)


@pytest.mark.deep
def test_an_invalid_setting_ends_all_hosts_with_its_field(model, tmp_path):
    address = free_address()
    hosts = ["--nnodes", "2", "--dist-init-addr", address]
    commands = [["serve", "--port", "0", "-tp", "3", str(model), *hosts], ["worker", "--node-rank", "1", *hosts]]
    processes = [
        subprocess.Popen([sys.executable, "-m", "jpaged", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    logs = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    assert all("tensor_parallel_size: must be a multiple of nnodes (2), not 3" in log for log in logs)
    assert [process.returncode for process in processes] in ([1, 1], [1, 69], [69, 1]), "the first names the error"


@pytest.mark.deep
def test_a_follower_that_is_killed_while_shapes_are_compiled_ends_the_leader(start):
    replica = start("skip")
    while "compiling" not in replica.log(0):
        time.sleep(0.05)
    replica.worker.kill()
    assert_ended(replica.leader, replica.logs[0], r"node 1 \(127.0.0.1:\d+\) is lost")
