"""Processes join a leader with its settings; others are refused with the field, and the leader goes on waiting."""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import socket
import threading
import time
import types

import jax
import pytest

from jpaged.cli.main import main
from jpaged.cli.setting_flags import add_settings, config_of
from jpaged.config import EngineConfig
from jpaged.parallel import hello
from jpaged.parallel import leader as leader_module
from jpaged.parallel.channel import Channel
from jpaged.parallel.follower import connect
from jpaged.parallel.frame import HEADER, VERSION
from jpaged.parallel.hello import join
from jpaged.parallel.leader import Followers
from jpaged.parallel.messages import Facts, Hello, Refusal
from jpaged.parallel.nodes import Nodes, cluster
from jpaged.runtime.identity import versions
from tests.parallel.test_replica import free_address
from tests.support.patience import PATIENCE_S, until

CONFIG = EngineConfig(model="/models/llama", max_num_seqs=8, seed=3, tokenizer="/tokenizers/llama")


@pytest.fixture
def dial():
    """A function that connects to a leader, until the end of the test."""
    with contextlib.ExitStack() as stack:

        def dial(nodes: Nodes) -> Channel:
            channel = connect(nodes)
            stack.callback(channel.close)
            return channel

        yield dial


@pytest.fixture
def leader(dial):
    """The flags of a leader, which is accepting two followers, and the followers once both have joined."""
    nodes = Nodes(nnodes=3, dist_init_addr=free_address())
    joined = []
    thread = threading.Thread(target=lambda: joined.append(Followers.accept(nodes, CONFIG)))
    thread.start()
    yield nodes, lambda: thread.join(PATIENCE_S) or joined[0]
    for rank in (1, 2):
        if not thread.is_alive():
            break
        with contextlib.suppress(ValueError):  # it has joined already
            join(dial(nodes), rank, nodes.nnodes, {})
    thread.join(PATIENCE_S)
    joined[0].end()


def settings(config: EngineConfig) -> dict:
    return dataclasses.asdict(config)


def test_followers_take_over_the_settings_of_the_leader(leader, dial):
    nodes, followers = leader
    channels = [dial(nodes), dial(nodes)]
    configs = [
        join(channels[0], 2, 3, {"seed": 3}),
        join(channels[1], 1, 3, {"model": "/elsewhere", "max_num_seqs": 8}),
    ]
    own = {"tokenizer": None, "skip_tokenizer_init": True}
    assert settings(configs[0]) == settings(CONFIG) | own
    assert settings(configs[1]) == settings(CONFIG) | own | {"model": "/elsewhere"}
    assert sorted(followers().channels) == [1, 2]


def test_decisions_of_followers_are_compared(leader, dial):
    nodes, followers = leader
    channels = [dial(nodes), dial(nodes)]
    for rank, channel in enumerate(channels, 1):
        join(channel, rank, 3, {})
        channel.send(Facts({"dtype": "float32", "model.hidden_size": 64 * rank}))
    with pytest.raises(ValueError, match=r"^node 2: model.hidden_size: must be 64 as on the leader, not 128$"):
        followers().check_facts({"dtype": "float32", "model.hidden_size": 64})


@pytest.mark.parametrize(
    "rank, nnodes, given, words",
    [
        (1, 2, {}, "nnodes: must be 3 as on the leader, not 2"),
        (3, 3, {}, "node_rank: must be between 1 and 2, not 3"),
        (0, 3, {}, "node_rank: must be between 1 and 2, not 0"),
        (1, 3, {"max_num_seqs": 4}, "max_num_seqs: must be 8 as on the leader, not 4"),
        (1, 3, {"frobnicate": 4}, "frobnicate: must be None as on the leader, not 4"),
    ],
)
def test_other_settings_are_refused_with_the_field(leader, dial, caplog, rank, nnodes, given, words):
    nodes, _ = leader
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=f"^{words}$"):
        join(dial(nodes), rank, nnodes, given)
    assert any(message.startswith("refused 127.0.0.1:") and message.endswith(words) for message in caplog.messages)


def test_a_rank_joins_once(leader, dial):
    nodes, _ = leader
    first = dial(nodes)
    join(first, 1, 3, {})
    with pytest.raises(ValueError, match=r"^node_rank: a process with 1 has already joined$"):
        join(dial(nodes), 1, 3, {})


def test_other_versions_are_refused(leader, dial, monkeypatch):
    nodes, _ = leader
    channel = dial(nodes)
    channel.send(Hello(1, 3, versions() | {"jax": "0.1"}, {}))
    answer = channel.receive()
    assert isinstance(answer, Refusal) and answer.reason.startswith("version of jax: must be ")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"", b"JPGD\2\0\xff\xff\xff\xff\0\0\0\0"])
def test_noise_does_not_disturb_the_leader(leader, dial, noise):
    nodes, followers = leader
    join(dial(nodes), 1, 3, {})
    with socket.create_connection(nodes.channel_address) as connected:
        connected.sendall(noise)
    assert join(dial(nodes), 2, 3, {}).max_num_seqs == 8
    assert len(followers().channels) == 2


@contextlib.contextmanager
def trickling(connected: socket.socket):
    """Send the beginning of a long frame byte by byte within the context."""
    stop = threading.Event()

    def send():
        data = itertools.chain(HEADER.pack(b"JPGD", VERSION, 2**19, 0), itertools.repeat(0))
        with contextlib.suppress(OSError):
            while not stop.wait(0.01):
                connected.sendall(bytes([next(data)]))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_process_that_trickles_its_hello_is_refused_and_another_joins(leader, dial, monkeypatch, caplog):
    monkeypatch.setattr(leader_module, "HELLO_TIMEOUT_S", 0.2)
    nodes, _ = leader
    connect(nodes).close()  # it listens
    with socket.create_connection(nodes.channel_address) as slow, trickling(slow):
        until(lambda: "timed out" in caplog.text)
        monkeypatch.setattr(leader_module, "HELLO_TIMEOUT_S", PATIENCE_S)
        assert join(dial(nodes), 1, 3, {}).max_num_seqs == 8


def test_slow_processes_do_not_extend_the_deadline_of_the_leader(monkeypatch):
    nodes, failed, begun = Nodes(nnodes=2, dist_init_addr=free_address()), [], []
    clock = lambda: time.monotonic() - begun[0] if begun else -PATIENCE_S
    monkeypatch.setattr(leader_module, "time", types.SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(leader_module, "deadline", lambda: 0.3)
    monkeypatch.setattr(leader_module, "HELLO_TIMEOUT_S", 2 * PATIENCE_S)

    def accept():
        with pytest.raises(ValueError, match="nnodes: nodes 1 have not joined within"):
            Followers.accept(nodes, CONFIG)
        failed.append(True)

    thread = threading.Thread(target=accept)
    thread.start()
    connect(nodes).close()  # it listens
    begun.append(time.monotonic())
    with socket.create_connection(nodes.channel_address) as slow, trickling(slow):
        thread.join(PATIENCE_S)
    assert failed


def test_a_leader_that_trickles_its_answer_is_left():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
        trickling(theirs),
    ):
        end = time.monotonic() + 0.2
        with pytest.raises(OSError, match=r"^dist_init_addr: the leader at here does not answer: timed out$"):
            join(Channel(ours, "here"), 1, 2, {}, end)


def test_followers_that_do_not_send_their_facts_are_named(leader, dial, monkeypatch):
    nodes, followers = leader
    channels = [dial(nodes), dial(nodes)]
    for rank, channel in enumerate(channels, 1):
        join(channel, rank, 3, {})
    channels[0].send(Facts({}))
    joined = followers()
    until(lambda: not joined._facts.empty())
    monkeypatch.setattr(hello, "START_TIMEOUT_S", 0.3)
    with pytest.raises(ValueError, match=r"^nnodes: nodes 2 have not checked their settings within "):
        joined.check_facts({})


def test_followers_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(hello, "START_TIMEOUT_S", 0.1)
    with pytest.raises(ValueError, match=r"nnodes: nodes 1, 2 have not joined within"):
        Followers.accept(Nodes(nnodes=3, dist_init_addr=free_address()), CONFIG)


@pytest.mark.parametrize("name", ["coordinator_address", "channel_address"])
def test_an_address_in_use_is_refused(name):
    nodes = Nodes(nnodes=2, dist_init_addr=free_address())
    host, port = getattr(nodes, name)
    with (
        socket.create_server((host, port)),
        pytest.raises(OSError, match=rf"dist_init_addr: can't listen on {host}:{port}: "),
    ):
        Followers.accept(nodes, CONFIG)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"nnodes": 0}, "nnodes: must be at least 1, not 0"),
        ({"nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, r"node_rank: must be below nnodes \(2\), not 2"),
        (
            {"nnodes": 2},
            "dist_init_addr: must be HOST:PORT with a port between 1 and 65534 if nnodes is above 1",
        ),
        ({"nnodes": 2, "dist_init_addr": "a:65535"}, "dist_init_addr: must be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": ":1"}, "dist_init_addr: must be HOST:PORT"),
        ({"nnodes": 2, "dist_init_addr": "a"}, "dist_init_addr: must be HOST:PORT"),
        ({"dist_init_addr": "a:1"}, "dist_init_addr: needs nnodes above 1, not 1"),
        ({"heartbeat_timeout": 60}, "heartbeat_timeout: needs nnodes above 1, not 1"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout: must be at least 1, not 0"),
    ],
)
def test_flags_of_hosts_are_checked(given, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Nodes(**given)


@pytest.mark.parametrize(
    "command, words",
    [
        ("worker", "nnodes: must be at least 2 for jpaged worker, not 1"),
        ("worker --nnodes 2 --dist-init-addr a:1", "node_rank: must be between 1 and nnodes - 1 (1)"),
        ("serve --nnodes 2 --node-rank 1 --dist-init-addr a:1", "node_rank: must be 0 for jpaged serve, not 1; use"),
        ("serve --nnodes 2", "dist_init_addr: must be HOST:PORT with a port"),
    ],
)  # fmt: skip
def test_commands_refuse_wrong_flags_of_hosts(command, words):
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert words in str(ended.value.code)


def test_followers_connect_to_the_next_port():
    assert Nodes(nnodes=2, dist_init_addr="[::1]:7000").channel_address == ("::1", 7001)
    assert Nodes(nnodes=2, dist_init_addr="host.example:7000").channel_address == ("host.example", 7001)


@pytest.mark.parametrize("flags, seconds", [((), 10), (("--heartbeat-timeout", "75"), 75)])
def test_the_heartbeat_is_a_setting(flags, seconds, monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    parser = argparse.ArgumentParser()
    add_settings(parser, Nodes)
    with cluster(config_of(parser.parse_args(["--nnodes", "2", "--dist-init-addr", "a:1", *flags]), Nodes)):
        assert given["heartbeat_timeout_seconds"] == seconds
